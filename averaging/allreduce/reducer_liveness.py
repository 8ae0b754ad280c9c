"""How long a sender waits for a reducer, which may wait for another sender and is pinged before it is dropped."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from averaging.allreduce.wait_monitor import WaitMonitor
from averaging.common.timeouts import expire
from averaging.deadlines.learned_deadlines import Deadline, Phase
from averaging.transport.base import Transport, is_alive


class ReducerLiveness:
    """Enforces the deadline of one reducer's replies; a context manager around the reading of them.

    The reducer is pinged shortly before its learned deadline. While it answers, the sender waits for up to twice
    `stall_timeout` without progress, because the reducer may wait for another sender. If nothing is learned yet, the
    reducer is pinged after a third of `stall_timeout` and has the rest to answer: the ping may queue behind a part.

    Args:
        name: the reducer.
        transport: this member's.
        monitor: the round's.
        limit: expires when the reducer is given up.

    Attributes:
        symptom: what was missing when the reducer was given up.
        seconds: how long there had been no progress then.
        deadline: seconds of the deadline that passed, and its basis.
        hold_up: why a reducer that replied in time was given up; empty for others.
    """

    def __init__(self, name: str, transport: Transport, monitor: WaitMonitor, limit: asyncio.Timeout) -> None:
        self._name, self._transport, self._monitor, self._limit = name, transport, monitor, limit
        # Waits that passed their deadline: progress count at the time, and seconds waited.
        self._overdue: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self._progressed = 0
        self.symptom, self.seconds, self.deadline, self.hold_up = "no reply", 0.0, (0.0, ""), ""

    async def __aenter__(self) -> Self:
        deadlines = self._monitor.deadlines
        self._learned, self._ping_deadline = self._monitor.deadline(self._name, Phase.REPLY), deadlines.shortest
        if self._learned.seconds >= deadlines.upper:
            self._ping_deadline = Deadline(max(deadlines.lower, 2 / 3 * deadlines.upper), "2/3 × stall_timeout")
        # Early enough that the answer to the ping is due at the learned deadline.
        early = max(deadlines.lower, self._learned.seconds - self._ping_deadline.seconds)
        self._until_ping = Deadline(early, self._learned.basis)
        self.progress()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._monitor.forget(self._name, Phase.REPLY, Phase.ANSWER)
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    def progress(self) -> None:
        """Records that the reducer took a part or answered one, and starts the next wait."""
        if self._progressed:
            self._monitor.end(self._name, Phase.REPLY)
        self._progressed += 1
        self.seconds = 0.0
        self._wait(self._until_ping)

    def answered_all(self) -> None:
        """Waits only for the end of the stream from now on, and no longer than the shortest deadline."""
        self._monitor.begin(self._name, Phase.REPLY, lambda *_: expire(self._limit), self._monitor.deadlines.shortest)

    def give_up(self, reason: str) -> None:
        """Gives up a reducer that replies in time, but holds the round up."""
        self.hold_up = reason
        expire(self._limit)

    def _wait(self, deadline: Deadline) -> None:
        """Starts or continues a wait. What is learned from it is the whole time without progress, pings included."""

        def overdue(waited: float, _: Deadline) -> None:
            self._overdue.put_nowait((self._progressed, waited))

        self._monitor.begin(self._name, Phase.REPLY, overdue, deadline, waited=self.seconds)

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        longest = Deadline(2 * self._monitor.deadlines.upper, "2 × stall_timeout")
        while True:
            progressed, waited = await self._overdue.get()
            if progressed != self._progressed:
                continue
            self.seconds = waited
            if waited >= longest.seconds:
                self.deadline = longest.seconds, longest.basis
                break
            self._wait(longest)
            pinged = now()
            alive = await self._is_alive()
            if progressed != self._progressed:
                continue
            self.seconds += now() - pinged
            if not alive:
                self.symptom = "no reply and no answer to a ping"
                self.deadline = self._learned.seconds, self._learned.basis
                break
            again = min(self.seconds + self._until_ping.seconds, longest.seconds)
            self._wait(Deadline(again, longest.basis))
        self._monitor.record_miss(self._name, Phase.REPLY)
        expire(self._limit)

    async def _is_alive(self) -> bool:
        """Whether the reducer answers a ping in time."""
        try:
            async with asyncio.timeout(None) as limit:
                self._monitor.begin(self._name, Phase.ANSWER, lambda *_: expire(limit), self._ping_deadline)
                return await is_alive(self._transport, self._name)
        except TimeoutError:
            return False
        finally:
            self._monitor.forget(self._name, Phase.ANSWER)
