"""A clock that keeps an observer from blaming others for the seconds in which it was stopped or busy itself. Pure."""

from __future__ import annotations

TICKS = 8
"""The clock is looked at so many times in the shortest deadline ..."""

MAX_INTERVAL = 0.25
"""... and at least every so many seconds."""


def interval_of(shortest: float) -> float:
    """Seconds between two looks at the clock, where no deadline is shorter than `shortest`."""
    return min(shortest / TICKS, MAX_INTERVAL)


class FairClock:
    """Seconds in which others could have been heard, had they done something.

    It has to be told of the time every `interval` seconds. If that comes late, this peer was stopped or busy, and no
    more than the interval counts. If nobody at all is heard, this peer's own link is suspected, and half of it counts.

    Args:
        interval: seconds.
        now: the moment at which it starts from 0.
    """

    def __init__(self, interval: float, now: float) -> None:
        self.interval = interval
        self._fair, self._last = 0.0, now

    def tick(self, now: float, *, deaf: bool = False) -> float:
        """Returns the fair seconds up to `now`.

        Args:
            now: in the running loop's time.
            deaf: whether several are waited for, and nobody was heard since the last tick.
        """
        self._fair += self._passed(now) / (2 if deaf else 1)
        self._last = max(self._last, now)
        return self._fair

    def at(self, now: float) -> float:
        """The fair seconds up to `now`, if somebody is heard until the next tick."""
        return self._fair + self._passed(now)

    def _passed(self, now: float) -> float:
        return min(max(0.0, now - self._last), self.interval)
