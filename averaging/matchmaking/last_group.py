"""The last group of a peer under one key, and whether it forms again without a search. Pure.

A group that has just worked together usually meets again at once. Its members then need no discovery: each asks the
last leader directly, with the same request and the same verdicts as in a search. They do so only while a search would
find the same group anyway, that is, while nobody else can be looking:

- The round before averaged, and lost no member.
- Discovery knows no peer of the run outside the group, and nobody outside has asked the leader in vain since.
- This peer's last declaration has not expired. So each member declares itself, and sees the others', at least once in
  that time, and peers whose groups do not know of each other meet then.
- Nobody has declared itself since: then that peer leads, by the rules.

A group that is not complete within `QUIET_SECONDS` goes on as a search.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from averaging.discovery import Entry
from averaging.matchmaking.rules import pack_looking, unpack_looking
from averaging.protocol import Group

QUIET_SECONDS = 0.05
"""Seconds for which the members of a group look for each other without a declaration. A member that is later than the
others by more than this is seen to be late: receipts report it from twice as many seconds."""

LEAD_SECONDS = 4 * QUIET_SECONDS
"""Seconds by which a member's declaration lasts longer than the leader's, so that the leader may begin to look after
it, and leads all the same."""

_ENDED = pack_looking(False)


class LastGroup:
    """What a peer remembers of its last group.

    Args:
        endpoint: this peer's name.
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
        """Whether a peer outside the group has asked since the last search."""
        asked, self._asked = self._asked, False
        return asked

    def read(self, entries: Mapping[str, Entry], *, surely: bool = False) -> Mapping[str, Entry]:
        """The declarations under the key. Those that belong to the last group count as ended, as its members know.

        They do not say so in discovery if it knows nobody else, see `Matchmaking`.

        Args:
            entries: the declarations.
            surely: whether those that only probably belong to it stay as they are.
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
        """The leader with which the group forms again; empty if this peer has to search.

        Args:
            entries: the declarations under the key.
            known: the peers that discovery knows.
            now: seconds since the epoch.
        """
        again = self._averages and self._ended and now < self._declared_until and self.is_all(entries, known)
        waiting = any(unpack_looking(entry.value) for entry in self.read(entries).values())
        return self._leader if again and not waiting else ""

    def may_return(self, endpoint: str) -> bool:
        return self._averages and not self._asked and self._leader == self._endpoint and endpoint in self._members

    def is_member(self, endpoint: str) -> bool:
        return endpoint in self._members
