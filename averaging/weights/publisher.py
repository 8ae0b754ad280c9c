"""`WeightPublisher`: publishes versions of a model's weights on the port of a peer or a server."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from averaging.averager import DecentralizedAverager
from averaging.common import CLIENT_PREFIX, is_count, is_endpoint, is_loopback, parse_address, plain_state
from averaging.errors import (
    AveragingError,
    BusyError,
    CallRefusedError,
    ConfigError,
    RefusalCause,
    SiteError,
    StateError,
    TensorError,
)
from averaging.receipts import WeightReader
from averaging.rpc import RpcHandler, rpc_caller
from averaging.tensors import in_thread
from averaging.training import ControlGroup, ranks_of
from averaging.weights.layout import (
    DESCRIBE,
    FETCH,
    FOLLOW,
    NOTHING_YET,
    Shard,
    first_difference,
    is_divided,
    version_message,
)
from averaging.weights.places import Place, SlotTable
from averaging.weights.snapshot import Opened, StateCopy, WeightPieces, WeightSnapshot, begin_copy, seal
from averaging.weights.store import Store
from averaging.weights.tree import PUBLISHER, Tree
from averaging.wire import weights_pb2 as wire

# How the ranks of a divided model agree on the version that they publish.


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know of a version.

    Attributes:
        version: its number, at rank 0.
        last: the newest version that any rank has published; -1 if none has.
        changed: whether any part has changed since.
        shards: all parts, that of rank 0 first. Parts of ranks that only repeat another one's are left out.
    """

    version: int
    last: int
    changed: bool
    shards: tuple[Shard, ...]


class PublisherRanks:
    """The ranks that publish one model.

    Args:
        group: their process group, of any backend.
        endpoint: address of the server of this rank's publisher.

    Raises:
        ConfigError: torch.distributed is not initialized.
    """

    def __init__(self, group: Any, endpoint: str) -> None:
        self.endpoint = endpoint
        self._group = ControlGroup(ranks_of(group))
        self.leads = self._group.rank == 0

    def agree(self, digest: bytes, version: int, last: int, *, changed: bool) -> Agreed:
        """Called by all ranks with what they are about to publish.

        Raises:
            SiteError: a rank has died, or has no address.
        """
        ranks = self._group.all_gather((digest, version, last, changed, self.endpoint))
        shards: dict[bytes, Shard] = {}
        for number, (part, _, _, _, endpoint) in enumerate(ranks):
            if number == 0 or (part not in shards and endpoint):
                shards[part] = Shard("" if number == 0 else endpoint, part)
        if missing := [number for number, (part, *_) in enumerate(ranks) if part not in shards]:
            raise SiteError(f"rank {missing[0]} has no server; give its publisher an endpoint, or to an averager")
        return Agreed(
            ranks[0][1],
            max(last for _, _, last, _, _ in ranks),
            any(changed for *_, changed, _ in ranks),
            tuple(shards.values()),
        )


logger = logging.getLogger("averaging.weights")

MAX_FOLLOWERS, MAX_FOLLOWERS_PER_HOST, MAX_FOLLOWERS_PER_CONNECTION = 4096, 512, 64
"""Followers of one publisher at once."""

FAN_OUT, FAN_OUT_OF_DIFFERENCES = 1, 4
"""Followers that get a version from one other follower. In a chain, each link carries a whole version once. For a
difference, which is short, the number of followers that it passes through counts."""

NOTIFIED_BYTES = 4 << 20
"""Senders that wait for pieces are woken once for so many bytes, and for the first piece."""

MAX_FAILED = 64
"""Endpoints that a request may name as failed."""


