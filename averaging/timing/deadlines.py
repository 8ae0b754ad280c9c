"""How long to wait for another peer: deadlines that are fixed, or learned from how long it took before."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

from averaging.common import counted

SLOW_LINK = 10e6 / 8  # rate in bytes/s that is presumed of a slow link, 10 Mbit/s
LIFETIME = 3600.0  # seconds after which an unused kind of wait is forgotten: the network may have changed
MEDIAN_FACTOR = 4.0  # a deadline is this many median waits, so that a link may become three times slower, plus ...
DEVIATION_FACTOR = 4.0  # ... this many median absolute deviations, but at least ...
LATEST_FACTOR = 2.0  # ... this many times the latest wait, so that it follows a lasting change at once
MAX_WAITS = 16  # waits that are remembered of each kind
MIN_WAITS = 3  # with fewer waits of one kind the deadline is guessed
GUESS_FACTOR = 2.0  # a guess is this many times the longest deadline that was learned of other peers
SIZE_CLASS_FACTOR = 4  # ratio of round sizes between one size class and the next
VERDICT_SECONDS = 3.0  # upper bound for the answer to a join request or to a request for a schema
MAX_KNOWN = 4096  # kinds of waits that are remembered, over all peers
MAX_IN_STATUS = 256  # kinds of waits that a peer's status contains


FAST_PART_SECONDS = 0.002
"""If 1 MiB takes less on the network, a part costs what the processor does for it, not what others wait for it."""

MIN_ROUND_BYTES = 16 << 20  # a smaller round says nothing about the network


class Phase(StrEnum):
    """What a peer waits for."""

    OPENING = "opening"
    """A sender opens its stream."""
    PART = "part"
    """A sender sends its next part."""
    TAKING = "taking"
    """A sender takes its next reply."""
    REPLY = "reply"
    """A reducer takes the next part or answers one."""
    ANSWER = "answer"
    """A reducer answers a ping."""
    VERDICT = "verdict"
    """A leader answers a join request."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """How long to wait, and why."""

    seconds: float  # without any progress
    basis: str  # an explanation such as `4 × its median of 1.2 s`


@dataclass(frozen=True, slots=True)
class Learned:
    """What was learned about one kind of wait for one peer."""

    endpoint: str
    phase: Phase
    size: int  # size class of the round, see `size_class`
    waits: int  # number of remembered waits
    median: float  # median of the waits, in seconds
    deadline: float  # deadline that would apply now, in seconds
    basis: str  # how the deadline was derived


@dataclass(slots=True)
class _Known:
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WAITS))
    typical: Deadline | None = None  # without bounds and doublings
    misses: int = 0  # in a row
    used: float = 0.0

    @property
    def reliable(self) -> bool:
        return len(self.waits) >= MIN_WAITS


class Deadlines:
    """The deadlines that one peer has learned about the others, kept from round to round.

    Args:
        lower: seconds of the shortest deadline, so that short pauses are tolerated.
        upper: seconds of the longest deadline, which also applies while nothing is known.
        longest: name of the option that sets `upper`.

    Attributes:
        fast: whether the last large round moved 1 MiB in less than `FAST_PART_SECONDS`.
    """

    def __init__(self, lower: float, upper: float, longest: str = "stall_timeout") -> None:
        self.lower, self.upper = min(lower, upper), upper
        self._longest = longest
        self.fast = False
        self._known: OrderedDict[tuple[str, Phase, int], _Known] = OrderedDict()  # least recently used first
        self._guesses: dict[tuple[Phase, int], Deadline | None] = {}  # until more is known

    def __len__(self) -> int:
        return len(self._known)

    def of(self, endpoint: str, phase: Phase, size: int, now: float) -> Deadline:
        """The deadline of a wait."""
        self._forget(now)
        known = self._known.get((endpoint, phase, size)) or _Known()
        learned = known.typical
        if not known.reliable:
            if (phase, size) not in self._guesses:  # all members of a round ask before anything is recorded
                self._guesses[phase, size] = self._guess(phase, size)
            guess = self._guesses[phase, size]
            if guess is None or learned is None or learned.seconds < guess.seconds:
                learned = guess
        return self._bounded(learned, phase, known.misses)

    @property
    def shortest(self) -> Deadline:
        return Deadline(self.lower, "the least stall timeout")

    def longest(self, phase: Phase) -> Deadline:
        """The upper bound of all deadlines of a phase, which also applies while nothing is known."""
        if phase is Phase.VERDICT:
            return Deadline(VERDICT_SECONDS, "the maximum for an answer")
        return Deadline(self.upper, self._longest)

    def _guess(self, phase: Phase, size: int) -> Deadline | None:
        """The deadline of a peer with too few waits of this kind; None if no peer has enough.

        It is taken from rounds of the nearest size. Those of smaller rounds are scaled, of larger ones not reduced.
        """
        learned: defaultdict[int, list[Deadline]] = defaultdict(list)  # by signed distance in size classes
        for (_, its_phase, its_size), known in self._known.items():
            if its_phase is phase and known.reliable and known.typical is not None:
                learned[size - its_size].append(known.typical)
        if not learned:
            return None
        smaller = min(learned, key=lambda distance: (abs(distance), distance))
        longest = max(typical.seconds for typical in learned[smaller])
        factor = GUESS_FACTOR * float(SIZE_CLASS_FACTOR ** min(max(0, smaller), 16))
        whose = f"the longest of {counted(len(learned[smaller]), 'peer')}"
        rounds = f" in {'smaller' if smaller > 0 else 'larger'} rounds" if smaller else ""
        least = GUESS_FACTOR * self.lower
        if longest * factor < least:
            return Deadline(least, f"{GUESS_FACTOR:g} × {whose}{rounds}")
        return Deadline(longest * factor, f"{factor:g} × {whose}{rounds}")

    def typical(self, endpoint: str, phase: Phase, size: int) -> tuple[float | None, float | None]:
        """How long a peer typically takes, and the median of that over all peers, with room for variation.

        Returns:
            Both in seconds, without bounds. The first is None with too few waits of the peer, the second without waits.
        """
        typical = [
            (name, known.typical.seconds, known.reliable)
            for (name, its_phase, its_size), known in self._known.items()
            if its_phase is phase and its_size == size and known.typical is not None
        ]
        own = next((seconds for name, seconds, reliable in typical if name == endpoint and reliable), None)
        return own, statistics.median(seconds for _, seconds, _ in typical) if typical else None

    def record(self, endpoint: str, phase: Phase, size: int, seconds: float, now: float) -> None:
        """Records the longest wait for a peer in a round that it completed."""
        known = self._use(endpoint, phase, size, now)
        known.waits.append(max(0.0, seconds))
        known.typical = _typical(known.waits)
        known.misses = 0

    def record_round(self, nbytes: int, seconds: float) -> None:
        """Records how long a round took to move so many bytes in its busier direction."""
        if nbytes >= MIN_ROUND_BYTES:
            self.fast = seconds * (1 << 20) < FAST_PART_SECONDS * nbytes

    def record_miss(self, endpoint: str, phase: Phase, size: int, now: float) -> None:
        """Records that a peer was given up at its deadline; the next deadline is longer.

        A peer that also misses the maximum deadline is treated as unreachable, not slow. It gets the maximum ever more
        rarely, and in between the deadline that it would have without misses.
        """
        self._use(endpoint, phase, size, now).misses += 1

    def learned(self) -> list[Learned]:
        """What is learned from at least `MIN_WAITS` waits, most recently used first. Callable from any thread."""
        result: list[Learned] = []
        for (endpoint, phase, size), known in reversed(list(self._known.items())):
            if len(waits := list(known.waits)) >= MIN_WAITS and len(result) < MAX_IN_STATUS:
                deadline = self._bounded(known.typical, phase, known.misses)
                median = statistics.median(waits)
                result.append(Learned(endpoint, phase, size, len(waits), median, deadline.seconds, deadline.basis))
        return result

    def _bounded(self, learned: Deadline | None, phase: Phase, misses: int) -> Deadline:
        longest = self.longest(phase)
        if learned is None:
            return longest if _gets_longest(misses) else self.shortest
        seconds, basis = learned.seconds, learned.basis
        if seconds < self.lower:
            seconds, basis = self.lower, f"the least stall timeout, more than {basis}"
        if seconds >= longest.seconds:
            return longest
        missed = counted(misses, "missed deadline")
        doublings = math.ceil(math.log2(longest.seconds / seconds))  # that reach the longest
        if misses < doublings:
            factor = 2**misses
            return Deadline(seconds * factor, f"{factor} × ({basis}) after {missed}" if misses else basis)
        if _gets_longest(misses - doublings):
            return longest
        return Deadline(seconds, f"{basis}, not doubled after {missed}")

    def _use(self, endpoint: str, phase: Phase, size: int, now: float) -> _Known:
        self._forget(now)
        self._guesses.clear()
        known = self._known.setdefault((endpoint, phase, size), _Known())
        self._known.move_to_end((endpoint, phase, size))
        known.used = now
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _forget(self, now: float) -> None:
        while self._known and now - next(iter(self._known.values())).used > LIFETIME:
            self._known.popitem(last=False)
            self._guesses.clear()


def _gets_longest(misses: int) -> bool:
    return misses & (misses - 1) == 0


def size_class(nbytes: int, members: int) -> int:
    """Class of rounds that take about as long: bytes times members differ by less than a factor of four.

    Args:
        nbytes: size of all tensors on the wire.
        members: number of members of the group.
    """
    return (nbytes * members).bit_length() // 2


def _typical(waits: Sequence[float]) -> Deadline:
    median, latest = statistics.median(waits), waits[-1]
    deviation = statistics.median(abs(wait - median) for wait in waits)
    seconds = MEDIAN_FACTOR * median + DEVIATION_FACTOR * deviation
    if LATEST_FACTOR * latest > seconds:
        return Deadline(LATEST_FACTOR * latest, f"{LATEST_FACTOR:g} × its last of {_short(latest)}")
    return Deadline(seconds, f"{seconds / median if median else MEDIAN_FACTOR:.2g} × its median of {_short(median)}")


def _short(seconds: float) -> str:
    return f"{seconds:.2g} s"


# A clock that does not count seconds in which this process was stopped or busy against other peers. Pure.


TICKS = 8  # ticks of the clock per shortest deadline
MAX_INTERVAL = 0.25  # maximum seconds between two ticks


def interval_of(shortest: float) -> float:
    return min(shortest / TICKS, MAX_INTERVAL)


class FairClock:
    """Counts fair seconds: those in which this process could have received messages.

    `tick` must be called every `interval` seconds. If a call is late, this process was stopped or busy, and only the
    interval counts. If nothing arrives from any peer, this peer's own link is suspected, and half of it counts.

    Args:
        interval: seconds.
        now: the time at which the clock starts from 0.
    """

    def __init__(self, interval: float, now: float) -> None:
        self.interval = interval
        self._fair, self._last = 0.0, now

    def tick(self, now: float, *, isolated: bool = False) -> float:
        """Returns the fair seconds up to `now`.

        Args:
            now: in the running loop's time.
            isolated: whether this peer waits for several others and received nothing since the last tick.
        """
        self._fair += self._passed(now) / (2 if isolated else 1)
        self._last = max(self._last, now)
        return self._fair

    def at(self, now: float) -> float:
        return self._fair + self._passed(now)

    def _passed(self, now: float) -> float:
        passed, interval = now - self._last, self.interval
        if passed < interval:
            return passed if passed > 0 else 0.0
        return interval


async def is_set_within(seconds: float | None, event: asyncio.Event) -> bool:
    """Waits for an event, at most for `seconds`. Returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


