"""When a peer's next round is due, after so many local steps or at moments of the run's clock, and for whom it waits.

With a quorum a round begins once the quorum is there and the grace period has passed. Whoever comes later takes part in
the next one, with a weight that falls with the age of its contribution. Pure: the caller passes the time.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

from averaging.common import counted, is_finite, parse_duration
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

    def __str__(self) -> str:
        return spelled_seconds(self.interval) if self.interval else counted(self.length, "step")

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
    """The schedule of a strategy's rounds, of which each fragment's takes place once in `sync_every`."""
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
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name} must be a whole number of steps, at least {minimum}, not {value!r}")
    return value


DEFAULT_GRACE, DEFAULT_DISCOUNT = 10.0, 0.95
"""Upper bound of the grace period in seconds, and factor of the weight for each step of age, unless they are given."""

LEAST_DISCOUNT = 0.1
"""Least factor of the weight, however late a contribution is. So a peer that always comes late still counts."""

LEAST_GRACE, MAX_GRACE = 0.25, 600.0
"""Limits in seconds. Within the least one the declarations of peers that come at the same time reach each other."""

RECENT_ROUNDS = 16
"""Rounds from whose beginnings the usual time between two is taken."""

MAX_SHARE = 1 / 50
"""Share of the time between two rounds for which those that are there wait. So a peer that is late by a whole round
holds nobody up, even if the user's bound would allow it."""

FIRST_GRACE = 1.0
"""Seconds for which a peer waits in its first rounds, since the time between two is not known then."""


@dataclass(slots=True)
class QuorumOptions:
    """The checked options of a strategy that waits for nobody who is late, and when its last rounds began."""

    quorum: int | float  # number of peers, this one included, or share of the peers that are training
    bound: float = DEFAULT_GRACE  # upper bound of the grace period in seconds
    discount: float = DEFAULT_DISCOUNT  # factor of the weight for each global step of age
    began: tuple[float, ...] = ()  # when the last rounds began; replaced as a whole, since the peer's thread reads it
    too_few: int = 0  # number of peers of which a warning said that they are less than the quorum

    def check(self, group_size: int, shards: int) -> None:
        """Raises ConfigError if no round with the quorum is possible."""
        if isinstance(self.quorum, int) and self.quorum > group_size:
            raise ConfigError(
                f"quorum={self.quorum} is more than group_size={group_size}, so no round could ever begin; set "
                f"group_size to at least {self.quorum} at all peers, or a smaller quorum"
            )
        if shards > 1:
            raise ConfigError(
                "quorum does not work with a model that is divided between the processes of a site, since the rounds "
                "of its shards could begin with different peers; leave quorum out"
            )

    def count(self, training: int) -> int:
        """Members without which no round begins, of so many peers that are training: at least 2."""
        if isinstance(self.quorum, int):
            return self.quorum
        return max(2, math.ceil(self.quorum * training - 1e-9))

    def weight_factor(self, age: int) -> float:
        return max(LEAST_DISCOUNT, self.discount**age)

    def note(self, began: float) -> None:
        """Notes when a round began that has averaged."""
        self.began = (*self.began, began)[-RECENT_ROUNDS:]

    @property
    def interval(self) -> float:
        """The median of the seconds between the beginnings of the last rounds; infinite if there were less than two."""
        intervals = [after - before for before, after in pairwise(self.began) if after > before]
        return statistics.median(intervals) if intervals else math.inf

    @property
    def grace(self) -> float:
        """Seconds for which the next round waits for further members than the quorum."""
        interval = self.interval
        return min(self.bound, FIRST_GRACE if interval == math.inf else max(LEAST_GRACE, MAX_SHARE * interval))

    def patience(self, ended: int, training: int, group_size: int) -> float:
        """Seconds for which a peer that has ended its training waits for those that have not.

        Infinite as long as fewer peers than the quorum have ended theirs. Otherwise it is a usual time between two
        rounds, and the longest for which a round waits for those that are late.
        """
        if ended < min(self.count(ended + training), group_size):
            return math.inf
        return self.interval + self.bound

    def __str__(self) -> str:
        text = f", quorum={self.quorum}"
        text += f", grace={self.bound:g}s" if self.bound != DEFAULT_GRACE else ""
        return text + (f", staleness_discount={self.discount:g}" if self.discount != DEFAULT_DISCOUNT else "")


