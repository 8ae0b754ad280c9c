"""How long to wait for another peer, learned from how long it took before. Pure: `now` is passed in.

As in TCP (RFC 6298) a deadline follows what was seen, leaves room for variation, and is doubled when it was missed; but
medians and median deviations take the place of the running means, so that one odd round hardly counts (Hampel, 1974).
Where too little is known of a peer, what it did in rounds of another size, or else what the others did, is doubled.
`averaging.deadlines.fair_clock` says in which seconds a wait is measured.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from averaging.deadlines.donor_rates import Rates
from averaging.deadlines.probation import Probation

MEDIAN_FACTOR = 4.0
"""A deadline is so many times the median wait, so that a link may be three times slower in the next round ..."""

DEVIATION_FACTOR = 4.0
"""... and so many median absolute deviations more ..."""

LATEST_FACTOR = 2.0
"""... and at least so many times the latest wait, so that a lasting change is followed at once."""

MAX_WAITS = 16
"""Waits that are remembered of each kind."""

ENOUGH_WAITS = 3
"""Fewer waits of one kind are too few to go by, and the deadline is guessed."""

GUESS_FACTOR = 2.0
"""A deadline that was learned of other peers, or in rounds of another size, is so many times as long."""

SIZE_CLASS_FACTOR = 4
"""Rounds of one size class are so many times as large as those of the class below."""

VERDICT_SECONDS = 3.0
"""How long a peer may take at most to answer a request to join, or to tell its schema."""

MAX_KNOWN = 4096
"""Kinds of waits, of all peers together, that are remembered."""

MAX_IN_STATUS = 256
"""Kinds of waits that a peer's status tells."""

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
    VERDICT = "verdict"
    """A peer that was asked to lead answers."""
    STATE = "state"
    """A donor begins to send its state."""
    CHUNK = "chunk"
    """A donor sends the next chunk of its state."""


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


@dataclass(frozen=True, slots=True)
class Guesses:
    """What is expected, for one phase and size, of peers of which too little is known.

    Attributes:
        elsewhere: by endpoint, as it was in rounds of another size.
        others: as with all others; None if of nobody anything is known.
    """

    elsewhere: Mapping[str, Deadline]
    others: Deadline | None

    def of(self, endpoint: str) -> Deadline | None:
        """The one for `endpoint`, if there is any."""
        return self.elsewhere.get(endpoint, self.others)


@dataclass(slots=True)
class _Known:
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITS))
    usual: Deadline | None = None  # by the waits alone, without bounds
    missed: int = 0  # deadlines in a row
    used: float = 0.0

    @property
    def enough(self) -> bool:
        return len(self.waits) >= ENOUGH_WAITS


_Key = tuple[str, Phase, int]


