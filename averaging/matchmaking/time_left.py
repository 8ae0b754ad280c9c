"""How long a search may still take."""

from __future__ import annotations

from collections.abc import Callable

from averaging.matchmaking.rules import CLOCK_TOLERANCE


class TimeLeft:
    """The seconds of one search that are left.

    They end at a moment by the clock, which others go by as well. Should the clock be set, that hardly changes them,
    and seconds in which this peer itself stood still do not count: when it goes on, the others may be there yet.

    Args:
        deadline: when they end, in seconds since the epoch.
        clock: seconds since the epoch.
        searched: fair seconds since now, see `FairClock`.
    """

    def __init__(self, deadline: float, clock: Callable[[], float], searched: Callable[[], float]) -> None:
        self._deadline, self._clock, self._searched = deadline, clock, searched
        self._seconds = deadline - clock()

    @property
    def seconds(self) -> float:
        """At most 0 when they are over."""
        left = self._seconds - self._searched()
        return min(max(self._deadline - self._clock(), left - CLOCK_TOLERANCE), left + CLOCK_TOLERANCE)
