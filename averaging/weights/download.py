"""Receives the pieces of a version, from its publisher or from the followers that the publisher names."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from averaging.common import CLIENT_PREFIX, is_endpoint, is_loopback, parse_address
from averaging.errors import AveragingError, ProtocolViolationError, StateError
from averaging.rpc import RpcChannel
from averaging.weights.layout import ranges_of, read_digests
from averaging.weights.snapshot import Incoming
from averaging.weights.store import DESCRIBE, FETCH, Changes
from averaging.wire import weights_pb2 as wire

logger = logging.getLogger("averaging.weights")

T = TypeVar("T")

# A source that waits for pieces itself is left after this many times `stall_timeout`. A follower that hands on is given
# so many times as long as another one: its own source may be the slow one, and those behind that leave it first.
WAITING_FACTOR = 4

# If all followers got their versions from the publisher, it would be so many times slower. One that is slower than that
# is left, after a share of `stall_timeout` as grace.
SHARED_BY, GRACE_SHARE = 16, 0.1
UNKNOWN_RATE = 4 << 20  # bytes/s of the publisher while none are known

# Connections on which one version is received, a further one for so many bytes. The system lets one connection have a
# few MiB under way, which carries 450 Mbit/s over 50 ms. They stay open between versions.
LANES, BYTES_PER_LANE = 4, 8 << 20
SHORTER = 16  # how many times shorter than the pieces differences are expected to be

STRIPE = 2  # successive pieces on one connection, so that they arrive about in their order, for those who wait for them
MAX_SOURCES = 32  # that are tried for one version before an error is reported
TOO_SLOW = "was slower than the publisher would be"


class SourcePace:
    """Whether a follower hands on `rate` bytes/s, with `grace` seconds, by the bytes of all calls to it. Pure."""

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


@dataclass(frozen=True, slots=True)
class PublisherLink:
    """A connection to a publisher, and the name under which this process follows it."""

    channel: RpcChannel
    follower: bytes

    @property
    def endpoint(self) -> str:
        return self.channel.endpoint

    @property
    def is_local(self) -> bool:  # whether it is reached through this machine's loopback
        return is_loopback(parse_address(self.endpoint)[0])


@dataclass(frozen=True, slots=True)
class _VersionDownload:
    incoming: Incoming
    publisher: PublisherLink
    arrived: Callable[[], None]  # called after each message with pieces or digests


class Downloads:
    """Receives the versions of one publisher.

    `dial` opens connections, see `FollowerOptions.dial`. A source that is silent for `stall_timeout` seconds is left.
    `own_endpoint` is that of this process, which is never a source. `changes` happen when digests have arrived.
    """

    def __init__(
        self, run_id: str, dial: Callable[..., RpcChannel], stall_timeout: float, own_endpoint: str, changes: Changes
    ) -> None:
        self._run_id, self._dial, self._changes = run_id, dial, changes
        self._stall_timeout, self._own_endpoint = stall_timeout, own_endpoint
        self._lanes: dict[str, list[RpcChannel]] = {}  # open connections by endpoint
        self._publisher_rate = float(UNKNOWN_RATE)  # bytes/s that have come from it at last

    async def receive(self, incoming: Incoming, publisher: PublisherLink, arrived: Callable[[], None]) -> None:
        """Receives all missing pieces of a version that this publisher has announced.

        Raises:
            StateError: neither the publisher nor a follower delivered them. What was received stays in `incoming`.
        """
        download = _VersionDownload(incoming, publisher, arrived)
        learns = [] if incoming.manifest.is_described else [self._learn(download)]
        try:
            await all_of([*learns, self._receive_pieces(download)])
            if not incoming.complete:
                raise StateError("it did not send all pieces")
        except (AveragingError, TimeoutError) as error:
            what = f"version {incoming.manifest.version}"
            raise StateError(f"{publisher.endpoint} did not deliver {what}: {error}") from None

    async def tell(self, publisher: PublisherLink, has: int) -> None:
        # See `DescribeRequest`. An older publisher refuses that.
        request = wire.DescribeRequest(run_id=self._run_id, follower=publisher.follower, has=has)
        with suppress(AveragingError, TimeoutError):
            async with aclosing(publisher.channel.stream(DESCRIBE, request)) as messages:
                await self._next(messages, 2.0)

    async def close(self, but: Collection[str] = ()) -> None:
        for endpoint in self._lanes.keys() - but:
            for lane in self._lanes.pop(endpoint):
                await lane.close()

    async def _learn(self, download: _VersionDownload) -> None:
        incoming, publisher = download.incoming, download.publisher
        first = len(incoming.digests)
        request = wire.DescribeRequest(
            run_id=self._run_id, name=incoming.manifest.name, first=first, follower=publisher.follower
        )
        clock = asyncio.get_running_loop().time
        last = clock()
        async with aclosing(publisher.channel.stream(DESCRIBE, request)) as messages:
            while not incoming.manifest.is_described:
                message = await self._next(messages)
                if message is None:
                    raise StateError("it ended the digests of a version")
                if message.digest:
                    incoming.describe(message.digest)
                elif message.pieces:
                    missing = incoming.manifest.layout.count - len(incoming.digests)
                    incoming.learn(read_digests(message.pieces, missing))
                    last = clock()
                elif clock() - last > WAITING_FACTOR * self._stall_timeout:
                    raise TimeoutError(f"it has sent no digests for {clock() - last:.0f} s")
                download.arrived()

    async def _next(self, messages: AsyncGenerator[T, None], limit: float = math.inf) -> T | None:
        try:
            async with asyncio.timeout(min(limit, self._stall_timeout)):
                return await anext(messages, None)
        except TimeoutError:
            reason = f"was silent for {self._stall_timeout:g} s"
            raise TimeoutError(f"it {reason if limit > self._stall_timeout else TOO_SLOW}") from None

    async def _receive_pieces(self, download: _VersionDownload) -> None:
        failed: dict[str, str] = {}  # sources, and why
        for _ in range(MAX_SOURCES):
            if not download.incoming.missing():
                return
            source = await self._receive_from(download.publisher.endpoint, download, failed)
            if not source:
                return
            if not is_endpoint(source) or source.startswith(CLIENT_PREFIX) or source == self._own_endpoint:
                raise ProtocolViolationError(f"it names {source[:100]!r} as a source")
            if source in failed:
                raise ProtocolViolationError(f"it names {source} again, which failed: {failed[source]}")
            try:
                named = await self._receive_from(source, download)
                failed[source] = f"it names {named[:100]!r} as a source" if named else "it did not send all pieces"
            except (AveragingError, TimeoutError) as error:
                # The publisher learns it from the next request, and names this source to nobody for some versions.
                failed[source] = str(error)
                level = logging.WARNING if isinstance(error, ProtocolViolationError) else logging.INFO
                logger.log(level, "%s did not deliver: %s", source, error)
        if download.incoming.missing():
            tried = "; ".join(f"{source}: {reason}" for source, reason in failed.items())
            raise StateError(f"no source delivered it ({tried})")

    def _request(self, download: _VersionDownload, pieces: list[int], failed: Collection[str]) -> wire.FetchRequest:
        base = download.incoming.differs_from
        return wire.FetchRequest(
            run_id=self._run_id,
            follower=download.publisher.follower,
            name=download.incoming.manifest.name,
            base=b"" if base is None else base.manifest.digest,
            pieces=[wire.Range(first=first, count=count) for first, count in ranges_of(pieces)],
            failed=failed,
            local=download.publisher.is_local,
        )

    async def _receive_from(self, endpoint: str, download: _VersionDownload, failed: Collection[str] = ()) -> str:
        """Receives all missing pieces from one source, over as many connections as their length needs.

        Returns the follower that the publisher names instead of sending them; else an empty string.
        """
        incoming, publisher, clock = download.incoming, download.publisher, asyncio.get_running_loop().time
        await self.close(but={endpoint, publisher.endpoint})
        expected = incoming.left // (1 if incoming.differs_from is None else SHORTER)
        shares = _shares(incoming.missing(), max(1, min(LANES, expected // BYTES_PER_LANE)))
        # The publisher answers on the connection of its announcements half a round trip later, on a new one after two.
        lanes = self._lanes.setdefault(endpoint, [])
        first = [publisher.channel] if endpoint == publisher.endpoint else []
        while len(first) + len(lanes) < len(shares):
            lanes.append(self._dial(endpoint, loopback=publisher.is_local))
        begun, received, grace = clock(), incoming.received, GRACE_SHARE * self._stall_timeout
        pace = None if first else SourcePace(self._publisher_rate / SHARED_BY, grace, begun)
        calls = [
            self._receive_share(lane, self._request(download, share, failed), download, pace)
            for lane, share in zip([*first, *lanes], shares, strict=False)
        ]
        if source := next(filter(None, await all_of(calls, until=bool)), ""):
            return source
        if pace is None and incoming.received - received >= incoming.manifest.layout.piece_bytes:
            self._publisher_rate = (incoming.received - received) / max(clock() - begun, 1e-3)
        return ""

    async def _receive_share(
        self, lane: RpcChannel, request: wire.FetchRequest, download: _VersionDownload, pace: SourcePace | None
    ) -> str:
        incoming, clock = download.incoming, asyncio.get_running_loop().time
        last = clock()
        async with aclosing(lane.stream(FETCH, request)) as replies:
            while True:
                reply = await self._next(replies, math.inf if pace is None else pace.left(clock()))
                if reply is None:
                    return ""
                if pace is not None and not pace.note(sum(len(piece.data) for piece in reply.pieces), clock()):
                    raise TimeoutError(f"it {TOO_SLOW}")
                if reply.source:
                    return reply.source
                for piece in reply.pieces:
                    await self._digest_known(incoming, piece.index)
                    incoming.add(piece.index, piece.coding, piece.data)
                if reply.pieces:
                    last = clock()
                    download.arrived()
                elif clock() - last > WAITING_FACTOR * self._stall_timeout:
                    raise TimeoutError(f"it has waited for pieces itself for {clock() - last:.0f} s")

    async def _digest_known(self, incoming: Incoming, index: int) -> None:
        """Waits for the digest of a piece. Meanwhile the connection of its source is not read."""
        if index < incoming.manifest.layout.count and not incoming.knows(index):
            waited = WAITING_FACTOR * self._stall_timeout
            if not await self._changes.wait(lambda: incoming.knows(index), waited):
                raise StateError(f"no digest of piece {index} has come for {waited:g} s")


def _shares(missing: list[int], lanes: int) -> list[list[int]]:
    return [[index for place, index in enumerate(missing) if place // STRIPE % lanes == lane] for lane in range(lanes)]


async def all_of(calls: Iterable[Coroutine[Any, Any, T]], until: Callable[[T], bool] = lambda _: False) -> list[T]:
    """The results of calls that run at the same time; of those that have ended, once `until` is true of one.

    One error is raised by itself, and what was wrong counts more than what did not arrive. A cancellation goes before
    any error: asyncio.TaskGroup forgets one that comes with an error, as it does when the connections close.
    """
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        with suppress(Exception):  # which is raised below
            for each in asyncio.as_completed(running):
                if until(await each):
                    break
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        ended = [task for task in running if not task.cancelled()]
        errors = [error for task in ended if (error := task.exception()) is not None]  # asyncio logs those never read
    if errors:
        raise next((error for error in errors if isinstance(error, ProtocolViolationError)), errors[0])
    return [task.result() for task in ended]
