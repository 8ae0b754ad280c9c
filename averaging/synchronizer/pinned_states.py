"""Bounds how many states are kept in memory because somebody reads them slowly. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_STATES = 4
"""States that are read at the same time, including the newest one."""


@dataclass(eq=False, slots=True)
class Pinned:
    """A state that is being read.

    Attributes:
        dropped: Whether its readers have to end.
    """

    readers: int = 0
    dropped: bool = False


class PinnedStates:
    """The states that are being read, the oldest first."""

    def __init__(self) -> None:
        self._states: dict[int, Pinned] = {}

    @contextmanager
    def reading(self, state: object) -> Iterator[Pinned]:
        """A context for one reader of a state. The oldest state is dropped if there are too many."""
        key = id(state)  # unique as long as the reader holds the state
        pinned = self._states.setdefault(key, Pinned())
        pinned.readers += 1
        if len(self._states) > MAX_STATES:
            oldest = next(iter(self._states))
            self._states.pop(oldest).dropped = True
        try:
            yield pinned
        finally:
            pinned.readers -= 1
            if not pinned.readers and self._states.get(key) is pinned:
                del self._states[key]
