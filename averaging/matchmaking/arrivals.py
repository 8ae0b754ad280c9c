"""When each peer began to look for a group, as one that looks observes it. Pure: all times are those of its own clock.

No message says it. Nodes and auxiliaries declare in discovery that they look, so whoever looks at that time sees the
declaration appear, later than it was made by the time that records take. A member whose declaration has not appeared
when the group is ready has come just then. Clients declare nothing: their leader alone knows when their request came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from averaging.common.addresses import CLIENT_PREFIX
from averaging.matchmaking.rules import CLOCK_TOLERANCE
from averaging.observe.receipts import LateArrival

STANDS_OUT_SECONDS = 0.1
"""A member that came so much later than the one before it is named ..."""

STANDS_OUT_FRACTION = 0.25
"""... if that is also such a fraction of the time since this peer's last attempt: steps never take quite the same."""

RENEWAL_SECONDS = CLOCK_TOLERANCE
"""A declaration that has run out may be renewed within so many seconds without being a new arrival."""

BEGINNING_SECONDS = 1.0
"""A group of which a member's declaration tells already, by saying that it looks no more, begins here within so many
seconds; otherwise the declaration was for an earlier group."""


class Arrivals:
    """What one peer observes during one search.

    Args:
        endpoint: of that peer.
        now: when its search begins.
    """

    def __init__(self, endpoint: str, now: float) -> None:
        self._endpoint = endpoint
        self._began: dict[str, float] = {endpoint: now}
        self._first = True  # discovery has not been read yet
        self._before: set[str] = set()  # those who looked already when it was read first
        self._declared: set[str] = set()
        self._lapsed: dict[str, float] = {}  # whose declaration is no more there, and since when
        self._ended: dict[str, float] = {}  # who declared to look no more, and when that was seen
        self._ready = now

    def observe(self, declarations: Mapping[str, bool], now: float) -> None:
        """Takes in what is in discovery now: by endpoint, whether that peer declares that it looks."""
        others = {name: looks for name, looks in declarations.items() if name != self._endpoint}
        if self._first:
            self._first = False
            self._before = {name for name, looks in others.items() if looks and name not in self._began}
            self._began |= dict.fromkeys(self._before, self._began[self._endpoint])
        for name in self._declared - others.keys():
            self._lapsed.setdefault(name, now)
        for name, looks in others.items():
            lapsed = self._lapsed.pop(name, now)
            if not looks:
                self._ended.setdefault(name, now)
            elif name not in self._began or name in self._ended or now - lapsed > RENEWAL_SECONDS:
                self._note(name, now)
        self._declared.update(others)

    def asked(self, name: str, now: float) -> None:
        """A peer has asked this one to lead it."""
        if name not in self._began or name in self._ended:
            self._note(name, now)

    def ready(self, now: float) -> None:
        """The group is complete."""
        self._ready = now

    def waited(self, name: str) -> float | None:
        """Seconds for which a member had been looking when the group was ready.

        None if that is not known: it looked already when this peer began, or it is a client that did not ask this peer.
        """
        began = None if name in self._before else self._arrival(name)
        return None if began is None else self._ready - began

    def last(self, members: Collection[str], since: float) -> LateArrival | None:
        """The member that came last, if it came so much later than all others that it stands out.

        If there are clients of whom nothing is known, they could have come after it. Then it is named only if the group
        was ready sooner after its arrival than it came after the others.

        Args:
            members: those for whom a group waits.
            since: when this peer's last attempt ended; a time before its search.
        """
        known = [(began, name) for name in members if (began := self._arrival(name)) is not None]
        if len(known) < 2:
            return None
        (before, _), (latest, name) = sorted(known)[-2:]
        seconds = latest - before
        if seconds < max(STANDS_OUT_SECONDS, STANDS_OUT_FRACTION * (self._ready - since)):
            return None
        if len(known) < len(members) and self._ready - latest >= seconds:
            return None
        return LateArrival(name, seconds)

    def _note(self, name: str, now: float) -> None:
        self._began[name] = now
        self._ended.pop(name, None)
        self._before.discard(name)

    def _arrival(self, name: str) -> float | None:
        """When it began to look, at the latest: those who looked already are said to have begun with this peer."""
        of_an_earlier_group = self._ready - self._ended.get(name, self._ready) > BEGINNING_SECONDS
        if name in self._began and not of_an_earlier_group:
            return self._began[name]
        return None if name.startswith(CLIENT_PREFIX) else self._ready
