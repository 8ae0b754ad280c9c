"""A peer has one `average` in progress at most, and it ends when the peer closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from averaging.errors import ClosedError, RoundError


class SingleAverage:
    """The `average` of a peer that is in progress, if there is one."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None  # it has none, but for the end of the peer
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_progress(self) -> bool:
        """Whether there is one."""
        return self._timeout is not None

    @asynccontextmanager
    async def until_closed(self, endpoint: str) -> AsyncIterator[None]:
        """Around an `average` of the peer at `endpoint`.

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
        """Ends what is in progress, and waits until it has ended."""
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        await self._idle.wait()
