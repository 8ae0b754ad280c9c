"""Rounds that wait for nobody who is late: quorum, grace period, and the weight of late contributions. Pure.

A round begins once the quorum is there and the grace period has passed. Whoever comes later takes part in the next one,
with a weight that falls with the age of its contribution.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

from averaging.common import is_finite, parse_duration
from averaging.errors import ConfigError
from averaging.receipts import Receipt

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


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """The options of a strategy that waits for nobody who is late, checked."""

    quorum: int | float  # number of peers, this one included, or share of the peers that are training
    grace: float = DEFAULT_GRACE  # upper bound of the grace period in seconds
    discount: float = DEFAULT_DISCOUNT  # factor of the weight for each global step of age

    def count(self, training: int) -> int:
        """Members without which no round begins, of so many peers that are training: at least 2."""
        if isinstance(self.quorum, int):
            return self.quorum
        return max(2, math.ceil(self.quorum * training - 1e-9))

    def weight_factor(self, age: int) -> float:
        return max(LEAST_DISCOUNT, self.discount**age)

    def __str__(self) -> str:
        text = f", quorum={self.quorum}"
        text += f", grace={self.grace:g}s" if self.grace != DEFAULT_GRACE else ""
        return text + (f", staleness_discount={self.discount:g}" if self.discount != DEFAULT_DISCOUNT else "")


def quorum_options(
    quorum: int | float | None, grace: float | str | None, staleness_discount: float | None
) -> QuorumOptions | None:
    """The options as a strategy gets them; None without `quorum`.

    Raises:
        ConfigError: one of them is invalid, or given without `quorum`.
    """
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


class Cadence:
    """When the last rounds began, and so for how long the next one waits for further members than the quorum."""

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._began: deque[float] = deque(maxlen=RECENT_ROUNDS)

    @property
    def grace(self) -> float:
        interval = self.interval
        return min(self._bound, FIRST_GRACE if interval == math.inf else max(LEAST_GRACE, MAX_SHARE * interval))

    @property
    def interval(self) -> float:
        """The median of the seconds between the beginnings of the last rounds; infinite if there were less than two."""
        intervals = [after - before for before, after in pairwise(self._began) if after > before]
        return statistics.median(intervals) if intervals else math.inf

    def note(self, receipt: Receipt) -> None:
        """Takes the receipt of a round that averaged."""
        self._began.append(receipt.started)


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
        return Attendance(timeliness, self.owed, self.repeats and not averaged)

    def after_failure(self) -> Attendance:
        return replace(self, owed=self.owed or not self.repeats, repeats=not self.repeats)


PATIENCE = 2
"""Expected rounds without a step of the run after which a peer says why it makes none."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """For how long a peer has made no step of its run."""

    position: int | None = None  # number of the run's steps, or of its rounds, when it has made the last one
    local_step: int = 0  # its local steps then
    since: float = 0.0  # when that was
    reason: str = ""  # why none has come since
    told: bool = False  # whether it has said so

    def is_long(self, local_step: int, now: float, steps: int, seconds: float) -> bool:
        return local_step - self.local_step > PATIENCE * max(1, steps) and now - self.since > PATIENCE * seconds