# Ends the body of a timeout before its time.


def expire(limit: asyncio.Timeout) -> None:
    """Ends the body of `limit` with a `TimeoutError` now. A body that has ended, or is ending so, is left as it is."""
    try:
        limit.reschedule(asyncio.get_running_loop().time())
    except RuntimeError:  # several observers may find a reason at the same moment
        return


MIN_TICK = 0.001  # minimum seconds between two ticks. Less might not change the time, which is a floating-point number


class FairTimeout:
    """Like `asyncio.timeout`, but seconds in which this process was stopped or busy do not count.

    Args:
        deadline: how long to wait.
        shortest: seconds of the shortest deadline that is used with this timeout; it sets the interval of the clock.

    Attributes:
        deadline: deadline of the current wait.

    Raises:
        TimeoutError: the deadline has passed. The message gives the seconds waited, the deadline and its basis.
    """

    def __init__(self, deadline: Deadline, shortest: float) -> None:
        self.deadline, self._interval = deadline, interval_of(shortest)
        self._since = 0.0  # in fair seconds
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._clock = FairClock(self._interval, self._loop.time())
        await self._limit.__aenter__()
        self._ticking = self._loop.call_later(self._interval, self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ticking.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            deadline = f"{_rounded(self.deadline.seconds)} = {self.deadline.basis}"
            raise TimeoutError(f"silent for {_rounded(self.waited)}, deadline {deadline}") from None

    @property
    def waited(self) -> float:
        return self._clock.at(self._loop.time()) - self._since

    @property
    def expired(self) -> bool:
        return self._limit.expired()

    def restart(self, deadline: Deadline) -> None:
        """Begins the next wait."""
        self._since = self._clock.at(self._loop.time())
        self.deadline = deadline

    def _tick(self) -> None:
        now = self._loop.time()
        left = self.deadline.seconds - (self._clock.tick(now) - self._since)
        if left <= 0:
            expire(self._limit)
        else:
            self._ticking = self._loop.call_later(min(self._interval, max(left, MIN_TICK)), self._tick)


@asynccontextmanager
async def learned_timeout(deadlines: Deadlines, endpoint: str, phase: Phase) -> AsyncGenerator[None, None]:
    """Applies the learned deadline of `endpoint` to the body of the context, and learns from how long it takes.

    Args:
        deadlines: the learned deadlines, updated here.
        endpoint: the peer that is waited for.
        phase: what it must do; the time for it does not depend on a size.

    Raises:
        TimeoutError: the deadline has passed. The message gives the seconds waited, the deadline and its basis.
    """
    loop = asyncio.get_running_loop()
    limit = FairTimeout(deadlines.of(endpoint, phase, 0, loop.time()), deadlines.lower)
    try:
        async with limit:
            yield
            waited = limit.waited
    except TimeoutError:
        if limit.expired:
            deadlines.record_miss(endpoint, phase, 0, loop.time())
        raise
    deadlines.record(endpoint, phase, 0, waited, loop.time())


def _rounded(seconds: float) -> str:
    return f"{round(seconds, 1):g} s"
