"""Waits for changes under a key, for the readers of a discovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from averaging.discovery.base import Entry

_MIN_WAIT = 0.001  # s; the loop's clock and the wall clock differ slightly


class Watchers:
    """Wakes the readers of a key when it changes or when something under it expires.

    Args:
        clock: seconds since the epoch.
        read: returns the entries under a key.
        next_expiration: when the first of them expires; None if there are none.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        read: Callable[[str], Mapping[str, Entry]],
        next_expiration: Callable[[str], float | None],
    ) -> None:
        self._clock, self._read, self._next_expiration = clock, read, next_expiration
        self._waiting: dict[str, dict[asyncio.Event, None]] = {}
        self._closed = False

    def notify(self, key: str) -> None:
        """Wakes the readers of `key`."""
        for event in self._waiting.get(key, ()):
            event.set()

    def close(self) -> None:
        """Ends all `watch` generators."""
        self._closed = True
        for key in self._waiting:
            self.notify(key)

    async def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """See `Discovery.watch`."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, {})
        waiting[event] = None
        yielded: Mapping[str, Entry] | None = None
        try:
            while not self._closed:
                event.clear()
                entries = self._read(key)
                if entries != yielded:
                    yielded = entries
                    yield entries
                else:
                    await self._wait(event, self._next_expiration(key))
        finally:
            del waiting[event]
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]

    async def _wait(self, event: asyncio.Event, until: float | None) -> None:
        seconds = None if until is None else max(_MIN_WAIT, until - self._clock())
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return
