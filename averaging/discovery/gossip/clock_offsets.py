"""How much the clocks of other peers differ from this one's, from the timestamps in their messages. Pure."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import dataclass

from averaging.common import is_endpoint
from averaging.discovery import clock_difference
from averaging.discovery.gossip.record import MAX_VERSION

logger = logging.getLogger(__name__)

MAX_CLOCKS = 256
"""Peers whose clocks are remembered; beyond this, the one that was heard longest ago is forgotten."""

STALE_SECONDS = 600.0
"""Seconds after which an offset is no longer used, and after which it is logged again."""

MAX_WARNINGS = 5
"""Warnings within `STALE_SECONDS`. A caller may claim any endpoint and any time, so the number must be limited."""

CONFIRM_SECONDS = 3.0
"""Seconds for which calls must show that a caller's clock is behind. Calls that waited while this peer stood still
seem to have been sent long ago."""

MAX_CORRECTION = 30.0
"""Seconds by which this peer's clock is corrected at most. With clocks that differ more no group is found anyway."""

CLIENT = "a client of this run"
"""The name for callers without an endpoint."""

_LATEST = MAX_VERSION / 1e6


@dataclass(slots=True)
class _Estimate:
    """Bounds of the seconds by which a clock is ahead of this peer's. The times are those of the event loop."""

    lower: float
    upper: float
    since: float
    latest: float
    has_answered: bool


class ClockOffsets:
    """Estimates the offsets of other peers' clocks, and logs a warning if one is too large.

    The timestamp of an answer lies between the call and the answer, so it bounds the offset from both sides. The
    timestamp of a call is at most `call_timeout` seconds old when it arrives.

    Args:
        tolerance: seconds by which two clocks may differ.
        call_timeout: seconds after which a caller gives up.
    """

    def __init__(self, tolerance: float, call_timeout: float) -> None:
        self._tolerance, self._call_timeout = tolerance, call_timeout
        self._estimates: dict[str, _Estimate] = {}  # the last one is that of the peer heard last
        self._warned: dict[str, float] = {}
        self._warnings: deque[float] = deque(maxlen=MAX_WARNINGS)

    def note_answer(self, endpoint: str, theirs: float, now: float, elapsed: float, moment: float) -> None:
        """A peer has answered a call.

        Args:
            endpoint: that peer.
            theirs: its clock when it answered, in seconds since the epoch; impossible values are ignored.
            now: this peer's clock, in seconds since the epoch.
            elapsed: seconds since the call began.
            moment: the event loop's time.
        """
        if 0 < theirs <= _LATEST:
            self._note(endpoint, _Estimate(theirs - now, theirs - now + elapsed, moment, moment, True))

    def note_call(self, endpoint: str, theirs: float, now: float, moment: float) -> None:
        """A peer has called, or a client if `endpoint` is empty; see `note_answer` for the arguments."""
        name = endpoint or CLIENT
        if 0 < theirs <= _LATEST and (name is CLIENT or is_endpoint(name)):
            ahead = theirs - now
            self._note(name, _Estimate(ahead, ahead + self._call_timeout, moment, moment, False))

    def excessive(self, moment: float) -> dict[str, float]:
        """The peers whose clocks differ by more than the tolerance, and the seconds ahead; negative if behind."""
        offsets = {
            name: self._excessive_offset(estimate, moment)
            for name, estimate in self._estimates.items()
            if moment - estimate.latest <= STALE_SECONDS
        }
        return {name: ahead for name, ahead in offsets.items() if ahead is not None}

    def own_offset(self, moment: float) -> float | None:
        """Seconds by which this peer's clock is ahead of the median of the others; None if none has answered lately."""
        ahead = self._offsets(moment)
        return -statistics.median(ahead) if ahead else None

    def correction(self, moment: float) -> float:
        return max(-MAX_CORRECTION, min(statistics.median([0.0, *self._offsets(moment)]), MAX_CORRECTION))

    def _offsets(self, moment: float) -> list[float]:
        return [
            (estimate.lower + estimate.upper) / 2
            for estimate in self._estimates.values()
            if estimate.has_answered and moment - estimate.latest <= STALE_SECONDS
        ]

    def _note(self, name: str, reading: _Estimate) -> None:
        known = self._estimates.pop(name, None)
        if known is not None and reading.latest - known.latest <= STALE_SECONDS:
            lower, upper = max(known.lower, reading.lower), min(known.upper, reading.upper)
            if lower <= upper:  # otherwise one of the clocks was set
                has_answered = known.has_answered or reading.has_answered
                reading = _Estimate(lower, upper, known.since, reading.latest, has_answered)
        self._estimates[name] = reading
        if len(self._estimates) > MAX_CLOCKS:
            del self._estimates[next(iter(self._estimates))]
        ahead = self._excessive_offset(reading, reading.latest)
        if ahead is not None and self._may_warn(name, reading.latest):
            logger.warning(
                "groups with %s may fail: its clock is %s this peer's clock, and %g s are allowed. Set the clocks of "
                "both machines, for example with NTP",
                *(name, clock_difference(ahead), self._tolerance),
            )

    def _excessive_offset(self, estimate: _Estimate, moment: float) -> float | None:
        """Seconds by which a clock is ahead, negative if behind; None if it may be within the tolerance."""
        if estimate.lower > self._tolerance:
            return estimate.lower
        if estimate.upper < -self._tolerance:
            if estimate.has_answered:
                return estimate.upper
            if moment - estimate.since >= CONFIRM_SECONDS:
                return estimate.lower
        return None

    def _may_warn(self, name: str, moment: float) -> bool:
        self._warned = {name: when for name, when in self._warned.items() if moment - when < STALE_SECONDS}
        full = len(self._warnings) == MAX_WARNINGS and moment - self._warnings[0] < STALE_SECONDS
        if full or name in self._warned:
            return False
        self._warned[name] = moment
        self._warnings.append(moment)
        return True
