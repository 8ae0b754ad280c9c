"""Measures how fast a peer trains. Pure: the caller passes the time.

A peer announces its rate in its progress record. Other peers put it into their receipts, which so distinguish slow
peers from those that are late for another reason.
"""

from __future__ import annotations

import statistics
from collections import deque

from averaging.common import is_number, unpack

REMEMBERED = 16
"""Steps of which the median is used, so that an evaluation between two steps does not change the rate."""

MIN_RATE, MAX_RATE = 1e-9, 1e9
"""Limits of plausible rates, per second."""

INDEX = 6
"""Position of the rate in a progress record, see `strategies.history.Progress`."""

MAX_ITEMS = 32
"""Limit on msgpack items in a progress record."""


class StepRate:
    """Measures the time that a peer works on its own steps. The time of rounds does not count.

    A step lasts from the return of one `step` of the averager to that of the next. Time inside `step`, or inside
    another call that may wait for other peers, counts only as far as it is passed to `worked`.
    """

    def __init__(self) -> None:
        self._returned: float | None = None  # end of the last call, when work on the next step began
        self._seconds: float | None = None  # of work on this step; None if its beginning is unknown
        self._units = 0.0
        self._seconds_per_unit: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self, now: float) -> None:
        """Begins a call of `step`, or another call that may wait for other peers."""
        self._seconds = None if self._returned is None else now - self._returned
        self._units = 0.0

    def worked(self, seconds: float) -> None:
        """Adds seconds of this peer's own work inside the call."""
        if self._seconds is not None:
            self._seconds += seconds

    def count(self, units: float) -> None:
        """Adds the units of this step: 1, or its samples."""
        self._units += units

    def end(self, now: float) -> None:
        """Ends the call."""
        if self._seconds is not None and self._units > 0:
            self._seconds_per_unit.append(max(0.0, self._seconds) / self._units)
        self._seconds = None
        self._returned = now

    @property
    def per_second(self) -> float | None:
        """Steps, or samples, per second; None while unknown."""
        if not self._seconds_per_unit:
            return None
        seconds = statistics.median(self._seconds_per_unit)
        # Rounded to three digits, because an unchanged record need not be published again.
        return float(f"{1 / seconds:.3g}") if 1 / MAX_RATE <= seconds <= 1 / MIN_RATE else None


def check_rate(value: object) -> float | None:
    """Returns a rate announced by another peer; None if it is implausible."""
    return float(value) if is_number(value) and MIN_RATE <= value <= MAX_RATE else None


def rate_in(progress: bytes) -> float | None:
    """Returns the rate in a progress record; None if it has none or is unreadable."""
    try:
        items = unpack(progress, MAX_ITEMS)
    except ValueError:
        return None
    return check_rate(items[INDEX]) if isinstance(items, list) and len(items) > INDEX else None
