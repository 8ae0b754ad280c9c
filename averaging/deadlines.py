"""How long to wait for another peer, learned from how long it took before. Pure: `now` is passed in.

As in TCP (RFC 6298) a deadline follows what was seen, leaves room for variation, and is doubled when it was missed; but
medians and median deviations take the place of the running means, so that one odd round hardly counts (Hampel, 1974).
A clock of its own keeps an observer from blaming others for the seconds in which it was stopped or busy itself.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum

FACTOR = 4.0
"""A deadline is so many times the median wait, so that a link may get three times slower from one round to the next."""

DEVIATIONS = 4.0
"""And so many median absolute deviations more."""

LATEST = 2.0
"""And at least so many times the latest wait, so that a lasting change is followed at once."""

ROUNDS = 16
"""Waits that are remembered of each kind."""

ENOUGH = 3
"""Fewer waits than that tell nothing yet."""

MAX_KNOWN = 4096
"""Kinds of waits, of all peers together, that are remembered."""

LIFETIME = 3600.0
"""Seconds after which a kind of wait of a peer that was not met again is forgotten."""


class Phase(StrEnum):
    """What is waited for."""

    OPENING = "opening"
    """A sender opens its stream."""
    PART = "part"
    """A sender sends its next part."""
    TAKING = "taking"
    """A sender takes its next reply."""
    REPLY = "reply"
    """A reducer takes the next part, or answers one."""
    ANSWER = "answer"
    """It is asked whether it lives."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long to wait, and how that came about.

    Attributes:
        seconds: without any progress.
        basis: in words, such as `4 × its median of 1.2 s`.
    """

    seconds: float
    basis: str


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of one kind of wait for one peer.

    Attributes:
        size: class of the size of the round, see `size_class`.
        waits: how many are remembered.
        median: of them, in seconds.
        deadline: in seconds, that would hold now.
        basis: of the deadline.
    """

    endpoint: str
    phase: Phase
    size: int
    waits: int
    median: float
    deadline: float
    basis: str


@dataclass(slots=True)
class _Known:
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=ROUNDS))
    missed: int = 0  # deadlines in a row
    used: float = 0.0


_Key = tuple[str, Phase, int]


class Deadlines:
    """What one peer has learned of the others, from round to round.

    Args:
        lower: no deadline is shorter, so that nobody is given up for a hiccup; seconds.
        upper: no deadline is longer, and so long is waited for whom too little is known; seconds.
    """

    def __init__(self, lower: float, upper: float) -> None:
        self.lower, self.upper = min(lower, upper), upper
        self._known: OrderedDict[_Key, _Known] = OrderedDict()  # the one not used for longest first

    def __len__(self) -> int:
        return len(self._known)

    def of(self, endpoint: str, phase: Phase, size: int, now: float) -> Deadline:
        """How long to wait."""
        self._forget(now)
        return self._deadline(self._known.get((endpoint, phase, size)))

    def saw(self, endpoint: str, phase: Phase, size: int, seconds: float, now: float) -> None:
        """In a round that it finished, the longest wait for it took so long."""
        known = self._use(endpoint, phase, size, now)
        known.waits.append(max(0.0, seconds))
        known.missed = 0

    def missed(self, endpoint: str, phase: Phase, size: int, now: float) -> None:
        """It was given up at its deadline; should that have been too short, the next one is longer."""
        self._use(endpoint, phase, size, now).missed += 1

    def learned(self, limit: int = 256) -> list[Learned]:
        """What is known well enough to be used, the latest first. For any thread."""
        result: list[Learned] = []
        for (endpoint, phase, size), known in reversed(list(self._known.items())):
            if len(waits := list(known.waits)) >= ENOUGH and len(result) < limit:
                deadline = self._deadline(known)
                median = statistics.median(waits)
                result.append(Learned(endpoint, phase, size, len(waits), median, deadline.seconds, deadline.basis))
        return result

    def _deadline(self, known: _Known | None) -> Deadline:
        if known is None or len(known.waits) < ENOUGH:
            return Deadline(self.upper, "part_timeout")
        median, latest = statistics.median(known.waits), known.waits[-1]
        deviation = statistics.median(abs(wait - median) for wait in known.waits)
        usual = FACTOR * median + DEVIATIONS * deviation
        seconds, basis = usual, f"{usual / median if median else FACTOR:.2g} × its median of {_short(median)}"
        if LATEST * latest > usual:
            seconds, basis = LATEST * latest, f"{LATEST:g} × its last of {_short(latest)}"
        if seconds < self.lower:
            seconds, basis = self.lower, f"min_part_timeout, its median is {_short(median)}"
        # The power is bounded, since whoever misses for years would make an overflow of it.
        if known.missed:
            factor = 2 ** min(known.missed, 32)
            seconds, basis = seconds * factor, f"{factor} × ({basis}), since it missed {known.missed} before"
        return Deadline(self.upper, "part_timeout") if seconds >= self.upper else Deadline(seconds, basis)

    def _use(self, endpoint: str, phase: Phase, size: int, now: float) -> _Known:
        self._forget(now)
        known = self._known.setdefault((endpoint, phase, size), _Known())
        self._known.move_to_end((endpoint, phase, size))
        known.used = now
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _forget(self, now: float) -> None:
        while self._known and now - next(iter(self._known.values())).used > LIFETIME:
            self._known.popitem(last=False)


def size_class(nbytes: int, members: int) -> int:
    """Rounds of one class take alike: bytes times members differ by less than a factor of four. Others tell nothing.

    Args:
        nbytes: of all tensors, as packed for the wire.
        members: of the group.
    """
    return (nbytes * members).bit_length() // 2


class FairClock:
    """Seconds in which others could have been heard, had they done something.

    It has to be told of the time every `interval` seconds. If that comes late, this peer was stopped or busy, and no
    more than the interval counts. If nobody at all is heard, this peer's own link is suspected, and half of it counts.

    Args:
        interval: seconds.
        now: the moment at which it starts from 0.
    """

    def __init__(self, interval: float, now: float) -> None:
        self.interval = interval
        self._fair, self._last = 0.0, now

    def tick(self, now: float, *, deaf: bool = False) -> float:
        """Returns the fair seconds up to `now`.

        Args:
            now: in the running loop's time.
            deaf: whether several are waited for, and nobody was heard since the last tick.
        """
        self._fair += self._passed(now) / (2 if deaf else 1)
        self._last = max(self._last, now)
        return self._fair

    def at(self, now: float) -> float:
        """The fair seconds up to `now`, if somebody is heard until the next tick."""
        return self._fair + self._passed(now)

    def _passed(self, now: float) -> float:
        return min(max(0.0, now - self._last), self.interval)


def _short(seconds: float) -> str:
    return f"{seconds:.2g} s"
