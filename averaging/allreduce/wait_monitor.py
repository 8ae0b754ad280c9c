"""All waits of one round: whom, since when, for how long at most; what was seen is learned from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from averaging.deadlines.fair_clock import FairClock, interval_of
from averaging.deadlines.learned_deadlines import Deadline, Deadlines, Guesses, Phase

_OF_SENDERS = (Phase.OPENING, Phase.PART)

_ALIKE = {Phase.TAKING: (Phase.TAKING, Phase.PART)}
"""Flow control hides how long a reply takes until many are under way, so the time of a part is allowed in any case."""

LAGGING = 8
"""One that has done one thing may take so many times as long for another. With the usual `min_part_timeout` that is
enough to look up a name, and to connect where the first packets are lost."""

Overdue = Callable[[float, Deadline], None]
"""Told how many seconds were waited, and the deadline."""


@dataclass(slots=True)
class _Wait:
    since: float  # in fair seconds
    deadline: Deadline
    overdue: Overdue


class WaitMonitor:
    """The waits of one round, by the running loop's time but fair, see `FairClock`.

    Args:
        deadlines: learned so far, and learned further here.
        size: class of the size of the round.
        senders: how many are waited for as senders.
    """

    def __init__(self, deadlines: Deadlines, size: int, senders: int) -> None:
        self.deadlines = deadlines
        self._size, self._senders = size, senders
        self._interval = interval_of(deadlines.lower)
        self._clock: FairClock | None = None  # not before the round has begun
        self._waits: dict[tuple[str, Phase], _Wait] = {}
        self._longest: dict[tuple[str, Phase], float] = {}
        self._learned: dict[tuple[str, Phase], Deadline] = {}  # nothing is learned of a member before it is done
        self._guesses: dict[Phase, Guesses] = {}  # of all that is known, so not for every member anew
        self._heard = False
        self._looks: list[Callable[[float], None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Deadlines are kept inside."""
        failure: Exception | None = None  # raised as it is, not in a group of errors
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(self._tick(FairClock(self._interval, _now())))
            try:
                yield
            except Exception as error:
                failure = error
            finally:
                ticking.cancel()
        if failure is not None:
            raise failure

    def at_every_look(self, look: Callable[[float], None]) -> None:
        """From now on `look` is called at every tick of the clock, with the fair seconds since the round began."""
        self._looks.append(look)

    def begin(
        self, name: str, phase: Phase, overdue: Overdue, deadline: Deadline | None = None, *, waited: float = 0.0
    ) -> None:
        """A wait begins, begins anew, or goes on.

        Args:
            name: who is waited for.
            phase: what for.
            overdue: called once if the deadline passes.
            deadline: the one that was learned if None.
            waited: seconds for which it has been waited already.
        """
        self._waits[name, phase] = _Wait(self._fair() - waited, deadline or self.deadline(name, phase), overdue)

    def hasten(self, name: str, phase: Phase, sign: str, times: float) -> None:
        """It gets `LAGGING` times as long as another `sign` of it took, or as the shortest deadline, if it is awaited.

        Args:
            name: who is waited for.
            phase: what for.
            sign: of life, which has come.
            times: what is waited for is so many times as large as the sign.
        """
        wait = self._waits.get((name, phase))
        if wait is None:
            return
        waited, shortest = self._fair() - wait.since, self.deadlines.shortest
        unit, basis = (waited, f"{waited:.2g} s") if waited > shortest.seconds else (shortest.seconds, shortest.basis)
        factor = LAGGING * max(1.0, times)
        if waited + factor * unit < wait.deadline.seconds:
            wait.deadline = Deadline(waited + factor * unit, f"{factor:.3g} × {basis} after {sign}")

    def deadline(self, name: str, phase: Phase) -> Deadline:
        """What was learned before this round. Waits begin with every part; it need not be looked up so often."""
        found = self._learned.get((name, phase))
        if found is None:
            learned = [self._look_up(name, one) for one in _ALIKE.get(phase, (phase,))]
            found = self._learned[name, phase] = max(learned, key=lambda one: one.seconds)
        return found

    def _look_up(self, name: str, phase: Phase) -> Deadline:
        if phase not in self._guesses:
            self._guesses[phase] = self.deadlines.guesses(phase, self._size)
        return self.deadlines.of(name, phase, self._size, _now(), self._guesses[phase])

    def end(self, name: str, phase: Phase, *, heard: bool = True) -> None:
        """It is over; `heard`: since what was waited for has come."""
        wait = self._waits.pop((name, phase), None)
        if heard:
            self._heard = True
            waited = self._fair() - wait.since if wait else 0.0
            self._longest[name, phase] = max(waited, self._longest.get((name, phase), 0.0))

    def forget(self, name: str, *phases: Phase) -> None:
        """It is given up: nothing is waited for any longer."""
        for phase in phases:
            self._waits.pop((name, phase), None)

    def done(self, name: str, *phases: Phase) -> None:
        """It has done all of that in this round: the longest wait of each is learned."""
        for phase in phases:
            self._waits.pop((name, phase), None)
            longest = self._longest.pop((name, phase), None)
            if longest is not None:
                self.deadlines.saw(name, phase, self._size, longest, _now())

    def missed(self, name: str, phase: Phase) -> None:
        """It is given up at a deadline."""
        self.deadlines.missed(name, phase, self._size, _now())

    def held_up(self, name: str) -> None:
        """It is given up since it has held the whole round up."""
        self.deadlines.probation.held_up(name, _now())

    def on_probation(self, name: str) -> bool:
        """Whether it has held a whole round up lately."""
        return self.deadlines.probation.includes(name, _now())

    def _fair(self) -> float:
        return self._clock.at(_now()) if self._clock else 0.0

    def _look(self, clock: FairClock) -> None:
        awaited = {name for name, phase in self._waits if phase in _OF_SENDERS}
        deaf = not self._heard and len(awaited) >= 2 and 2 * len(awaited) > self._senders
        self._heard = False
        now = clock.tick(_now(), deaf=deaf)
        for key, wait in list(self._waits.items()):
            waited = now - wait.since
            if waited >= wait.deadline.seconds and self._waits.get(key) is wait:
                del self._waits[key]
                wait.overdue(waited, wait.deadline)
        for look in self._looks:
            look(now)

    async def _tick(self, clock: FairClock) -> None:
        self._clock = clock
        while True:
            await asyncio.sleep(self._interval)
            self._look(clock)


def _now() -> float:
    return asyncio.get_running_loop().time()
