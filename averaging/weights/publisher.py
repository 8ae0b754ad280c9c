"""`WeightPublisher`: publishes versions of a model's weights on the port of a peer or a server."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from averaging.averager import DecentralizedAverager
from averaging.common import CLIENT_PREFIX, HostQuota, is_count, is_endpoint, is_loopback, parse_address, plain_state
from averaging.errors import AveragingError, BusyError, CallRefusedError, ConfigError, RefusalCause, TensorError
from averaging.receipts import WeightReader
from averaging.rpc import RpcHandler, rpc_caller
from averaging.tensors import in_thread
from averaging.weights.layout import first_difference, version_message
from averaging.weights.parts import AgreedVersion, PublisherRanks, is_divided
from averaging.weights.snapshot import OpenedVersion, StateCopy, WeightPieces, WeightSnapshot, begin_copy, seal
from averaging.weights.storage import FolderWriter
from averaging.weights.store import DESCRIBE, FETCH, FOLLOW, Store
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

MAX_FOLLOWERS, MAX_FOLLOWERS_PER_HOST = 4096, 512  # of one publisher at once
NOTIFIED_BYTES = 4 << 20  # senders that wait for pieces are woken once for so many bytes, and for the first piece
MAX_FAILED = 64  # endpoints that a request may name as failed
LEFT_VERSIONS = 16  # for which a follower that another one has left hands on none

# So long a version goes through a chain of followers, since each link then carries it once: on emulated links of
# 100 Mbit/s, 64 MiB to the last of 8 take 1.5 times as long as to one (docs/design/performance.md). A shorter one
# takes less than the way through a chain; each follower sends it to four others, and the publisher to two.
CHAIN_BYTES, FAN_OUT, COPIES = 12 << 20, 4, 2
SHORTER = 16  # how many times shorter than the weights differences are expected to be


class WeightPublisher:
    """Publishes versions of a model's weights, which `WeightFollower` and `averaging follow` receive.

    ```python
    services = [WeightPublisher(model)]
    optimizer = DecentralizedAverager(adamw, model=model, run_id="demo", strategy=…, services=services)
    ```

    With an averager, the weights are published at the start, and after each round or global step if they have changed,
    also if no other peer took part. The version is the global step, or the local step if the strategy has no global
    steps. Of a schedule-free optimizer the evaluation weights are published. The training thread copies the weights;
    their digests are computed in another thread. If training is faster than that, versions are left out. Elsewhere,
    serve it with `RpcServer("127.0.0.1:4300", [publisher])` and call `publish`.

    The publisher sends each version to one follower or two. The others get it from those. It keeps the newest version
    and `bases` earlier ones, and a follower that has one of them gets differences only. Each takes the memory of the
    tensors that changed.

    Args:
        model: Module whose state dict is published if `publish` gets none. Names are published without the prefixes
            of wrappers, such as `_orig_mod.` of `torch.compile` and `module.` of DistributedDataParallel.
        run_id: Only followers of this run are served; None for the run of the averager, or for all followers.
        dtype: Floating-point tensors are published in this dtype. In `torch.bfloat16` a version is half as long, and a
            difference a tenth of one in float32.
        bases: Earlier versions that are kept.
        process_group: Group of the ranks between which `fully_shard` divides the model. Each rank then publishes what
            it holds, and `publish_now` is called by all of them at the same time. Followers join the publisher of rank
            0, which names the others.
        to: Folder into which the versions are written too: a path, or a URL of fsspec such as `s3://bucket/run`. That
            happens in another thread, and takes the memory of one more copy; a storage that is down does not stop
            training. `close` waits until the newest version is there; an averager that closes does so.
        keep: Whole versions that stay in `to`, with the differences that follow them; older ones are removed.
        endpoint: With `process_group` and without an averager, `host:port` of the server of this rank's publisher.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        run_id: str | None = None,
        dtype: torch.dtype | None = None,
        bases: int = 2,
        to: str = "",
        keep: int = 2,
        process_group: Any = None,
        endpoint: str = "",
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point dtype, not {dtype}")
        if not is_count(bases):
            raise ConfigError(f"bases must be a whole number, at least 0, not {bases!r}")
        if to and process_group is not None:
            raise ConfigError("a folder takes whole models; give `to` to a publisher without process_group")
        self._model, self._run_id, self._dtype = model, run_id, dtype
        self._folder = FolderWriter(to, keep) if to else None
        self._store = Store(bases)
        self._quota = HostQuota(MAX_FOLLOWERS, MAX_FOLLOWERS_PER_HOST)
        self._publishing = threading.Lock()
        self._followers: dict[bytes, _Follower] = {}  # those that follow now, by their names
        self._trees: dict[bytes, Tree] = {}  # by the name of the version
        self._left: dict[str, int] = {}  # endpoints of followers that others have left, and for how many versions yet
        self._background = _Background(partial(self._publish_copy, at_least=True))
        self._ranks = None if process_group is None else PublisherRanks(process_group, endpoint)

    @property
    def needs_no_port(self) -> bool:  # whether it is of use to an averager in client mode
        return self._folder is not None

    @classmethod
    def of_store(cls, store: Store, run_id: str) -> Self:
        """A publisher of what a follower has, and of the version that it is receiving."""
        publisher = cls(run_id=run_id or None)
        publisher._store = store
        return publisher

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, timeout: float = 90.0) -> None:
        """Waits until the newest version is in the folder `to`, and lets other publishers write there.

        By default so long that the lease of a publisher that has died is taken over.

        Raises:
            StateError: The storage did not take it within `timeout` seconds, or another publisher writes there.
        """
        self._background.join(timeout)
        if self._folder is not None:
            self._folder.close(timeout)

    @property
    def of_each_shard(self) -> bool:  # whether the averager of each shard serves it, and not only that of rank 0
        return self._ranks is not None

    @property
    def version(self) -> int | None:
        """The newest published version; None before the first."""
        newest = self._store.newest
        return None if newest is None else newest.manifest.version

    @property
    def digest(self) -> bytes | None:
        """The digest of the newest published version: SHA-256 of the names, dtypes, shapes and bytes of its tensors."""
        newest = self._store.newest
        return None if newest is None else newest.manifest.digest

    @property
    def bytes_sent(self) -> int:
        """Bytes of weights sent to followers so far."""
        return self._store.sent

    @property
    def followers(self) -> int:
        """Number of followers that are connected."""
        return len(self._followers)

    def readers(self) -> Iterable[WeightReader]:
        """The connected followers, for the status of the peer."""
        for name, follower in self._followers.items():
            has = follower.asked if follower.engine_has is None else follower.engine_has
            part = "" if has is None or has >= 0 else f"unknown: a part of {-1 - has}"
            where = follower.endpoint or name.hex()[:8]
            yield WeightReader("follower", where, part, None if part else has, self.version)

    async def publish(self, state: Mapping[str, torch.Tensor] | None = None, version: int | None = None) -> int:
        """Publishes a state dict, or the model's, whose tensors must not change until it returns. Returns the version.

        The version is above the one before, by one if None. Values that are no tensors are left out.

        Raises:
            ConfigError: `version` is not above the newest one, unless the weights are the same too. There are neither a
                state nor a model.
            TensorError: A tensor cannot be published, or differs in dtype or shape from the version before.
        """
        return await in_thread(lambda: self.publish_now(state, version))

    def publish_now(self, state: Mapping[str, torch.Tensor] | None = None, version: int | None = None) -> int:
        """Does the same as `publish`, from any thread; the version is sent while it is copied, about 1.4 GiB/s."""
        return self._publish_copy(self._copy(state), version)

    def publish_snapshot(self, snapshot: WeightSnapshot) -> None:
        """Publishes weights that were received and verified; again the newest ones does nothing."""
        with self._publishing:
            last = -1 if self.version is None else self.version
            if snapshot.manifest.version > last:
                self._keep(snapshot)
            elif snapshot.manifest.version < last:
                raise _not_above(snapshot.manifest.version, last)

    def averaged(self, averager: DecentralizedAverager) -> None:
        """Called by the averager that serves this publisher, see `StateService`."""
        if self._model is None:
            raise ConfigError("give the model to the publisher: services=[WeightPublisher(model)]")
        self._run_id = self._run_id or averager.run_id
        step = averager.local_step if averager.global_step is None else averager.global_step
        with averager.evaluation_weights():
            copy = self._copy(None).copy_all()
        if self._ranks is None:
            self._background.publish_soon(copy, step)
        else:  # in step with the other ranks
            self._ranks.endpoint = averager.own_endpoint
            self._publish_copy(copy, step, at_least=True)

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [FOLLOW.streams(self._follow), FETCH.streams(self.fetch), DESCRIBE.streams(self._describe)]

    def _copy(self, state: Mapping[str, torch.Tensor] | None) -> StateCopy:
        if state is None:
            if self._model is None:
                raise ConfigError("there is nothing to publish; give a state dict, or a model to the publisher")
            state = self._model.state_dict()
        state = plain_state(state)
        if self._ranks is not None and not self._ranks.leads:  # tensors that are not divided are those of rank 0
            state = {name: tensor for name, tensor in state.items() if is_divided(tensor)}
        return begin_copy(state, self._dtype, self._store.newest)

    def _publish_copy(self, copy: StateCopy, version: int | None, *, at_least: bool = False) -> int:
        # With `at_least`, the version is raised above the newest one if the weights have changed.
        with self._publishing:
            newest, ranks = self._store.newest, self._ranks
            last = -1 if newest is None else newest.manifest.version
            version = last + 1 if version is None else version
            if not is_count(version):
                raise ConfigError(f"version must be a whole number, not {version!r}")
            if newest is not None and newest.manifest.layout is not copy.layout:
                names = f"in version {last}", "now"
                difference = first_difference(newest.manifest.layout.tensors, copy.layout.tensors, names)
                if difference is not None:
                    raise TensorError(f"the weights differ from the last version: {difference}; use a new publisher")
            if ranks is None and version > last:
                self._publish_opened(OpenedVersion(copy, version, newest))
                return version
            snapshot = seal(copy, version, newest)
            digest = snapshot.manifest.digest
            agreed = AgreedVersion(version, last, newest is None or digest != newest.manifest.digest)
            if ranks is not None:
                agreed = ranks.agree(digest, agreed)
            version = agreed.version
            if not agreed.changed and (at_least or version == agreed.last):
                return last
            if version <= agreed.last:
                if not at_least:
                    raise _not_above(version, agreed.last)
                version = agreed.last + 1
            # Only rank 0 names all parts: its followers learn from it which parts are one version.
            shards = agreed.shards if ranks is not None and ranks.leads else ()
            self._add(replace(snapshot, manifest=replace(snapshot.manifest, version=version, shards=shards)))
            return version

    def _publish_opened(self, opened: OpenedVersion) -> None:
        self._store.receiving(opened)
        try:
            told = 0
            for done in opened.describe():
                if not told or done - told >= NOTIFIED_BYTES:
                    self._store.changes.happened()
                    told = done
            self._add(opened.finish())
        finally:
            self._store.receiving(None)

    def _add(self, snapshot: WeightSnapshot) -> None:
        self._keep(snapshot)
        what, manifest = "version" if self._ranks is None else "a part of version", snapshot.manifest
        logger.info("published %s %d, digest %s", what, manifest.version, manifest.digest.hex()[:8])

    def _keep(self, snapshot: WeightSnapshot) -> None:
        self._store.add(snapshot)
        if self._folder is not None:
            self._folder.write_soon(snapshot, self._run_id or "")

    def _check_run(self, run_id: str) -> None:
        if self._run_id and run_id and run_id != self._run_id:
            reason = f"the publisher belongs to run {self._run_id!r}, not to {run_id[:64]!r}; give both the same run id"
            raise CallRefusedError("", reason, RefusalCause.WRONG_RUN)

    async def _follow(self, request: wire.FollowRequest) -> AsyncGenerator[wire.Version, None]:
        self._check_run(request.run_id)
        name, host = request.follower, rpc_caller().host
        if name in self._followers:
            raise BusyError("a follower of this name is here; try again later")
        if not self._quota.take(host):
            raise BusyError(f"there are {self._quota.taken_by(host)} followers of your host here; try again later")
        can_be_called = is_endpoint(request.endpoint) and not request.endpoint.startswith(CLIENT_PREFIX)
        self._followers[name] = _Follower(request.endpoint if can_be_called else "", request.local)
        try:
            announced = self._store.latest
            yield wire.Version() if announced is None else version_message(announced.manifest)
            while True:
                before, announced = announced, await self._newer_than(announced)
                yield version_message(announced.manifest, None if before is None else before.manifest.layout)
        finally:
            self._quota.leave(host)
            del self._followers[name]
            for tree in self._trees.values():
                tree.leave(name)

    async def _newer_than(self, announced: WeightPieces | None) -> WeightPieces:
        version = -1 if announced is None else announced.manifest.version
        while True:
            latest = self._store.latest  # another thread may give it up at any time
            if latest is not None and latest.manifest.version > version:
                return latest
            await self._store.changes.wait(
                lambda: (latest := self._store.latest) is not None and latest.manifest.version > version
            )

    async def _describe(self, request: wire.DescribeRequest) -> AsyncGenerator[wire.Digests, None]:
        self._check_run(request.run_id)
        if not request.name:
            if follower := self._followers.get(request.follower):
                follower.engine_has = request.has
            return
        async with aclosing(self._store.describe(request.name, request.first)) as messages:
            async for message in messages:
                yield message

    async def fetch(self, request: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        """Sends pieces, or the name of a follower that has them."""
        self._check_run(request.run_id)
        if source := self._source_for(request):
            yield wire.Reply(source=source)
            return
        async with aclosing(self._store.send(request)) as replies:
            async for reply in replies:
                yield reply

    def _source_for(self, request: wire.FetchRequest) -> str:
        """The endpoint of the follower from which the caller gets the version; empty if from here."""
        pieces = self._store.get(request.name)
        follower = self._followers.get(request.follower)
        if follower is None:  # it follows no versions and hands on nothing
            return ""
        follower.asked = pieces.manifest.version
        tree, failed = self._tree(pieces, request.base), set(request.failed[:MAX_FAILED])
        before = self._followers.get(tree.sources.get(request.follower, PUBLISHER))
        if before is not None and before.endpoint in failed:  # only what was really its source
            self._left[before.endpoint] = LEFT_VERSIONS
        chosen = tree.source_of(
            request.follower,
            # Who reaches this publisher through loopback can use all that others can.
            able={
                name
                for name, each in self._followers.items()
                if each.endpoint
                and each.endpoint not in self._left
                and (request.local or not is_loopback(parse_address(each.endpoint)[0]))
            },
            failed={name for name, each in self._followers.items() if each.endpoint in failed},
        )
        return "" if chosen == PUBLISHER else self._followers[chosen].endpoint

    def _tree(self, pieces: WeightPieces, base: bytes) -> Tree:
        """The tree of a version, whose form depends on the length of what its first follower asks for."""
        self._trees = {known: tree for known, tree in self._trees.items() if self._store.find(known) is not None}
        name, nbytes = pieces.manifest.name, pieces.manifest.layout.nbytes
        if name not in self._trees:
            self._left = {endpoint: versions - 1 for endpoint, versions in self._left.items() if versions > 1}
            if self._store.find(base) is not None:
                nbytes = self._store.difference_bytes() or nbytes // SHORTER
            self._trees[name] = Tree(1, 1) if nbytes >= CHAIN_BYTES else Tree(COPIES, FAN_OUT)
        return self._trees[name]


@dataclass(slots=True)
class _Follower:
    endpoint: str  # at which it hands on; empty if it does not
    local: bool  # whether it reaches this publisher through loopback
    asked: int | None = None  # the newest version that it has asked for
    engine_has: int | None = None  # as in `DescribeRequest.has`, if it has said so


PUBLISHER = b""  # stands for the publisher among the names of followers


class Tree:
    """Decides who gets one version from whom: the first `copies` that ask from the publisher, the next from those.

    A follower sends to `fan_out` others, and to as many that do not hand on. One that is slow still receives an earlier
    version when the others ask, and so comes last.
    """

    def __init__(self, copies: int, fan_out: int) -> None:
        self._copies, self._fan_out = copies, fan_out
        self.sources: dict[bytes, bytes] = {}  # of each follower

    def source_of(self, follower: bytes, able: Collection[bytes], failed: Collection[bytes]) -> bytes:
        """The source of a follower: the same as before, or after a failure the publisher.

        A new one gets the publisher if that has room, else one of those who are `able` to hand on and have room, that
        with the shortest way to the publisher, or the publisher if there is none.
        """
        before = self.sources.pop(follower, None)
        if before is not None and before not in failed and (before == PUBLISHER or before in able):
            self.sources[follower] = before
            return before
        chosen = PUBLISHER
        if not failed and Counter(self.sources.values())[PUBLISHER] >= self._copies:
            alike = Counter(source for each, source in self.sources.items() if (each in able) is (follower in able))
            ways = {each: self._way(each) for each in self.sources if each in able and alike[each] < self._fan_out}
            # Two of which one gets the version through the other would wait for each other.
            possible = (each for each, way in ways.items() if follower not in way)
            chosen = min(possible, key=lambda each: len(ways[each]), default=PUBLISHER)
        self.sources[follower] = chosen
        return chosen

    def leave(self, follower: bytes) -> None:
        self.sources.pop(follower, None)

    def _way(self, follower: bytes) -> list[bytes]:
        way: list[bytes] = []
        while (follower := self.sources.get(follower, PUBLISHER)) != PUBLISHER:
            way.append(follower)
        return way


class _Background:
    """Publishes copies in a thread that exists while there is one. A newer copy replaces one that still waits."""

    def __init__(self, publish: Callable[[StateCopy, int], object]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._next: tuple[StateCopy, int] | None = None
        self._running = False
        self._thread: threading.Thread | None = None

    def publish_soon(self, copy: StateCopy, version: int) -> None:
        with self._lock:
            self._next = copy, version
            if not self._running:
                self._running = True
                self._thread = threading.Thread(target=self._run, name="the publisher of weights", daemon=True)
                self._thread.start()

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._running = False
                    return
                (copy, version), self._next = self._next, None
            try:
                self._publish(copy, version)
            except AveragingError as error:
                logger.error("the weights of step %d were not published: %s", version, error)
            del copy  # its memory is free while nothing is published


def _not_above(version: int, last: int) -> ConfigError:
    return ConfigError(f"version {version} is not above {last}, which is published; versions never go back")
