"""When a download that failed is tried again. Pure: the caller brings the time."""

from __future__ import annotations

from collections.abc import Collection

FIRST_PAUSE, LAST_PAUSE = 0.25, 8.0
"""Seconds to wait after the first failure, doubled with each further one; and the most."""


class Retries:
    """Puts a pause between two attempts with the same donors; a donor that was not asked before is asked at once."""

    def __init__(self) -> None:
        self._asked: frozenset[str] = frozenset()
        self._failures = 0
        self._next = 0.0

    def is_due(self, donors: Collection[str], now: float) -> bool:
        """Whether to ask these donors at `now`, in seconds of a clock that is not set back."""
        return not self._failures or now >= self._next or not self._asked.issuperset(donors)

    def failed(self, donors: Collection[str], now: float) -> None:
        """None of them could deliver."""
        self._next = now + min(FIRST_PAUSE * 2 ** min(self._failures, 16), LAST_PAUSE)
        self._asked |= frozenset(donors)
        self._failures += 1

    def succeeded(self) -> None:
        """What failed before is forgotten."""
        self._asked, self._failures = frozenset(), 0
