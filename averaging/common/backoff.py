"""Exponential backoff. Pure: the source of randomness is passed in, and the caller sleeps."""

from __future__ import annotations

import random

_MAX_DOUBLINGS = 64


def backoff_delay(first: float, longest: float, failures: int) -> float:
    """Returns the delay after that many earlier failures: `first`, doubled with each failure, at most `longest`."""
    return min(longest, first * 2.0 ** min(failures, _MAX_DOUBLINGS))


class Backoff:
    """Delays that double until `reset`.

    Args:
        first: the first delay in seconds.
        longest: upper bound of the delay in seconds, before jitter.
        rng: source of the jitter; without it the delays have none.
        jitter: lowest and highest random factor of a delay.
    """

    def __init__(
        self, first: float, longest: float, rng: random.Random | None = None, jitter: tuple[float, float] = (0.5, 1.5)
    ) -> None:
        self._first, self._longest, self._rng, self._jitter = first, longest, rng, jitter
        self._failures = 0

    def next_delay(self) -> float:
        """Returns the seconds to wait before the next try."""
        delay = backoff_delay(self._first, self._longest, self._failures)
        self._failures += 1
        return delay if self._rng is None else delay * self._rng.uniform(*self._jitter)

    def reset(self) -> None:
        """Makes the next delay the first one again, after a success."""
        self._failures = 0
