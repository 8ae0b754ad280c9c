"""What both lanes of a stream share: the upload of its messages, and the end of a stream that was refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

LINGER_SECONDS = 0.5
"""Seconds for which a stream is read that was refused: some callers lose the reply if one of their writes fails."""

Request = TypeVar("Request")


MESSAGES_AT_ONCE = 16
"""Messages that are sent before other tasks of the event loop get a chance: small ones may never have to wait."""


class Upload(Generic[Request]):
    """Sends messages with the network's backpressure, in a task that runs `run`, until they or the call end.

    `encode` returns the arguments of `send` for a message; `finish` is called after the last one, and `abort` if
    `messages` raises. An error in `lost` means that the call has ended: the reader of the replies gets the reason.
    """

    def __init__(
        self,
        messages: AsyncIterator[Request],
        encode: Callable[[Request], tuple[Any, ...]],
        send: Callable[..., Awaitable[object]],
        finish: Callable[[], Awaitable[object]],
        abort: Callable[[], object],
        lost: tuple[type[Exception], ...],
    ) -> None:
        self.task: asyncio.Task[None] | None = None  # that of `run`
        self.ended = False  # whether all messages were sent
        self.failure: Exception | None = None  # of `messages`
        self._messages, self._encode, self._send = messages, encode, send
        self._finish, self._abort, self._lost = finish, abort, lost

    async def run(self) -> None:
        sent = 0
        try:
            async for message in self._messages:
                content = self._encode(message)
                try:
                    await self._send(*content)
                except self._lost:
                    return
                sent += 1
                if sent % MESSAGES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            with suppress(*self._lost):
                await self._finish()
                self.ended = True
        except Exception as error:
            self.failure = error
            self._abort()
        finally:
            await close(self._messages)

    def cancel(self, _: object = None) -> None:
        if self.task is not None:
            self.task.cancel()

    async def close(self) -> None:
        """Ends the upload and drops its exception.

        The task keeps its exception, whose frames keep this object and the call. That reference cycle would keep the
        call alive until a garbage collection, and gRPC keeps the connection of a closed channel while a call exists.
        """
        self.cancel()
        task, self.task = self.task, None
        if task is not None:
            await asyncio.wait({task})
        self.failure = None


async def close(iterator: AsyncIterator[object]) -> None:
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()


async def linger(read: Callable[[], Awaitable[bool]]) -> None:
    """Discards what a refused caller still sends, while `read` returns that more may follow, for a limited time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while await read():
                pass
