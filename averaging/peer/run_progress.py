"""The announced progress of the peers of a run, packed by their strategies, and which of them are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, suppress
from itertools import compress

from averaging.common import CLIENT_PREFIX, Backoff, apart, member_of
from averaging.discovery import Discovery, Entry, PublishedRecord
from averaging.errors import AveragingError, PeerUnreachableError
from averaging.receipts import rate_in
from averaging.transport import Transport

logger = logging.getLogger("averaging.peer")

LIFETIME, REFRESH = 15.0, 5.0
"""Seconds for which an announcement is valid, also after its peer's death; and after which it is renewed."""

MAX_JUDGED = 4096  # peers of which it is remembered whether this peer can average with them

PAUSE = 0.02
"""Minimum seconds between two announcements of a peer."""


# A process that was killed leaves its records in discovery. So peers that are expected are called:

FIRST_PAUSE, LAST_PAUSE = 0.2, 2.0
"""Seconds until an expected peer is called for the first time, doubled with each further call; and their maximum.
A peer that arrives in time is not called."""

MAX_CALLS = 16  # peers that are called at a time

CALL_TIMEOUT = 2.0
"""Seconds for which a call may take; a refused connection takes one round trip."""


class RunProgress:
    """What the peers of a run announce under one key, and which of them are gone."""

    def __init__(
        self,
        key: str,
        endpoint: str,
        discovery: Discovery,
        transport: Transport,
        clock: Callable[[], float],
        given: Collection[str] = (),
    ) -> None:
        self._key, self._endpoint, self._discovery, self._transport = key, endpoint, discovery, transport
        self._own: bytes | None = None
        self._given, self._apart = given, dict[str, str]()  # peers that this one cannot average with, and why
        self._gone: dict[str, Entry] = {}  # last announcements of peers that refuse connections
        # This peer's own record; it is kept while the peer is entered.
        self.notice = PublishedRecord(
            discovery,
            self._key,
            endpoint,
            lambda: self._own,
            lifetime=LIFETIME,
            refresh=REFRESH,
            pause=PAUSE,
            clock=clock,
        )

    def announce(self, progress: bytes, *, soon: bool = True) -> None:
        self._own = progress
        if soon:
            self.notice.changed()

    @property
    def announcements(self) -> dict[str, bytes]:
        """The last announcement of each other peer, by endpoint.

        Without peers that are marked as gone, and those that this peer cannot average with, see `apart`.
        """
        entries = self._discovery.get(self._key)
        self._gone = {name: entry for name, entry in self._gone.items() if entries.get(name) == entry}
        return {
            name: entry.value
            for name, entry in entries.items()
            if name != self._endpoint and name not in self._gone and not self._is_apart(name)
        }

    def _is_apart(self, name: str) -> bool:
        """Whether this peer cannot average with another one; warns once of each."""
        if name not in self._apart:
            if len(self._apart) >= MAX_JUDGED:
                self._apart.clear()
            reason = self._apart[name] = apart(self._endpoint, name, self._given)
            if reason:
                logger.warning("this peer averages with no peer at %s, and waits for none there: %s", name, reason)
        return bool(self._apart[name])

    def is_outvoted(self, differing: Collection[str], alike: Collection[str]) -> bool:
        """Whether this peer, and not the peers that differ from it, has options that its run does not have.

        The greater number of hosts is right: several records of one host are one peer that is wrong several times. Of
        equally many, those are right among which is a peer that this one was told to join.
        """
        there, here = ({member_of(name) for name in names} - {""} for names in (differing, alike))
        here.add(member_of(self._endpoint) or self._endpoint)  # a client counts for itself only
        if len(there) != len(here):
            return len(there) > len(here)
        return not {*self._given}.isdisjoint(differing) and {*self._given}.isdisjoint(alike)

    @property
    def is_published(self) -> bool:
        """Whether the others get what this peer has announced last. After a restart its earlier record may linger."""
        entry = self._discovery.get(self._key).get(self._endpoint)
        return entry is not None and entry.value == self._own

    @property
    def announcers(self) -> frozenset[str]:
        return frozenset(self._discovery.get(self._key).keys() - {self._endpoint})

    def step_rates(self, names: Collection[str]) -> dict[str, float]:
        """The step rates that these peers announced last, this one included; without those that are unknown."""
        entries = self._discovery.get(self._key)
        progress_of = {name: entries[name].value for name in names if name in entries}
        if self._own is not None and self._endpoint in names:
            progress_of[self._endpoint] = self._own
        return {name: rate for name, progress in progress_of.items() if (rate := rate_in(progress)) is not None}

    async def mark_refusing(self, names: Collection[str]) -> list[str]:
        """Calls at most `MAX_CALLS` of these peers, and returns those whose address refuses connections.

        Their announcements are ignored until they renew them.
        """
        called = sorted(name for name in names if not name.startswith(CLIENT_PREFIX))[:MAX_CALLS]
        refused = await asyncio.gather(*(self._is_refused(name) for name in called))
        entries = self._discovery.get(self._key)
        self._gone |= {name: entries[name] for name in compress(called, refused) if name in entries}
        return list(compress(called, refused))

    async def mark_missing(self, missing: Callable[[], Collection[str]]) -> AsyncGenerator[str, None]:
        """Calls the missing peers again and again, and yields those that refuse connections, until it is closed."""
        backoff = Backoff(FIRST_PAUSE, LAST_PAUSE)
        while True:
            await asyncio.sleep(backoff.next_delay())
            for name in await self.mark_refusing(missing()):
                yield name

    async def gone_of(self, names: Collection[str]) -> list[str]:
        """Those of these peers that refuse connections, now or since their last announcement."""
        refused = await self.mark_refusing(names)
        return [name for name in names if name in refused or name in self._gone]

    async def _is_refused(self, endpoint: str) -> bool:
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._transport.get_schema(endpoint)
        except PeerUnreachableError as error:
            return error.refused
        except (TimeoutError, AveragingError):
            pass
        return False

    def is_gone(self, endpoint: str) -> bool:
        return endpoint in self._gone

    async def watch(self) -> AsyncGenerator[dict[str, bytes], None]:
        async with aclosing(self._discovery.watch(self._key)) as changes:
            async for _ in changes:
                yield self.announcements

    async def until(self, condition: Callable[[dict[str, bytes]], bool], timeout: float) -> dict[str, bytes]:
        """Waits until the announcements fulfil `condition`, or for `timeout` seconds; returns them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), aclosing(self.watch()) as changes:
                async for announcements in changes:
                    if condition(announcements):
                        return announcements
        return self.announcements
