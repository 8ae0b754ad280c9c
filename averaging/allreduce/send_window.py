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
"""Bytes of parts that one member may have sent before their averages come, to all reducers together: a link of
1 Gbit/s and 50 ms holds 6 MiB."""

LEAST_PARTS = 3
"""Whole parts that each reducer gets in any case: one on its way there, one that is averaged, and one whose average is
on its way back."""

PATIENCE_SECONDS = 1.0
"""A part that was held back for so long is sent all the same, even if others were answered meanwhile, and so are all
after it: a reducer may answer only when it has all parts, or give up a sender that delivers nothing."""


def bytes_ahead(part_bytes: int, reducers: int) -> int:
    """How many bytes of parts without an average may be between a member and one reducer; both compute the same.

    Args:
        part_bytes: the largest size of a part on the wire.
        reducers: of the group, but for one: a member that reduces sends to no more. One that does not, a client for
            example, sends to one more, and has up to twice `AHEAD_BYTES` under way.
    """
    return max(LEAST_PARTS * part_bytes, AHEAD_BYTES // max(1, reducers))


def reach(sizes: Sequence[int], nbytes: int) -> list[int]:
    """For each number of parts that are answered, how many may be sent.

    Args:
        sizes: of a shard's parts on the wire, in order; none above `nbytes`.
        nbytes: how many bytes may await their averages, see `bytes_ahead`.

    Returns:
        One more than there are parts; the last is the number of parts.
    """
    ends = [0, *accumulate(sizes)]
    return [bisect_right(ends, done + nbytes) - 1 for done in ends]


class SendWindow:
    """Holds one stream of parts back, at its sender or where it is read.

    Args:
        reach: for each number of parts that are answered, how many may go on, see the function `reach`.
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