class WeightPublisher:
    """Publishes versions of a model's weights, which `WeightFollower` and `averaging follow` receive.

    ```python
    services = [WeightPublisher(model)]
    optimizer = DecentralizedAverager(adamw, model=model, run_id="demo", strategy=…, services=services)
    ```

    With an averager, the weights are published at the start, and after each round or global step if they have changed,
    also if no other peer took part. The version is the global step, or the local step if the strategy has no global
    steps. Of a schedule-free optimizer the evaluation weights are published. The training thread copies the weights;
    their digests are computed in another thread. If training is faster than that, versions are left out.

    Elsewhere, call `publish`:

    ```python
    publisher = WeightPublisher()
    async with RpcServer("127.0.0.1:4300", [publisher]):
        await publisher.publish(model.state_dict(), version=1)
    ```

    The publisher sends each version to `copies` followers. The others get it from those. It keeps the newest version
    and `bases` earlier ones, and a follower that has one of them gets differences only. Each takes the memory of the
    tensors that changed.

    Args:
        model: Module whose state dict is published if `publish` gets none. Names are published without the prefixes
            of wrappers, such as `_orig_mod.` of `torch.compile` and `module.` of DistributedDataParallel.
        run_id: Only followers of this run are served; None for the run of the averager, or for all followers.
        dtype: Floating-point tensors are published in this dtype. In `torch.bfloat16` a version is half as long, and a
            difference a tenth of one in float32.
        bases: Earlier versions that are kept.
        max_bytes: Earlier versions are dropped while all versions together take more memory than this.
        copies: Followers that get a version from here. Failures of followers can add to it.
        fan_out: Followers that get a version from one other follower. If None, 1 for whole versions and 4 for
            differences.
        process_group: Group of the ranks between which `fully_shard` divides the model. Each rank then publishes what
            it holds, and `publish_now` is called by all of them at the same time. Followers join the publisher of rank
            0, which names the others.
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
        max_bytes: int | None = None,
        copies: int = 2,
        fan_out: int | None = None,
        process_group: Any = None,
        endpoint: str = "",
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point dtype, not {dtype}")
        for name, value, least in (
            ("bases", bases, 0),
            ("copies", copies, 1),
            ("fan_out", 1 if fan_out is None else fan_out, 1),
        ):
            if not is_count(value) or value < least:
                raise ConfigError(f"{name} must be a whole number, at least {least}, not {value!r}")
        self._model, self._run_id, self._dtype = model, run_id, dtype
        self._copies, self._fan_out = copies, fan_out
        self._store = Store(bases, max_bytes)
        self._places = SlotTable("followers", MAX_FOLLOWERS, MAX_FOLLOWERS_PER_HOST, MAX_FOLLOWERS_PER_CONNECTION)
        self._publishing = threading.Lock()
        self._followers: dict[bytes, str] = {}  # endpoints of those that follow now
        self._asked_for: dict[bytes, int] = {}  # newest version that each of those has asked for
        self._trees: dict[bytes, Tree] = {}  # by the name of the version
        self._background = _Background(partial(self._seal, at_least=True))
        self._ranks = None if process_group is None else PublisherRanks(process_group, endpoint)

    @property
    def of_each_shard(self) -> bool:
        """Whether the averager of each shard serves it, and not only that of rank 0."""
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
        for name, endpoint in self._followers.items():
            yield WeightReader("follower", endpoint or name.hex()[:8], "", self._asked_for.get(name), self.version)

    async def publish(self, state: Mapping[str, torch.Tensor] | None = None, version: int | None = None) -> int:
        """Publishes weights. The tensors must not change until it returns.

        Args:
            state: Tensors by name; the model's state dict if None. Values that are no tensors are left out.
            version: Number above that of the version before; the next number if None.

        Returns:
            The version.

        Raises:
            ConfigError: `version` is not above the newest one, unless the weights are the same too. There are neither a
                state nor a model.
            TensorError: A tensor cannot be published, or differs in dtype or shape from the version before.
        """
        return await in_thread(lambda: self.publish_now(state, version))

    def publish_now(self, state: Mapping[str, torch.Tensor] | None = None, version: int | None = None) -> int:
        """Does the same as `publish`, from any thread; it takes about 0.7 s for each GiB.

        The version is announced at once, and sent while it is copied and its digests are computed.
        """
        return self._seal(self._copy(state), version)

    def publish_snapshot(self, snapshot: WeightSnapshot) -> None:
        """Publishes weights that were received and verified; again the newest ones does nothing.

        Raises:
            ConfigError: the version is below the newest one.
        """
        with self._publishing:
            newest = self._store.newest
            if newest is None or snapshot.manifest.version > newest.manifest.version:
                self._store.add(snapshot)
            elif snapshot.manifest.version < newest.manifest.version:
                raise ConfigError(
                    f"version {snapshot.manifest.version} is below {newest.manifest.version}, which is published; "
                    "versions never go back"
                )

    def averaged(self, averager: DecentralizedAverager) -> None:
        """Called by the averager that serves this publisher, see `StateService`."""
        if self._model is None:
            raise ConfigError("give the model to the publisher: services=[WeightPublisher(model)]")
        self._run_id = self._run_id or averager.run_id
        step = averager.local_step if averager.global_step is None else averager.global_step
        if self._ranks is not None:
            self._ranks.endpoint = averager.own_endpoint
        with averager.evaluation_weights():
            copy = self._copy(None)
            if self._ranks is None:
                copy.filled_elsewhere = True  # here, and the other thread follows
                self._background.do(copy, step)
            copy.fill()
        if self._ranks is not None:  # in step with the other ranks
            self._seal(copy, step, at_least=True)

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `RpcService`."""
        return [FOLLOW.streams(self._follow), FETCH.streams(self._fetch), DESCRIBE.streams(self._describe)]

    def _copy(self, state: Mapping[str, torch.Tensor] | None) -> StateCopy:
        if state is None:
            if self._model is None:
                raise ConfigError("there is nothing to publish; give a state dict, or a model to the publisher")
            state = self._model.state_dict()
        state = plain_state(state)
        if self._ranks is not None and not self._ranks.leads:  # tensors that are not divided are those of rank 0
            state = {name: tensor for name, tensor in state.items() if is_divided(tensor)}
        return begin_copy(state, self._dtype)

    def _seal(self, copy: StateCopy, version: int | None, *, at_least: bool = False) -> int:
        """Publishes a copy. With `at_least`, the version is raised above the newest one if the weights have changed."""
        with self._publishing:
            newest = self._store.newest
            last = -1 if newest is None else newest.manifest.version
            version = last + 1 if version is None else version
            if not is_count(version):
                raise ConfigError(f"version must be a whole number, not {version!r}")
            if newest is not None:
                _check_same_layout(newest, copy)
            if self._ranks is None and version > last:
                self._publish_opened(Opened(copy, version, newest))
                return version
            snapshot = seal(copy, version, newest)
            if self._ranks is not None:
                return self._publish_part(self._ranks, snapshot, last, at_least=at_least)
            if newest is not None and version <= last:
                if snapshot.manifest.digest == newest.manifest.digest and (at_least or version == last):
                    return last
                if not at_least:
                    raise ConfigError(
                        f"version {version} is not above {last}, which is published; versions never go back"
                    )
                snapshot = snapshot.under(last + 1)
            self._add(snapshot)
        return snapshot.manifest.version

    def _publish_opened(self, opened: Opened) -> None:
        """Announces a version, and completes it while it is sent."""
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
        self._store.add(snapshot)
        manifest = snapshot.manifest
        logger.info("published version %d, digest %s", manifest.version, manifest.digest.hex()[:8])

    def _publish_part(self, ranks: PublisherRanks, snapshot: WeightSnapshot, last: int, *, at_least: bool) -> int:
        """Publishes this rank's part of a version, as all ranks have agreed."""
        newest = self._store.newest
        changed = newest is None or snapshot.manifest.digest != newest.manifest.digest
        agreed = ranks.agree(snapshot.manifest.digest, snapshot.manifest.version, last, changed=changed)
        if not agreed.changed and (at_least or agreed.version <= agreed.last):
            return last
        version = agreed.version
        if version <= agreed.last:
            if not at_least:
                raise ConfigError(f"version {version} is not above {agreed.last}, which is published at some rank")
            version = agreed.last + 1
        manifest = replace(snapshot.manifest, version=version, shards=agreed.shards if ranks.leads else ())
        self._store.add(WeightSnapshot(manifest, snapshot.buffers))
        logger.info("published a part of version %d, digest %s", version, manifest.digest.hex()[:8])
        return version

    def _check_run(self, run_id: str) -> None:
        if self._run_id and run_id and run_id != self._run_id:
            reason = f"the publisher belongs to run {self._run_id!r}, not to {run_id[:64]!r}; give both the same run id"
            raise CallRefusedError("", reason, RefusalCause.WRONG_RUN)

    async def _follow(self, request: wire.FollowRequest) -> AsyncGenerator[wire.Version, None]:
        self._check_run(request.run_id)
        name = request.follower
        if name in self._followers:
            raise BusyError("a follower of this name is here; try again later")
        place = Place(rpc_caller(), lose=self._store.changes.happened)
        self._places.enter(place, now=0.0)
        self._followers[name] = request.endpoint if _can_be_called(request.endpoint) else ""
        try:
            announced = self._store.latest
            yield NOTHING_YET if announced is None else version_message(announced.manifest)
            while True:
                layout = None if announced is None else announced.manifest.layout
                announced = await self._newer_than(-1 if announced is None else announced.manifest.version, place)
                yield version_message(announced.manifest, layout)
        finally:
            self._places.leave(place)
            del self._followers[name]
            self._asked_for.pop(name, None)
            for tree in self._trees.values():
                tree.leave(name)

    async def _newer_than(self, version: int, place: Place) -> WeightPieces:
        while (latest := self._store.latest) is None or latest.manifest.version <= version:
            await self._store.changes.wait(lambda: place.lost or self._store.is_newer_than(version))
            if place.lost:
                raise BusyError("your host has the most followers, and another one needs a place; try again later")
        return latest

    async def _describe(self, request: wire.DescribeRequest) -> AsyncGenerator[wire.Digests, None]:
        self._check_run(request.run_id)
        async with aclosing(self._store.describe(request.name, request.first)) as messages:
            async for message in messages:
                yield message

    async def _fetch(self, request: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        self._check_run(request.run_id)
        source = self._source_for(request)
        asked = self._store.find(request.name)
        if request.follower in self._followers and asked is not None:
            self._asked_for[request.follower] = asked.manifest.version
        if source:
            yield wire.Reply(source=source)
            return
        async with aclosing(self._store.send(request)) as replies:
            async for reply in replies:
                yield reply

    def _source_for(self, request: wire.FetchRequest) -> str:
        """The endpoint of the follower from which the caller gets the version; empty if from here."""
        name = request.name
        if not self._store.holds(name):
            raise StateError(f"no version with the digest {name.hex()[:8]} is kept here; ask for the newest one")
        self._trees = {known: tree for known, tree in self._trees.items() if self._store.holds(known)}
        tree = self._trees.setdefault(name, Tree(self._copies))
        failed = set(request.failed[:MAX_FAILED])
        able = {
            name: endpoint
            for name, endpoint in self._followers.items()
            if endpoint and (request.local or not is_loopback(parse_address(endpoint)[0]))
        }
        names = {name for name, endpoint in self._followers.items() if endpoint in failed}
        if request.follower not in self._followers:  # it follows no versions and hands on nothing
            return ""
        usual = FAN_OUT_OF_DIFFERENCES if self._store.holds(request.base) else FAN_OUT
        chosen = tree.source_of(request.follower, able, names, self._fan_out or usual)
        return "" if chosen == PUBLISHER else able[chosen]


def _check_same_layout(newest: WeightSnapshot, copy: StateCopy) -> None:
    names = f"in version {newest.manifest.version}", "now"
    difference = first_difference(newest.manifest.layout.tensors, copy.specs, names)
    if difference is not None:
        raise TensorError(f"the weights differ from the last version: {difference}; use a new publisher")


def _can_be_called(endpoint: str) -> bool:
    return bool(endpoint) and is_endpoint(endpoint) and not endpoint.startswith(CLIENT_PREFIX)


class _Background:
    """Publishes copies in a thread that exists while there is one. A newer copy replaces one that still waits."""

    def __init__(self, publish: Callable[[StateCopy, int], object]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._next: tuple[StateCopy, int] | None = None
        self._running = False

    def do(self, copy: StateCopy, version: int) -> None:
        """Publishes a copy under this version or a higher one, soon."""
        with self._lock:
            self._next = copy, version
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, name="the publisher of weights", daemon=True).start()

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
            del copy
