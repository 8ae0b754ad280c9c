"""How far the peers of a run are, each in its strategy's own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing

from averaging.discovery.base import Discovery, Entry
from averaging.discovery.published_record import PublishedRecord
from averaging.observe.step_rate import rate_in
from averaging.protocol.group import progress_key

LIFETIME, REFRESH = 15.0, 5.0
"""Seconds for which what a peer tells holds, and a dead peer may be waited for; and after which it is told again."""

PAUSE = 0.02
"""A peer tells how far it is at most once in so many seconds."""


class RunProgress:
    """What the peers of a run tell each other under `RUN.progress`.

    Attributes:
        notice: this peer's own; it is kept while the peer is entered.
    """

    def __init__(self, run_id: str, endpoint: str, discovery: Discovery, clock: Callable[[], float]) -> None:
        self._key, self._endpoint, self._discovery = progress_key(run_id), endpoint, discovery
        self._word: bytes | None = None
        self._gone: dict[str, Entry] = {}  # peers at whose address nothing listens, and what they announced last
        self.notice = PublishedRecord(
            discovery,
            self._key,
            endpoint,
            lambda: self._word,
            lifetime=LIFETIME,
            refresh=REFRESH,
            pause=PAUSE,
            clock=clock,
        )

    def tell(self, word: bytes, *, soon: bool = True) -> None:
        """Announces to the others how far this peer is; that holds until the next call, and a while after its death.

        Args:
            word: at most 1 KiB.
            soon: at once; if not, with the next renewal of the record.
        """
        self._word = word
        if soon:
            self.notice.changed()

    @property
    def told(self) -> dict[str, bytes]:
        """How far the other peers are, by endpoint: what each has announced last, but for those that are `gone`."""
        entries = self._discovery.get(self._key)
        self._gone = {name: entry for name, entry in self._gone.items() if entries.get(name) == entry}
        return {
            name: entry.value for name, entry in entries.items() if name != self._endpoint and name not in self._gone
        }

    def step_rates(self, names: Collection[str]) -> dict[str, float]:
        """The step rates that these peers, of which this one may be one, announced last; those that are known."""
        entries = self._discovery.get(self._key)
        words = {name: entries[name].value for name in names if name in entries}
        if self._word is not None and self._endpoint in names:
            words[self._endpoint] = self._word
        return {name: rate for name, word in words.items() if (rate := rate_in(word)) is not None}

    def gone(self, endpoint: str) -> None:
        """Nothing listens at the address of that peer, so it is left out until it renews its announcement."""
        entry = self._discovery.get(self._key).get(endpoint)
        if entry is not None:
            self._gone[endpoint] = entry

    async def watch(self) -> AsyncGenerator[dict[str, bytes], None]:
        """Yields what the others have told, at once and again whenever that changes."""
        async with aclosing(self._discovery.watch(self._key)) as changes:
            async for _ in changes:
                yield self.told

    async def others_tell(self, count: int, timeout: float) -> bool:
        """Whether so many others tell how far they are, now or within `timeout` seconds."""
        return len(await self.until(lambda told: len(told) >= count, timeout)) >= count

    async def until(self, condition: Callable[[dict[str, bytes]], bool], timeout: float) -> dict[str, bytes]:
        """Waits until what the others tell fulfils `condition`, at most `timeout` seconds; returns what they tell."""
        try:
            async with asyncio.timeout(timeout), aclosing(self.watch()) as changes:
                async for told in changes:
                    if condition(told):
                        return told
        except TimeoutError:
            return self.told
        return self.told
