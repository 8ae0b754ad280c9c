"""When it is a peer's turn to average. Pure: the caller brings the time."""

from __future__ import annotations

from averaging.errors import ConfigError

SMOOTHING = 0.2
"""Weight of the newest step in the running mean of the seconds a step takes."""


class AveragingSchedule:
    """Counts the steps between two turns of a peer.

    A turn comes every so many steps. It comes earlier if others wait for this peer who would be gone before it has made
    them all: so a slower peer, or one that joined in between, falls into step with the rest.

    Args:
        every: steps between two turns, at least 1.

    Raises:
        ConfigError: `every` is not a whole number above 0.
    """

    def __init__(self, every: int) -> None:
        self.every = whole("every", every, 1)
        self.steps = 0
        self._seconds = 0.0  # that a step takes, about
        self._last: float | None = None

    def count(self, now: float) -> None:
        """A step has been made."""
        self.steps += 1
        if self._last is not None:
            taken = now - self._last
            self._seconds = taken if self._seconds == 0 else self._seconds + SMOOTHING * (taken - self._seconds)
        self._last = now

    def is_due(self, now: float, awaited_until: float | None) -> bool:
        """Whether it is this peer's turn.

        Args:
            now: seconds since the epoch.
            awaited_until: when the last of those who wait for a group now will be gone; None if nobody waits.
        """
        if self.steps >= self.every:
            return True
        there = now + (self.every - self.steps + 1) * self._seconds
        return self.steps > 0 and self._seconds > 0 and awaited_until is not None and now < awaited_until < there

    def taken(self) -> None:
        """The turn has been taken; what it took does not count as a step's time."""
        self.steps = 0
        self._last = None


def whole(name: str, value: int, least: int) -> int:
    """Returns a whole number that is at least so much.

    Raises:
        ConfigError: it is not.
    """
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} must be a whole number of steps, at least {least}, not {value!r}")
    return value
