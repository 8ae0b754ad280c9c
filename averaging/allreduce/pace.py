"""How far a member runs ahead of the averages of its parts.

The transport's back-pressure alone would let it fill every buffer between itself and a reducer that waits for somebody
else, and its faster streams take the link from its slower ones, for which all wait in the end.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

AHEAD_BYTES = 8 << 20
"""Of one member to all reducers together, parts that have no average yet: a link of 1 Gbit/s and 50 ms holds 6 MiB."""

LEAST_PARTS = 3
"""Whole parts to each reducer in any case: one on its way there, one that is averaged, one whose average comes back."""

PATIENCE_SECONDS = 1.0
"""No part is held back for longer, not even while smaller ones are answered; the rest is sent all the same then. A
reducer may answer only when it has it all, or give up a sender that delivers nothing."""


def bytes_ahead(part_bytes: int, reducers: int) -> int:
    """Of parts without an average between a member and one reducer, on the wire; the same for both of them.

    Args:
        part_bytes: of a part on the wire, at most.
        reducers: in the group, besides a member that reduces. One that does not, a client for example, has one more of
            them, and with that up to twice `AHEAD_BYTES` under way.
    """
    return max(LEAST_PARTS * part_bytes, AHEAD_BYTES // max(1, reducers))


def reach(sizes: Sequence[int], nbytes: int) -> list[int]:
    """For each number of parts that are answered, how many may be sent.

    Args:
        sizes: of a shard's parts on the wire, in order; none above `nbytes`.
        nbytes: that may await their averages, see `bytes_ahead`.

    Returns:
        One more than there are parts; the last is the number of parts.
    """
    ends = [0, *accumulate(sizes)]
    return [bisect_right(ends, done + nbytes) - 1 for done in ends]


class Pace:
    """Holds one stream of parts back, at its sender or where it is read.

    Args:
        reach: see above.
        patience: seconds for which one part is held back at most, and then no other any longer; None for ever.
    """

    def __init__(self, reach: Sequence[int], patience: float | None = None) -> None:
        self._reach, self._patience = reach, patience
        self._answered = 0
        self._moved = asyncio.Event()
        self._kept = True

    async def wait(self, number: int) -> None:
        """Returns when the part with that number may go on."""
        if not self._holds(number):
            return
        try:
            async with asyncio.timeout(self._patience):
                while self._holds(number):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            self._kept = False

    def _holds(self, number: int) -> bool:
        return self._kept and number >= self._reach[self._answered]

    def answered(self) -> None:
        """One more part has its average."""
        self._answered += 1
        self._moved.set()
