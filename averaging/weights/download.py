"""Receives the pieces of a version, from its publisher or from the followers that the publisher names."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

from averaging.common import CLIENT_PREFIX, is_endpoint, is_loopback, parse_address
from averaging.errors import AveragingError, ProtocolViolationError, StateError
from averaging.rpc import RpcChannel
from averaging.weights.lanes import LANES, Dial, SourceLanes
from averaging.weights.layout import (
    DESCRIBE,
    FETCH,
    MAX_WARM_BYTES,
    WARM,
    WeightLayout,
    ranges_of,
    read_digests,
)
from averaging.weights.snapshot import Incoming
from averaging.weights.store import Changes
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

Message = TypeVar("Message")

WAITING_FACTOR = 4
"""A source that waits for pieces itself is left after this many times `stall_timeout`. A follower that hands on is
given so many times as long as another one: its own source may be the slow one, and those behind that leave it first."""

SHARED_BY = 16
"""The publisher would be so many times slower if all followers got their versions from it. One that is slower is left.
"""

UNKNOWN_RATE = 4 << 20
"""Bytes/s of the publisher while none are known."""

GRACE_SHARE = 0.1
"""Share of `stall_timeout` that a follower may be late."""

SHORTER = 16
"""Differences are expected to be this many times shorter than the pieces."""

STRIPE = 2
"""Successive pieces on one connection, so that the pieces arrive about in their order, for those who wait for them."""

MAX_SOURCES = 32
"""Sources that are tried for one version before an error is reported."""


MAX_WRONG = 3
"""Times that a publisher may send something wrong. Another source may not."""


TOO_SLOW = "was slower than the publisher would be"


class SourcePace:
    """Whether a follower hands on as fast as it must, by the bytes of all calls to it. Pure.

    Args:
        rate: least bytes/s.
        grace: seconds that it may be late.
        now: seconds of a monotonic clock.
    """

    def __init__(self, rate: float, grace: float, now: float) -> None:
        self._rate, self._grace = rate, grace
        self._credit, self._last = grace, now

    def left(self, now: float) -> float:
        """Seconds until it is too late with a message."""
        return max(0.0, self._credit - (now - self._last))

    def note(self, nbytes: int, now: float) -> bool:
        """A message has come, without bytes if the follower waits itself. Returns whether it is in time."""
        late = (now - self._last) / (1 if nbytes else WAITING_FACTOR)
        self._credit, self._last = min(self._grace, self._credit - late + nbytes / self._rate), now
        return self._credit > 0


class OtherVersionError(Exception):
    """The publisher wants this follower to take another version, because it is slower than versions come.

    Attributes:
        message: the version.
    """

    def __init__(self, message: wire.Version) -> None:
        super().__init__(message.version)
        self.message = message


@dataclass(frozen=True, slots=True)
class Publisher:
    """A connection to a publisher.

    Attributes:
        channel: the connection.
        follower: the name under which this process follows the publisher.
    """

    channel: RpcChannel
    follower: bytes

    @property
    def is_local(self) -> bool:
        """Whether it is reached through this machine's loopback."""
        return is_loopback(parse_address(self.channel.endpoint)[0])


