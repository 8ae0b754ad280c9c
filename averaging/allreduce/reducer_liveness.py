"""How long a reducer may be silent. It may itself be waiting for a sender, so it is asked before it is given up."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from averaging.allreduce.wait_monitor import WaitMonitor
from averaging.deadlines.learned_deadlines import Deadline, Phase
from averaging.transport.base import Transport, is_alive


class ReducerLiveness:
    """Keeps the deadline of one reducer's replies; a context manager around the reading of them.

    Near a learned deadline the reducer is asked whether it lives; while it answers, it is waited for up to two
    part_timeouts, since it waits up to one for somebody else. While nobody is known yet, it is
    asked after a third of part_timeout and has two thirds to answer: on a narrow link the question waits behind a part.

    Args:
        name: the reducer.
        transport: this member's.
        watch: the round's.
        limit: expires when it is to be given up.

    Attributes:
        deed: what it did when it was given up.
        seconds: for which there had been no progress then.
        deadline: of that, in seconds, and its basis.
        holds_up: why it was given up although it was not silent; empty if it was.
    """

    def __init__(self, name: str, transport: Transport, watch: WaitMonitor, limit: asyncio.Timeout) -> None:
        self._name, self._transport, self._watch, self._limit = name, transport, watch, limit
        self._passed: asyncio.Queue[tuple[int, float]] = asyncio.Queue()  # at which step, and seconds waited
        self._steps = 0
        self.deed, self.seconds, self.deadline, self.holds_up = "no reply", 0.0, (0.0, ""), ""

    async def __aenter__(self) -> Self:
        deadlines = self._watch.deadlines
        self._learned, self._answer = self._watch.deadline(self._name, Phase.REPLY), deadlines.shortest
        if self._learned.seconds >= deadlines.upper:
            self._answer = Deadline(max(deadlines.lower, 2 / 3 * deadlines.upper), "2/3 × part_timeout")
        # The answer is to be there by the deadline.
        early = max(deadlines.lower, self._learned.seconds - self._answer.seconds)
        self._until_asked = Deadline(early, self._learned.basis)
        self.progress()
        self._guarding = asyncio.create_task(self._guard())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.forget(self._name, Phase.REPLY, Phase.ANSWER)
        self._guarding.cancel()
        await asyncio.gather(self._guarding, return_exceptions=True)

    def progress(self) -> None:
        """The reducer took a part, or answered one."""
        if self._steps:
            self._watch.end(self._name, Phase.REPLY)
        self._steps += 1
        self.seconds = 0.0
        self._wait(self._until_asked)

    def answered_all(self) -> None:
        """Only the end of its stream is still to come. One that never ends it holds nobody up for longer than this."""
        self._watch.begin(self._name, Phase.REPLY, lambda *_: self._expire(), self._watch.deadlines.shortest)

    def give_up(self, deed: str) -> None:
        """It replies in time, but holds the round up."""
        self.holds_up = deed
        self._expire()

    def _expire(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time())

    def _wait(self, deadline: Deadline) -> None:
        """Waits, or waits on: what is learned is the whole time without progress, however often it is asked."""
        self._watch.begin(self._name, Phase.REPLY, self._overdue, deadline, waited=self.seconds)

    def _overdue(self, waited: float, _: Deadline) -> None:
        self._passed.put_nowait((self._steps, waited))

    async def _guard(self) -> None:
        now = asyncio.get_running_loop().time
        longest = Deadline(2 * self._watch.deadlines.upper, "2 × part_timeout")
        while True:
            steps, waited = await self._passed.get()
            if steps != self._steps:
                continue
            self.seconds = waited
            if waited >= longest.seconds:
                self.deadline = longest.seconds, longest.basis
                break
            self._wait(longest)
            asked = now()
            lives = await self._lives()
            if steps != self._steps:
                continue
            self.seconds += now() - asked
            if not lives:
                self.deed = "no reply, nor an answer when asked whether it lives,"
                self.deadline = self._learned.seconds, self._learned.basis
                break
            again = min(self.seconds + self._until_asked.seconds, longest.seconds)
            self._wait(Deadline(again, longest.basis))
        self._watch.missed(self._name, Phase.REPLY)
        self._expire()

    async def _lives(self) -> bool:
        """Whether it answers anything in time."""
        try:
            async with asyncio.timeout(None) as limit:

                def overdue(waited: float, deadline: Deadline) -> None:
                    limit.reschedule(asyncio.get_running_loop().time())

                self._watch.begin(self._name, Phase.ANSWER, overdue, self._answer)
                return await is_alive(self._transport, self._name)
        except TimeoutError:
            return False
        finally:
            self._watch.forget(self._name, Phase.ANSWER)
