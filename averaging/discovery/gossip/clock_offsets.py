"""How much the clocks of other peers differ from this one's, from the timestamps in their messages. Pure."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass

from averaging.discovery import clock_difference
from averaging.discovery.gossip.record import MAX_VERSION

logger = logging.getLogger(__name__)

MAX_CLOCKS = 256  # peers whose clocks are remembered; beyond this, the one that was heard longest ago is forgotten
STALE_SECONDS = 600.0  # seconds after which an offset is no longer used, and after which it is logged again
MAX_WARNINGS = 5  # warnings within `STALE_SECONDS`. A peer whose own clock is wrong would warn of all others.

MAX_CORRECTION = 30.0
"""Seconds by which this peer's clock is corrected at most. With clocks that differ more no group is found anyway."""


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Bounds of the seconds by which a clock is ahead of this peer's, and the event loop's time of the last reading."""

    lower: float
    upper: float
    moment: float


class ClockOffsets:
    """Estimates the offsets of other peers' clocks, and logs a warning if one is over `tolerance` seconds."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._estimates: dict[str, _Estimate] = {}  # the last one is that of the peer heard last
        self._warned: dict[str, float] = {}

    def note(self, endpoint: str, theirs: float, now: float, elapsed: float, moment: float) -> None:
        """A peer has sent the time by its clock, `theirs`, which arrived at `now`, both in seconds since the epoch.

        It read its clock at most `elapsed` seconds before: the time since this peer's question. `moment` is the event
        loop's time.
        """
        if not 0 < theirs <= MAX_VERSION / 1e6:
            return
        lower, upper = theirs - now, theirs - now + elapsed
        known = self._estimates.pop(endpoint, None)
        if known is not None and moment - known.moment <= STALE_SECONDS:
            closer = max(known.lower, lower), min(known.upper, upper)
            if closer[0] <= closer[1]:  # otherwise one of the clocks was set
                lower, upper = closer
        self._estimates[endpoint] = _Estimate(lower, upper, moment)
        if len(self._estimates) > MAX_CLOCKS:
            del self._estimates[next(iter(self._estimates))]
        ahead = self._excess(self._estimates[endpoint])
        if ahead and self._may_warn(endpoint, moment):
            logger.warning(
                "groups with %s may fail: its clock is %s this peer's clock, and %g s are allowed. Set the clocks of "
                "both machines, for example with NTP",
                *(endpoint, clock_difference(ahead), self._tolerance),
            )

    def excessive(self, moment: float) -> dict[str, float]:
        """The peers whose clocks differ by more than the tolerance, and the seconds ahead; negative if behind."""
        offsets = {name: self._excess(estimate) for name, estimate in self._lately(moment).items()}
        return {name: ahead for name, ahead in offsets.items() if ahead}

    def own_offset(self, moment: float) -> float | None:
        """Seconds by which this peer's clock is ahead of the median of the others; None if none has answered lately."""
        ahead = self._offsets(moment)
        return -statistics.median(ahead) if ahead else None

    def correction(self, moment: float) -> float:
        return max(-MAX_CORRECTION, min(statistics.median([0.0, *self._offsets(moment)]), MAX_CORRECTION))

    def _offsets(self, moment: float) -> list[float]:
        return [(estimate.lower + estimate.upper) / 2 for estimate in self._lately(moment).values()]

    def _lately(self, moment: float) -> dict[str, _Estimate]:
        return {name: each for name, each in self._estimates.items() if moment - each.moment <= STALE_SECONDS}

    def _excess(self, estimate: _Estimate) -> float:
        if estimate.lower > self._tolerance:
            return estimate.lower
        return estimate.upper if estimate.upper < -self._tolerance else 0.0

    def _may_warn(self, name: str, moment: float) -> bool:
        self._warned = {name: when for name, when in self._warned.items() if moment - when < STALE_SECONDS}
        if name in self._warned or len(self._warned) >= MAX_WARNINGS:
            return False
        self._warned[name] = moment
        return True
