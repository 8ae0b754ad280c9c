"""A quota per host, so that one host cannot take all. Pure."""

from __future__ import annotations

import math
from collections import Counter


class HostQuota:
    """Counts what callers have taken, in total and by host.

    Args:
        in_all: maximum of all hosts together.
        per_host: maximum of one host.
    """

    def __init__(self, in_all: float, per_host: float) -> None:
        self._in_all, self._per_host = in_all, per_host
        self._taken: Counter[str] = Counter()

    def taken_by(self, host: str) -> int:
        """Returns what `host` has taken."""
        return self._taken[host]

    def has_room(self, host: str, amount: int = 1) -> bool:
        """Whether `host` may take that much now."""
        if self._taken[host] + amount > self._per_host:
            return False
        return self._in_all == math.inf or self._taken.total() + amount <= self._in_all

    def take(self, host: str, amount: int = 1) -> bool:
        """Takes an amount; returns whether there was room for it."""
        if not self.has_room(host, amount):
            return False
        self._taken[host] += amount
        return True

    def leave(self, host: str, amount: int = 1) -> None:
        """Returns an amount."""
        self._taken[host] -= amount
        if not self._taken[host]:
            del self._taken[host]
