"""How fast a peer trains. Pure: the caller brings the time.

A peer announces its rate in its record of progress. Others read it there, so that receipts can tell a slow peer from
one that was late for another reason.
"""

from __future__ import annotations

import statistics
from collections import deque

from averaging.common.safe_msgpack import is_number, unpack

REMEMBERED = 16
"""The rate is that of the median of so many steps: an evaluation between two steps does not change it."""

LEAST, MOST = 1e-9, 1e9
"""Rates of others, per second, that are believed."""

PLACE = 6
"""Where the rate stands in a record of progress, see `strategies.history.Progress`."""

MAX_ITEMS = 32
"""Items that a record of progress may consist of, see `unpacking`."""


class StepRate:
    """Measures the seconds in which a peer works on its own steps. The time of rounds does not count.

    A step is what happens from the return of one `step` of the averager to that of the next. Of the time inside of
    `step`, or of another call that may wait for others, only what is passed to `worked` counts.
    """

    def __init__(self) -> None:
        self._returned: float | None = None  # from the last call, since when the script works on the next step
        self._seconds: float | None = None  # of work on this step; None if its beginning is not known
        self._units = 0.0
        self._seconds_per_unit: deque[float] = deque(maxlen=REMEMBERED)

    def begin(self, now: float) -> None:
        """The script has called `step`, or something else that may wait for others."""
        self._seconds = None if self._returned is None else now - self._returned
        self._units = 0.0

    def worked(self, seconds: float) -> None:
        """So much of the time inside of `step` was work of this peer's own."""
        if self._seconds is not None:
            self._seconds += seconds

    def count(self, units: float) -> None:
        """What this step is counted as: 1, or its samples."""
        self._units += units

    def end(self, now: float) -> None:
        """The call returns, and the script goes on with its own work."""
        if self._seconds is not None and self._units > 0:
            self._seconds_per_unit.append(max(0.0, self._seconds) / self._units)
        self._seconds = None
        self._returned = now

    @property
    def per_second(self) -> float | None:
        """Steps, or samples, per second; None as long as it is not known."""
        if not self._seconds_per_unit:
            return None
        seconds = statistics.median(self._seconds_per_unit)
        # Three digits: a record that says the same as before need not be told again.
        return float(f"{1 / seconds:.3g}") if 1 / MOST <= seconds <= 1 / LEAST else None


def check_rate(value: object) -> float | None:
    """A rate that somebody announced; None if it is not one that can be."""
    return float(value) if is_number(value) and LEAST <= value <= MOST else None


def rate_in(progress: bytes) -> float | None:
    """The rate in a record of progress; None if it has none, or is unreadable."""
    try:
        items = unpack(progress, MAX_ITEMS)
    except ValueError:
        return None
    return check_rate(items[PLACE]) if isinstance(items, list) and len(items) > PLACE else None
