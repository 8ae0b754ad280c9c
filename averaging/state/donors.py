"""State donors: their declarations in discovery, and how long a newcomer waits for one."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from averaging.common import is_number, pack, unpack
from averaging.discovery import Discovery, PublishedRecord
from averaging.protocol import donors_key
from averaging.timing import SLOW_LINK, Deadline, FairTimeout

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


# How long a donor may be silent, and how slow while others are left to ask.


PREPARING = 10
"""Times `silence` for the first message of a donor that answers calls but has not begun to send. It may be copying a
large state and computing its digests, 0.6 s for a GiB on an idle AMD EPYC. While others can be asked, a donor has the
same part of `silence`: it may be stopped, and this peer would stand still."""

LEAST_RATE = SLOW_LINK / 8
"""Bytes per second below which the next donor is asked. What came is kept, and the last one may be as slow as it is."""

PER_MESSAGE = 1 << 10
"""Bytes for which a smaller message counts: it takes time as well."""


class DonorWatch:
    """Ends the reading of a donor that is silent for too long, or too slow; a context manager around it.

    Args:
        silence: seconds until each message.
        first: seconds until the first message.
        least_rate: bytes per second that are expected in each `silence` seconds after the first message; 0 for none.

    Raises:
        TimeoutError: the donor was silent for too long or delivered too little. The message has the figures.
    """

    def __init__(self, silence: float, *, first: float, least_rate: float) -> None:
        self._silence, self._rate = Deadline(silence, "timeout"), least_rate
        basis = "timeout" if first == silence else f"{first / silence:g} × timeout"
        self._limit = FairTimeout(Deadline(first, basis), silence)
        self._began: float | None = None  # the window of the rate, in fair seconds of the messages so far
        self._now, self._delivered = 0.0, 0

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._limit.__aexit__(kind, error, traceback)

    def received(self, nbytes: int) -> None:
        """Restarts the deadline after a message.

        Raises:
            TimeoutError: too little has come in the last `silence` seconds.
        """
        self._now += self._limit.waited
        self._limit.restart(self._silence)
        if self._began is None:
            self._began = self._now
        self._delivered += max(nbytes, PER_MESSAGE)
        if (seconds := self._now - self._began) < self._silence.seconds:
            return
        if self._delivered < (expected := self._rate * seconds):
            raise TimeoutError(
                f"delivered {self._delivered} bytes in {seconds:.1f} s, expected at least {expected:.0f} while others "
                "can be asked"
            )
        self._began, self._delivered = self._now, 0
