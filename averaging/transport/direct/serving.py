"""Serves the streams of parts that come over one connection, one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from averaging.common import HostQuota
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
        self._quota = HostQuota(limits.in_all, limits.per_host)

    def add(self, host: str, nbytes: int) -> None:
        """Records bytes that are about to be held.

        Raises:
            BusyError: that would be too many.
        """
        if not self._quota.take(host, nbytes):
            raise BusyError("the unfinished requests of your host hold too much memory")

    def release(self, host: str, nbytes: int) -> None:
        """Records that bytes are no longer held, or that a round bounds them."""
        self._quota.leave(host, nbytes)


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
