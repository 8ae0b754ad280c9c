"""Serves the streams of parts that come over one connection, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from averaging.errors import AveragingError, BusyError, PeerUnreachableError, ProtocolViolationError
from averaging.protocol import AveragingData
from averaging.transport import AveragingService
from averaging.transport.direct.frames import FrameKind
from averaging.transport.direct.heads import HeaderCache, encode_error, encode_head
from averaging.transport.direct.link import FRAMES_AHEAD, Link
from averaging.transport.direct.sealing import Admission
from averaging.transport.grpc import IDLE_SECONDS, WRITE_BYTES_PER_SECOND, WRITE_SECONDS

# Bounds what connections to the direct port may take, by the address of the caller. Pure.


MAX_CONNECTIONS, MAX_CONNECTIONS_PER_HOST = 1024, 256
"""Connections of callers with a ticket."""

MAX_NEWCOMERS, MAX_NEWCOMERS_PER_HOST = 512, 64
"""Connections whose ticket has not arrived yet."""


class ConnectionQuota:
    """Counts connections of one kind.

    Args:
        in_all: maximum number.
        per_host: maximum number from one address.
    """

    def __init__(self, in_all: int, per_host: int) -> None:
        self._in_all, self._per_host = in_all, per_host
        self._taken: Counter[str] = Counter()

    def take(self, host: str) -> bool:
        """Takes a place; returns whether there was one."""
        if self._taken[host] >= self._per_host or self._taken.total() >= self._in_all:
            return False
        self._taken[host] += 1
        return True

    def leave(self, host: str) -> None:
        """Frees a place."""
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]


@dataclass(frozen=True, slots=True)
class HeldLimits:
    """Bytes of parts that no round has asked for.

    Attributes:
        per_host: limit of the callers at one address.
        in_all: limit of all callers.
    """

    per_host: int
    in_all: int


class Held:
    """Counts the bytes of streams that no round has accepted yet."""

    def __init__(self, limits: HeldLimits) -> None:
        self._limits = limits
        self._hosts: Counter[str] = Counter()

    def add(self, host: str, nbytes: int) -> None:
        """Records bytes that are about to be held.

        Raises:
            BusyError: that would be too many.
        """
        if self._hosts[host] + nbytes > self._limits.per_host or self._hosts.total() + nbytes > self._limits.in_all:
            raise BusyError("the unfinished requests of your host hold too much memory")
        self._hosts[host] += nbytes

    def release(self, host: str, nbytes: int) -> None:
        """Records that bytes are no longer held, or that a round bounds them."""
        self._hosts[host] -= nbytes
        if not self._hosts[host]:
            del self._hosts[host]


logger = logging.getLogger("averaging.transport")

IDLE_GRACE_SECONDS = 60.0
"""A callee keeps an idle connection for this much longer than its caller, so that only the caller ends it."""

LINGER_SECONDS = 0.5
"""After the callee has ended a stream, the rest of it is discarded for this time; then the connection is closed."""


class Stream:
    """The messages of one stream of parts.

    Attributes:
        ended: whether the caller has sent the last one.
    """

    def __init__(self, link: Link, admission: Admission, heads: HeaderCache, held: Held) -> None:
        self._link, self._admission, self._heads, self._held = link, admission, heads, held
        self._begun = self._accepted = self.ended = False
        self._nbytes = 0
        link.ahead, link.on_frame = 0, self._count

    async def begin(self) -> bool:
        """Waits until the stream begins; False if the connection ends instead."""
        try:
            async with asyncio.timeout(IDLE_SECONDS + IDLE_GRACE_SECONDS):
                await self._link.activity()
        except TimeoutError:
            return False
        return not self._link.lost

    def __aiter__(self) -> AsyncIterator[AveragingData]:
        return self

    async def __anext__(self) -> AveragingData:
        if self._begun and not self._accepted:  # a round has accepted the sender, and bounds what is read from now on
            self._accept()
        if self.ended:
            raise StopAsyncIteration
        kind, head, body = await self._link.read()
        self._begun = True
        if kind is FrameKind.END:
            self.ended = True
            raise StopAsyncIteration
        if kind is not FrameKind.PART:
            raise ProtocolViolationError(f"sent {kind.name} in a stream of parts")
        message = self._heads.decode(head, body)
        if message.endpoint:
            self._admission.check(message.endpoint)
        return message

    async def read_to_the_end(self) -> None:
        """Discards what the caller still sends, for at most `LINGER_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self.ended:
                    self.ended = (await self._link.read()).kind is FrameKind.END

    def close(self) -> None:
        """Ends the count of its bytes."""
        self._accept()
        self._link.on_frame = None

    def _count(self, nbytes: int) -> None:
        if not self._accepted:
            self._held.add(self._admission.host, nbytes)
            self._nbytes += nbytes

    def _accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            self._held.release(self._admission.host, self._nbytes)
            self._link.ahead = FRAMES_AHEAD


def write_seconds(nbytes: int) -> float:
    """How long a caller may take to read a reply of a size."""
    return WRITE_SECONDS + nbytes / WRITE_BYTES_PER_SECOND


async def serve_stream(link: Link, stream: Stream, service: AveragingService) -> None:
    """Serves one stream to its end. The connection can carry another one if `stream.ended`, and it is not `spent`.

    A stream that got no average spends the connection: streams that are empty, or that no round wants, would otherwise
    follow each other as fast as the caller sends them, and take the event loop from the rounds.
    """
    link.spent = True
    with suppress(PeerUnreachableError):
        await _answer(link, stream, service)
        await stream.read_to_the_end()


async def _answer(link: Link, stream: Stream, service: AveragingService) -> None:
    try:
        async with aclosing(service.aggregate_part(stream)) as replies:
            async for reply in replies:
                body = b"" if reply.tensor_part is None else reply.tensor_part.buffer
                link.spent = link.spent and reply.tensor_part is None
                await link.send(FrameKind.PART, encode_head(reply), body)
    except PeerUnreachableError:
        raise
    except AveragingError as error:
        await link.send(FrameKind.ERROR, encode_error(error))
    except Exception:
        logger.exception("a stream of parts from %s failed", link.name)
        await link.send(FrameKind.ERROR, encode_error(None))
    else:
        await link.send(FrameKind.END)