class Downloads:
    """Receives versions.

    Args:
        run_id: the run that is followed.
        dial: opens connections, see `FollowerOptions.dial`.
        stall_timeout: seconds without a message after which a source is left.
        own_endpoint: endpoint of this process, which is never a source; empty if it hands on nothing.
        changes: happen when digests have arrived.

    Attributes:
        rejected_sources: endpoints that sent something wrong, with what it was. They are never asked again.
    """

    def __init__(self, run_id: str, dial: Dial, stall_timeout: float, own_endpoint: str, changes: Changes) -> None:
        self._run_id, self._changes = run_id, changes
        self._lanes = SourceLanes(run_id, dial)
        self._warming: asyncio.Task[None] | None = None
        self._stall_timeout, self._own_endpoint = stall_timeout, own_endpoint
        self.rejected_sources: dict[str, str] = {}
        self._wrong: Counter[str] = Counter()  # what a publisher has sent
        self._publisher_rate = 0.0  # bytes/s that have come from it at last; 0 if not known

    async def keep_warm(self, publisher: Publisher, source: str, layout: WeightLayout | None) -> None:
        """Keeps the connections to a source fast, and closes those to former ones. A version that comes ends it."""
        at_publisher = publisher.channel.endpoint
        if source and self._objection(source, self.rejected_sources):
            return
        await self._lanes.keep({at_publisher, source or at_publisher})
        if publisher.is_local:  # loopback is fast at once
            return
        most = MAX_WARM_BYTES if layout is None else layout.nbytes // LANES
        self._warming = asyncio.create_task(self._warm_and_report(source or at_publisher, most, publisher))
        try:
            await asyncio.wait({self._warming})
        finally:
            self._warming.cancel()
            await asyncio.wait({self._warming})
            self._warming = None

    async def _warm_and_report(self, source: str, most: int, publisher: Publisher) -> None:
        before = self._lanes.rate
        await self._lanes.warm(source, most, loopback=publisher.is_local)
        if self._lanes.rate != before:
            request = wire.WarmRequest(run_id=self._run_id, follower=publisher.follower, rate=self._lanes.rate)
            with suppress(AveragingError):
                async with aclosing(publisher.channel.stream(WARM, request)) as fillers:
                    await anext(fillers, None)

    async def close(self) -> None:
        """Closes all connections to sources."""
        await self._lanes.close()

    async def receive(
        self,
        incoming: Incoming,
        publisher: Publisher,
        arrived: Callable[[], None],
        planned: str | None = None,
        has: int = -1,
    ) -> None:
        """Receives all missing pieces.

        Args:
            incoming: the version.
            publisher: the publisher that announced it.
            arrived: callback after each message with pieces.
            planned: the source that the publisher has planned, empty for itself; None to ask for one.
            has: the version that is here; -1 for none.

        Raises:
            StateError: neither the publisher nor a follower delivered them. What was received stays in `incoming`.
            OtherVersionError: another version is to be received.
        """
        at_publisher = publisher.channel.endpoint
        if self._warming is not None:
            self._warming.cancel()
        try:
            async with asyncio.TaskGroup() as tasks:
                granted = asyncio.Event()
                tasks.create_task(self._learn(incoming, publisher, arrived, granted, has))
                if planned is None:
                    await granted.wait()
                await self._receive_pieces(incoming, publisher, arrived, planned)
        except BaseExceptionGroup as group:
            error = _worst(group)
            if isinstance(error, StateError | OtherVersionError) or not isinstance(
                error, AveragingError | TimeoutError
            ):
                raise error from None
            self.blame(at_publisher, error)
            raise self._undelivered(incoming, at_publisher, error) from None
        if not incoming.complete:
            raise self._undelivered(incoming, at_publisher, "it did not send all pieces")

    async def tell(self, publisher: Publisher, has: int) -> None:
        """Tells a publisher what this follower's engine has, see `DescribeRequest`. An older one refuses that."""
        request = wire.DescribeRequest(run_id=self._run_id, follower=publisher.follower, has=has)
        with suppress(AveragingError, TimeoutError):
            async with aclosing(publisher.channel.stream(DESCRIBE, request)) as messages:
                await self._next(messages, 2.0)

    def blame(self, publisher: str, error: Exception) -> None:
        """Rejects a publisher that sends wrong pieces again and again. Without TLS a link may have spoilt one."""
        self._wrong[publisher] += isinstance(error, ProtocolViolationError)
        if self._wrong[publisher] >= MAX_WRONG:
            self.rejected_sources[publisher] = str(error)

    @staticmethod
    def _undelivered(incoming: Incoming, endpoint: str, reason: object) -> StateError:
        return StateError(f"{endpoint} did not deliver version {incoming.manifest.version}: {reason}")

    async def _learn(
        self, incoming: Incoming, publisher: Publisher, arrived: Callable[[], None], granted: asyncio.Event, has: int
    ) -> None:
        """Asks for a version, and receives the digests that were not known when it was announced.

        `granted` is set when the publisher agrees that this version is received.
        """
        request = wire.DescribeRequest(
            run_id=self._run_id,
            name=incoming.manifest.name,
            first=len(incoming.digests),
            follower=publisher.follower,
            has=has,
            rate=self._lanes.rate,
        )
        clock = asyncio.get_running_loop().time
        last = clock()
        async with aclosing(publisher.channel.stream(DESCRIBE, request)) as messages:
            while not granted.is_set() or not incoming.manifest.is_described:
                message = await self._next(messages)
                if message is None:
                    raise StateError("it ended the digests of a version")
                if message.HasField("instead"):
                    raise OtherVersionError(message.instead)
                if message.digest:
                    if not incoming.manifest.is_described:
                        incoming.describe(message.digest)
                    granted.set()
                elif message.pieces:
                    granted.set()
                    missing = incoming.manifest.layout.count - len(incoming.digests)
                    incoming.learn(read_digests(message.pieces, missing))
                    last = clock()
                elif clock() - last > WAITING_FACTOR * self._stall_timeout:
                    raise TimeoutError(f"it has sent no digests for {clock() - last:.0f} s")
                arrived()

    async def _next(self, messages: AsyncGenerator[Message, None], limit: float = math.inf) -> Message | None:
        try:
            async with asyncio.timeout(min(limit, self._stall_timeout)):
                return await anext(messages, None)
        except TimeoutError:
            reason = f"was silent for {self._stall_timeout:g} s"
            raise TimeoutError(f"it {reason if limit > self._stall_timeout else TOO_SLOW}") from None

    async def _receive_pieces(
        self, incoming: Incoming, publisher: Publisher, arrived: Callable[[], None], planned: str | None
    ) -> None:
        """Receives all missing pieces, as soon as their digests are known."""
        failed, at_publisher = dict(self.rejected_sources), publisher.channel.endpoint
        if planned and not self._objection(planned, failed):
            failed[planned] = await self._try(planned, publisher, incoming, arrived)
        for _ in range(MAX_SOURCES):
            if not incoming.missing():
                return
            try:
                source = await self._receive_from(
                    at_publisher, publisher, incoming, arrived, list(failed), at_once=planned == ""
                )
                planned = None
                if source and (objection := self._objection(source, failed)):
                    raise ProtocolViolationError(objection)
            except (AveragingError, TimeoutError) as error:
                self.blame(at_publisher, error)
                raise self._undelivered(incoming, at_publisher, error) from None
            if source:
                reason = await self._try(source, publisher, incoming, arrived)
                if reason:
                    failed[source] = reason
            elif incoming.missing():
                raise self._undelivered(incoming, at_publisher, "it did not send all pieces")
        if incoming.missing():
            tried = "; ".join(f"{source}: {reason}" for source, reason in failed.items())
            raise StateError(f"no source delivered version {incoming.manifest.version} ({tried})")

    async def _try(self, source: str, publisher: Publisher, incoming: Incoming, arrived: Callable[[], None]) -> str:
        """Receives from a follower. Returns why it did not deliver all, or an empty string."""
        try:
            await self._receive_from(source, publisher, incoming, arrived, [], at_once=True)
        except ProtocolViolationError as error:
            self.rejected_sources[source] = str(error)
            logger.warning("%s sent something wrong and is not asked again: %s", source, error)
            return str(error)
        except (AveragingError, TimeoutError) as error:
            logger.info("%s did not deliver: %s", source, error)
            return str(error)
        return "it did not send all pieces" if incoming.missing() else ""

    def _objection(self, source: str, failed: Mapping[str, str]) -> str:
        """What speaks against a source that the publisher names; empty if nothing does."""
        if not is_endpoint(source) or source.startswith(CLIENT_PREFIX) or source == self._own_endpoint:
            return f"it names {source[:100]!r} as a source"
        if source in failed:
            return f"it names {source} again, which failed: {failed[source]}"
        return ""

    async def _receive_from(
        self,
        endpoint: str,
        publisher: Publisher,
        incoming: Incoming,
        arrived: Callable[[], None],
        failed: list[str],
        *,
        at_once: bool,
    ) -> str:
        """Receives all missing pieces from one source. Returns another source if it names one, else an empty string.

        Args:
            endpoint: the source.
            publisher: the publisher, which may be the source.
            incoming: the version.
            arrived: see `receive`.
            failed: endpoints that the publisher should not name.
            at_once: whether it will not name another source, so that all connections are used from the start.
        """
        expected = incoming.left // (1 if incoming.differs_from is None else SHORTER)
        shares = _shares(incoming.missing(), self._lanes.count_for(endpoint, expected))
        first, *further = self._lanes.to(endpoint, len(shares), loopback=publisher.is_local)
        clock, received = asyncio.get_running_loop().time, incoming.received
        pace, begun = None, clock()
        if endpoint != publisher.channel.endpoint:
            rate = (self._publisher_rate or self._lanes.rate or UNKNOWN_RATE) / SHARED_BY
            pace = SourcePace(rate, GRACE_SHARE * self._stall_timeout, begun)
        asked = _Asked(publisher, failed, incoming, arrived, pace)

        async def receive(lane: RpcChannel, share: list[int]) -> None:
            if await self._receive_share(lane, asked, share):
                raise StateError("it sends some of the pieces only")

        try:
            async with asyncio.TaskGroup() as lanes:

                def begin() -> None:
                    for lane, share in zip(further, shares[1:], strict=True):
                        lanes.create_task(receive(lane, share))

                if at_once:
                    begin()
                named = await self._receive_share(first, asked, shares[0], (lambda: None) if at_once else begin)
            if pace is None and incoming.received - received >= incoming.manifest.layout.piece_bytes:
                self._publisher_rate = (incoming.received - received) / max(clock() - begun, 1e-3)
            return named
        except BaseExceptionGroup as group:
            raise _worst(group) from None

    async def _receive_share(
        self,
        channel: RpcChannel,
        asked: _Asked,
        share: list[int],
        begin: Callable[[], None] = lambda: None,
    ) -> str:
        """Receives some pieces. `begin` is called when the source has begun to send, or to wait for pieces itself."""
        incoming, publisher, pace = asked.incoming, asked.publisher, asked.pace
        base = incoming.differs_from
        request = wire.FetchRequest(
            run_id=self._run_id,
            follower=publisher.follower,
            name=incoming.manifest.name,
            base=b"" if base is None else base.manifest.digest,
            pieces=[wire.Range(first=first, count=count) for first, count in ranges_of(share)],
            failed=asked.failed,
            local=publisher.is_local,
        )
        clock = asyncio.get_running_loop().time
        last, begun = clock(), False
        async with aclosing(channel.stream(FETCH, request)) as replies:
            while True:
                reply = await self._next(replies, math.inf if pace is None else pace.left(clock()))
                if reply is None:
                    return ""
                if pace is not None and not pace.note(sum(len(piece.data) for piece in reply.pieces), clock()):
                    raise TimeoutError(f"it {TOO_SLOW}")
                if reply.source:
                    return str(reply.source)
                if not begun:
                    begun = True
                    begin()
                for piece in reply.pieces:
                    await self._digest_known(incoming, piece.index)
                    incoming.add(piece.index, piece.coding, piece.data)
                if reply.pieces:
                    last = clock()
                    asked.arrived()
                elif clock() - last > WAITING_FACTOR * self._stall_timeout:
                    raise TimeoutError(f"it has waited for pieces itself for {clock() - last:.0f} s")

    async def _digest_known(self, incoming: Incoming, index: int) -> None:
        """Waits for the digest of a piece. Meanwhile the connection of its source is not read."""
        if index < incoming.manifest.layout.count and not incoming.knows(index):
            waited = WAITING_FACTOR * self._stall_timeout
            if not await self._changes.wait(lambda: incoming.knows(index), waited):
                raise StateError(f"no digest of piece {index} has come for {waited:g} s")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What requests to one source have in common.

    Attributes:
        publisher: the publisher that announced the version.
        failed: endpoints that the publisher should not name.
        incoming: the version.
        arrived: callback after each message with pieces.
        pace: of the source; None if it is the publisher.
    """

    publisher: Publisher
    failed: list[str]
    incoming: Incoming
    arrived: Callable[[], None]
    pace: SourcePace | None


def _shares(missing: list[int], lanes: int) -> list[list[int]]:
    return [[index for place, index in enumerate(missing) if place // STRIPE % lanes == lane] for lane in range(lanes)]


def _worst(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error of a group: what was wrong counts more than what did not arrive."""
    errors = [_worst(each) if isinstance(each, BaseExceptionGroup) else each for each in group.exceptions]
    for kind in (OtherVersionError, ProtocolViolationError):
        if found := [error for error in errors if isinstance(error, kind)]:
            return found[0]
    return errors[0]
