"""What members have done wrong, and with whom this peer therefore forms no group for a while. Pure.

A name is what a member calls itself. Only those who know a group's random id, its members, can make another's name look
bad, and only here: nobody is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from averaging.observe.receipts import DropCode, Dropped

FIRST_SECONDS, LAST_SECONDS = 300.0, 6 * 3600.0
"""Seconds for which a peer that broke the protocol is left out, doubled each further time; and the most."""

FORGOTTEN_AFTER = 24 * 3600.0
"""Seconds without an offence after which a peer is as good as new."""

MAX_REMEMBERED = 1024

_OFFENCES = frozenset({DropCode.PROTOCOL_VIOLATION, DropCode.NON_FINITE})


@dataclass(slots=True)
class _Entry:
    counts: Counter[DropCode] = field(default_factory=Counter)
    excluded_until: float = 0.0
    last: float = 0.0


class Exclusions:
    """Remembers offences. All times are seconds since the epoch; if they step back, what is remembered goes with them.

    NaN and infinity are counted and cost a member the round; what breaks the protocol excludes it from the next ones
    for `FIRST_SECONDS`, and twice as long each further time.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._latest = 0.0  # moment that was told

    def note(self, endpoint: str, code: DropCode, now: float) -> None:
        """Remembers what a member did; codes that are no offence are passed over."""
        if code not in _OFFENCES:
            return
        self._follow(now)
        self._forget(now)
        entry = self._entries.setdefault(endpoint, _Entry())
        entry.counts[code] += 1
        entry.last = now
        if code is DropCode.PROTOCOL_VIOLATION:
            seconds = FIRST_SECONDS * 2 ** min(entry.counts[code] - 1, 10)
            entry.excluded_until = now + min(seconds, LAST_SECONDS)
        if len(self._entries) > MAX_REMEMBERED:
            del self._entries[min(self._entries, key=lambda name: (self._entries[name].last, name == endpoint))]

    def note_dropped(self, dropped: Iterable[Dropped], now: float) -> None:
        """Remembers the members that a round lost through their own fault."""
        for lost in dropped:
            self.note(lost.endpoint, lost.code, now)

    def excludes(self, endpoint: str, now: float) -> bool:
        """Whether this peer forms no group with that one at present."""
        self._follow(now)
        entry = self._entries.get(endpoint)
        return entry is not None and now < entry.excluded_until

    def excluded(self, now: float) -> dict[str, float]:
        """Until when each peer is excluded that is so at present."""
        self._follow(now)
        return {name: entry.excluded_until for name, entry in self._entries.items() if now < entry.excluded_until}

    @property
    def counts(self) -> dict[str, Mapping[DropCode, int]]:
        """How often each member has done what."""
        return {name: dict(entry.counts) for name, entry in self._entries.items()}

    def _follow(self, now: float) -> None:
        """A clock that was set back must not lengthen an exclusion by as much."""
        back = self._latest - now
        self._latest = now
        if back > 0:
            for entry in self._entries.values():
                entry.excluded_until -= back
                entry.last -= back

    def _forget(self, now: float) -> None:
        old = [
            name
            for name, entry in self._entries.items()
            if now - max(entry.last, entry.excluded_until) >= FORGOTTEN_AFTER
        ]
        for name in old:
            del self._entries[name]
