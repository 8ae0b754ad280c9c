"""How often to try again, and how much a host may take. Pure: the caller sleeps, and passes the random source."""

from __future__ import annotations

import math
import random
from collections import Counter

_MAX_DOUBLINGS = 64


def backoff_delay(first: float, longest: float, failures: int) -> float:
    """Returns the delay after that many earlier failures: `first`, doubled with each failure, at most `longest`."""
    return min(longest, first * 2.0 ** min(failures, _MAX_DOUBLINGS))


class Backoff:
    """Delays of `first` seconds that double until `reset`, up to `longest`, times a random factor within `jitter`."""

    def __init__(
        self, first: float, longest: float, rng: random.Random | None = None, jitter: tuple[float, float] = (0.5, 1.5)
    ) -> None:
        self._first, self._longest, self._rng, self._jitter = first, longest, rng, jitter
        self._failures = 0

    def next_delay(self) -> float:
        delay = backoff_delay(self._first, self._longest, self._failures)
        self._failures += 1
        return delay if self._rng is None else delay * self._rng.uniform(*self._jitter)

    def reset(self) -> None:
        self._failures = 0


# Quotas per host, so that one host cannot take all.


class HostQuota:
    """Counts what callers have taken, in total and by host."""

    def __init__(self, in_all: float, per_host: float) -> None:
        self._in_all, self._per_host = in_all, per_host
        self._taken: Counter[str] = Counter()

    def taken_by(self, host: str) -> int:
        return self._taken[host]

    @property
    def total(self) -> int:
        return self._taken.total()

    def take(self, host: str, amount: int = 1) -> bool:
        """Takes an amount; returns whether there was room for it."""
        if self._taken[host] + amount > self._per_host:
            return False
        if self._in_all < math.inf and self._taken.total() + amount > self._in_all:
            return False
        self._taken[host] += amount
        return True

    def leave(self, host: str, amount: int = 1) -> None:
        self._taken[host] -= amount
        if not self._taken[host]:
            del self._taken[host]
