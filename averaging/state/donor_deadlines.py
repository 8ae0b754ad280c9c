"""How long a donor may be silent during a download, and how slow, by what was learned of it, of others, and here."""

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
"""A donor that lives, but has not begun within the longest deadline, gets so many times that to begin: before its first
message it copies its state and takes the digests of all of it, 0.6 s for a GiB on an idle AMD EPYC."""

WINDOW = 32
"""The longest wait among so many chunks is learned, so that a long download learns before it is over."""


class DonorDeadlines:
    """The deadlines of one download from several donors.

    A donor may have good reasons to take longer than ever, such as a state that it has to copy first. So one that was
    given up before the longest deadline is owed the longest one, should no other donor deliver; and one that lives,
    but has not begun within that, `PREPARING` times as long to begin. One that was too slow is asked again, should
    nobody be faster, and then for less, down to the least.

    Args:
        deadlines: learned so far, and learned further here.

    Attributes:
        times_slow: how often each donor was too slow.
        too_slow: those that were so when the least was expected of them.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._owed: Counter[str] = Counter()  # to each donor: how many times the longest deadline, to begin
        self._given: Counter[str] = Counter()
        self._less: set[str] = set()  # those that are owed an attempt in which less is expected
        self.times_slow: Counter[str] = Counter()
        self.too_slow: set[str] = set()

    def silence(self, donor: str, *, alone: bool = False) -> DonorSilence:
        """Keeps the deadlines while `donor` is read; the longest ones if they are owed to it.

        If it is `alone`, there is no other donor for which it could be left.
        """
        times = self._given[donor] = self._owed[donor]
        self._less.discard(donor)
        rate = expected_rate(self._deadlines.rates.best(_now()), self.times_slow[donor], alone=alone)
        return DonorSilence(self._deadlines, donor, times, rate, given_up=self._given_up, was_slow=self._was_slow)

    def _given_up(self, donor: str) -> None:
        self._owed[donor] = max(1, self._owed[donor])

    def _was_slow(self, donor: str, rate: Rate) -> None:
        self._given_up(donor)
        self.times_slow[donor] += 1
        (self.too_slow if rate.is_least else self._less).add(donor)

    def is_preparing(self, donor: str) -> None:
        """It lives, but has not begun."""
        self._owed[donor] = PREPARING

    @property
    def to_answer(self) -> float:
        """Seconds in which a donor answers whether it lives."""
        return self._deadlines.upper / 3

    def owes(self, donor: str) -> bool:
        """Whether `donor` was not asked again since it was given up early, was too slow, or found to be preparing."""
        return donor in self._less or self._owed[donor] > self._given[donor]


class DonorSilence:
    """Keeps the deadlines and the rate of one donor's messages; a context manager around the reading of them.

    Args:
        deadlines: learned so far, and learned further here.
        times: how many times the longest deadline it gets to begin, and the longest then, whatever was learned; 0 for
            what was learned.
        rate: what is expected of it.
        given_up: told of the donor if it is given up before the longest deadline.
        was_slow: told of the donor if it is given up since it delivered too little.

    Raises:
        TimeoutError: it was silent for too long, or delivered too little; the message says for how long, or how much,
            and what that was based on.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        donor: str,
        times: int,
        rate: Rate,
        *,
        given_up: Callable[[str], object],
        was_slow: Callable[[str, Rate], object],
    ) -> None:
        self._deadlines, self._donor, self._times, self._given_up = deadlines, donor, times, given_up
        self._rate, self._was_slow = rate, was_slow
        self._flow: Throughput | None = None  # from the first message on
        self._heard_at, self._by_flow = 0.0, False  # in fair seconds; whether the present wait ends by the flow
        self._phase = Phase.STATE
        self._count, self._windows = 0, 0  # chunks in this window, and windows before it
        self._longest, self._ever = 0.0, 0.0  # waits for a chunk in this window, and in this download
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
        slow = self._limit.expired and self._by_flow
        if slow:
            self._was_slow(self._donor, self._rate)
        elif self._limit.expired:
            self._deadlines.missed(self._donor, self._phase, 0, _now())
            if self._limit.deadline.seconds < self._deadlines.upper:
                self._given_up(self._donor)
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            if slow:
                raise TimeoutError(str(self._flow)) from None
            raise

    def heard(self) -> None:
        """A message came."""
        waited = self._limit.waited
        self._heard_at += waited
        if self._phase is Phase.STATE:
            self._deadlines.saw(self._donor, Phase.STATE, 0, waited, _now())
            self._phase = Phase.CHUNK
            self._deadline = self._look_up()
        else:
            self._count += 1
            self._longest = max(self._longest, waited)
            self._ever = max(self._ever, waited)
            if self._count == WINDOW:
                self._end_window()
                self._deadline = self._look_up()
        self._limit.restart(self._bounded())

    def delivered(self, left: int) -> None:
        """It was as announced; so many bytes are left, as `StateReader.left` counts them."""
        if self._flow is None:
            self._flow = Throughput(self._rate, self._deadlines.upper, left, self._heard_at)
            logger.debug(
                "%s sends its state and has %.3g s for it, at %s", self._donor, self._flow.limit, self._rate.basis
            )
        self._flow.heard(left, self._heard_at)
        silence, enough = self._bounded(), self._flow.time_left(self._heard_at)
        self._by_flow = enough < silence.seconds
        self._limit.deadline = Deadline(enough, self._rate.basis) if self._by_flow else silence

    def finished(self) -> None:
        """All is there."""
        if self._flow is not None:
            self._deadlines.rates.saw(self._flow.delivered, self._flow.seconds(self._heard_at), _now())

    def _end_window(self) -> None:
        self._deadlines.saw(self._donor, Phase.CHUNK, 0, self._longest, _now())
        self._windows += 1
        self._count, self._longest = 0, 0.0

    def _look_up(self) -> Deadline:
        if self._times:
            longest = self._deadlines.longest(self._phase)
            if self._phase is Phase.STATE and self._times > 1:
                return Deadline(self._times * longest.seconds, f"{self._times} × {longest.basis}")
            return longest
        return self._deadlines.of(self._donor, self._phase, 0, _now())

    def _bounded(self) -> Deadline:
        """What was learned, but never less than it has just taken."""
        seconds = min(LATEST_FACTOR * self._ever, self._deadlines.upper)
        if seconds <= self._deadline.seconds:
            return self._deadline
        return Deadline(seconds, f"{LATEST_FACTOR:g} × its longest of {self._ever:.2g} s in this download")


def _now() -> float:
    return asyncio.get_running_loop().time()
