"""When a peer's next round is due: after so many local steps, or at moments of the run's clock.

Pure: the caller passes the time.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque

from averaging.common import parse_duration
from averaging.errors import ConfigError

SMOOTHING = 0.2
"""Weight of the newest step in the running mean of the seconds per step."""

RECENT = 5
"""Steps whose median duration counts as that of the next one; a step that compiles or evaluates does not move it."""

MAX_IDLE = 1 / 8
"""Share of the time since its last round that a peer waits for a moment at most; otherwise it comes to a later one."""

LATE_SECONDS = 1.0
"""Seconds after a moment in which a peer still comes to it, although it sees nobody who looks for a group."""

LEAST_INTERVAL, MAX_INTERVAL = 0.1, 7 * 86400.0
"""Limits of `sync_every` in seconds."""


class Schedule(ABC):
    """Decides when a peer's next round is due."""

    steps = 0
    interval = 0.0
    length = 0

    @property
    def moment(self) -> float:
        return 0.0

    @abstractmethod
    def count(self, now: float) -> None:
        """Counts one step, which ended at `now`."""

    @abstractmethod
    def is_due(self, now: float, declared_until: float | None) -> bool:
        """Whether this peer averages now."""

    @abstractmethod
    def restart(self) -> None:
        """Starts counting anew, because a round begins; its duration does not count as a step's."""

    def resume(self, now: float) -> None:
        return

    def skip(self) -> None:
        return

    def comes(self, now: float) -> float:
        return 0.0


class AveragingSchedule(Schedule):
    """Counts the local steps between two rounds of a peer.

    A round is due after `sync_every` steps. It is due earlier if other peers look for a group and would stop looking
    before this peer has made all its steps. So a slower peer, or one that joined in between, aligns with the others.

    Args:
        sync_every: steps between two rounds, at least 1.

    Raises:
        ConfigError: `sync_every` is not an integer of at least 1.
    """

    def __init__(self, sync_every: int) -> None:
        self.sync_every = self.length = check_whole_number("sync_every", sync_every, 1)
        self._seconds = 0.0  # running mean per step
        self._last: float | None = None

    def count(self, now: float) -> None:
        self.steps += 1
        if self._last is not None:
            seconds = now - self._last
            self._seconds = seconds if self._seconds == 0 else self._seconds + SMOOTHING * (seconds - self._seconds)
        self._last = now

    def is_due(self, now: float, declared_until: float | None) -> bool:
        if self.steps >= self.sync_every:
            return True
        if self.steps == 0 or self._seconds <= 0 or declared_until is None:
            return False
        return now < declared_until < now + (self.sync_every - self.steps + 1) * self._seconds

    def restart(self) -> None:
        self.steps = 0
        self._last = None


class ClockSchedule(Schedule):
    """Rounds at the multiples of an interval since the epoch, by the run's clock, with the steps made so far.

    A peer whose next step would end after the moment comes before it and waits, since the others wait for one that
    comes late. If that wait is longer than `MAX_IDLE` of the time for which it has trained, as with steps longer than
    the interval, it trains on and comes to a later moment instead. It tells the others which (`comes`), and they do
    not wait for it before. A peer that has made no step yet comes to no moment.

    Whoever looks for a group shows that by its clock the moment has come. So peers whose clocks differ by less than
    half an interval meet when the first of them looks, and each moment is served once.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._next: int | None = None  # number of the moment that the next round serves
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._resumed: float | None = None  # when the last step began
        self._began: float | None = None  # the first step since the last round

    @property
    def moment(self) -> float:
        return 0.0 if self._next is None else self._next * self.interval

    def count(self, now: float) -> None:
        self.steps += 1
        if self._resumed is not None and now > self._resumed:
            self._durations.append(now - self._resumed)
        if self._began is None:
            self._began = now if self._resumed is None else min(now, self._resumed)
        if self._next is None:
            self._next = self._at_or_after(now)
        self._resumed = now

    def is_due(self, now: float, declared_until: float | None) -> bool:
        """Whether this peer averages now, or at `moment` if that is later; `now` is of the run's clock."""
        if self.steps == 0 or self._next is None:
            return False
        early = self.moment - now
        if early > 2 * self.interval:  # the clock was set back; a peer that came early has up to 1.5 intervals left
            self._next, early = self._at_or_after(now), self._at_or_after(now) * self.interval - now
        if declared_until is not None and declared_until > now and abs(early) <= self.interval / 2:
            return True
        if early < -min(LATE_SECONDS, self.interval / 4):
            self._next = self._at_or_after(now)  # nobody is there any more
            early = self.moment - now
        return early <= 0 or (self._step_seconds > early and self.comes(now) == self.moment)

    def restart(self) -> None:
        self.steps, self._began = 0, None
        self.skip()

    def skip(self) -> None:
        if self._next is not None:
            self._next += 1

    def resume(self, now: float) -> None:
        self._resumed = now

    def comes(self, now: float) -> float:
        if self._next is None:
            return 0.0
        seconds, number = self._step_seconds, self._next
        if seconds <= 0:
            return self.moment
        worked = 0.0 if self._began is None else max(0.0, now - self._began)
        if not self.steps:
            number = max(number, self._at_or_after(now + seconds))
        while True:
            left = number * self.interval - now
            before = max(0, math.floor(left / seconds)) * seconds  # time of whole steps until that moment
            if left - before <= MAX_IDLE * (worked + before):
                return number * self.interval
            number = max(number + 1, self._at_or_after(now + before + seconds))

    @property
    def _step_seconds(self) -> float:
        return statistics.median(self._durations) if self._durations else 0.0

    def _at_or_after(self, now: float) -> int:
        return math.ceil(now / self.interval - 1e-9)


def make_schedule(sync_every: int | str, fragments: int = 1) -> Schedule:
    """The schedule of a strategy's rounds, of which each fragment's takes place once in `sync_every`.

    Raises:
        ConfigError: `sync_every` is neither a number of steps, at least 1 and a multiple of `fragments`, nor a time.
    """
    if type(sync_every) is int and sync_every >= 1:
        if sync_every % fragments:
            raise ConfigError(
                f"sync_every must be a multiple of fragments; {sync_every} steps cannot be divided into {fragments!r}"
            )
        return AveragingSchedule(sync_every // fragments)
    if isinstance(sync_every, str):
        try:
            seconds = parse_duration(sync_every)
        except ConfigError as error:
            raise ConfigError(f"sync_every: {error}; a number of local steps is written without quotes") from None
        if not LEAST_INTERVAL <= seconds / fragments <= MAX_INTERVAL:
            of_fragments = f" for each of {fragments} fragments" if fragments > 1 else ""
            raise ConfigError(
                f"sync_every must be {LEAST_INTERVAL:g} s to {MAX_INTERVAL / 86400:g} days{of_fragments}, not "
                f"{sync_every!r}"
            )
        return ClockSchedule(seconds / fragments)
    raise ConfigError(
        f"sync_every must be a whole number of local steps, at least 1, or a time such as '120s', not {sync_every!r}"
    )


def spelled_seconds(seconds: float) -> str:
    return f"{seconds:.10g}s"


def check_whole_number(name: str, value: int, minimum: int) -> int:
    """Returns `value`.

    Raises:
        ConfigError: it is not an integer of at least `minimum`.
    """
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name} must be a whole number of steps, at least {minimum}, not {value!r}")
    return value
