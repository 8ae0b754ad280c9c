"""`ModelReceiver`: follows the publishers of a model, receives its versions, and hands them on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Self

from averaging.common import Backoff, is_folder, is_loopback, parse_address, spelled
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
    StateError,
    TensorError,
    TransportError,
    refusal_cause,
)
from averaging.rpc import Credentials, RpcChannel, RpcHandler, RpcServer
from averaging.seeds import Seeds
from averaging.weights.download import Downloads, PublisherLink
from averaging.weights.layout import Shard, WeightLayout, WeightManifest, WeightSpec, read_version
from averaging.weights.parts import check_own, is_wanted, missing_part, whole_of
from averaging.weights.publisher import WeightPublisher
from averaging.weights.snapshot import DividedSnapshot, Incoming, WeightSnapshot
from averaging.weights.storage import VersionFolder
from averaging.weights.store import FETCH, FOLLOW, Changes, Store
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

MIN_PAUSE, MAX_PAUSE = 0.1, 2.0  # seconds between two attempts to reach publishers; the pause doubles
NAME_BYTES = 16
EARLY_SECONDS = 2.0  # for which a call for a version waits that was not announced here yet
REMEMBERED = 4  # versions of each part of which the manifest is kept, so that those of one version are found together

Publisher = PublisherLink | VersionFolder


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """The options of a follower that do not depend on what it does with the weights."""

    join: Sequence[str]  # addresses of publishers, sources of them, see `averaging.seeds`, or folders of versions
    run_id: str  # the run that is followed; empty for any
    credentials: Credentials = field(default_factory=Credentials)
    listen: str | None = "127.0.0.1:0"  # address at which it hands on versions; None if it does not
    advertise: str | None = None  # address at which others reach it, if that differs
    join_timeout: float = 10.0  # seconds within which a publisher must answer at the start
    stall_timeout: float = 30.0  # seconds without a message after which a source is left
    max_bytes: int = 1 << 40  # of the largest state that is accepted
    min_version: int = 0  # earlier versions are not received
    seeds: Seeds = field(init=False)  # the addresses that `join` names now
    folders: Mapping[str, VersionFolder] = field(init=False)  # those in `join`

    def __post_init__(self) -> None:
        if isinstance(self.join, str) or not self.join:
            raise ConfigError(f"join must be a list of addresses of publishers, not {self.join!r}")
        of_folder = self.stall_timeout, self.max_bytes
        object.__setattr__(
            self, "folders", {each: VersionFolder(each, *of_folder) for each in self.join if is_folder(each)}
        )
        try:
            addresses = [each for each in self.join if each not in self.folders]
            object.__setattr__(self, "seeds", Seeds(addresses, self.credentials))
        except ConfigError as error:
            raise ConfigError(f"join: {error}") from None

    def dial(self, endpoint: str, *, loopback: bool) -> RpcChannel:
        """Returns a connection to a publisher or another follower. All connections of a follower are made here.

        An address that the user has not named is dialled only if a peer can be there, on loopback only if `loopback`.
        """
        return RpcChannel(
            endpoint,
            credentials=self.credentials,
            named_by_peer=endpoint not in self.seeds.named,
            loopback=loopback,
            certified_host=self.seeds.names.get(endpoint),
        )

    @property
    def hands_on(self) -> bool:
        """Whether others could reach this follower: not if it listens on loopback and the publishers are elsewhere."""
        if self.listen is None:
            return False
        own, others = self.advertise or self.listen, self.seeds.addresses
        return not is_loopback(parse_address(own)[0]) or all(is_loopback(parse_address(each)[0]) for each in others)


class ModelReceiver:
    """Receives the versions of a model while it is entered, as an async context manager.

    A model has one part or, if `fully_shard` divides it at the publishers, several. The joined publisher announces the
    first part of each version, and names the publishers of the others, which are followed as well. A version is
    complete when each wanted part has the digest that the joined publisher named for it. So parts of two versions are
    never mixed.

    Of `own`, the part of each tensor that the follower holds, other models are refused, and of a model in parts only
    that is received; None takes whatever is published. `base` are weights that are here already. `on_progress` gets the
    received and expected bytes of all parts, before they are encoded.
    """

    def __init__(
        self,
        options: FollowerOptions,
        own: Callable[[], Sequence[WeightSpec]] | None = None,
        base: WeightSnapshot | None = None,
        on_progress: Callable[[int, int], None] = lambda received, total: None,
    ) -> None:
        self._options, self._own, self._on_progress = options, own, on_progress
        self.changes = Changes()  # of versions, parts of them, `failure` and `connected`
        self.endpoint = ""  # at which this follower hands on versions; empty if it does not
        self._stack = AsyncExitStack()
        self._first = _PartReceiver(self, options, base)
        self._others: dict[str, _PartReceiver] = {}  # by the endpoint of their publisher
        # The publisher of a folder names nobody, so this follower announces what it has itself.
        self._relay = WeightPublisher.of_store(self._first.store, options.run_id) if options.folders else None
        self.bytes_received = 0  # of encoded pieces
        self.retries = 0  # attempts to receive a version that failed
        self._complete: WeightSnapshot | DividedSnapshot | None = base  # the newest complete version

    @property
    def announced(self) -> WeightManifest | None:  # the newest that a publisher has announced
        return self._first.announced

    @property
    def newest(self) -> WeightSnapshot | DividedSnapshot | None:
        """The newest version that is here completely, or TensorError if its parts are not one model, or another."""
        # One that was announced with its digests is known before an earlier one that is still being received.
        for manifest in sorted(self._first.manifests, key=lambda each: each.version, reverse=True):
            if self._complete is not None and manifest.version <= self._complete.manifest.version:
                break
            if (snapshot := self._put_together(manifest)) is not None:
                self._complete = snapshot
                break
        return self._complete

    @property
    def failure(self) -> AveragingError | None:  # that has ended following for good
        return next((part.failure for part in self._parts if part.failure), None)

    @property
    def connected(self) -> bool:
        return all(part.connected for part in self._parts)

    @property
    def bytes_sent(self) -> int:
        return sum(part.store.sent for part in self._parts)

    async def __aenter__(self) -> Self:
        """Returns when a publisher has answered.

        Raises:
            StateError: none did within `join_timeout`, or none of them publishes weights.
            ListenError, TensorError, TransportError: see `WeightFollower.__enter__`.
        """
        options, first = self._options, self._first
        async with AsyncExitStack() as stack:
            stack.push_async_callback(options.seeds.close)
            await options.seeds.look_up()
            if options.hands_on and options.listen is not None:
                server = RpcServer(options.listen, [self], advertise=options.advertise, credentials=options.credentials)
                self.endpoint = (await stack.enter_async_context(server)).endpoint
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for running in (first.run(), self._follow_others()):
                stack.callback(tasks.create_task(running).cancel)
            answered = await self.changes.wait(lambda: first.reached or first.failure is not None, options.join_timeout)
            failure = first.failure if answered else first.not_reached()
            if failure is None:
                self._stack = stack.pop_all()
                return self
        raise failure  # outside of the TaskGroup, which would make a group of it

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def wait_newer(self, version: int | None, timeout: float | None) -> bool:
        """Waits until a version above `version` was received, or following has ended; returns whether there is one.

        It may be called in any event loop.
        """

        def is_newer() -> bool:
            newest = self.newest
            return newest is not None and (version is None or newest.manifest.version > version)

        await self.changes.wait(lambda: is_newer() or self.failure is not None, timeout)
        return is_newer()

    async def tell(self, version: int | None, part_of: int = 0) -> None:
        """Tells the publishers what an engine has got from here; None if it may have a part of version `part_of`."""
        has = -1 - part_of if version is None else version
        await asyncio.gather(*(part.tell(has) for part in self._parts))

    def rpc_handlers(self) -> list[RpcHandler]:
        announcing = () if self._relay is None else self._relay.rpc_handlers()
        return [FETCH.streams(self._fetch), *(each for each in announcing if each.method is not FETCH)]

    async def _fetch(self, request: wire.FetchRequest) -> AsyncGenerator[wire.Reply, None]:
        """Hands on pieces. The caller may have been announced a version sooner than this follower."""

        def holders() -> list[Store]:
            return [part.store for part in self._parts if part.store.find(request.name) is not None]

        await self.changes.wait(lambda: bool(holders()), EARLY_SECONDS)
        store = next(iter(holders()), self._first.store)
        relay = self._relay if store is self._first.store else None
        async with aclosing(store.send(request) if relay is None else relay.fetch(request)) as replies:
            async for reply in replies:
                yield reply

    @property
    def _parts(self) -> list[_PartReceiver]:
        return [self._first, *tuple(self._others.values())]  # other threads look at them too

    def check(self, part: _PartReceiver, manifest: WeightManifest) -> None:
        if self._own is not None:
            check_own(self._own(), manifest, is_part=part is not self._first or manifest.is_divided)
        if part is self._first and not manifest.shards and manifest.layout.has_parts:
            raise TensorError(
                f"{', '.join(self._options.join)} publishes a part of a model, and names no others; join the publisher "
                "of rank 0"
            )
        total = manifest.layout.nbytes + sum(each.nbytes for each in self._parts if each is not part)
        if total > self._options.max_bytes:
            limit = spelled("max_bytes", self._options.max_bytes)
            raise ProtocolViolationError(f"{total} bytes of weights in all parts, more than {limit}")

    def wants(self, manifest: WeightManifest) -> bool:
        return self._own is None or not manifest.is_divided or is_wanted(self._own(), manifest.layout)

    def advance(self) -> None:
        counts = [part.progress for part in self._parts]
        self._on_progress(sum(done for done, _ in counts), sum(of_all for _, of_all in counts))

    def _put_together(self, manifest: WeightManifest) -> WeightSnapshot | DividedSnapshot | None:
        manifests, snapshots = [], []
        for number, shard in enumerate(manifest.shards or (Shard("", manifest.digest),)):
            part = self._others.get(shard.endpoint) if number else self._first
            known = () if part is None else tuple(part.manifests)
            described = next((each for each in known if each.digest == shard.digest), None)
            if part is None or described is None:
                return None
            manifests.append(described)
            if self.wants(described):
                snapshot = part.store.complete(shard.digest)
                if snapshot is None:
                    return None
                snapshots.append(snapshot)
        if not manifest.is_divided:
            return replace(snapshots[0], manifest=manifest)
        # Only with the layouts of all parts: each fits the model alone, and together they could lack elements.
        own = None if self._own is None else self._own()
        layouts = [each.layout for each in manifests]
        wholes = {spec.name: whole_of(spec) for layout in layouts for spec in layout.tensors}
        difference = missing_part(list(wholes.values()) if own is None else own, layouts)
        if difference is not None:
            other, remedy = "parts that are not one model", "see that all ranks publish the same"
            if own is not None:
                other, remedy = "another model", "follow with the same model"
            raise TensorError(f"the publishers publish {other}: {difference}; {remedy}")
        return DividedSnapshot(manifest, tuple(snapshots))

    async def _follow_others(self) -> None:
        running: dict[str, asyncio.Task[None]] = {}

        def named() -> set[str]:
            return set() if self.announced is None else {shard.endpoint for shard in self.announced.shards[1:]}

        async with asyncio.TaskGroup() as tasks:
            while True:
                endpoints = named()
                for endpoint in running.keys() - endpoints:
                    running.pop(endpoint).cancel()
                    del self._others[endpoint]
                base = self._complete if isinstance(self._complete, WeightSnapshot) else None
                for endpoint in endpoints - running.keys():
                    part = _PartReceiver(self, self._options, base, endpoint, self._first.is_local)
                    self._others[endpoint], running[endpoint] = part, tasks.create_task(part.run())
                await self.changes.wait(lambda: named() != running.keys())


class _PartReceiver:
    # Follows the publishers of one part of a model, and receives its versions. Those that the user has joined publish
    # the first part. That of another part is at an `endpoint` that one of them has named, on `loopback` if that is.

    def __init__(
        self,
        model: ModelReceiver,
        options: FollowerOptions,
        base: WeightSnapshot | None,
        endpoint: str = "",
        loopback: bool = False,
    ) -> None:
        self._model, self._options, self._endpoint, self._loopback = model, options, endpoint, loopback
        self.store = Store(bases=1, changes=model.changes)
        if base is not None:
            self.store.add(base)
        self.announced: WeightManifest | None = None if base is None else base.manifest
        self.manifests: deque[WeightManifest] = deque(maxlen=REMEMBERED)  # with digests
        self.is_local = self.connected = False  # the publisher that announced the newest version, and any
        self.reached = False  # whether a publisher has ever answered
        self.failure: AveragingError | None = None  # why following has ended for good
        self.progress = (0, 0)  # received and expected bytes of the present version, before they are encoded
        self._publisher: Publisher | None = None  # who announced the newest version
        self._current: Publisher | None = None  # who is connected
        self._layout: WeightLayout | None = None
        self._incoming: Incoming | None = None
        self._reasons: dict[str, AveragingError] = {}  # by address, since it was last connected
        self._warned_old = False

    async def run(self) -> None:
        options, changes = self._options, self.store.changes
        self._downloads = Downloads(options.run_id, options.dial, options.stall_timeout, self._model.endpoint, changes)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._receive())
        finally:
            await self._downloads.close()

    async def tell(self, has: int) -> None:
        if isinstance(self._current, PublisherLink):
            await self._downloads.tell(self._current, has)

    def not_reached(self) -> AveragingError:
        reasons, findings = list(self._reasons.values()), "" if self._endpoint else self._options.seeds.findings
        if self._all_refuse():
            first = reasons[0]
            if isinstance(first, CallRefusedError) and first.cause is RefusalCause.NOT_SERVED:
                return StateError(
                    f"{first.endpoint} publishes no weights; give its averager or peer services=[WeightPublisher(…)], "
                    "or follow another one"
                )
            return first
        answers = "; ".join((*map(str, reasons), findings)).strip("; ") or "no answer"
        return StateError(
            f"no publisher answered within {self._options.join_timeout:g} s ({answers}); check the addresses, "
            "and that a publisher is up"
        )

    @property
    def nbytes(self) -> int:
        return 0 if self._layout is None else self._layout.nbytes

    @property
    def _addresses(self) -> Sequence[str]:
        return (self._endpoint,) if self._endpoint else (*self._options.seeds.addresses, *self._options.folders)

    def _all_refuse(self) -> bool:
        reasons = [self._reasons.get(address) for address in self._addresses]
        failures = not self._endpoint and self._options.seeds.failures
        return bool(reasons) and not failures and all(error and _is_definite(error) for error in reasons)

    async def _follow(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while self.failure is None:
            for address in self._addresses:
                try:
                    await self._follow_one(address)
                    error: AveragingError = StateError(f"{address} has ended the announcements")
                except AveragingError as failure:
                    error = failure
                if isinstance(error, TensorError):
                    self.failure = error
                if self.connected:
                    logger.warning("the publisher %s is lost: %s; trying again", address, error)
                    self.connected = False
                    backoff.reset()
                self._reasons[address] = error
                self.store.changes.happened()
            if self._all_refuse():
                self.failure = self.failure or self.not_reached()
            if self.failure is None:
                await asyncio.sleep(backoff.next_delay())
                if not self._endpoint:
                    await self._options.seeds.look_up()
                self._reasons = {name: error for name, error in self._reasons.items() if name in self._addresses}
        self.store.changes.happened()

    async def _follow_one(self, address: str) -> None:
        options = self._options
        publisher: Publisher
        if folder := options.folders.get(address):
            publisher, announcements = folder, folder.announcements(options.run_id)
        else:
            link = PublisherLink(options.dial(address, loopback=self._loopback), os.urandom(NAME_BYTES))
            publisher, announcements = link, self._announcements(link)
        try:
            async with aclosing(announcements):
                async for manifest in announcements:
                    if manifest is not None:
                        self._announce(manifest, publisher)
                    self.connected, self.reached, self._current = True, True, publisher
                    self._reasons.pop(address, None)
                    self.store.changes.happened()
        finally:
            if self._publisher is publisher:
                self._publisher = None
            if self._current is publisher:
                self._current = None

    async def _announcements(self, publisher: PublisherLink) -> AsyncGenerator[WeightManifest | None, None]:
        options, address = self._options, publisher.endpoint
        # A loopback endpoint is of no use to the followers of a publisher elsewhere.
        own = self._model.endpoint
        reachable = own and (publisher.is_local or not is_loopback(parse_address(own)[0]))
        request = wire.FollowRequest(
            run_id=options.run_id,
            follower=publisher.follower,
            endpoint=own if reachable else "",
            local=publisher.is_local,
        )
        async with publisher.channel, aclosing(publisher.channel.stream(FOLLOW, request)) as announcements:
            try:
                async with asyncio.timeout(options.join_timeout):
                    message = await anext(announcements, None)
            except TimeoutError:
                raise PeerUnreachableError(address, f"no answer within {options.join_timeout:g} s") from None
            layout: WeightLayout | None = None  # of the message before
            while message is not None:
                try:
                    manifest = read_version(message, options.max_bytes, layout)
                except ProtocolViolationError as error:
                    raise ProtocolViolationError(f"{address} announces {error}") from None
                layout = layout if manifest is None else manifest.layout
                yield manifest
                message = await anext(announcements, None)

    def _announce(self, manifest: WeightManifest, publisher: Publisher) -> None:
        if manifest.layout != self._layout:
            self._model.check(self, manifest)
            self._layout = manifest.layout
            self.store.arrange(manifest.layout)
        manifest = replace(manifest, layout=self._layout)  # one object for all versions, which compares fast
        received = self.store.newest
        if received is None or manifest.version > received.manifest.version:
            self.announced, self._publisher, self.is_local = manifest, publisher, publisher.is_local
            self._warned_old = False
            if manifest.is_described:
                self.manifests.append(manifest)
        elif not self._warned_old and not (manifest.is_described and manifest.digest == received.manifest.digest):
            self._warned_old = True
            logger.warning(
                "%s publishes version %d, and version %d is here; versions never go back, so it is left out",
                publisher.endpoint,
                manifest.version,
                received.manifest.version,
            )

    async def _receive(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            await self.store.changes.wait(self._is_behind)
            manifest, publisher = self.announced, self._publisher
            if manifest is None or publisher is None:
                continue
            try:
                await self._receive_one(manifest, publisher)
            except StateError as error:
                logger.warning("%s; trying again", error)
                self._model.retries += 1
                incoming = self._incoming
                if incoming and not incoming.manifest.is_described and incoming.knows(manifest.layout.count - 1):
                    self._incoming = Incoming(manifest, self.store.newest, incoming)  # the digests may be wrong
                self.store.changes.happened()
                await asyncio.sleep(backoff.next_delay())
            else:
                backoff.reset()

    async def _receive_one(self, manifest: WeightManifest, publisher: Publisher) -> None:
        # What has arrived of this version stays if a source fails. Of another one stays what is the same in this, for
        # example if its publisher has started again and gives it another name.
        incoming, base, wanted = self._incoming, self.store.newest, (manifest.name, manifest.version)
        if isinstance(publisher, VersionFolder):
            base = await publisher.catch_up(manifest, base, self._counting)
            incoming = Incoming(manifest, base, incoming)
        elif incoming is None or (incoming.manifest.name, incoming.manifest.version) != wanted:
            incoming = Incoming(manifest, base, incoming)
        self._incoming = incoming
        self.store.receiving(incoming)
        if isinstance(publisher, VersionFolder):
            await publisher.receive(incoming, self._counting(incoming))
        else:
            await self._downloads.receive(incoming, publisher, self._counting(incoming))
        snapshot, self._incoming = incoming.finish(), None
        if snapshot.manifest not in self.manifests:
            self.manifests.append(snapshot.manifest)
        self.store.add(snapshot)
        self.store.receiving(None)

    def _counting(self, incoming: Incoming) -> Callable[[], None]:
        total, before = incoming.left, incoming.received

        def arrived() -> None:
            nonlocal before
            self._model.bytes_received += incoming.received - before
            before = incoming.received
            self.progress = (total - incoming.left, total)
            self.store.changes.happened()
            self._model.advance()

        return arrived

    def _is_behind(self) -> bool:
        newest, announced = self.store.newest, self.announced
        return (
            announced is not None
            and self._publisher is not None
            and announced.version >= self._options.min_version
            and self._model.wants(announced)
            and (newest is None or newest.manifest.version < announced.version)
        )


def _is_definite(error: AveragingError) -> bool:
    """Whether a further attempt would fail alike."""
    return (
        isinstance(error, TensorError | ProtocolViolationError)
        or refusal_cause(error) is RefusalCause.NOT_SERVED
        or (isinstance(error, TransportError) and error.definite)
    )
