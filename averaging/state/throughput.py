"""Whether a donor delivers fast enough: who drips a byte now and then must not hold a newcomer for ever. Pure.

In each window, from its first message on, a donor has to deliver what is expected of it in that time, or all that is
left. So no download lasts longer than `Throughput.limit`, which follows from the size of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from averaging.deadlines.donor_rates import SLOW_LINK

SHARE = 8
"""A donor has to be so many times slower than expected to be left for another one, and each further time that it is
asked so many times slower still."""

LEAST = 16 << 10
"""Bytes/s that are expected of any donor, 128 kbit/s: a GiB takes 18 hours at that.

That is two messages of 256 KiB in a `part_timeout` of 30 s; a donor with half of it would be silent for that long. Nor
does a donor go on with a reader that takes less, if others wait."""

PER_TENSOR = 1 << 10
"""A tensor counts as so many bytes more than it has: messages with few or none take their time, too."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What is expected of a donor.

    Attributes:
        bytes_per_second: so much.
        basis: in words, such as `1/8 of the 10 Mbit/s presumed of slow links`.
    """

    bytes_per_second: float
    basis: str

    @property
    def is_least(self) -> bool:
        """Whether no donor is ever asked for less."""
        return self.bytes_per_second <= LEAST


LEAST_RATE = Rate(LEAST, f"{LEAST >> 10} KiB/s, the least of any donor and reader")


def expected_rate(best: float | None, times_slow: int, *, alone: bool = False) -> Rate:
    """What is expected of a donor in this attempt of a download.

    Args:
        best: bytes/s at which any donor has delivered lately; None if nothing is known.
        times_slow: how often it was too slow before.
        alone: whether there is no other donor for which it could be left.
    """
    share = SHARE ** (1 + times_slow)
    rate = (SLOW_LINK if best is None else best) / share
    if alone or rate < 2 * LEAST:  # to ask once more for little less would gain little
        return LEAST_RATE
    of = "10 Mbit/s presumed of slow links" if best is None else f"{best / 1e6:.1f} MB/s of the best donor"
    return Rate(rate, f"1/{share} of the {of}")


class Throughput:
    """Watches the bytes of one donor, from its first message on.

    Args:
        rate: what is expected.
        window: seconds.
        left: bytes still to come, as `StateReader.left` counts them.
        now: seconds by any clock that counts fairly.

    Attributes:
        delivered: bytes since then.
    """

    def __init__(self, rate: Rate, window: float, left: int, now: float) -> None:
        self._rate, self._window = rate, window
        self._first = self._start = now
        self._at_start = self._left = left
        self.delivered = 0

    @property
    def limit(self) -> float:
        """Seconds from the first message until all is there, if the donor is not given up before that."""
        return (self.delivered + self._left) / self._rate.bytes_per_second + self._window

    def heard(self, left: int, now: float) -> None:
        """A message came; so much is left now."""
        self._next_window(now)
        self.delivered += self._left - left
        self._left = left
        self._next_window(now)

    def time_left(self, now: float) -> float:
        """Seconds until the donor is too slow unless it delivers more; infinity if it has done enough for now."""
        return math.inf if self._missing <= 0 else max(0.0, self._start + self._window - now)

    def seconds(self, now: float) -> float:
        """Since the first message."""
        return now - self._first

    def __str__(self) -> str:
        whole = self._at_start < self._rate.bytes_per_second * self._window
        return (
            f"delivered {self._at_start - self._left} bytes in {self._window:g} s, at least {self._wanted} are expected"
            f"{', all that was left' if whole else ''}: {self._rate.basis}"
        )

    @property
    def _wanted(self) -> int:
        """Bytes in this window."""
        return min(math.ceil(self._rate.bytes_per_second * self._window), self._at_start)

    @property
    def _missing(self) -> int:
        """Bytes in this window."""
        return self._wanted - (self._at_start - self._left)

    def _next_window(self, now: float) -> None:
        """What comes late, but before anybody was given up for it, is in time."""
        if self._missing <= 0 and now >= self._start + self._window:
            self._start += self._window
            self._at_start = self._left
