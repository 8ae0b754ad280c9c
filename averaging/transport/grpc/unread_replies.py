"""Limits for replies that callers do not read: bytes per host and connection, and seconds per reply."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from averaging.errors import BusyError, ProtocolViolationError
from averaging.transport.grpc.channel_options import WRITE_BYTES_PER_SECOND, WRITE_SECONDS

logger = logging.getLogger("averaging.transport")

MAX_UNREAD_BYTES = 64 << 20
"""Bytes of unread replies to one host. Above it, the connection that has most of them gets no further ones. It is
closed when another connection of the host calls. Until then the host may have twice as many."""

UNREAD_SECONDS = 5.0
"""A connection is closed for its unread replies only if the oldest of them is unread for this time."""

REPLY_OVERHEAD = 8 << 10
"""Memory of a reply besides its bytes, since gRPC keeps a stream for it."""

Context = grpc.aio.ServicerContext[Any, Any]


async def write_average(context: Context, path: str, raw: bytes) -> None:
    """Writes one average of a round, which counts nowhere: the round bounds how many a member leaves unread.

    Raises:
        ProtocolViolationError: the caller has not read it in time.
    """
    try:
        async with asyncio.timeout(_time_for(raw)):
            await context.write(raw)
    except TimeoutError:
        raise _cut_off(context, path) from None


class UnreadReplies:
    """The unread replies, by host and connection.

    A reply counts until its caller has read it or the connection is closed, since gRPC keeps its bytes until then.

    Attributes:
        hang_up: closes the connection of a caller, named as gRPC does.
    """

    def __init__(self) -> None:
        self._bytes: dict[str, Counter[str]] = {}  # of each connection, by host
        self._since: dict[str, dict[object, float]] = {}  # when each reply to a connection was made, the oldest first
        self._writing: set[asyncio.Task[None]] = set()
        self.hang_up: Callable[[str], object] = lambda _: None

    def check(self, host: str, connection: str) -> None:
        """Called before a reply is made.

        Raises:
            BusyError: the host has too many unread replies, and this connection most of them.
        """
        unread = self._bytes.get(host, Counter())
        total = unread.total()
        if total < MAX_UNREAD_BYTES:
            return
        largest, most = unread.most_common(1)[0]
        oldest = next(iter(self._since[largest].values()))
        if unread[connection] < most and asyncio.get_running_loop().time() > oldest + UNREAD_SECONDS:
            logger.warning("closed the connection of %s: %.0f MiB of replies are unread", largest, most / (1 << 20))
            self.hang_up(largest)
        if unread[connection] >= most or total >= 2 * MAX_UNREAD_BYTES:
            raise BusyError(
                f"{total >> 20} MiB of replies to your host are unread; read them, or close their connections"
            )

    async def write(self, context: Context, host: str, path: str, raw: bytes) -> None:
        """Writes one reply, and waits until the caller reads it.

        Raises:
            ProtocolViolationError: the caller has not read it in time. The call ends; gRPC keeps its stream until the
                caller reads the reply or closes the connection.
        """
        nbytes, connection = len(raw) + REPLY_OVERHEAD, context.peer()
        unread, since = self._bytes.setdefault(host, Counter()), self._since.setdefault(connection, {})
        this = object()

        async def write() -> None:
            try:
                await context.write(raw)
            finally:
                unread[connection] -= nbytes
                del since[this]
                if not since:
                    del unread[connection], self._since[connection]
                if not unread:
                    del self._bytes[host]

        unread[connection] += nbytes
        since[this] = asyncio.get_running_loop().time()
        writing = asyncio.ensure_future(write())
        self._writing.add(writing)
        writing.add_done_callback(self._forget)
        done, _ = await asyncio.wait([writing], timeout=_time_for(raw))
        if not done:
            raise _cut_off(context, path)
        await writing

    async def ended(self) -> None:
        """Waits until no reply is being written, after the server has stopped."""
        if self._writing:
            await asyncio.wait(self._writing)

    def _forget(self, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # a reply whose caller timed out


def _time_for(raw: bytes) -> float:
    return WRITE_SECONDS + len(raw) / WRITE_BYTES_PER_SECOND


def _cut_off(context: Context, path: str) -> ProtocolViolationError:
    logger.warning("%s reads no reply to %s and is cut off", context.peer(), path)
    return ProtocolViolationError("the caller took no answer for too long")
