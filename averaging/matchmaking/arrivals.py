"""When each member began to look for a group, as one peer observes it. Pure: all times are of this peer's own clock.

No message carries these times. Nodes and auxiliaries declare in discovery that they look for a group. A peer that is
searching sees a new declaration as soon as the record has reached it. A member whose declaration has not appeared when
the group is ready counts as having arrived at that moment. Clients declare nothing: only their leader knows when their
request came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from averaging.common import CLIENT_PREFIX
from averaging.matchmaking.rules import CLOCK_TOLERANCE
from averaging.receipts import LateArrival

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
    """What one peer observes during one search.

    Args:
        endpoint: endpoint of that peer.
        now: when its search begins.
    """

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
        """Notes that a peer has asked this one to lead it."""
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
        """The member that arrived last, if it was so late that it is worth reporting.

        A client of another leader may have arrived even later. If there is one, a member is reported only if the group
        was ready sooner after its arrival than it arrived after the others.

        Args:
            members: those for whom a group waits.
            since: when this peer's last round ended; a time before its search.
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
