"""Time-outs by fair seconds, see `averaging.deadlines.fair_clock`, and such as follow what was learned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from averaging.deadlines.fair_clock import FairClock, interval_of
from averaging.deadlines.learned_deadlines import Deadline, Deadlines, Phase

LEAST = 0.001
"""Seconds between two ticks at least: less may be too little to change the time, which is a floating-point number."""


class FairTimeout:
    """Like `asyncio.timeout`, but seconds in which this peer itself was stopped or busy do not count.

    Args:
        deadline: how long to wait.
        shortest: no deadline is shorter, in seconds; the clock is looked at several times meanwhile.

    Attributes:
        deadline: the one of the present wait.

    Raises:
        TimeoutError: it has passed. The message says after how long, and which it was.
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
            told = f"silent for {_told(self.waited)}, deadline {_told(self.deadline.seconds)} = {self.deadline.basis}"
            raise TimeoutError(told) from None

    @property
    def waited(self) -> float:
        """Fair seconds since the wait began, or began anew."""
        return self._clock.at(self._loop.time()) - self._since

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self._limit.expired()

    def restart(self, deadline: Deadline) -> None:
        """What was waited for has come; the next wait begins."""
        self._since = self._clock.at(self._loop.time())
        self.deadline = deadline

    def _tick(self) -> None:
        now = self._loop.time()
        left = self.deadline.seconds - (self._clock.tick(now) - self._since)
        if left <= 0:
            self._limit.reschedule(now)
        else:
            self._ticking = self._loop.call_later(min(self._interval, max(left, LEAST)), self._tick)


@asynccontextmanager
async def learned_timeout(deadlines: Deadlines, endpoint: str, phase: Phase) -> AsyncGenerator[None, None]:
    """Gives `endpoint` as long for something as was learned, and learns from it.

    Args:
        deadlines: learned so far, and learned further here.
        endpoint: who is waited for.
        phase: what is waited for, which does not depend on a size.

    Raises:
        TimeoutError: it took longer. The message says how long, and what that was based on.
    """
    loop = asyncio.get_running_loop()
    limit = FairTimeout(deadlines.of(endpoint, phase, 0, loop.time()), deadlines.lower)
    try:
        async with limit:
            yield
            waited = limit.waited
    except TimeoutError:
        if limit.expired:
            deadlines.missed(endpoint, phase, 0, loop.time())
        raise
    deadlines.saw(endpoint, phase, 0, waited, loop.time())


def _told(seconds: float) -> str:
    return f"{round(seconds, 1):g} s"
