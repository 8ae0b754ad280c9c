"""What limits a stream of parts: the send window, and the deadlines of whoever is waited for."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

from averaging.timing import Deadline, Deadlines, FairClock, Phase, interval_of

# The send window: how many parts a member sends before their averages arrive.
#
# With the transport's flow control alone, a member would fill every buffer on the path to a reducer that waits for
# another sender. Its faster streams would also take bandwidth from its slower ones, which determine the round's
# duration.

WINDOW_BYTES = 8 << 20  # window of one member over all its reducers; a link of 1 Gbit/s and 50 ms holds 6 MiB

MIN_PARTS = 3
"""Minimum window per reducer, in parts: one in transit, one that is averaged, and one whose average is in transit."""

MAX_HOLD_SECONDS = 1.0
"""After a part has waited for this long, the window is abandoned: the reducer's software may answer only when it has
all parts, or drop a sender that delivers nothing."""


def window_bytes(part_bytes: int, reducers: int) -> int:
    """The window in bytes between a member and one reducer; both compute the same.

    `part_bytes` is the largest size of a part on the wire, `reducers` the number of reducers in the group minus one,
    which is to how many a reducing member sends. A client sends to one more and has up to twice `WINDOW_BYTES` in
    transit.
    """
    return max(MIN_PARTS * part_bytes, WINDOW_BYTES // max(1, reducers))


def send_limits(sizes: Sequence[int], nbytes: int) -> list[int]:
    """For each number of answered parts, from 0 to all, how many parts may be sent in a window of `nbytes`.

    `sizes` are those of a shard's parts on the wire, in order; none is above `nbytes`.
    """
    ends = [0, *accumulate(sizes)]
    return [bisect_right(ends, done + nbytes) - 1 for done in ends]


class SendWindow:
    """Limits one stream of parts, at its sender or at its reader, see the function `send_limits`.

    A part waits at most `max_hold` seconds; then the window is no longer enforced.
    """

    def __init__(self, send_limits: Sequence[int], max_hold: float | None = None) -> None:
        self._send_limits, self._max_hold = send_limits, max_hold
        self._answered = 0
        self._waiter: asyncio.Future[None] | None = None  # of the part that must wait
        self._enforced = True

    def holds(self, number: int) -> bool:
        return self._enforced and number >= self._send_limits[self._answered]

    async def wait(self, number: int) -> None:
        """Returns when part `number` may be sent or read. Only one part waits at a time."""
        try:
            async with asyncio.timeout(self._max_hold):
                while self.holds(number):
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError:
            self._enforced = False
        finally:
            self._waiter = None

    def answered(self) -> None:
        self._answered += 1
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


# The deadlines of all waits of one round, which are enforced, and learned from how long the waits took.

_OF_SENDERS = (Phase.OPENING, Phase.PART)

_SIMILAR = {Phase.TAKING: (Phase.TAKING, Phase.PART)}
"""Phases whose longest deadline is used. Transport buffers hide how long a reply takes until they are full, so a reply
is allowed at least the time of a part."""

Overdue = Callable[[float, Deadline], None]
"""Called with the seconds waited and the deadline that passed."""


class RoundClock:
    """Fair seconds since the start of a round, see `FairClock`."""

    __slots__ = ("any_received", "clock")

    def __init__(self) -> None:
        self.clock: FairClock | None = None  # before the round has started
        self.any_received = False  # whether something that was waited for has come since the last tick

    def now(self) -> float:
        return 0.0 if self.clock is None else self.clock.at(_now())


class StreamWait:
    """A wait for one member in one phase, which comes again with each part of its stream.

    It is only a moment and a deadline: the monitor looks at all of them at each tick of its clock. Nothing is armed or
    cancelled for a part.
    """

    __slots__ = ("_clock", "deadline", "longest", "overdue", "since")

    def __init__(self, clock: RoundClock, deadline: Deadline, overdue: Overdue | None = None) -> None:
        self._clock, self.deadline = clock, deadline
        self.overdue = overdue  # called once if the deadline passes
        self.since: float | None = None  # when it began, in fair seconds; None while nobody waits
        self.longest: float | None = None  # seconds of the longest one that has ended

    def begin(self, waited: float = 0.0) -> None:
        self.since = self._clock.now() - waited

    def end(self) -> None:
        self._ended(self._clock.now())
        self.since = None

    def again(self) -> None:
        now = self._clock.now()
        self._ended(now)
        self.since = now

    def _ended(self, now: float) -> None:
        self._clock.any_received = True
        waited = 0.0 if self.since is None else now - self.since
        if self.longest is None or waited > self.longest:
            self.longest = waited


class WaitMonitor:
    """The waits of one round in a size class, measured in fair seconds of the running loop's time, see `FairClock`."""

    def __init__(self, deadlines: Deadlines, size: int, senders: int) -> None:
        self.deadlines = deadlines
        self._size, self._senders = size, senders
        self._interval = interval_of(deadlines.lower)
        self._clock = RoundClock()
        self._waits: dict[tuple[str, Phase], StreamWait] = {}
        # Cached: what is learned during a round does not change its deadlines.
        self._learned: dict[tuple[str, Phase], Deadline] = {}
        self.check: Callable[[float], None] | None = None  # called at each tick with the fair seconds of the round

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        failure: Exception | None = None  # raised outside the task group, which would wrap it
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._tick(FairClock(self._interval, _now())))
            try:
                yield
            except Exception as error:
                failure = error
            finally:
                ticking.cancel()
                self.check = None  # it refers to the round, which would otherwise be a reference cycle
                for wait in self._waits.values():
                    wait.overdue = None  # for the same reason
        if failure is not None:
            raise failure

    def wait(
        self, name: str, phase: Phase, overdue: Overdue | None = None, deadline: Deadline | None = None
    ) -> StreamWait:
        """The wait for a member in a phase, which replaces an earlier one; by default with the learned deadline."""
        wait = self._waits[name, phase] = StreamWait(self._clock, deadline or self.deadline(name, phase), overdue)
        return wait

    def begin(self, name: str, phase: Phase, overdue: Overdue, deadline: Deadline | None = None) -> None:
        self.wait(name, phase, overdue, deadline).begin()

    def end(self, name: str, phase: Phase) -> None:
        """Ends a wait with what was waited for, even if that came before the wait had begun."""
        wait = self._waits.get((name, phase)) or self.wait(name, phase)
        wait.end()

    def deadline(self, name: str, phase: Phase) -> Deadline:
        deadline = self._learned.get((name, phase))
        if deadline is None:
            now, phases = _now(), _SIMILAR.get(phase, (phase,))
            learned = [self.deadlines.of(name, similar, self._size, now) for similar in phases]
            deadline = self._learned[name, phase] = max(learned, key=lambda candidate: candidate.seconds)
        return deadline

    def longest_learned(self, phase: Phase) -> float:
        return max((known.seconds for (_, of), known in self._learned.items() if of is phase), default=0.0)

    def forget(self, name: str, *phases: Phase) -> None:
        for phase in phases:
            if (wait := self._waits.get((name, phase))) is not None:
                wait.since = None

    def done(self, name: str, *phases: Phase) -> None:
        """Records that a member has completed these phases in this round; learns the longest wait of each."""
        for phase in phases:
            wait = self._waits.pop((name, phase), None)
            if wait is not None and wait.longest is not None:
                self.deadlines.record(name, phase, self._size, wait.longest, _now())

    def waiting_for(self, least: float) -> list[str]:
        now = self._clock.now()
        waits = ((name, wait.since) for (name, _), wait in self._waits.items())
        return sorted({name for name, since in waits if since is not None and now - since >= least})

    def record_miss(self, name: str, phase: Phase) -> None:
        self.deadlines.record_miss(name, phase, self._size, _now())

    def _check(self, clock: FairClock) -> None:
        pending = {
            name for (name, phase), wait in self._waits.items() if phase in _OF_SENDERS and wait.since is not None
        }
        isolated = not self._clock.any_received and len(pending) >= 2 and 2 * len(pending) > self._senders
        self._clock.any_received = False
        now = clock.tick(_now(), isolated=isolated)
        for key, wait in list(self._waits.items()):
            # What one of them calls may end, restart or replace another.
            if wait.since is not None and now - wait.since >= wait.deadline.seconds and self._waits.get(key) is wait:
                waited, wait.since = now - wait.since, None
                if wait.overdue is not None:
                    wait.overdue(waited, wait.deadline)
        if self.check is not None:
            self.check(now)

    async def _tick(self, clock: FairClock) -> None:
        self._clock.clock = clock
        while True:
            await asyncio.sleep(self._interval)
            self._check(clock)


def _now() -> float:
    return asyncio.get_running_loop().time()
