"""Decides whether a donor delivers fast enough, so that a trickling donor cannot hold up a newcomer. Pure.

In each window from its first message on, a donor must deliver the bytes expected in that time, or all that are left.
So no download takes longer than `Throughput.limit`, which follows from the size of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from averaging.deadlines.donor_rates import SLOW_LINK

SLOW_FACTOR = 8
"""A donor is replaced if it is this many times slower than the best known donor. The factor is applied again each time
it is asked again."""

MIN_BYTES_PER_SECOND = 16 << 10
"""Bytes/s that every donor must deliver: 128 kbit/s, at which a GiB takes 18 hours. A donor also stops sending to a
reader that is slower if other readers wait.

It is two messages of 256 KiB in a `stall_timeout` of 30 s. Half of it would be silence for that long."""

PER_TENSOR = 1 << 10
"""Bytes added to the size of each tensor, because messages with few or no bytes also take time."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate expected of a donor.

    Attributes:
        bytes_per_second: lower limit.
        basis: where it comes from, such as `1/8 of the 10 Mbit/s assumed for slow links`.
    """

    bytes_per_second: float
    basis: str

    @property
    def is_minimum(self) -> bool:
        """Whether the rate cannot be lowered further."""
        return self.bytes_per_second <= MIN_BYTES_PER_SECOND


MIN_RATE = Rate(MIN_BYTES_PER_SECOND, f"{MIN_BYTES_PER_SECOND >> 10} KiB/s, the minimum for every donor and reader")


def expected_rate(best: float | None, times_slow: int, *, alone: bool = False) -> Rate:
    """Returns the rate expected of a donor.

    Args:
        best: best recent rate of any donor in bytes/s; None if unknown.
        times_slow: how often this donor was too slow before.
        alone: whether no other donor is left to try.
    """
    factor = SLOW_FACTOR ** (1 + times_slow)
    rate = (SLOW_LINK if best is None else best) / factor
    if alone or rate < 2 * MIN_BYTES_PER_SECOND:  # a try between the two would gain little
        return MIN_RATE
    reference = "10 Mbit/s assumed for slow links" if best is None else f"{best / 1e6:.1f} MB/s of the best donor"
    return Rate(rate, f"1/{factor} of the {reference}")


class Throughput:
    """Measures the throughput of one donor from its first message on.

    Args:
        rate: expected rate.
        window: seconds.
        left: `StateAssembler.left` at the first message.
        now: fair seconds, see `deadlines.fair_clock`.

    Attributes:
        delivered: bytes since the first message.
    """

    def __init__(self, rate: Rate, window: float, left: int, now: float) -> None:
        self._rate, self._window = rate, window
        self._first = self._start = now
        self._at_start = self._left = left
        self.delivered = 0

    @property
    def limit(self) -> float:
        """Maximum seconds of the whole download, from the first message on."""
        return (self.delivered + self._left) / self._rate.bytes_per_second + self._window

    def update(self, left: int, now: float) -> None:
        """Counts a message; `left` is the present `StateAssembler.left`."""
        self._next_window(now)
        self.delivered += self._left - left
        self._left = left
        self._next_window(now)

    def time_left(self, now: float) -> float:
        """Seconds until the donor is too slow unless it delivers more; infinity if this window is complete."""
        return math.inf if self._missing <= 0 else max(0.0, self._start + self._window - now)

    def seconds(self, now: float) -> float:
        """Seconds since the first message."""
        return now - self._first

    def __str__(self) -> str:
        whole = self._at_start < self._rate.bytes_per_second * self._window
        return (
            f"delivered {self._at_start - self._left} bytes in {self._window:g} s, expected at least {self._expected}"
            f"{', all that was left' if whole else ''}: {self._rate.basis}"
        )

    @property
    def _expected(self) -> int:
        """Bytes in this window."""
        return min(math.ceil(self._rate.bytes_per_second * self._window), self._at_start)

    @property
    def _missing(self) -> int:
        """Bytes in this window."""
        return self._expected - (self._at_start - self._left)

    def _next_window(self, now: float) -> None:
        """Begins the next window. Bytes that come late, but before the donor was given up, count for the old one."""
        if self._missing <= 0 and now >= self._start + self._window:
            self._start += self._window
            self._at_start = self._left
