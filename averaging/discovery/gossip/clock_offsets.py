"""By how much the clocks of others differ from this peer's, by the timestamps in their messages. Pure."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from averaging.common.addresses import is_endpoint
from averaging.discovery.base import clock_difference
from averaging.discovery.gossip.record import MAX_VERSION

logger = logging.getLogger(__name__)

MOST_CLOCKS = 256
"""Peers whose clocks are remembered; beyond it the one that was heard least lately is forgotten."""

STALE_SECONDS = 600.0
"""Seconds after which a difference is no longer believed, and after which it is reported again."""

MOST_WARNINGS = 5
"""Warnings within `STALE_SECONDS`: whoever can call may claim any name and any time."""

AGREEING_SECONDS = 3.0
"""Calls must show for so long that their caller's clock is behind.

When this peer stood still, the calls that waited meanwhile look as if they had been sent long ago."""

CLIENT = "a client of this run"
"""Stands for callers without an endpoint."""

_LATEST = MAX_VERSION / 1e6


@dataclass(slots=True)
class _Estimate:
    """Bounds of the seconds by which a clock is ahead of this peer's; moments are of the running loop."""

    least: float
    most: float
    since: float
    latest: float
    both_ways: bool


class Clocks:
    """Reads the clocks of others, and warns of those that differ too much.

    A timestamp in an answer was made between the question and the answer, so it bounds the difference from both sides.
    One in a call was made at most `longest_call` seconds before it arrived.

    Args:
        tolerance: seconds by which two clocks may differ.
        longest_call: seconds after which a caller gives a call up.
    """

    def __init__(self, tolerance: float, longest_call: float) -> None:
        self._tolerance, self._longest_call = tolerance, longest_call
        self._estimates: dict[str, _Estimate] = {}  # the latest heard last
        self._warned: dict[str, float] = {}
        self._warnings: deque[float] = deque(maxlen=MOST_WARNINGS)

    def answered(self, endpoint: str, theirs: float, now: float, elapsed: float, moment: float) -> None:
        """A peer has answered a question.

        Args:
            endpoint: that peer.
            theirs: what its clock showed as it answered, in seconds since the epoch; anything else is passed over.
            now: what this peer's clock shows, likewise.
            elapsed: seconds since the question was asked.
            moment: the running loop's time.
        """
        if 0 < theirs <= _LATEST:
            self._note(endpoint, _Estimate(theirs - now, theirs - now + elapsed, moment, moment, True))

    def called(self, endpoint: str, theirs: float, now: float, moment: float) -> None:
        """A peer has called, or a client if `endpoint` is empty; for the arguments see `answered`."""
        name = endpoint or CLIENT
        if 0 < theirs <= _LATEST and (name is CLIENT or is_endpoint(name)):
            ahead = theirs - now
            self._note(name, _Estimate(ahead, ahead + self._longest_call, moment, moment, False))

    def apart(self, moment: float) -> dict[str, float]:
        """Whose clock differs by more than the tolerance, and by how many seconds it is ahead (below 0: behind)."""
        found = {
            name: self._difference(estimate, moment)
            for name, estimate in self._estimates.items()
            if moment - estimate.latest <= STALE_SECONDS
        }
        return {name: ahead for name, ahead in found.items() if ahead is not None}

    def _note(self, name: str, reading: _Estimate) -> None:
        known = self._estimates.pop(name, None)
        if known is not None and reading.latest - known.latest <= STALE_SECONDS:
            least, most = max(known.least, reading.least), min(known.most, reading.most)
            if least <= most:  # else one of the clocks was set
                both_ways = known.both_ways or reading.both_ways
                reading = _Estimate(least, most, known.since, reading.latest, both_ways)
        self._estimates[name] = reading
        if len(self._estimates) > MOST_CLOCKS:
            del self._estimates[next(iter(self._estimates))]
        ahead = self._difference(reading, reading.latest)
        if ahead is not None and self._may_warn(name, reading.latest):
            logger.warning(
                "groups with %s may fail: its clock is %s this peer's clock, and %g s are allowed. Set the clocks of "
                "both machines, for example with NTP",
                *(name, clock_difference(ahead), self._tolerance),
            )

    def _difference(self, estimate: _Estimate, moment: float) -> float | None:
        """Seconds by which a clock is ahead, or below 0 behind; None if it may be within the tolerance."""
        if estimate.least > self._tolerance:
            return estimate.least
        if estimate.most < -self._tolerance:
            if estimate.both_ways:
                return estimate.most
            if moment - estimate.since >= AGREEING_SECONDS:
                return estimate.least
        return None

    def _may_warn(self, name: str, moment: float) -> bool:
        self._warned = {one: when for one, when in self._warned.items() if moment - when < STALE_SECONDS}
        full = len(self._warnings) == MOST_WARNINGS and moment - self._warnings[0] < STALE_SECONDS
        if full or name in self._warned:
            return False
        self._warned[name] = moment
        self._warnings.append(moment)
        return True
