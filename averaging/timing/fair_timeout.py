"""Timeouts in fair seconds, see `averaging.timing.fair_timeout`, with fixed or learned deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from averaging.timing.learned_deadlines import Deadline, Deadlines, Phase

# A clock that does not count seconds in which this process was stopped or busy against other peers. Pure.


TICKS = 8
"""Ticks of the clock per shortest deadline."""

MAX_INTERVAL = 0.25
"""Maximum seconds between two ticks."""


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


# Ends the body of a timeout before its time.


def expire(limit: asyncio.Timeout) -> None:
    """Ends the body of `limit` with a `TimeoutError` now. A body that has ended, or is ending so, is left as it is."""
    try:
        limit.reschedule(asyncio.get_running_loop().time())
    except RuntimeError:  # several observers may find a reason at the same moment
        return


MIN_TICK = 0.001
"""Minimum seconds between two ticks. Less might not change the time, which is a floating-point number."""


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