class Deadlines:
    """What one peer has learned of the others, from round to round.

    Args:
        lower: no deadline is shorter, so that nobody is given up for a hiccup; seconds.
        upper: no deadline is longer, and so long is waited while nothing is known; seconds.
        longest: what `upper` is called.

    Attributes:
        rates: how fast the others have delivered their state.
        probation: who has held a whole round up.
    """

    def __init__(self, lower: float, upper: float, longest: str = "part_timeout") -> None:
        self.lower, self.upper = min(lower, upper), upper
        self._longest = longest
        self.rates = Rates()
        self.probation = Probation()
        self._known: OrderedDict[_Key, _Known] = OrderedDict()  # the one not used for longest first

    def __len__(self) -> int:
        return len(self._known)

    def of(self, endpoint: str, phase: Phase, size: int, now: float, guesses: Guesses | None = None) -> Deadline:
        """How long to wait. `guesses` are those for this phase and size, where they are at hand already."""
        self._forget(now)
        known = self._known.get((endpoint, phase, size)) or _Known()
        found = known.usual
        if not known.enough:
            guess = (guesses or self.guesses(phase, size)).of(endpoint)
            if guess is None or found is None or found.seconds < guess.seconds:
                found = guess
        return self._bounded(found, phase, known.missed)

    @property
    def shortest(self) -> Deadline:
        """No deadline is shorter."""
        return Deadline(self.lower, "min_part_timeout")

    def longest(self, phase: Phase) -> Deadline:
        """No deadline is longer, and so long is waited while nothing is known."""
        if phase is Phase.VERDICT:
            return Deadline(VERDICT_SECONDS, "the longest for a verdict")
        return Deadline(self.upper, self._longest)

    def guesses(self, phase: Phase, size: int) -> Guesses:
        """What to expect of those of whom too little is known; it takes a look at all that is known."""
        nearest: dict[str, tuple[int, int, Deadline]] = {}  # how far in size, how much smaller, by endpoint
        for (endpoint, its_phase, its_size), known in self._known.items():
            if its_phase is phase and known.enough and known.usual is not None:
                found = abs(size - its_size), size - its_size, known.usual
                if endpoint not in nearest or found[:2] < nearest[endpoint][:2]:
                    nearest[endpoint] = found
        elsewhere = {endpoint: self._guess(usual, smaller, "that") for endpoint, (_, smaller, usual) in nearest.items()}
        if not nearest:
            return Guesses(elsewhere, None)
        near = min(far for far, _, _ in nearest.values())
        alike = [name for name, (far, _, _) in nearest.items() if far == near]
        slowest = max(alike, key=lambda name: elsewhere[name].seconds)
        _, smaller, usual = nearest[slowest]
        whose = f"the longest of {len(alike)} others" if len(alike) > 1 else "that of 1 other"
        return Guesses(elsewhere, self._guess(usual, smaller, whose))

    def usual(self, endpoint: str, phase: Phase, size: int) -> tuple[float | None, float | None]:
        """How long a peer usually takes, with room for variation but without bounds, and the median of that over all.

        Returns:
            Both in seconds; None where too little is known of it, and where nobody is known.
        """
        known = {
            name: entry
            for (name, its_phase, its_size), entry in self._known.items()
            if its_phase is phase and its_size == size and entry.usual is not None
        }
        own = known.get(endpoint)
        usual = [entry.usual.seconds for entry in known.values() if entry.usual is not None]
        return (
            own.usual.seconds if own is not None and own.usual is not None and own.enough else None,
            statistics.median(usual) if usual else None,
        )

    def saw(self, endpoint: str, phase: Phase, size: int, seconds: float, now: float) -> None:
        """In a round that it finished, the longest wait for it took so long."""
        known = self._use(endpoint, phase, size, now)
        known.waits.append(max(0.0, seconds))
        known.usual = _usual(known.waits)
        known.missed = 0

    def missed(self, endpoint: str, phase: Phase, size: int, now: float) -> None:
        """It was given up at its deadline; should that have been too short, the next one is longer.

        Who misses the longest too gets it more and more seldom, and else what it would have had at first.
        """
        self._use(endpoint, phase, size, now).missed += 1

    def learned(self) -> list[Learned]:
        """What is known well enough to be used, the latest first. For any thread."""
        result: list[Learned] = []
        for (endpoint, phase, size), known in reversed(list(self._known.items())):
            if len(waits := list(known.waits)) >= ENOUGH_WAITS and len(result) < MAX_IN_STATUS:
                deadline = self._bounded(known.usual, phase, known.missed)
                median = statistics.median(waits)
                result.append(Learned(endpoint, phase, size, len(waits), median, deadline.seconds, deadline.basis))
        return result

    def _guess(self, usual: Deadline, smaller: int, whose: str) -> Deadline:
        """From what was usual in rounds that were so many classes smaller; larger ones take no less."""
        factor = GUESS_FACTOR * float(SIZE_CLASS_FACTOR ** min(max(0, smaller), 16))
        rounds = f" in {'smaller' if smaller > 0 else 'larger'} rounds" if smaller else ""
        least = GUESS_FACTOR * self.lower
        if usual.seconds * factor < least:
            return Deadline(least, f"{GUESS_FACTOR:g} × {whose}{rounds}")
        return Deadline(usual.seconds * factor, f"{factor:g} × {whose}{rounds}")

    def _bounded(self, found: Deadline | None, phase: Phase, missed: int) -> Deadline:
        longest = self.longest(phase)
        if found is None:
            return longest if _is_tried(missed) else self.shortest
        seconds, basis = found.seconds, found.basis
        if seconds < self.lower:
            seconds, basis = self.lower, f"min_part_timeout, more than {basis}"
        if seconds >= longest.seconds:
            return longest
        doublings = math.ceil(math.log2(longest.seconds / seconds))  # with which it is the longest
        if missed < doublings:
            factor = 2**missed
            told = f"{factor} × ({basis}), since it missed {missed} before" if missed else basis
            return Deadline(seconds * factor, told)
        if _is_tried(missed - doublings):
            return longest
        return Deadline(seconds, f"{basis}, not doubled since it missed {missed} before")

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


def _is_tried(missed: int) -> bool:
    """Whether the longest deadline is given to one that missed it so often: it is rather cut off than slow."""
    return missed & (missed - 1) == 0


def size_class(nbytes: int, members: int) -> int:
    """Rounds of one class take alike: bytes times members differ by less than a factor of four. Others tell nothing.

    Args:
        nbytes: of all tensors, as packed for the wire.
        members: of the group.
    """
    return (nbytes * members).bit_length() // 2


def _usual(waits: Sequence[float]) -> Deadline:
    """What is usual by these waits, with room for variation."""
    median, latest = statistics.median(waits), waits[-1]
    deviation = statistics.median(abs(wait - median) for wait in waits)
    seconds = MEDIAN_FACTOR * median + DEVIATION_FACTOR * deviation
    if LATEST_FACTOR * latest > seconds:
        return Deadline(LATEST_FACTOR * latest, f"{LATEST_FACTOR:g} × its last of {_short(latest)}")
    return Deadline(seconds, f"{seconds / median if median else MEDIAN_FACTOR:.2g} × its median of {_short(median)}")


def _short(seconds: float) -> str:
    return f"{seconds:.2g} s"
