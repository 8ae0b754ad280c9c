"""Decides which peers that claim to be ahead are asked for their state. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Collection

FIRST_PAUSE, LAST_PAUSE = 0.25, 8.0
"""Seconds for which claims are ignored after the first failed download, doubled with each further failure; and the
maximum, unless the download itself took longer."""


class ProgressClaims:
    """Remembers the peers whose claims failed, so that a false claim delays no other peer.

    A peer that was not asked before is asked at once. A peer that failed is ignored for a pause and then asked again.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._failures = 0
        self._next = 0.0

    def ignored(self, now: float) -> Collection[str]:
        """The peers whose claims are ignored at `now`, in seconds of a monotonic clock."""
        return frozenset(self._failed) if now < self._next else frozenset()

    def may_wait(self, now: float) -> bool:
        """Whether training may wait for the next download: not while the last failure is recent."""
        return now >= self._next

    def failed(self, donors: Collection[str], now: float, seconds: float) -> None:
        """Records that none of `donors` could deliver, and that finding out took `seconds`."""
        if now - seconds < self._next:  # it began while other peers were ignored already
            self._next = max(self._next, now + seconds)
        else:
            self._failed.clear()
            self._next = now + max(min(FIRST_PAUSE * 2 ** min(self._failures, 16), LAST_PAUSE), seconds)
            self._failures += 1
        self._failed.update(donors)

    def succeeded(self) -> None:
        """Forgets all failures."""
        self._failed, self._failures, self._next = set(), 0, 0.0
