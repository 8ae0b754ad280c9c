"""`WeightPublisher`: publishes versions of a model's weights on the port of a peer or a server."""

from __future__ import annotations

import asyncio
import logging
import statistics
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
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
from averaging.weights.claims import Claims
from averaging.weights.layout import (
    DESCRIBE,
    FETCH,
    FOLLOW,
    WARM,
    Shard,
    WeightLayout,
    first_difference,
    is_divided,
    version_message,
)
from averaging.weights.places import Place, SlotTable
from averaging.weights.snapshot import OpenedVersion, StateCopy, WeightPieces, WeightSnapshot, begin_copy, seal
from averaging.weights.store import Store
from averaging.weights.tree import (
    PUBLISHER,
    UNKNOWN_DIFFERENCE,
    UNKNOWN_WHOLE,
    Tree,
    best_fan_out,
    in_order,
)
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

ASK_AGAIN_SECONDS = 0.2
"""A slow follower that has the newest version which others receive waits; so often it is looked whether there is room
for a newer one."""

MOST_WARMED = 64
"""Followers that learn their probable source before the first version. Each that joins costs a plan for all."""

MOST_COPIES = 2
"""Copies that the publisher sends if the user has not said how many."""

NOTIFIED_BYTES = 4 << 20
"""Senders that wait for pieces are woken once for so many bytes, and for the first piece."""

MAX_FAILED = 64
"""Endpoints that a request may name as failed."""

