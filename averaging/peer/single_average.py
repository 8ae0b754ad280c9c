"""Allows one `average` of a peer at a time, and ends it when the peer closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from averaging.common.timeouts import expire
from averaging.errors import ClosedError, RoundError


class SingleAverage:
    """The `average` in progress of a peer, if there is one."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None  # expires only when the peer closes
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_progress(self) -> bool:
        """Whether an `average` is in progress."""
        return self._timeout is not None

    @asynccontextmanager
    async def until_closed(self, endpoint: str) -> AsyncIterator[None]:
        """Wraps an `average` of the peer at `endpoint`.

        Raises:
            RoundError: another one is in progress.
            ClosedError: the peer was closed meanwhile.
        """
        if self._timeout is not None:
            raise RoundError("another average() of this peer is in progress; await it first")
        self._timeout = timeout = asyncio.timeout(None)
        self._idle.clear()
        try:
            async with timeout:
                yield
        except TimeoutError:
            if timeout.expired():
                raise ClosedError(f"{endpoint} was closed while it averaged") from None
            raise
        finally:
            self._timeout = None
            self._idle.set()

    async def close(self) -> None:
        """Ends the `average` in progress and waits for its end."""
        if self._timeout is not None:
            expire(self._timeout)
        await self._idle.wait()
