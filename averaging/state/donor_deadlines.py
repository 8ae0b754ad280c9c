"""How long a donor may be silent during a download, and how slow, learned from this and earlier downloads."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from averaging.deadlines.fair_timeout import FairTimeout
from averaging.deadlines.learned_deadlines import LATEST_FACTOR, Deadline, Deadlines, Phase
from averaging.state.throughput import Rate, Throughput, expected_rate

logger = logging.getLogger("averaging.state")

PREPARING = 10
"""Factor on the maximum deadline for the first message of a donor that answers calls but has not begun to send. It may
be copying a large state and computing its digests, 0.6 s for a GiB on an idle AMD EPYC."""

WINDOW = 32
"""Chunks per window. The longest wait of each window is learned, so a long download adapts before it ends."""


class DonorDeadlines:
    """The deadlines of one download from several donors.

    A donor may be slower than before for a good reason, such as a state that it must copy first. If no other donor
    delivers, it is asked again: with the maximum deadline if it was given up at a shorter one, with `PREPARING` times
    that if it answers calls but has not begun to send, and with a lower expected rate if it was too slow.

    Args:
        deadlines: learned deadlines of the donors, updated by this download.

    Attributes:
        times_slow: how often each donor was too slow.
        too_slow: donors that were slower than the minimum rate.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._next_factor: Counter[str] = Counter()  # by donor: factor on the maximum deadline, 0 = learned deadline
        self._last_factor: Counter[str] = Counter()
        self._retry_slower: set[str] = set()  # donors to be asked again with a lower expected rate
        self.times_slow: Counter[str] = Counter()
        self.too_slow: set[str] = set()

    def watch(self, donor: str, *, alone: bool = False) -> DonorWatch:
        """Returns a context manager that enforces the deadlines while `donor` is read.

        Set `alone` if no other donor is left to try; only the minimum rate is enforced then.
        """
        factor = self._last_factor[donor] = self._next_factor[donor]
        self._retry_slower.discard(donor)
        rate = expected_rate(self._deadlines.rates.best(_now()), self.times_slow[donor], alone=alone)
        return DonorWatch(
            self._deadlines, donor, factor, rate, on_early_timeout=self._on_early_timeout, on_slow=self._on_slow
        )

    def _on_early_timeout(self, donor: str) -> None:
        self._next_factor[donor] = max(1, self._next_factor[donor])

    def _on_slow(self, donor: str, rate: Rate) -> None:
        self._on_early_timeout(donor)
        self.times_slow[donor] += 1
        (self.too_slow if rate.is_minimum else self._retry_slower).add(donor)

    def set_preparing(self, donor: str) -> None:
        """Records that `donor` answers calls but has not begun to send."""
        self._next_factor[donor] = PREPARING

    @property
    def ping_timeout(self) -> float:
        """Seconds within which a donor must answer whether it is alive."""
        return self._deadlines.upper / 3

    def should_retry(self, donor: str) -> bool:
        """Whether `donor` may succeed with a longer deadline or a lower expected rate than last time."""
        return donor in self._retry_slower or self._next_factor[donor] > self._last_factor[donor]


class DonorWatch:
    """Enforces the deadlines and the rate of one donor; a context manager around the reading of its messages.

    Args:
        deadlines: learned deadlines, updated by this download.
        factor: factor on the maximum deadline for the first message, 1 for later ones; 0 selects learned deadlines.
        rate: expected rate.
        on_early_timeout: called with the donor if it is given up before the maximum deadline.
        on_slow: called with the donor and `rate` if it is given up because it delivered too little.

    Raises:
        TimeoutError: the donor was silent for too long or delivered too little. The message has the figures.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        donor: str,
        factor: int,
        rate: Rate,
        *,
        on_early_timeout: Callable[[str], object],
        on_slow: Callable[[str, Rate], object],
    ) -> None:
        self._deadlines, self._donor, self._factor, self._rate = deadlines, donor, factor, rate
        self._on_early_timeout, self._on_slow = on_early_timeout, on_slow
        self._throughput: Throughput | None = None  # from the first message on
        self._last_message_at = 0.0  # in fair seconds
        self._rate_decides = False  # whether the rate ends the present wait before the deadline does
        self._phase = Phase.STATE
        self._count, self._windows = 0, 0  # chunks in this window, and windows before it
        self._max_wait_in_window, self._max_wait = 0.0, 0.0  # for a chunk
        self._deadline = self._look_up()
        self._limit = FairTimeout(self._deadline, deadlines.lower)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._count and not self._windows:
            self._end_window()
        slow = self._limit.expired and self._rate_decides
        if slow:
            self._on_slow(self._donor, self._rate)
        elif self._limit.expired:
            self._deadlines.record_miss(self._donor, self._phase, 0, _now())
            if self._limit.deadline.seconds < self._deadlines.upper:
                self._on_early_timeout(self._donor)
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            if slow:
                raise TimeoutError(str(self._throughput)) from None
            raise

    def message_received(self) -> None:
        """Restarts the deadline of the next message."""
        waited = self._limit.waited
        self._last_message_at += waited
        if self._phase is Phase.STATE:
            self._deadlines.record(self._donor, Phase.STATE, 0, waited, _now())
            self._phase = Phase.CHUNK
            self._deadline = self._look_up()
        else:
            self._count += 1
            self._max_wait_in_window = max(self._max_wait_in_window, waited)
            self._max_wait = max(self._max_wait, waited)
            if self._count == WINDOW:
                self._end_window()
                self._deadline = self._look_up()
        self._limit.restart(self._bounded())

    def delivered(self, left: int) -> None:
        """Updates the rate after a valid message; `left` is the present `StateAssembler.left`."""
        now = self._last_message_at
        if self._throughput is None:
            self._throughput = Throughput(self._rate, self._deadlines.upper, left, now)
            limit = self._throughput.limit
            logger.debug("%s sends its state and has %.3g s for it, at %s", self._donor, limit, self._rate.basis)
        self._throughput.update(left, now)
        silence, time_left = self._bounded(), self._throughput.time_left(now)
        self._rate_decides = time_left < silence.seconds
        self._limit.deadline = Deadline(time_left, self._rate.basis) if self._rate_decides else silence

    def finished(self) -> None:
        """Learns the rate of a complete download."""
        if self._throughput is not None:
            seconds = self._throughput.seconds(self._last_message_at)
            self._deadlines.rates.record(self._throughput.delivered, seconds, _now())

    def _end_window(self) -> None:
        self._deadlines.record(self._donor, Phase.CHUNK, 0, self._max_wait_in_window, _now())
        self._windows += 1
        self._count, self._max_wait_in_window = 0, 0.0

    def _look_up(self) -> Deadline:
        if self._factor:
            longest = self._deadlines.longest(self._phase)
            if self._phase is Phase.STATE and self._factor > 1:
                return Deadline(self._factor * longest.seconds, f"{self._factor} × {longest.basis}")
            return longest
        return self._deadlines.of(self._donor, self._phase, 0, _now())

    def _bounded(self) -> Deadline:
        """The learned deadline, extended if this download has already had longer waits."""
        seconds = min(LATEST_FACTOR * self._max_wait, self._deadlines.upper)
        if seconds <= self._deadline.seconds:
            return self._deadline
        return Deadline(seconds, f"{LATEST_FACTOR:g} × its longest of {self._max_wait:.2g} s in this download")


def _now() -> float:
    return asyncio.get_running_loop().time()
