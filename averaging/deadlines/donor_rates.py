"""The best recent rate at which donors delivered a state, to compare slow donors with. Pure: `now` is passed in."""

from __future__ import annotations

SLOW_LINK = 10e6 / 8
"""Rate in bytes/s that is presumed of a slow link, 10 Mbit/s."""

MIN_SECONDS = 1.0
"""A shorter transfer counts as if it had taken this long, and only if a slow link would have taken longer."""

LIFETIME = 3600.0
"""Seconds after which a rate is forgotten, since the network may have changed."""


class Rates:
    """The best rate at which a whole state was delivered in the last hour."""

    def __init__(self) -> None:
        self._best, self._since = 0.0, float("-inf")

    def record(self, nbytes: int, seconds: float, now: float) -> None:
        """Records a complete transfer from a donor."""
        rate = nbytes / max(seconds, MIN_SECONDS)
        if seconds < MIN_SECONDS and rate < SLOW_LINK:
            return  # for example the rest of a resumed download
        if (best := self.best(now)) is None or rate >= best:
            self._best, self._since = rate, now

    def best(self, now: float) -> float | None:
        """Bytes/s; None if nothing is known."""
        return self._best if now - self._since <= LIFETIME else None
