"""How fast others have delivered a state: what a slow one can be compared with. Pure: `now` is passed in."""

from __future__ import annotations

SLOW_LINK = 10e6 / 8
"""Bytes/s that are presumed of a slow link, 10 Mbit/s."""

SHORT = 1.0
"""Seconds: of what took less only that counts which a slow link would not have carried in so many."""

LIFETIME = 3600.0
"""Seconds after which a rate is forgotten: the network may be another one."""


class Rates:
    """The best rate at which a whole state was delivered in the last hour."""

    def __init__(self) -> None:
        self._best, self._since = 0.0, float("-inf")

    def saw(self, nbytes: int, seconds: float, now: float) -> None:
        """So many bytes came in so many seconds, from a donor that has then delivered all."""
        rate = nbytes / max(seconds, SHORT)
        if seconds < SHORT and rate < SLOW_LINK:
            return  # the last few bytes of a state, say
        if (best := self.best(now)) is None or rate >= best:
            self._best, self._since = rate, now

    def best(self, now: float) -> float | None:
        """Bytes/s; None if nothing is known."""
        return self._best if now - self._since <= LIFETIME else None
