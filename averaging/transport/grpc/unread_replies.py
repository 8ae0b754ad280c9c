"""Replies that callers have not taken: how many bytes a host may leave here, and how long one is waited for."""

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
"""Bytes of replies that wait for the callers of one host. Further calls are refused until some of these are taken."""

REPLY_OVERHEAD = 8 << 10
"""What a reply takes besides its bytes: gRPC keeps a stream for it."""

Context = grpc.aio.ServicerContext[Any, Any]


class UnreadReplies:
    """The replies on their way to their callers, by host.

    A reply counts until its caller has taken it or the connection is gone, also when nobody waits for that any longer:
    gRPC keeps its bytes until then.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._writing: set[asyncio.Task[None]] = set()

    def check(self, host: str) -> None:
        """Called before a reply is made.

        Raises:
            BusyError: the host leaves too many unread.
        """
        if self._bytes[host] >= MAX_UNREAD_BYTES:
            told = f"{self._bytes[host] >> 20} MiB of replies to your host are unread"
            raise BusyError(f"{told}; read them, or close their connections")

    async def write(self, context: Context, host: str, path: str, raw: bytes) -> None:
        """Writes one reply, and waits until the caller takes it.

        Raises:
            ProtocolViolationError: the caller has not taken it in a long time. The service is done with it then; gRPC
                keeps its stream until the caller takes what is on its way, or is gone.
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
        done, _ = await asyncio.wait([writing], timeout=WRITE_SECONDS + len(raw) / WRITE_BYTES_PER_SECOND)
        if not done:
            logger.warning("%s takes no answer to %s and is cut off", context.peer(), path)
            raise ProtocolViolationError("the caller took no answer for too long")
        await writing

    async def ended(self) -> None:
        """Returns when no reply is on its way any more, after the server has stopped."""
        if self._writing:
            await asyncio.wait(self._writing)

    def _forget(self, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # of one that nobody waits for any more
