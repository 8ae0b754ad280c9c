"""The tasks of a follower: it follows publishers, receives their versions, and hands them on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
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
from averaging.rpc import Credentials, RpcChannel, RpcHandler, RpcServer, RpcService
from averaging.seeds import Seeds
from averaging.weights.download import Downloads, OtherVersionError, Publisher
from averaging.weights.lanes import KEEP_SECONDS
from averaging.weights.layout import (
    FETCH,
    FOLLOW,
    WARM,
    WeightLayout,
    WeightManifest,
    read_version,
)
from averaging.weights.snapshot import DividedSnapshot, Incoming, WeightSnapshot
from averaging.weights.store import Changes, Store
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

MIN_PAUSE, MAX_PAUSE = 0.1, 2.0
"""Seconds between two attempts to reach publishers; the pause doubles."""

NAME_BYTES = 16

EARLY_SECONDS = 2.0
"""A call for a version that was not announced here yet waits for so long."""


@dataclass(frozen=True, kw_only=True)
class FollowerOptions:
    """The options of a follower that do not depend on what it does with the weights.

    Attributes:
        join: addresses of publishers, or sources of them, see `averaging.seeds`.
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
        services: further gRPC methods to serve where it hands on versions.
        seeds: the addresses that `join` names now.
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
    given: Collection[str] | None = None
    loopback: bool = False
    services: Sequence[RpcService] = ()
    seeds: Seeds = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.join, str) or not self.join:
            raise ConfigError(f"join must be a list of addresses of publishers, not {self.join!r}")
        try:
            object.__setattr__(self, "seeds", Seeds(self.join, self.credentials))
        except ConfigError as error:
            raise ConfigError(f"join: {error}") from None

    def of_part(self, endpoint: str, *, loopback: bool) -> FollowerOptions:
        """The options for another part of the model.

        Args:
            endpoint: address of its publisher, which the joined publisher has named.
            loopback: whether that may be on loopback.
        """
        listen = self.listen
        if listen is not None and (parse_address(listen)[1] != 0 or self.advertise is not None):
            listen = None  # the port is that of the first part; so this one is not handed on
        return replace(
            self, join=[endpoint], given=self.seeds.named, loopback=loopback, listen=listen, advertise=None, services=()
        )

    def dial(self, endpoint: str, *, loopback: bool) -> RpcChannel:
        """Returns a connection to a publisher or another follower. All connections of a follower are made here.

        Args:
            endpoint: address; if the user has not named it, it is dialled only if a peer can be there.
            loopback: whether such an address may be on loopback.
        """
        named = endpoint not in (self.seeds.named if self.given is None else self.given)
        certified = self.seeds.names.get(endpoint)
        return RpcChannel(
            endpoint, credentials=self.credentials, named_by_peer=named, loopback=loopback, certified_host=certified
        )

    @property
    def hands_on(self) -> bool:
        """Whether others could reach this follower: not if it listens on loopback and the publishers are elsewhere."""
        if self.listen is None:
            return False
        own, others = self.advertise or self.listen, self.seeds.addresses
        return not is_loopback(parse_address(own)[0]) or all(is_loopback(parse_address(each)[0]) for each in others)


