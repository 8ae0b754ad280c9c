"""The tasks of a follower: it follows publishers, receives their versions, and hands them on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Self

from averaging.common import Backoff, is_loopback, parse_address
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
from averaging.weights.download import Downloads, Publisher
from averaging.weights.layout import (
    FETCH,
    FOLLOW,
    WeightLayout,
    WeightManifest,
    WeightSpec,
    check_own,
    is_wanted,
    read_version,
)
from averaging.weights.part_receivers import MAX_PAUSE, MIN_PAUSE, DividedSnapshot, PartReceivers
from averaging.weights.snapshot import Incoming, WeightSnapshot
from averaging.weights.store import Changes, Store
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

NAME_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """The options of a follower that do not depend on what it does with the weights.

    Attributes:
        join: addresses of publishers.
        run_id: the run that is followed.
        credentials: certificates and tokens.
        listen: address at which it hands on versions; None if it does not.
        advertise: address at which others reach it, if that differs.
        join_timeout: seconds within which a publisher must answer at the start.
        stall_timeout: seconds without a message after which a source is left.
        max_bytes: largest accepted state.
        min_version: earlier versions are not received.
        given: addresses that the user has named, which are always dialled; None for those of `join`.
        loopback: whether `join`, if another publisher has named it, may be on loopback.
    """

    join: Sequence[str]
    run_id: str
    credentials: Credentials = field(default_factory=Credentials)
    listen: str | None = "127.0.0.1:0"
    advertise: str | None = None
    join_timeout: float = 10.0
    stall_timeout: float = 30.0
    max_bytes: int = 1 << 40
    min_version: int = 0
    given: Sequence[str] | None = None
    loopback: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.join, str) or not self.join:
            raise ConfigError(f"join must be a list of addresses of publishers, not {self.join!r}")
        for address in self.join:
            if parse_address(address)[1] == 0:
                raise ConfigError(f"join: {address!r} has port 0; give the port on which the publisher listens")

    def of_part(self, endpoint: str, *, loopback: bool) -> FollowerOptions:
        """The options for another part of the model.

        Args:
            endpoint: its publisher, which the joined one has named.
            loopback: whether that may be on loopback.
        """
        listen = self.listen
        if listen is not None and (parse_address(listen)[1] != 0 or self.advertise is not None):
            listen = None  # the port is that of the first part; so this one is not handed on
        return replace(self, join=[endpoint], given=self.join, loopback=loopback, listen=listen, advertise=None)

    def dial(self, endpoint: str, *, loopback: bool) -> RpcChannel:
        """Returns a connection to a publisher or another follower. All connections of a follower are made here.

        Args:
            endpoint: where to; one that the user has not named is dialled only if a peer can be there.
            loopback: whether such a one may be on loopback.
        """
        named = endpoint not in (self.join if self.given is None else self.given)
        return RpcChannel(endpoint, credentials=self.credentials, named_by_peer=named, loopback=loopback)

    @property
    def hands_on(self) -> bool:
        """Whether others could reach this follower: not if it listens on loopback and the publishers are elsewhere."""
        if self.listen is None:
            return False
        own, others = self.advertise or self.listen, self.join
        return not is_loopback(parse_address(own)[0]) or all(is_loopback(parse_address(each)[0]) for each in others)


class VersionReceiver:
    """Follows the publishers of one model while it is entered, as an async context manager.

    If the announced versions are a part of a model, the others are received too, see `PartReceivers`.

    Args:
        options: see `FollowerOptions`.
        own: returns what the follower holds of each tensor, so that other models are refused and only what it holds is
            received; None to take whatever is published.
        base: weights that are here already.
        on_progress: called with received and expected bytes, before they are encoded.
        part_of: the changes of the receiver of the model's first part, and a function that is called with each
            manifest, if this one receives another part; None otherwise.

    Attributes:
        announced: the newest version that a publisher has announced.
        announced_locally: whether that publisher is on loopback.
        store: what was received; its `changes` also happen when `failure` or `connected` change.
        retries: attempts to receive a version that failed.
        endpoint: where this follower hands on versions; empty if it does not.
    """

    def __init__(
        self,
        options: FollowerOptions,
        own: Callable[[], Sequence[WeightSpec]] | None = None,
        base: WeightSnapshot | None = None,
        on_progress: Callable[[int, int], None] = lambda received, total: None,
        part_of: tuple[Changes, Callable[[WeightManifest], None]] | None = None,
    ) -> None:
        self._options, self._own, self._on_progress, self._part_of = options, own, on_progress, part_of
        self._stack = AsyncExitStack()
        self.store = Store(bases=1, changes=None if part_of is None else part_of[0])
        if base is not None:
            self.store.add(base)
        self.announced: WeightManifest | None = None if base is None else base.manifest
        self.announced_locally = False
        self.retries = 0
        self.endpoint = ""
        self._failure: AveragingError | None = None
        self._connected = False
        self._bytes_received = 0
        self._publisher: Publisher | None = None  # who announced that version
        self._layout: WeightLayout | None = None
        self._incoming: Incoming | None = None
        self._reasons: dict[str, AveragingError] = {}  # by address, since it was last connected
        self._told_old = False
        self._reached = asyncio.Event()  # a publisher has answered, or all have refused
        self._parts: PartReceivers | None = None  # of a model that comes in parts, of which this receives the first

    def of_part(
        self,
        options: FollowerOptions,
        base: WeightSnapshot | None,
        on_progress: Callable[[int, int], None],
        note: Callable[[WeightManifest], None],
    ) -> VersionReceiver:
        """Returns a receiver of another part of the same model; for the arguments see `VersionReceiver`."""
        return VersionReceiver(options, self._own, base, on_progress, (self.store.changes, note))

    @property
    def newest(self) -> WeightSnapshot | DividedSnapshot | None:
        """The newest version that was received completely."""
        return self.store.newest if self._parts is None else self._parts.newest

    @property
    def failure(self) -> AveragingError | None:
        """Why following has ended for good."""
        if self._failure is not None or self._parts is None:
            return self._failure
        return self._parts.failure or next((part.failure for part in self._others if part.failure), None)

    @property
    def connected(self) -> bool:
        """Whether a publisher of each part is connected."""
        return self._connected and all(part.connected for part in self._others)

    @property
    def bytes_received(self) -> int:
        """Bytes of encoded pieces."""
        former = 0 if self._parts is None else self._parts.former_bytes
        return self._bytes_received + former + sum(part.bytes_received for part in self._others)

    @property
    def bytes_sent(self) -> int:
        """Bytes handed on."""
        return self.store.sent + sum(part.bytes_sent for part in self._others)

    @property
    def _others(self) -> tuple[VersionReceiver, ...]:
        """The receivers of the other parts."""
        return () if self._parts is None else tuple(self._parts.others.values())

    async def __aenter__(self) -> Self:
        """Returns when a publisher has answered.

        Raises:
            StateError: none did within `join_timeout`, or none of them publishes weights.
            ListenError: it cannot listen.
            TensorError: the weights do not fit.
            TransportError: all refuse this follower.
        """
        options = self._options
        failure: AveragingError | None = None
        async with AsyncExitStack() as stack:
            if options.hands_on and options.listen is not None:
                server = RpcServer(
                    options.listen, [_HandsOn(self.store)], advertise=options.advertise, credentials=options.credentials
                )
                self.endpoint = (await stack.enter_async_context(server)).endpoint
            self._downloads = Downloads(options.run_id, options.dial, options.stall_timeout, self.endpoint)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for running in (self._follow(), self._receive(), self._follow_parts()):
                stack.callback(tasks.create_task(running).cancel)
            try:
                async with asyncio.timeout(options.join_timeout):
                    await self._reached.wait()
            except TimeoutError:
                failure = self._not_reached()
            failure = failure or self._failure
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

        await self.store.changes.wait(lambda: is_newer() or self.failure is not None, timeout)
        return is_newer()

    def _not_reached(self) -> AveragingError:
        reasons = list(self._reasons.values())
        if len(reasons) == len(set(self._options.join)) and all(map(_is_definite, reasons)):
            first = reasons[0]
            if isinstance(first, CallRefusedError) and first.cause is RefusalCause.NOT_SERVED:
                return StateError(
                    f"{first.endpoint} publishes no weights; give its averager or peer services=[WeightPublisher(…)], "
                    "or follow another one"
                )
            return first
        told = "; ".join(map(str, reasons)) or "no answer"
        return StateError(
            f"no publisher answered within {self._options.join_timeout:g} s ({told}); check the addresses, "
            "and that a publisher is up"
        )

    # Following

    async def _follow(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while self._failure is None:
            for address in self._options.join:
                try:
                    await self._follow_one(address)
                    error: AveragingError = StateError(f"{address} has ended the announcements")
                except AveragingError as failure:
                    error = failure
                if isinstance(error, TensorError):
                    self._failure = error
                if self._connected:
                    logger.warning("the publisher %s is lost: %s; trying again", address, error)
                    self._connected = False
                    backoff.reset()
                self._reasons[address] = error
                self.store.changes.happened()
            refused = len(self._reasons) == len(set(self._options.join)) and all(
                map(_is_definite, self._reasons.values())
            )
            if refused:
                self._failure = self._failure or self._not_reached()
            if self._failure is not None:
                self._reached.set()
            else:
                await asyncio.sleep(backoff.next_delay())
        self.store.changes.happened()

    async def _follow_one(self, address: str) -> None:
        options = self._options
        if address in self._downloads.liars:
            raise ProtocolViolationError(
                f"{address} sent something wrong and is not asked again: {self._downloads.liars[address]}"
            )
        publisher = Publisher(options.dial(address, loopback=options.loopback), os.urandom(NAME_BYTES))
        # A loopback endpoint is of no use to the followers of a publisher elsewhere.
        reachable = self.endpoint and (publisher.is_local or not is_loopback(parse_address(self.endpoint)[0]))
        request = wire.FollowRequest(
            run_id=options.run_id, follower=publisher.follower, endpoint=self.endpoint if reachable else ""
        )
        try:
            async with publisher.channel, aclosing(publisher.channel.stream(FOLLOW, request)) as announcements:
                try:
                    async with asyncio.timeout(options.join_timeout):
                        message = await anext(announcements, None)
                except TimeoutError:
                    raise PeerUnreachableError(address, f"no answer within {options.join_timeout:g} s") from None
                while message is not None:
                    try:
                        manifest = read_version(message, options.max_bytes, self._layout)
                    except ProtocolViolationError as error:
                        raise ProtocolViolationError(f"{address} announces {error}") from None
                    if manifest is not None:
                        self._announce(manifest, publisher)
                    self._connected = True
                    self._reasons.pop(address, None)
                    self._reached.set()
                    self.store.changes.happened()
                    message = await anext(announcements, None)
        finally:
            if self._publisher is publisher:
                self._publisher = None

    def _announce(self, manifest: WeightManifest, publisher: Publisher) -> None:
        if self._own is not None:
            check_own(self._own(), manifest, is_part=manifest.is_divided or self._part_of is not None)
        if self._part_of is not None:
            self._part_of[1](manifest)
        elif self._parts is None and manifest.is_divided:
            self._parts = PartReceivers(self, self._options, self._own, self.store.newest, self._on_progress)
        if self._parts is not None:
            self._parts.announce(manifest)
        if manifest.layout is not self._layout:
            self._layout = manifest.layout
            self.store.arrange(manifest.layout)
        received = self.store.newest
        if received is None or manifest.version > received.manifest.version:
            self.announced, self._publisher, self.announced_locally = manifest, publisher, publisher.is_local
            self._told_old = False
        elif manifest.digest != received.manifest.digest and not self._told_old:
            self._told_old = True
            logger.warning(
                "%s publishes version %d, and version %d is here; versions never go back, so it is left out",
                publisher.channel.endpoint,
                manifest.version,
                received.manifest.version,
            )

    async def _follow_parts(self) -> None:
        """Follows the other parts of a model from when it turns out to come in parts."""
        await self.store.changes.wait(lambda: self._parts is not None)
        if self._parts is not None:
            await self._parts.run()

    # Receiving

    async def _receive(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            await self.store.changes.wait(self._is_behind)
            manifest, publisher = self.announced, self._publisher
            if manifest is None or publisher is None:
                continue
            incoming = self._incoming
            if incoming is None or incoming.manifest.digest != manifest.digest:
                incoming = Incoming(manifest, self.store.newest)
            self._incoming = incoming
            self.store.receiving(incoming)
            total, before = incoming.left, self._bytes_received - incoming.received

            def arrived(incoming: Incoming = incoming, total: int = total, before: int = before) -> None:
                self._bytes_received = before + incoming.received
                self.store.changes.happened()
                if self._parts is None:
                    self._on_progress(total - incoming.left, total)
                else:
                    self._parts.advance("", total - incoming.left, total)

            try:
                await self._downloads.receive(incoming, publisher, arrived)
            except StateError as error:
                logger.warning("%s; trying again", error)
                self.retries += 1
                self.store.changes.happened()
                if publisher.channel.endpoint in self._downloads.liars:
                    self._publisher = None
                    await publisher.channel.close()  # ends its announcements too
                await asyncio.sleep(backoff.next_delay())
            else:
                snapshot = incoming.finish()
                self._incoming = None
                backoff.reset()
                self.store.add(WeightSnapshot(manifest, snapshot.buffers))
                self.store.receiving(None)

    def _wants(self, manifest: WeightManifest) -> bool:
        """Whether a version has something that the follower holds."""
        return self._own is None or not manifest.is_divided or is_wanted(self._own(), manifest.layout)

    def _is_behind(self) -> bool:
        newest, announced = self.store.newest, self.announced
        return (
            announced is not None
            and self._publisher is not None
            and announced.version >= self._options.min_version
            and self._wants(announced)
            and (newest is None or newest.manifest.version < announced.version)
        )


def _is_definite(error: AveragingError) -> bool:
    """Whether a further attempt would fail alike."""
    return (
        isinstance(error, TensorError | ProtocolViolationError)
        or refusal_cause(error) is RefusalCause.NOT_SERVED
        or (isinstance(error, TransportError) and error.definite)
    )


class _HandsOn:
    """The service of a follower: it sends pieces, and announces nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def rpc_handlers(self) -> list[RpcHandler]:
        """See `RpcService`."""
        return [FETCH.streams(self._store.send)]
