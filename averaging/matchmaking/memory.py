"""What one peer remembers of others from search to search: their conduct, when they began to look, and its last group.

Pure: `now` is passed in, and all times are of this peer's own clock. No message says when a member began to look: a
node shows it by its declaration, a client by its request to the leader.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from averaging.common import CLIENT_PREFIX, backoff_delay
from averaging.discovery import Entry
from averaging.matchmaking.rules import CLOCK_TOLERANCE, LeaderStanding, pack_looking, unpack_looking
from averaging.protocol import Group
from averaging.receipts import LateArrival
from averaging.timing import VERDICT_SECONDS, Deadlines

DESERTION_SECONDS = 1800.0  # seconds for which a deserter is remembered, unless it leads a group before

EXCLUSION_SECONDS, MAX_EXCLUSION_SECONDS = 5.0, 300.0
"""Seconds for which a peer is neither asked nor accepted that was at fault twice in a row, doubled each further time.
It costs the others a round each time that it is tried again. Once may be an accident."""

MAX_REMEMBERED = 1024  # peers of each kind that are remembered

Value = TypeVar("Value")


class Conduct:
    """What one peer remembers of the others, for all its searches; `deadlines` are how long they take to answer."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self.deadlines = Deadlines(VERDICT_SECONDS, VERDICT_SECONDS) if deadlines is None else deadlines
        # The latest is last.
        self._unanswered: OrderedDict[str, int] = OrderedDict()
        self._deserted: OrderedDict[str, float] = OrderedDict()  # until when that counts
        self._faults: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often in a row, and excluded until when
        self._logged: OrderedDict[str, None] = OrderedDict()

    def note_answer(self, endpoint: str) -> None:
        self._unanswered.pop(endpoint, None)

    def note_silence(self, endpoint: str) -> None:
        _remember(self._unanswered, endpoint, self.unanswered(endpoint) + 1)

    def note_desertion(self, endpoint: str, now: float) -> None:
        _remember(self._deserted, endpoint, now + DESERTION_SECONDS)

    def note_group(self, endpoint: str) -> None:
        self._deserted.pop(endpoint, None)

    def unanswered(self, endpoint: str) -> int:
        return self._unanswered.get(endpoint, 0)

    def standing(self, endpoint: str, now: float) -> LeaderStanding:
        if now < self._deserted.get(endpoint, now):
            return LeaderStanding.DESERTER
        return LeaderStanding.SILENT if endpoint in self._unanswered else LeaderStanding.GOOD

    def note_fault(self, endpoint: str, now: float) -> None:
        times, _ = self._faults.get(endpoint, (0, 0.0))
        seconds = backoff_delay(EXCLUSION_SECONDS, MAX_EXCLUSION_SECONDS, times - 1) if times else 0.0
        _remember(self._faults, endpoint, (times + 1, now + seconds))

    def note_well(self, endpoint: str) -> None:
        self._faults.pop(endpoint, None)

    def excluded(self, now: float) -> dict[str, float]:
        return {name: until for name, (_, until) in self._faults.items() if now < until}

    def is_new(self, difference: str) -> bool:
        """Whether a schema difference was not found before, in any topic: every search may find the same one again."""
        new = difference not in self._logged
        _remember(self._logged, difference, None)
        return new


def _remember(kept: OrderedDict[str, Value], endpoint: str, value: Value) -> None:
    kept[endpoint] = value
    kept.move_to_end(endpoint)
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)


MIN_LATE_SECONDS = 0.1
"""The last member is reported if it arrived at least this many seconds after the one before it ..."""

MIN_LATE_FRACTION = 0.25
"""... and also this fraction of the time since this peer's last round, since local steps vary in length."""

RENEWAL_SECONDS = CLOCK_TOLERANCE
"""A declaration that is renewed within this many seconds after it expired is not a new arrival."""

GROUP_START_SECONDS = 1.0
"""If a member declared at most this many seconds before the group was ready that its search is over, it was for this
group. If it did so earlier, its declaration belonged to an earlier group."""