class VersionReceiver:
    """Follows the publishers of a model, or of a part of one, while it is entered, as an async context manager.

    Args:
        options: options of the follower.
        check: callback with the manifest of each version before it is received; raises TensorError to refuse it.
        base: weights that are here already.
        on_progress: callback with received and expected bytes, before they are encoded.
        wanted: whether a version is received; one that is not is only known by its manifest.
        changes: shared with other receivers; None for its own.

    Attributes:
        announced: the newest version that a publisher has announced.
        announced_locally: whether that publisher is on loopback.
        store: the received versions; its `changes` also happen when `failure` or `connected` change.
        retries: attempts to receive a version that failed.
        endpoint: address at which this follower hands on versions; empty if it does not.
    """

    def __init__(
        self,
        options: FollowerOptions,
        check: Callable[[WeightManifest], None] = lambda _: None,
        base: WeightSnapshot | None = None,
        on_progress: Callable[[int, int], None] = lambda received, total: None,
        *,
        wanted: Callable[[WeightManifest], bool] = lambda _: True,
        changes: Changes | None = None,
    ) -> None:
        self._options, self._check, self._on_progress, self._wanted = options, check, on_progress, wanted
        self._stack = AsyncExitStack()
        self.store = Store(bases=1, changes=changes)
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
        self._current: Publisher | None = None  # who is connected
        self._layout: WeightLayout | None = None
        self._incoming: Incoming | None = None
        self._instead: WeightManifest | None = None  # what the publisher wants this follower to receive
        self._planned: str | None = None  # from whom to get `announced`; "" is the publisher
        self._next_source = ""  # from whom the next version will probably come; empty for the publisher
        self._reasons: dict[str, AveragingError] = {}  # by address, since it was last connected
        self._warned_old = False
        self._reached = asyncio.Event()  # a publisher has answered, or all have refused

    @property
    def newest(self) -> WeightSnapshot | DividedSnapshot | None:
        """The newest version that was received completely."""
        return self.store.newest

    @property
    def failure(self) -> AveragingError | None:
        """Why following has ended for good."""
        return self._failure

    @property
    def connected(self) -> bool:
        """Whether a publisher is connected."""
        return self._connected

    @property
    def bytes_received(self) -> int:
        """Bytes of encoded pieces."""
        return self._bytes_received

    @property
    def bytes_sent(self) -> int:
        """Bytes handed on."""
        return self.store.sent

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
            stack.push_async_callback(options.seeds.close)
            await options.seeds.look_up()
            if options.hands_on and options.listen is not None:
                server = RpcServer(
                    options.listen,
                    [_HandsOn(self.store), *options.services],
                    advertise=options.advertise,
                    credentials=options.credentials,
                )
                self.endpoint = (await stack.enter_async_context(server)).endpoint
            stack.push_async_callback(lambda: self._downloads.close())
            self._downloads = Downloads(
                options.run_id, options.dial, options.stall_timeout, self.endpoint, self.store.changes
            )
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for running in self._work():
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

    async def tell(self, version: int | None, part_of: int = 0) -> None:
        """Tells the publisher the version that an engine has got from here; None if it may have a part of `part_of`."""
        if self._current is not None:
            await self._downloads.tell(self._current, -1 - part_of if version is None else version)

    def _not_reached(self) -> AveragingError:
        reasons, seeds = list(self._reasons.values()), self._options.seeds
        if self._all_refuse():
            first = reasons[0]
            if isinstance(first, CallRefusedError) and first.cause is RefusalCause.NOT_SERVED:
                return StateError(
                    f"{first.endpoint} publishes no weights; give its averager or peer services=[WeightPublisher(…)], "
                    "or follow another one"
                )
            return first
        answers = "; ".join((*map(str, reasons), seeds.findings)).strip("; ") or "no answer"
        return StateError(
            f"no publisher answered within {self._options.join_timeout:g} s ({answers}); check the addresses, "
            "and that a publisher is up"
        )

    def _all_refuse(self) -> bool:
        seeds = self._options.seeds
        reasons = [self._reasons.get(address) for address in seeds.addresses]
        return bool(reasons) and not seeds.failures and all(error and _is_definite(error) for error in reasons)

    def _work(self) -> list[Coroutine[None, None, None]]:
        return [self._follow(), self._receive(), self._keep_warm()]

    # Following

    async def _follow(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while self._failure is None:
            for address in self._options.seeds.addresses:
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
            if self._all_refuse():
                self._failure = self._failure or self._not_reached()
            if self._failure is not None:
                self._reached.set()
            else:
                await asyncio.sleep(backoff.next_delay())
                await self._options.seeds.look_up()
                known = self._options.seeds.addresses
                self._reasons = {name: error for name, error in self._reasons.items() if name in known}
        self.store.changes.happened()

    async def _follow_one(self, address: str) -> None:
        options = self._options
        if address in self._downloads.rejected_sources:
            raise ProtocolViolationError(
                f"{address} sent something wrong and is not asked again: {self._downloads.rejected_sources[address]}"
            )
        publisher = Publisher(options.dial(address, loopback=options.loopback), os.urandom(NAME_BYTES))
        # A loopback endpoint is of no use to the followers of a publisher elsewhere.
        reachable = self.endpoint and (publisher.is_local or not is_loopback(parse_address(self.endpoint)[0]))
        request = wire.FollowRequest(
            run_id=options.run_id,
            follower=publisher.follower,
            endpoint=self.endpoint if reachable else "",
            local=publisher.is_local,
        )
        try:
            async with publisher.channel, aclosing(publisher.channel.stream(FOLLOW, request)) as announcements:
                try:
                    async with asyncio.timeout(options.join_timeout):
                        message = await anext(announcements, None)
                except TimeoutError:
                    raise PeerUnreachableError(address, f"no answer within {options.join_timeout:g} s") from None
                manifest: WeightManifest | None = None
                while message is not None:
                    layout = None if manifest is None else manifest.layout
                    try:
                        manifest = read_version(message, options.max_bytes, layout)
                    except ProtocolViolationError as error:
                        raise ProtocolViolationError(f"{address} announces {error}") from None
                    planned = message.planned.source if message.HasField("planned") else None
                    self._next_source = planned or ""
                    if manifest is not None:
                        self._announce(manifest, publisher, planned)
                    self._connected, self._current = True, publisher
                    self._reasons.pop(address, None)
                    self._reached.set()
                    self.store.changes.happened()
                    message = await anext(announcements, None)
        finally:
            if self._publisher is publisher:
                self._publisher = None
            if self._current is publisher:
                self._current = None

    def _announce(self, manifest: WeightManifest, publisher: Publisher, planned: str | None) -> None:
        self._check(manifest)
        if manifest.layout == self._layout:
            manifest = replace(manifest, layout=self._layout)  # so that versions share it
        else:
            self._layout = manifest.layout
            self.store.arrange(manifest.layout)
        received = self.store.newest
        if received is None or manifest.version > received.manifest.version:
            self.announced, self._publisher, self.announced_locally = manifest, publisher, publisher.is_local
            # Sources are planned for followers that are not busy. Another one asks when it comes to this version.
            self._planned = planned if self._incoming is None else None
            self._warned_old = False
        elif not self._warned_old and not (manifest.is_described and manifest.digest == received.manifest.digest):
            self._warned_old = True
            logger.warning(
                "%s publishes version %d, and version %d is here; versions never go back, so it is left out",
                publisher.channel.endpoint,
                manifest.version,
                received.manifest.version,
            )

    # Receiving

    async def _receive(self) -> None:
        backoff = Backoff(MIN_PAUSE, MAX_PAUSE)
        while True:
            await self.store.changes.wait(self._is_behind)
            manifest, publisher = self._instead or self.announced, self._publisher
            self._instead = None
            if manifest is None or publisher is None:
                continue
            # What has arrived of this version stays if a source fails. Of another one stays what is the same in this,
            # for example if its publisher has started again and gives it another name.
            incoming = self._incoming
            if incoming is None or incoming.manifest.name != manifest.name:
                incoming = Incoming(manifest, self.store.newest, incoming)
            self._incoming = incoming
            self.store.receiving(incoming)
            total, before = incoming.left, self._bytes_received - incoming.received

            def arrived(incoming: Incoming = incoming, total: int = total, before: int = before) -> None:
                self._bytes_received = before + incoming.received
                self.store.changes.happened()
                self._on_progress(total - incoming.left, total)

            try:
                planned, self._planned = self._planned, None
                has = -1 if self.store.newest is None else self.store.newest.manifest.version
                await self._downloads.receive(incoming, publisher, arrived, planned, has)
            except (StateError, OtherVersionError) as error:
                if isinstance(error, OtherVersionError):
                    self._instead = self._read_other(error.message, publisher, has)
                    if self._instead is not None:
                        continue
                logger.warning("%s; trying again", error)
                self.retries += 1
                if not incoming.manifest.is_described and len(incoming.digests) == incoming.manifest.layout.count:
                    self._incoming = Incoming(manifest, self.store.newest, incoming)  # the digests may be wrong
                self.store.changes.happened()
                if publisher.channel.endpoint in self._downloads.rejected_sources:
                    self._publisher = None
                    await publisher.channel.close()  # ends its announcements too
                await asyncio.sleep(backoff.next_delay())
            else:
                snapshot = incoming.finish()
                self._incoming = None
                backoff.reset()
                described = replace(snapshot.manifest, version=manifest.version, shards=manifest.shards)
                if not manifest.is_described:
                    self._check(described)
                self.store.add(WeightSnapshot(described, snapshot.buffers))
                self.store.receiving(None)

    def _read_other(self, message: wire.Version, publisher: Publisher, has: int) -> WeightManifest | None:
        """The version that the publisher wants this follower to take; None if it is none."""
        try:
            manifest = read_version(message, self._options.max_bytes, self._layout)
            if manifest is None or manifest.version <= has or manifest.layout != self._layout:
                raise ProtocolViolationError("no version that is newer and of the same model")
        except ProtocolViolationError as error:
            logger.warning("%s wants another version to be taken, and names %s", publisher.channel.endpoint, error)
            self._downloads.blame(publisher.channel.endpoint, error)
            return None
        return replace(manifest, layout=self._layout)

    async def _keep_warm(self) -> None:
        """Keeps the connections on which the next version will probably come."""
        kept: tuple[Publisher | None, str] = (None, "")

        def changed() -> bool:
            return self._incoming is None and (self._current, self._next_source) != kept

        while True:
            await self.store.changes.wait(changed, KEEP_SECONDS)
            if self._incoming is None:
                kept = publisher, source = self._current, self._next_source
                if publisher is not None:
                    await self._downloads.keep_warm(publisher, source, self._layout)

    def _is_behind(self) -> bool:
        newest, announced = self.store.newest, self.announced
        return (
            announced is not None
            and self._publisher is not None
            and announced.version >= self._options.min_version
            and self._wanted(announced)
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
        return [FETCH.streams(partial(self._store.send, early=EARLY_SECONDS)), WARM.streams(self._store.warm)]
