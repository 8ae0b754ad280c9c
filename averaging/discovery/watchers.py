"""Those who wait for changes under a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from averaging.discovery.base import Entry

_SHORTEST_WAIT = 0.001  # s; the loop's clock and the wall clock are not the same one


class Watchers:
    """Wakes watchers when a key changes, and each by itself when something under its key expires.

    Args:
        clock: seconds since the epoch.
        read: what is under a key now.
        next_end: when the first of that will be gone; None if there is nothing.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        read: Callable[[str], Mapping[str, Entry]],
        next_end: Callable[[str], float | None],
    ) -> None:
        self._clock = clock
        self._read = read
        self._next_end = next_end
        self._waiting: dict[str, dict[asyncio.Event, None]] = {}
        self._closed = False

    def notify(self, key: str) -> None:
        """Something under `key` changed."""
        for event in self._waiting.get(key, ()):
            event.set()

    def close(self) -> None:
        """Ends all watching."""
        self._closed = True
        for key in self._waiting:
            self.notify(key)

    async def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """See `Discovery.watch`."""
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, {})
        waiting[event] = None
        told: Mapping[str, Entry] | None = None
        try:
            while not self._closed:
                event.clear()
                entries = self._read(key)
                if entries != told:
                    told = entries
                    yield entries
                else:
                    await self._wait(event, self._next_end(key))
        finally:
            del waiting[event]
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]

    async def _wait(self, event: asyncio.Event, moment: float | None) -> None:
        """Until the event is set or the moment has come."""
        seconds = None if moment is None else max(_SHORTEST_WAIT, moment - self._clock())
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return
