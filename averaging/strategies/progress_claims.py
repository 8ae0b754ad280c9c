"""Which claims to be ahead deserve an attempt to download the state behind them. Pure: the caller brings the time."""

from __future__ import annotations

from collections.abc import Collection

FIRST_PAUSE, LAST_PAUSE = 0.25, 8.0
"""Seconds after the first failed download until the same peers are asked again, doubled after each further failure;
and the most, unless the download itself took longer."""


class ProgressClaims:
    """Remembers whose claims failed: a peer that could not deliver what it claims holds nobody up.

    A peer that was not asked before is asked at once. One that failed is doubted until its pause is over, and then
    asked again.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._failures = 0
        self._next = 0.0

    def doubted(self, now: float) -> Collection[str]:
        """Those whose claims are passed over at `now`, in seconds of a clock that is not set back."""
        return frozenset(self._failed) if now < self._next else frozenset()

    def may_wait(self, now: float) -> bool:
        """Whether training may be held up by the next attempt: not as long as the last failure is recent."""
        return now >= self._next

    def failed(self, donors: Collection[str], now: float, seconds: float) -> None:
        """None of these could deliver, which took so many seconds."""
        if now - seconds < self._next:  # the attempt began when others were doubted already
            self._next = max(self._next, now + seconds)
        else:
            self._failed.clear()
            self._next = now + max(min(FIRST_PAUSE * 2 ** min(self._failures, 16), LAST_PAUSE), seconds)
            self._failures += 1
        self._failed.update(donors)

    def succeeded(self) -> None:
        """What failed before is forgotten."""
        self._failed, self._failures, self._next = set(), 0, 0.0
