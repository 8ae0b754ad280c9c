"""State donors: their declarations in discovery, and the order in which a newcomer asks them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from averaging.common import is_number, pack, unpack
from averaging.discovery import Discovery, PublishedRecord
from averaging.protocol import donors_key
from averaging.timing import LATEST_FACTOR, SLOW_LINK, Deadline, Deadlines, FairTimeout, Phase

LIFETIME, REFRESH = 60.0, 20.0
"""Seconds until a declaration expires, and between its renewals."""

PAUSE = 1.0
"""Minimum seconds between two declarations: newcomers need no record of each of several rounds in a second."""


class Donors:
    """The state donors of a run, from the view of the peer `endpoint`.

    The priority of a donor is the version of its state: the peer that has averaged most often is asked first.

    Attributes:
        declaration: this peer's own record as a donor. It is published only if this peer shares its state.
    """

    def __init__(
        self, run_id: str, endpoint: str, discovery: Discovery, version: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._key = donors_key(run_id)
        self._endpoint, self._discovery = endpoint, discovery
        self.declaration = PublishedRecord(
            discovery,
            self._key,
            endpoint,
            lambda: pack(float(version())),
            lifetime=LIFETIME,
            refresh=REFRESH,
            pause=PAUSE,
            clock=clock,
        )

    async def follow(self) -> None:
        await self._discovery.follow(self._key, keep=False)

    def others(self) -> list[tuple[float, str]]:
        """Priority and endpoint of the other donors, highest priority first."""
        entries = self._discovery.get(self._key)
        declared = [(unpack_priority(entry.value), name) for name, entry in entries.items() if name != self._endpoint]
        known = [(priority, name) for priority, name in declared if priority is not None]
        return sorted(known, key=lambda donor: (-donor[0], donor[1]))


def unpack_priority(value: bytes) -> float | None:
    """Priority in a donor's declaration; None if it is unreadable."""
    try:
        priority = unpack(value)
    except ValueError:
        return None
    return float(priority) if is_number(priority) else None


# Decides whether a donor delivers fast enough, so that a trickling donor cannot hold up a newcomer. Pure.
#
# In each window from its first message on, a donor must deliver the bytes expected in that time, or all that are left.
# So no download takes longer than `Throughput.limit`, which follows from the size of the state.


SLOW_FACTOR = 8
"""A donor is replaced if it is this many times slower than the best known donor. The factor is applied again each time
it is asked again."""

MIN_BYTES_PER_SECOND = 16 << 10
"""Bytes/s that every donor must deliver: 128 kbit/s, at which a GiB takes 18 hours. A donor also stops sending to a
reader that is slower if other readers wait.

It is two messages of 256 KiB in a `stall_timeout` of 30 s. Half of it would be silence for that long."""

PER_TENSOR = 1 << 10
"""Bytes added to the size of each tensor, because messages with few or no bytes also take time."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate expected of a donor.

    Attributes:
        bytes_per_second: lower limit.
        basis: origin of the rate, such as `1/8 of the 10 Mbit/s assumed for slow links`.
    """

    bytes_per_second: float
    basis: str

    @property
    def is_minimum(self) -> bool:
        return self.bytes_per_second <= MIN_BYTES_PER_SECOND


MIN_RATE = Rate(MIN_BYTES_PER_SECOND, f"{MIN_BYTES_PER_SECOND >> 10} KiB/s, the minimum for every donor and reader")


def expected_rate(best: float | None, times_slow: int, *, alone: bool = False) -> Rate:
    """Returns the rate expected of a donor.

    Args:
        best: best recent rate of any donor in bytes/s; None if unknown.
        times_slow: how often this donor was too slow before.
        alone: whether no other donor is left to try.
    """
    factor = SLOW_FACTOR ** (1 + times_slow)
    rate = (SLOW_LINK if best is None else best) / factor
    if alone or rate < 2 * MIN_BYTES_PER_SECOND:  # a try between the two would gain little
        return MIN_RATE
    reference = "10 Mbit/s assumed for slow links" if best is None else f"{best / 1e6:.1f} MB/s of the best donor"
    return Rate(rate, f"1/{factor} of the {reference}")


class Throughput:
    """Measures the throughput of one donor from its first message on.

    Args:
        rate: expected rate.
        window: seconds.
        left: `StateAssembler.left` at the first message.
        now: fair seconds, see `deadlines.fair_clock`.

    Attributes:
        delivered: bytes since the first message.
    """

    def __init__(self, rate: Rate, window: float, left: int, now: float) -> None:
        self._rate, self._window = rate, window
        self._first = self._start = now
        self._at_start = self._left = left
        self.delivered = 0

    @property
    def limit(self) -> float:
        return (self.delivered + self._left) / self._rate.bytes_per_second + self._window

    def update(self, left: int, now: float) -> None:
        """Counts a message; `left` is the present `StateAssembler.left`."""
        self._next_window(now)
        self.delivered += self._left - left
        self._left = left
        self._next_window(now)

    def time_left(self, now: float) -> float:
        return math.inf if self._missing <= 0 else max(0.0, self._start + self._window - now)

    def seconds(self, now: float) -> float:
        return now - self._first

    def __str__(self) -> str:
        whole = self._at_start < self._rate.bytes_per_second * self._window
        return (
            f"delivered {self._at_start - self._left} bytes in {self._window:g} s, expected at least {self._expected}"
            f"{', all that was left' if whole else ''}: {self._rate.basis}"
        )

    @property
    def _expected(self) -> int:
        return min(math.ceil(self._rate.bytes_per_second * self._window), self._at_start)

    @property
    def _missing(self) -> int:
        return self._expected - (self._at_start - self._left)

    def _next_window(self, now: float) -> None:
        """Begins the next window. Bytes that come late, but before the donor was given up, count for the old one."""
        if self._missing <= 0 and now >= self._start + self._window:
            self._start += self._window
            self._at_start = self._left


# How long a donor may be silent during a download, and how slow, learned from this and earlier downloads.


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
        self._next_factor[donor] = PREPARING

    @property
    def ping_timeout(self) -> float:
        return self._deadlines.upper / 3

    def should_retry(self, donor: str) -> bool:
        return donor in self._retry_slower or self._next_factor[donor] > self._last_factor[donor]


class DonorWatch:
    """Enforces the deadlines and the rate of one donor; a context manager around the reading of its messages.

    Args:
        deadlines: learned deadlines, updated by this download.
        factor: factor on the maximum deadline for the first message, 1 for later ones; 0 selects learned deadlines.
        rate: expected rate.
        on_early_timeout: callback with the donor if it is given up before the maximum deadline.
        on_slow: callback with the donor and `rate` if it is given up because it delivered too little.

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
