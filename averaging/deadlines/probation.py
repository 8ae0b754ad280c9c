"""Members that have held a whole round up lately, and therefore get less time for a while. Pure."""

from __future__ import annotations

from collections import OrderedDict

FIRST_SECONDS, MAX_SECONDS = 300.0, 6 * 3600.0
"""Duration of the first probation in seconds, which doubles with each further one, and the longest duration."""

FORGET_SECONDS = 24 * 3600.0
"""After this time without a probation the next one is as long as the first."""

MAX_REMEMBERED = 1024


class Probation:
    """Remembers members that were given up because they held a round up. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._until: OrderedDict[str, tuple[int, float]] = OrderedDict()  # count, and end; the latest last

    def add(self, endpoint: str, now: float) -> None:
        """Puts a member on probation. A second call during its probation changes nothing, so that it ends."""
        count, until = self._until.get(endpoint, (0, 0.0))
        if now < until:
            return
        if now >= until + FORGET_SECONDS:
            count = 0
        self._until[endpoint] = count + 1, now + min(FIRST_SECONDS * 2.0 ** min(count, 10), MAX_SECONDS)
        self._until.move_to_end(endpoint)
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)

    def includes(self, endpoint: str, now: float) -> bool:
        """Whether a member is on probation."""
        return now < self._until.get(endpoint, (0, 0.0))[1]
