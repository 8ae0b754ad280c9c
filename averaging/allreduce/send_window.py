"""The send window: how many parts a member sends before their averages arrive.

With the transport's flow control alone, a member would fill every buffer on the path to a reducer that waits for
another sender. Its faster streams would also take bandwidth from its slower ones, which determine the round's duration.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

WINDOW_BYTES = 8 << 20
"""Window of one member over all its reducers; a link of 1 Gbit/s and 50 ms holds 6 MiB."""

MIN_PARTS = 3
"""Minimum window per reducer, in parts: one in transit, one that is averaged, and one whose average is in transit."""

MAX_HOLD_SECONDS = 1.0
"""After a part has waited for this long, the window is abandoned: the reducer's software may answer only when it has
all parts, or drop a sender that delivers nothing."""


def window_bytes(part_bytes: int, reducers: int) -> int:
    """The window in bytes between a member and one reducer; both compute the same.

    Args:
        part_bytes: the largest size of a part on the wire.
        reducers: number of reducers in the group minus one, which is to how many a reducing member sends. A client
            sends to one more and has up to twice `WINDOW_BYTES` in transit.
    """
    return max(MIN_PARTS * part_bytes, WINDOW_BYTES // max(1, reducers))


def send_limits(sizes: Sequence[int], nbytes: int) -> list[int]:
    """For each number of answered parts, from 0 to all, how many parts may be sent.

    Args:
        sizes: sizes of a shard's parts on the wire, in order; none above `nbytes`.
        nbytes: the window, see `window_bytes`.
    """
    ends = [0, *accumulate(sizes)]
    return [bisect_right(ends, done + nbytes) - 1 for done in ends]


class SendWindow:
    """Limits one stream of parts, at its sender or at its reader.

    Args:
        send_limits: see the function `send_limits`.
        max_hold: seconds that one part waits at most; then the window is no longer enforced. None: no limit.
    """

    def __init__(self, send_limits: Sequence[int], max_hold: float | None = None) -> None:
        self._send_limits, self._max_hold = send_limits, max_hold
        self._answered = 0
        self._waiter: asyncio.Future[None] | None = None  # of the part that must wait
        self._enforced = True

    def holds(self, number: int) -> bool:
        """Whether part `number` must wait."""
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
        """Records that one more part has its average."""
        self._answered += 1
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
