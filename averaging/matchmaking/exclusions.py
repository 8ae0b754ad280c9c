"""Which peers have broken the protocol, and until when this peer forms no group with them. Pure.

Peers are known by their endpoints. Only a peer that knows a group's random id and its members can put the blame on
another endpoint, and only at this peer: exclusions are not sent to anyone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from averaging.common import backoff_delay
from averaging.receipts import DropCode, Dropped

FIRST_SECONDS, MAX_SECONDS = 300.0, 6 * 3600.0
"""Seconds of the first exclusion of a peer, doubled each further time; and the longest exclusion."""

FORGET_SECONDS = 24 * 3600.0
"""Seconds without an offence after which the earlier ones are forgotten."""

MAX_REMEMBERED = 1024

_OFFENCES = frozenset({DropCode.PROTOCOL_VIOLATION, DropCode.NON_FINITE})


@dataclass(slots=True)
class _Entry:
    counts: Counter[DropCode] = field(default_factory=Counter)
    excluded_until: float = 0.0
    last: float = 0.0


class Exclusions:
    """Remembers offences. All times are seconds since the epoch. A clock that is set back lengthens no exclusion.

    A peer that broke the protocol is excluded for `FIRST_SECONDS`, and twice as long each further time. NaN and
    infinity are only counted: they cost the member the round in which it sent them.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._last_now = 0.0

    def note(self, endpoint: str, code: DropCode, now: float) -> None:
        """Remembers what a member did; codes that are not offences are ignored."""
        if code not in _OFFENCES:
            return
        self._follow_clock(now)
        self._forget(now)
        entry = self._entries.setdefault(endpoint, _Entry())
        entry.counts[code] += 1
        entry.last = now
        if code is DropCode.PROTOCOL_VIOLATION:
            entry.excluded_until = now + backoff_delay(FIRST_SECONDS, MAX_SECONDS, entry.counts[code] - 1)
        if len(self._entries) > MAX_REMEMBERED:
            del self._entries[min(self._entries, key=lambda name: (self._entries[name].last, name == endpoint))]

    def note_dropped(self, dropped: Iterable[Dropped], now: float) -> None:
        """Remembers the offences among the members that a round dropped."""
        for member in dropped:
            self.note(member.endpoint, member.code, now)

    def excludes(self, endpoint: str, now: float) -> bool:
        """Whether this peer forms no group with `endpoint` at present."""
        return endpoint in self.excluded(now)

    def excluded(self, now: float) -> dict[str, float]:
        """The peers that are excluded at present, and until when."""
        self._follow_clock(now)
        return {name: entry.excluded_until for name, entry in self._entries.items() if now < entry.excluded_until}

    @property
    def counts(self) -> dict[str, Mapping[DropCode, int]]:
        """The number of offences of each kind, by endpoint."""
        return {name: dict(entry.counts) for name, entry in self._entries.items()}

    def _follow_clock(self, now: float) -> None:
        """Moves all entries back with a clock that was set back."""
        back = self._last_now - now
        self._last_now = now
        if back > 0:
            for entry in self._entries.values():
                entry.excluded_until -= back
                entry.last -= back

    def _forget(self, now: float) -> None:
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if now - max(entry.last, entry.excluded_until) < FORGET_SECONDS
        }
