"""Limits for replies that callers do not read: bytes per host, and seconds per reply."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import grpc

from averaging.errors import BusyError, ProtocolViolationError
from averaging.transport.grpc.channel_options import WRITE_BYTES_PER_SECOND, WRITE_SECONDS

logger = logging.getLogger("averaging.transport")

MAX_UNREAD_BYTES = 64 << 20
"""Bytes of unread replies to one host. Above it, further calls of the host are refused."""

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
    """The unread replies, by host.

    A reply counts until its caller has read it or the connection is closed, since gRPC keeps its bytes until then.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._writing: set[asyncio.Task[None]] = set()

    def check(self, host: str) -> None:
        """Called before a reply is made.

        Raises:
            BusyError: the host has too many unread replies.
        """
        if self._bytes[host] >= MAX_UNREAD_BYTES:
            unread = self._bytes[host] >> 20
            raise BusyError(f"{unread} MiB of replies to your host are unread; read them, or close their connections")

    async def write(self, context: Context, host: str, path: str, raw: bytes) -> None:
        """Writes one reply, and waits until the caller reads it.

        Raises:
            ProtocolViolationError: the caller has not read it in time. The call ends; gRPC keeps its stream until the
                caller reads the reply or closes the connection.
        """
        nbytes = len(raw) + REPLY_OVERHEAD

        async def write() -> None:
            try:
                await context.write(raw)
            finally:
                self._bytes[host] -= nbytes
                if not self._bytes[host]:
                    del self._bytes[host]

        self._bytes[host] += nbytes
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