def quorum_options(
    quorum: int | float | None, grace: float | str | None, staleness_discount: float | None
) -> QuorumOptions | None:
    if quorum is None:
        for name, value in (("grace", grace), ("staleness_discount", staleness_discount)):
            if value is not None:
                raise ConfigError(f"{name} is an option of rounds with a quorum; set quorum too, or leave {name} out")
        return None
    is_share = isinstance(quorum, float) and 0 < quorum <= 1
    if isinstance(quorum, bool) or not (is_share or (isinstance(quorum, int) and quorum >= 2)):
        raise ConfigError(
            "quorum must be a whole number of peers, at least 2 with this one, or a share of the peers that are "
            f"training, such as 0.5, not {quorum!r}"
        )
    seconds = DEFAULT_GRACE if grace is None else _seconds(grace)
    discount = DEFAULT_DISCOUNT if staleness_discount is None else staleness_discount
    if not is_finite(discount) or not 0 < discount <= 1:
        raise ConfigError(f"staleness_discount must be above 0 and at most 1, not {staleness_discount!r}")
    return QuorumOptions(quorum, seconds, float(discount))


def _seconds(grace: float | str) -> float:
    try:
        seconds = parse_duration(grace) if isinstance(grace, str) else grace
    except ConfigError as error:
        raise ConfigError(f"grace: {error}") from None
    if not is_finite(seconds) or not LEAST_GRACE <= seconds <= MAX_GRACE:
        raise ConfigError(
            f"grace, the longest time for which a round waits for peers that are late, must be from {LEAST_GRACE:g} s "
            f"to {MAX_GRACE:g} s, such as '10s', not {grace!r}"
        )
    return float(seconds)


# With a quorum nobody waits for a peer that has missed a round, nor does that peer wait.


class Timeliness(Enum):
    """How a peer keeps up with the rounds of the others."""

    IN_TIME = auto()
    """It takes part in their next round with the state of all."""
    LATE = auto()
    """They have begun a round without it. It downloads their state in the background. Where changes are averaged, it
    also sends its own to their next round, whose result it can apply only once it has taken over their state."""
    REBASED = auto()
    """It has taken over the newest state, with the local steps that no average includes on top. It takes over no other
    state before these are averaged, so a peer that is always late costs one download for each contribution."""


class RoundEvent(Enum):
    """What changes the timeliness of a peer."""

    MISSED = auto()  # the others are ahead, or have begun a round without it
    LEVEL = auto()  # they are not: if they had begun a round, it has failed
    REBASED = auto()  # it has taken over a state, or has tried to, with local steps on top that no average includes
    TOOK_OVER = auto()  # it has taken over a state, and averages include all of its local steps
    INCLUDED = auto()  # a round has averaged its change, but it does not hold the state that this changes
    AVERAGED = auto()  # it holds the result of a round, or has made a step alone
    UNMET = auto()  # nobody leads a round for the state that it has taken over, so it leads the next one if need be


TRANSITIONS: Mapping[RoundEvent, Mapping[Timeliness, Timeliness]] = {
    RoundEvent.MISSED: {Timeliness.IN_TIME: Timeliness.LATE},
    RoundEvent.LEVEL: {Timeliness.LATE: Timeliness.IN_TIME},
    RoundEvent.REBASED: {Timeliness.IN_TIME: Timeliness.REBASED, Timeliness.LATE: Timeliness.REBASED},
    RoundEvent.TOOK_OVER: {Timeliness.LATE: Timeliness.IN_TIME, Timeliness.REBASED: Timeliness.IN_TIME},
    RoundEvent.INCLUDED: {Timeliness.REBASED: Timeliness.LATE},
    RoundEvent.AVERAGED: {Timeliness.LATE: Timeliness.IN_TIME, Timeliness.REBASED: Timeliness.IN_TIME},
    RoundEvent.UNMET: {Timeliness.REBASED: Timeliness.IN_TIME},
}
"""The timeliness after an event, by that before; what is not listed stays the same."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """A peer's part in the rounds of the others."""

    timeliness: Timeliness = Timeliness.IN_TIME
    owed: bool = False  # whether it takes part in the next round although none of its own is due
    repeats: bool = False  # whether its last round has failed and is repeated

    def after(self, event: RoundEvent) -> Attendance:
        averaged = event in (RoundEvent.AVERAGED, RoundEvent.INCLUDED)
        timeliness = TRANSITIONS[event].get(self.timeliness, self.timeliness)
        repeats = self.repeats and not averaged
        if timeliness is self.timeliness and repeats == self.repeats:
            return self  # as after most steps
        return Attendance(timeliness, self.owed, repeats)

    def after_failure(self) -> Attendance:
        return replace(self, owed=self.owed or not self.repeats, repeats=not self.repeats)


PATIENCE = 2
"""Expected rounds without a step of the run after which a peer says why it makes none."""


@dataclass(slots=True)
class Standstill:
    """For how long a peer has made no step of its run."""

    position: int | None = None  # number of the run's steps, or of its rounds, when it has made the last one
    local_step: int = 0  # its local steps then
    since: float = 0.0  # when that was
    reason: str = ""  # why none has come since
    told: bool = False  # whether it has said so

    def is_long(self, local_step: int, now: float, steps: int, seconds: float) -> bool:
        return local_step - self.local_step > PATIENCE * max(1, steps) and now - self.since > PATIENCE * seconds
