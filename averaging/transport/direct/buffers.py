"""Buffers in which frames are received, used again when nothing refers to them any more. Pure."""

from __future__ import annotations

import sys

KEPT_BYTES = 16 << 20
"""Bytes of buffers that are kept for further frames. The first use of fresh memory costs more than a copy."""

_UNUSED = 2
"""References to a kept buffer that nobody uses: that of the list, and that of the question."""


_KEPT_FROM = 64 << 10
"""Smaller buffers are not kept: memory for them is not fresh, and to search among many would cost more."""

_STEP = 4096
"""Sizes are multiples of it, so that parts with heads of different lengths share buffers."""


class Buffers:
    """The buffers of one transport.

    A view of a buffer, and a tensor that shares its memory, refer to it. So it is free when only this object does.
    Buffers beyond the limit are not kept, and are freed like any object.

    Args:
        limit: bytes to keep.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._kept: list[bytearray] = []
        self._nbytes = 0
        self._next = 0  # where the search begins: buffers mostly become free in the order in which they were taken

    def take(self, nbytes: int) -> bytearray:
        """Returns a buffer of at least `nbytes` bytes; its content is arbitrary."""
        if nbytes < _KEPT_FROM:
            return bytearray(nbytes)
        kept = self._kept
        for place in range(self._next, self._next + len(kept)):
            index = place % len(kept)
            if nbytes <= len(kept[index]) <= 2 * nbytes and sys.getrefcount(kept[index]) == _UNUSED:
                self._next = index + 1
                return kept[index]
        buffer = bytearray(-(-nbytes // _STEP) * _STEP)
        if self._make_room(len(buffer)):
            kept.append(buffer)
            self._nbytes += len(buffer)
        return buffer

    def _make_room(self, nbytes: int) -> bool:
        """Forgets unused buffers of other sizes until `nbytes` more fit; returns whether they do."""
        kept = self._kept
        for index in reversed(range(len(kept))):
            if self._nbytes + nbytes <= self._limit:
                break
            if sys.getrefcount(kept[index]) == _UNUSED:
                self._nbytes -= len(kept[index])
                del kept[index]
        return self._nbytes + nbytes <= self._limit
