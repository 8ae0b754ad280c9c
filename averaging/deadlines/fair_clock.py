"""A clock that does not count seconds in which this process was stopped or busy against other peers. Pure."""

from __future__ import annotations

TICKS = 8
"""Ticks of the clock per shortest deadline."""

MAX_INTERVAL = 0.25
"""Maximum seconds between two ticks."""


def interval_of(shortest: float) -> float:
    """Seconds between two ticks if no deadline is shorter than `shortest`."""
    return min(shortest / TICKS, MAX_INTERVAL)


class FairClock:
    """Counts fair seconds: those in which this process could have received messages.

    `tick` must be called every `interval` seconds. If a call is late, this process was stopped or busy, and only the
    interval counts. If nothing arrives from any peer, this peer's own link is suspected, and half of it counts.

    Args:
        interval: seconds.
        now: the time at which the clock starts from 0.
    """

    def __init__(self, interval: float, now: float) -> None:
        self.interval = interval
        self._fair, self._last = 0.0, now

    def tick(self, now: float, *, isolated: bool = False) -> float:
        """Returns the fair seconds up to `now`.

        Args:
            now: in the running loop's time.
            isolated: whether this peer waits for several others and received nothing since the last tick.
        """
        self._fair += self._passed(now) / (2 if isolated else 1)
        self._last = max(self._last, now)
        return self._fair

    def at(self, now: float) -> float:
        """The fair seconds up to `now`, assuming that this peer is not isolated."""
        return self._fair + self._passed(now)

    def _passed(self, now: float) -> float:
        return min(max(0.0, now - self._last), self.interval)
