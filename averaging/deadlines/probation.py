"""Members that have held a whole round up lately, and are therefore given less time for a while. Pure."""

from __future__ import annotations

from collections import OrderedDict

FIRST_SECONDS, LAST_SECONDS = 300.0, 6 * 3600.0
"""Seconds for which a member that has held a round up is on probation, doubled each further time; and the most."""

FORGOTTEN_AFTER = 24 * 3600.0
"""Seconds after a probation after which the next one is as long as the first."""

MAX_REMEMBERED = 1024


class Probation:
    """Remembers who was given up since it held a round up. All times are seconds of a clock that never steps back."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, tuple[int, float]] = OrderedDict()  # how often, and until when; the latest last

    def held_up(self, endpoint: str, now: float) -> None:
        """It was given up. While it is on probation this adds nothing, so that it is tried again in the end."""
        times, until = self._until.get(endpoint, (0, 0.0))
        if now < until:
            return
        if now >= until + FORGOTTEN_AFTER:
            times = 0
        self._until[endpoint] = times + 1, now + min(FIRST_SECONDS * 2.0 ** min(times, 10), LAST_SECONDS)
        self._until.move_to_end(endpoint)
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)

    def includes(self, endpoint: str, now: float) -> bool:
        """Whether it is on probation."""
        return now < self._until.get(endpoint, (0, 0.0))[1]
