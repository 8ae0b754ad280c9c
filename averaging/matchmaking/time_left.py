"""How long a search may still take."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from averaging.deadlines.fair_timeout import FairTimeout
from averaging.deadlines.learned import Deadline
from averaging.matchmaking.rules import CLOCK_TOLERANCE


class TimeLeft:
    """The seconds of one search that are left, which it needs as a context manager.

    They end at a moment by the clock, which others go by as well. Should the clock be set, that hardly changes them,
    and seconds in which this peer itself stood still do not count: when it goes on, the others may be there yet.

    Args:
        deadline: when they end, in seconds since the epoch.
        clock: seconds since the epoch.
    """

    def __init__(self, deadline: float, clock: Callable[[], float]) -> None:
        self._deadline, self._clock = deadline, clock
        self._seconds = deadline - clock()
        self._watch = FairTimeout(Deadline(math.inf, "it is only a watch"), math.inf)

    async def __aenter__(self) -> Self:
        await self._watch.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._watch.__aexit__(kind, error, traceback)

    @property
    def seconds(self) -> float:
        """At most 0 when they are over."""
        left = self._seconds - self._watch.waited
        return min(max(self._deadline - self._clock(), left - CLOCK_TOLERANCE), left + CLOCK_TOLERANCE)