class Arrivals:
    """What one peer, `endpoint`, observes during one search, which begins `now`."""

    def __init__(self, endpoint: str, now: float) -> None:
        self._endpoint = endpoint
        self._arrived: dict[str, float] = {endpoint: now}
        self._first = True  # discovery has not been read yet
        self._already_looking: set[str] = set()  # when discovery was read first
        self._declared: set[str] = set()
        self._lapsed: dict[str, float] = {}  # peers whose declaration has disappeared, and since when
        self._ended: dict[str, float] = {}  # peers that declared the end of their search, and when this peer saw it
        self._ready = now

    def observe(self, declarations: Mapping[str, bool], now: float) -> None:
        """Takes the present declarations: by endpoint, whether that peer looks for a group."""
        others = {name: looks for name, looks in declarations.items() if name != self._endpoint}
        if self._first:
            self._first = False
            self._already_looking = {name for name, looks in others.items() if looks and name not in self._arrived}
            self._arrived |= dict.fromkeys(self._already_looking, self._arrived[self._endpoint])
        for name in self._declared - others.keys():
            self._lapsed.setdefault(name, now)
        for name, looks in others.items():
            lapsed = self._lapsed.pop(name, now)
            if not looks:
                self._ended.setdefault(name, now)
            elif name not in self._arrived or name in self._ended or now - lapsed > RENEWAL_SECONDS:
                self._add(name, now)
        self._declared.update(others)

    def add_request(self, name: str, now: float) -> None:
        if name not in self._arrived or name in self._ended:
            self._add(name, now)

    def set_ready(self, now: float) -> None:
        self._ready = now

    def waited(self, name: str) -> float | None:
        """Seconds for which a member had been looking when the group was ready.

        None if that is unknown: it was already looking when this peer began, or it is a client of another leader.
        """
        arrived = None if name in self._already_looking else self._arrival(name)
        return None if arrived is None else self._ready - arrived

    def last(self, members: Collection[str], since: float) -> LateArrival | None:
        """The one of `members` that arrived last, if it was so late that it is worth reporting.

        `since` is when this peer's last round ended. A client of another leader may have arrived even later. If there
        is one, a member is reported only if the group was ready sooner after its arrival than it arrived after the
        others.
        """
        known = [(arrived, name) for name in members if (arrived := self._arrival(name)) is not None]
        if len(known) < 2:
            return None
        (before, _), (latest, name) = sorted(known)[-2:]
        seconds = latest - before
        if seconds < max(MIN_LATE_SECONDS, MIN_LATE_FRACTION * (self._ready - since)):
            return None
        if len(known) < len(members) and self._ready - latest >= seconds:
            return None
        return LateArrival(name, seconds)

    def _add(self, name: str, now: float) -> None:
        self._arrived[name] = now
        self._ended.pop(name, None)
        self._already_looking.discard(name)

    def _arrival(self, name: str) -> float | None:
        """When a member arrived, at the latest: a peer that was already looking counts as arriving with this one."""
        of_an_earlier_group = self._ready - self._ended.get(name, self._ready) > GROUP_START_SECONDS
        if name in self._arrived and not of_an_earlier_group:
            return self._arrived[name]
        return None if name.startswith(CLIENT_PREFIX) else self._ready


QUIET_SECONDS = 0.05
"""Seconds for which the members of a group look for each other without a declaration. A member that is later than the
others by more than this is seen to be late: receipts report it from twice as many seconds."""

LEAD_SECONDS = 4 * QUIET_SECONDS
"""Seconds by which a member's declaration lasts longer than the leader's, so that the leader may begin to look after
it, and leads all the same."""

_ENDED = pack_looking(False)


class LastGroup:
    """What a peer remembers of its last group, and whether it forms again without a search.

    Its members then ask the last leader directly. They do so only while a search would find the same group anyway: the
    round before averaged and lost no member, discovery knows nobody outside of the group, nobody outside has asked the
    leader in vain since, nobody has declared itself since, and this peer's last declaration has not expired, so that
    peers whose groups do not know of each other meet once in that time.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._members: frozenset[str] = frozenset()
        self._leader = ""
        self._averages = False  # the round of the group is in progress, or has averaged and lost no member
        self._ended = False
        self._declared_until = 0.0
        self._over: dict[str, float] = {}
        self._probably_over: dict[str, float] = {}
        self._asked = False

    def note_declaration(self, until: float) -> None:
        self._declared_until = until

    def note_begin(self, group: Group, entries: Mapping[str, Entry]) -> None:
        """A group has begun. The present declarations of its members belong to the search that is over."""
        self._members, self._leader = frozenset(group.endpoints), group.leader
        self._averages, self._ended = True, False
        self._over = {name: entry.expiration for name, entry in entries.items() if name in self._members}
        self._probably_over = self._over

    def note_end(self, entries: Mapping[str, Entry], whole: bool) -> None:
        """The round of the group is over; `whole` if it averaged and lost no member.

        Declarations that have arrived since it began are probably older than it, too.
        """
        self._averages, self._ended = whole, True
        self._probably_over = {name: entry.expiration for name, entry in entries.items() if name in self._members}

    def note_asked(self, endpoint: str) -> None:
        self._asked |= endpoint not in self._members

    def take_asked(self) -> bool:
        asked, self._asked = self._asked, False
        return asked

    def read(self, entries: Mapping[str, Entry], *, surely: bool = False) -> Mapping[str, Entry]:
        """The declarations under the key. Those that belong to the last group count as ended, as its members know.

        They do not say so in discovery if it knows nobody else, see `Matchmaking`. Those that only probably belong to
        it stay as they are if `surely`.
        """
        over = self._over if surely else self._probably_over
        return {
            name: replace(entry, value=_ENDED)
            if entry.expiration <= over.get(name, 0.0) and unpack_looking(entry.value)
            else entry
            for name, entry in entries.items()
        }

    def is_all(self, entries: Mapping[str, Entry], known: Collection[str]) -> bool:
        return self._members.issuperset(entries) and self._members.issuperset(known)

    def leader(self, entries: Mapping[str, Entry], known: Collection[str], now: float) -> str:
        """The leader with which the group forms again; empty if it has to search. `known` are discovery's peers."""
        again = self._averages and self._ended and now < self._declared_until and self.is_all(entries, known)
        waiting = any(unpack_looking(entry.value) for entry in self.read(entries).values())
        return self._leader if again and not waiting else ""

    def may_return(self, endpoint: str) -> bool:
        return self._averages and not self._asked and self._leader == self._endpoint and endpoint in self._members

    def is_member(self, endpoint: str) -> bool:
        return endpoint in self._members