LEFT_VERSIONS = 16
"""Versions for which a follower that another one has left hands on none."""


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

    The publisher sends each version to one follower or a few. The others get it from those. It keeps the newest
    version and `bases` earlier ones, and a follower that has one of them gets differences only. Each takes the memory
    of the tensors that changed.

    Args:
        model: Module whose state dict is published if `publish` gets none. Names are published without the prefixes
            of wrappers, such as `_orig_mod.` of `torch.compile` and `module.` of DistributedDataParallel.
        run_id: Only followers of this run are served; None for the run of the averager, or for all followers.
        dtype: Floating-point tensors are published in this dtype. In `torch.bfloat16` a version is half as long, and a
            difference a tenth of one in float32.
        bases: Earlier versions that are kept.
        max_bytes: Earlier versions are dropped while all versions together take more memory than this.
        copies: Followers that get a version from here. Failures of followers can add to it. If None, as many as make
            the last follower have the version soon at the rates that were measured: 1 or 2.
        fan_out: Followers that get a version from one other follower. If None, 1, 2 or 4 likewise.
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
        copies: int | None = None,
        fan_out: int | None = None,
        process_group: Any = None,
        endpoint: str = "",
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype must be a floating-point dtype, not {dtype}")
        for name, value, least in (
            ("bases", bases, 0),
            ("copies", 1 if copies is None else copies, 1),
            ("fan_out", 1 if fan_out is None else fan_out, 1),
        ):
            if not is_count(value) or value < least:
                raise ConfigError(f"{name} must be a whole number, at least {least}, not {value!r}")
        self._model, self._run_id, self._dtype = model, run_id, dtype
        self._copies, self._fan_out = copies, fan_out
        self._claims = Claims()
        self._store = Store(
            bases, max_bytes, retain=lambda kept, here: self._claims.claimed(kept, here, time.monotonic())
        )
        self._places = SlotTable("followers", MAX_FOLLOWERS, MAX_FOLLOWERS_PER_HOST, MAX_FOLLOWERS_PER_CONNECTION)
        self._publishing = threading.Lock()
        self._followers: dict[bytes, str] = {}  # endpoints of those that follow now
        self._asked_for: dict[bytes, int] = {}  # newest version that each of those has asked for
        self._in_engines: dict[bytes, int] = {}  # what some of those have said that their engines have
        self._local: set[bytes] = set()  # those that reach this publisher through loopback
        self._rates: dict[bytes, float] = {}  # bytes/s that each of those has received from here
        self._trees: dict[bytes, _Shaped] = {}  # by the name of the version
        self._left: dict[str, int] = {}  # endpoints of followers that others have left, and for how many versions yet
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
            has = self._in_engines.get(name, self._asked_for.get(name))
            part = "" if has is None or has >= 0 else f"unknown: a part of {-1 - has}"
            yield WeightReader("follower", endpoint or name.hex()[:8], part, None if part else has, self.version)

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
        return [
            FOLLOW.streams(self._follow),
            FETCH.streams(self._fetch),
            DESCRIBE.streams(self._describe),
            WARM.streams(self._warm),
        ]

    def _copy(self, state: Mapping[str, torch.Tensor] | None) -> StateCopy:
        if state is None:
            if self._model is None:
                raise ConfigError("there is nothing to publish; give a state dict, or a model to the publisher")
            state = self._model.state_dict()
        state = plain_state(state)
        if self._ranks is not None and not self._ranks.leads:  # tensors that are not divided are those of rank 0
            state = {name: tensor for name, tensor in state.items() if is_divided(tensor)}
        return begin_copy(state, self._dtype, self._store.newest)

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
                self._publish_opened(OpenedVersion(copy, version, newest))
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

    def _publish_opened(self, opened: OpenedVersion) -> None:
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
        if request.local:
            self._local.add(name)
        try:
            announced = self._store.latest
            yield self._announcement(name, announced, None)
            while True:
                layout = None if announced is None else announced.manifest.layout
                announced = await self._newer_than(-1 if announced is None else announced.manifest.version, place)
                yield self._announcement(name, announced, layout)
        finally:
            self._places.leave(place)
            del self._followers[name]
            self._local.discard(name)
            self._rates.pop(name, None)
            self._asked_for.pop(name, None)
            self._in_engines.pop(name, None)
            self._claims.leave(name)
            for shaped in self._trees.values():
                shaped.tree.leave(name)

    def _announcement(self, name: bytes, pieces: WeightPieces | None, known: WeightLayout | None) -> wire.Version:
        """What a follower is told of a version, with the source that is planned for it."""
        if pieces is None:
            few = list(self._followers) if len(self._followers) <= MOST_WARMED else []
            message, tree = wire.Version(), self._plan(few, whole=True).tree
        else:
            message, tree = version_message(pieces.manifest, known), self._tree(pieces).tree
        source = tree.sources.get(name)
        if source is not None and (pieces is None or not pieces.manifest.is_described):
            message.planned.source = "" if source == PUBLISHER else self._followers.get(source, "")
        return message

    def _tree(self, pieces: WeightPieces) -> _Shaped:
        """The tree of a version, planned for those followers that are not busy with an earlier one."""
        self._trees = {known: shaped for known, shaped in self._trees.items() if self._store.holds(known)}
        name = pieces.manifest.name
        if name not in self._trees:
            self._left = {endpoint: versions - 1 for endpoint, versions in self._left.items() if versions > 1}
            before = self._store.newest
            last = -1 if before is None or before is pieces else before.manifest.version
            waiting = [each for each in self._followers if self._asked_for.get(each, -1) >= last]
            self._trees[name] = self._plan(waiting if not pieces.manifest.is_described else [], whole=last < 0)
        return self._trees[name]

    def _plan(self, waiting: Sequence[bytes], *, whole: bool) -> _Shaped:
        usual = UNKNOWN_WHOLE if whole else UNKNOWN_DIFFERENCE
        known = [rate for each in waiting if (rate := self._rates.get(each, 0.0)) > 0]
        latest = self._store.latest
        if known and latest is not None and len(waiting) > 1:
            nbytes = (not whole and self._store.difference_bytes()) or latest.manifest.layout.nbytes
            usual = best_fan_out(len(waiting), nbytes, statistics.median(known))
        copies = self._copies or min(usual, MOST_COPIES)
        shaped = _Shaped(Tree(copies), self._fan_out or usual)
        # Who hands on comes first. Who reaches this publisher through loopback can use all that others can.
        placed = sorted(in_order(waiting, self._rates), key=lambda each: self._followers[each] in ("", *self._left))
        for local in (False, True):
            able = self._able(local)
            shaped.tree.plan([each for each in placed if (each in self._local) is local], able, shaped.fan_out)
        return shaped

    def _able(self, local: bool) -> dict[bytes, str]:
        """The followers that hand on to those that reach this publisher through loopback, or to all."""
        return {
            name: endpoint
            for name, endpoint in self._followers.items()
            if endpoint and endpoint not in self._left and (local or not is_loopback(parse_address(endpoint)[0]))
        }

    async def _newer_than(self, version: int, place: Place) -> WeightPieces:
        while (latest := self._store.latest) is None or latest.manifest.version <= version:
            await self._store.changes.wait(lambda: place.lost or self._store.is_newer_than(version))
            if place.lost:
                raise BusyError("your host has the most followers, and another one needs a place; try again later")
        return latest

    async def _describe(self, request: wire.DescribeRequest) -> AsyncGenerator[wire.Digests, None]:
        self._check_run(request.run_id)
        if not request.name and request.follower in self._followers:
            self._in_engines[request.follower] = request.has
            return
        asked = self._store.find(request.name)
        if request.follower in self._followers and asked is not None:
            self._rates[request.follower] = float(request.rate)
            taken = self._take(request, asked)
            while taken is None:
                yield wire.Digests()
                await asyncio.sleep(ASK_AGAIN_SECONDS)
                taken = self._take(request, self._store.latest)
            self._asked_for[request.follower] = taken.manifest.version
            if taken.manifest.version != asked.manifest.version:
                yield wire.Digests(instead=version_message(taken.manifest))
                return
        async with aclosing(self._store.describe(request.name, request.first)) as messages:
            async for message in messages:
                yield message

    def _take(self, request: wire.DescribeRequest, asked: WeightPieces | None) -> WeightPieces | None:
        """The version that a follower takes now; None if it has to wait for one."""
        if asked is None or request.follower not in self._followers:
            raise StateError("you follow no versions here any more")
        version, nbytes = asked.manifest.version, asked.manifest.layout.nbytes
        now, usual = time.monotonic(), self._store.usual
        taken = self._claims.ask(request.follower, request.has, version, usual, nbytes, now)
        return None if taken is None else self._store.with_number(taken)

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
        pieces = self._store.find(name)
        if pieces is None:
            raise StateError(f"no version with the digest {name.hex()[:8]} is kept here; ask for the newest one")
        shaped = self._tree(pieces)
        before = self._followers.get(shaped.tree.sources.get(request.follower, PUBLISHER), "")
        if before in request.failed[:MAX_FAILED]:  # only what was really its source
            self._left[before] = LEFT_VERSIONS
        if request.follower not in self._followers:  # it follows no versions and hands on nothing
            return ""
        failed = set(request.failed[:MAX_FAILED])
        names = {name for name, endpoint in self._followers.items() if endpoint in failed}
        able = self._able(request.local)
        # A follower whose base is no recent version gets the whole, at least from other followers, which have left that
        # base behind; of the whole a source sends no more copies than a link carries, of all versions together.
        base = self._store.find(request.base)
        fan_out = shaped.fan_out
        if not self._fan_out and (base is None or base.manifest.version not in self._store.usual):
            fan_out = UNKNOWN_WHOLE
            busy = self._sending(pieces) - {shaped.tree.sources.get(request.follower)}
            able = {each: endpoint for each, endpoint in able.items() if each not in busy}
        chosen = shaped.tree.source_of(request.follower, able, names, fan_out)
        return "" if chosen == PUBLISHER else able[chosen]

    def _sending(self, other: WeightPieces) -> set[bytes]:
        """The followers from which others receive a version now that is not this one."""
        sending: set[bytes] = set()
        for name, shaped in self._trees.items():
            pieces = self._store.find(name)
            if pieces is not None and pieces is not other:
                version = pieces.manifest.version
                sources = shaped.tree.sources.items()
                sending |= {source for follower, source in sources if self._asked_for.get(follower) == version}
        return sending

    async def _warm(self, request: wire.WarmRequest) -> AsyncGenerator[wire.Filler, None]:
        self._check_run(request.run_id)
        if request.follower in self._followers:
            self._rates[request.follower] = float(request.rate)
        async with aclosing(self._store.warm(request)) as fillers:
            async for filler in fillers:
                yield filler


@dataclass(frozen=True, slots=True)
class _Shaped:
    """The tree of a version, and how many copies each follower sends."""

    tree: Tree
    fan_out: int


def _check_same_layout(newest: WeightSnapshot, copy: StateCopy) -> None:
    if newest.manifest.layout is copy.layout:
        return
    names = f"in version {newest.manifest.version}", "now"
    difference = first_difference(newest.manifest.layout.tensors, copy.layout.tensors, names)
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
