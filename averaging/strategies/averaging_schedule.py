"""Decides when a peer's next round is due. Pure: the caller passes the time."""

from __future__ import annotations

from averaging.errors import ConfigError

SMOOTHING = 0.2
"""Weight of the newest step in the running mean of the seconds per step."""


class AveragingSchedule:
    """Counts the local steps between two rounds of a peer.

    A round is due every `every` steps. It is due earlier if other peers look for a group and would stop looking before
    this peer has made all its steps. So a slower peer, or one that joined in between, aligns with the others.

    Args:
        every: steps between two rounds, at least 1.

    Raises:
        ConfigError: `every` is not an integer of at least 1.
    """

    def __init__(self, every: int) -> None:
        self.every = check_whole_number("every", every, 1)
        self.steps = 0
        self._seconds = 0.0  # running mean per step
        self._last: float | None = None

    def count(self, now: float) -> None:
        """Counts one step, which ended at `now`."""
        self.steps += 1
        if self._last is not None:
            seconds = now - self._last
            self._seconds = seconds if self._seconds == 0 else self._seconds + SMOOTHING * (seconds - self._seconds)
        self._last = now

    def is_due(self, now: float, declared_until: float | None) -> bool:
        """Whether this peer averages now.

        Args:
            now: seconds since the epoch.
            declared_until: when the last of the other peers' declarations expires; None if nobody looks for a group.
        """
        if self.steps >= self.every:
            return True
        if self.steps == 0 or self._seconds <= 0 or declared_until is None:
            return False
        return now < declared_until < now + (self.every - self.steps + 1) * self._seconds

    def restart(self) -> None:
        """Starts counting anew, because a round begins; its duration does not count as a step's."""
        self.steps = 0
        self._last = None


def check_whole_number(name: str, value: int, minimum: int) -> int:
    """Returns `value`.

    Raises:
        ConfigError: it is not an integer of at least `minimum`.
    """
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name} must be a whole number of steps, at least {minimum}, not {value!r}")
    return value
