"""What one peer remembers of the conduct of others from search to search. Pure.

`ResponseHistory` has who answers when asked to lead, in seconds of a clock that is never set back, such as the event
loop's. `Exclusions` has who has broken the protocol, in seconds since the epoch, and until when this peer forms no
group with them. It also has who can call this peer and cannot be called, and until when it takes no such follower,
since the shard of that would be lost in each round. `Conduct` is all of it. Peers are known by their endpoints. Only a
peer that knows a group's random id and its members can put the blame on another endpoint, and only at this peer:
exclusions are not sent to anyone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeVar

from averaging.common import backoff_delay
from averaging.receipts import DropCode, Dropped
from averaging.timing import VERDICT_SECONDS, Deadlines

MAX_SECONDS = 6 * 3600.0
"""Longest exclusion, and longest time for which a deserter is remembered."""

MAX_REMEMBERED = 1024
"""Peers of each kind that are remembered."""

# Who answers.

DESERTION_SECONDS = 1800.0
"""Seconds for which a deserter is remembered, doubled each further time up to `MAX_SECONDS`."""

MIN_FRUITLESS_SECONDS = 0.25
"""A request that led to no group counts as fruitless if it took longer; an ordinary refusal comes at once."""

DISBANDED_SECONDS = 1.0
"""A disbanded group counts as at least this long, since this peer has sent its own followers away for it."""

FRUITLESS_TIMES, FRUITLESS_SECONDS = 3, 3.0
"""A peer with this many fruitless requests in a row that took this many seconds in total counts as a deserter."""

Value = TypeVar("Value")


class LeaderStanding(IntEnum):
    """Why a peer should rather not be asked to lead. Peers of a lower standing are asked first."""

    GOOD = 0
    """Nothing is known against it."""
    UNCERTAIN = 1
    """It has never answered this peer, and neither have others that were asked for the first time lately."""
    SILENT = 2
    """It did not answer the last request in time."""
    DESERTER = 3
    """It accepted this peer as its follower, and then neither began nor disbanded the group in time. Or it has refused
    this peer, or disbanded its group, several times after a long time."""
    REPEAT_DESERTER = 4
    """It did so several times in a row."""


class ResponseHistory:
    """Remembers how each peer answered the last requests of this peer.

    Attributes:
        silent_newcomers: number of peers in a row that did not answer when they were asked for the first time.
    """

    def __init__(self) -> None:
        self.silent_newcomers = 0
        # The latest is last. Peers that answer have a table of their own, which many new names cannot flush.
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._unanswered: OrderedDict[str, int] = OrderedDict()
        self._fruitless: OrderedDict[str, tuple[int, float]] = OrderedDict()  # requests in a row, and their seconds
        self._deserted: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often, and until when that counts

    def note_answer(self, endpoint: str) -> None:
        """It answered a request, early or late."""
        if endpoint not in self._answered:
            self.silent_newcomers = 0
        self._unanswered.pop(endpoint, None)
        _remember(self._answered, endpoint, None)

    def note_silence(self, endpoint: str) -> None:
        """It did not answer within its head start."""
        if endpoint not in self._answered and endpoint not in self._unanswered:
            self.silent_newcomers += 1
        _remember(self._unanswered, endpoint, self.unanswered(endpoint) + 1)

    def note_desertion(self, endpoint: str, now: float) -> None:
        """It accepted this peer, and its declared time passed without a decision."""
        times, _ = self._deserted.get(endpoint, (0, 0.0))
        seconds = backoff_delay(DESERTION_SECONDS, MAX_SECONDS, times)
        _remember(self._deserted, endpoint, (times + 1, now + seconds))

    def note_fruitless(self, endpoint: str, seconds: float, now: float, *, disbanded: bool) -> None:
        """A request took this long and led to no group: it was refused, or the group was `disbanded`."""
        if disbanded:
            seconds = max(seconds, DISBANDED_SECONDS)
        if seconds < MIN_FRUITLESS_SECONDS:
            return
        times, total = self._fruitless.get(endpoint, (0, 0.0))
        times, total = times + 1, total + seconds
        if times >= FRUITLESS_TIMES and total >= FRUITLESS_SECONDS:
            self.note_desertion(endpoint, now)
            total = 0.0
        _remember(self._fruitless, endpoint, (times, total))

    def note_group(self, endpoint: str) -> None:
        """It began a group with this peer."""
        self._deserted.pop(endpoint, None)
        self._fruitless.pop(endpoint, None)

    def fruitless(self, endpoint: str) -> int:
        return self._fruitless.get(endpoint, (0, 0.0))[0]

    def suspicion(self, endpoint: str) -> int:
        """The number of unanswered requests that count against it.

        For a peer that has answered before, these are its own. All others are judged together: a peer that did not
        answer by the number of such peers, and a new one by `silent_newcomers`.
        """
        if endpoint in self._answered:
            return self.unanswered(endpoint)
        return len(self._unanswered) if endpoint in self._unanswered else self.silent_newcomers

    def unanswered(self, endpoint: str) -> int:
        return self._unanswered.get(endpoint, 0)

    def standing(self, endpoint: str, now: float) -> LeaderStanding:
        """Its standing now."""
        times, until = self._deserted.get(endpoint, (0, now))
        if now < until:
            return LeaderStanding.DESERTER if times == 1 else LeaderStanding.REPEAT_DESERTER
        if endpoint in self._unanswered:
            return LeaderStanding.SILENT
        return LeaderStanding.UNCERTAIN if self.suspicion(endpoint) else LeaderStanding.GOOD


def _remember(kept: OrderedDict[str, Value], endpoint: str, value: Value) -> None:
    kept[endpoint] = value
    kept.move_to_end(endpoint)
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)


# Who is excluded.

EXCLUSION_SECONDS = 300.0
"""Seconds of the first exclusion of a peer, doubled each further time up to `MAX_SECONDS`."""

FORGET_SECONDS = 24 * 3600.0
"""Seconds without an offence after which the earlier ones are forgotten."""

ONE_WAY_SECONDS, MAX_ONE_WAY_SECONDS = 5.0, 60.0
"""Seconds for which a peer that could not be called in two rounds in a row is no follower of this peer, doubled each
further time. It costs the others a round each time that it is tried again."""

_OFFENCES = frozenset({DropCode.PROTOCOL_VIOLATION, DropCode.NON_FINITE})


@dataclass(slots=True)
class _Entry:
    counts: Counter[DropCode] = field(default_factory=Counter)
    excluded_until: float = 0.0
    last: float = 0.0


class Exclusions:
    """Remembers offences. All times are seconds since the epoch. A clock that is set back lengthens no exclusion.

    A peer that broke the protocol is excluded for `EXCLUSION_SECONDS`, and twice as long each further time. NaN and
    infinity are only counted: they cost the member the round in which it sent them.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._one_way: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often in a row, and until when
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
            entry.excluded_until = now + backoff_delay(EXCLUSION_SECONDS, MAX_SECONDS, entry.counts[code] - 1)
        if len(self._entries) > MAX_REMEMBERED:
            del self._entries[min(self._entries, key=lambda name: (self._entries[name].last, name == endpoint))]

    def note_dropped(self, dropped: Iterable[Dropped], now: float) -> None:
        """Remembers the offences among the members that a round dropped."""
        for member in dropped:
            self.note(member.endpoint, member.code, now)

    def note_reach(self, one_way: Iterable[str], answered: Iterable[str], now: float) -> None:
        """Remembers which members of a round could call this peer and did not answer its calls, and who answered."""
        self._follow_clock(now)
        for endpoint in answered:
            self._one_way.pop(endpoint, None)
        for endpoint in one_way:
            # Once may also be a member that was interrupted in the round.
            times, _ = self._one_way.get(endpoint, (0, 0.0))
            seconds = backoff_delay(ONE_WAY_SECONDS, MAX_ONE_WAY_SECONDS, times - 1) if times else 0.0
            _remember(self._one_way, endpoint, (times + 1, now + seconds))

    def is_one_way(self, endpoint: str, now: float) -> bool:
        """Whether `endpoint` could call this peer in its last rounds and could not be called, a short time ago."""
        self._follow_clock(now)
        return now < self._one_way.get(endpoint, (0, now))[1]

    def excludes(self, endpoint: str, now: float) -> bool:
        return endpoint in self.excluded(now)

    def excluded(self, now: float) -> dict[str, float]:
        """The peers that are excluded at present, and until when."""
        self._follow_clock(now)
        return {name: entry.excluded_until for name, entry in self._entries.items() if now < entry.excluded_until}

    @property
    def counts(self) -> dict[str, Mapping[DropCode, int]]:
        return {name: dict(entry.counts) for name, entry in self._entries.items()}

    def _follow_clock(self, now: float) -> None:
        back = self._last_now - now
        self._last_now = now
        if back > 0:
            for entry in self._entries.values():
                entry.excluded_until -= back
                entry.last -= back
            for endpoint, (times, until) in self._one_way.items():
                self._one_way[endpoint] = times, until - back

    def _forget(self, now: float) -> None:
        self._entries = {
            name: entry
            for name, entry in self._entries.items()
            if now - max(entry.last, entry.excluded_until) < FORGET_SECONDS
        }


# What is logged, and all together.


class LoggedDifferences:
    """The schema differences that this peer has logged, in all topics: every search may find the same one again."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()

    def add(self, text: str) -> bool:
        """Adds a difference; returns whether it is new."""
        new = text not in self._texts
        _remember(self._texts, text, None)
        return new


@dataclass(frozen=True, slots=True)
class Conduct:
    """What one peer remembers of the others, for all its searches.

    Attributes:
        exclusions: peers that are neither asked nor accepted.
        history: how peers answered this peer's requests.
        deadlines: how long they take to answer.
        logged: schema differences that have been logged.
    """

    exclusions: Exclusions = field(default_factory=Exclusions)
    history: ResponseHistory = field(default_factory=ResponseHistory)
    deadlines: Deadlines = field(default_factory=lambda: Deadlines(VERDICT_SECONDS, VERDICT_SECONDS))
    logged: LoggedDifferences = field(default_factory=LoggedDifferences)
