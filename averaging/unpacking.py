"""Reading msgpack of strangers without first becoming large: a few bytes can ask for lists of many empty lists."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import msgpack

MAX_DEPTH = 64
"""Lists and maps inside each other."""

_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **{0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
    **{0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
}
"""Bytes that follow the first byte of nil, booleans, numbers and extensions of fixed length."""

_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
"""Bytes of the length that follows the first byte of bytes and text, of extensions, of arrays and of maps."""


def unpack(packed: bytes, max_items: int) -> Any:
    """What msgpack reads there.

    Args:
        packed: bytes from anybody.
        max_items: numbers, texts, lists and so on, at any depth, that it may consist of.

    Raises:
        ValueError: it is not msgpack, has more items or is deeper than `MAX_DEPTH`; nothing was allocated for it then.
    """
    _check(packed, max_items)
    try:
        return msgpack.unpackb(packed, strict_map_key=False)
    except (TypeError, msgpack.UnpackException) as error:  # an unhashable key, for one
        raise ValueError(f"{type(error).__name__}: {error}") from None


def is_number(value: object) -> TypeGuard[float]:
    """Whether what was read is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(packed: bytes, max_items: int) -> None:
    """Goes over the items without making them."""
    place, items, left = 0, 1, [1]  # left: items still to come of each list or map that is open
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        if place >= len(packed):
            raise ValueError("it is cut short")
        place, inside = _step(packed, place)
        items += inside
        if items > max_items:
            raise ValueError(f"it has more than {max_items} items")
        if inside and len(left) > MAX_DEPTH:
            raise ValueError(f"it is deeper than {MAX_DEPTH}")
        left.append(inside)


def _step(packed: bytes, place: int) -> tuple[int, int]:
    """Goes over the item that begins at `place`.

    Returns:
        Where the next one begins, which may be the first inside of this one; and how many are inside of this one.
    """
    first, place = packed[place], place + 1
    if first <= 0x7F or first >= 0xE0:
        return place, 0
    if first <= 0x8F:
        return place, 2 * (first & 0x0F)
    if first <= 0x9F:
        return place, first & 0x0F
    if first <= 0xBF:
        return place + (first & 0x1F), 0
    if first in _FIXED:
        return place + _FIXED[first], 0
    for kinds, extra, per_length in ((_COUNTED, 0, 0), (_EXTENSIONS, 1, 0), (_ARRAYS, 0, 1), (_MAPS, 0, 2)):
        if width := kinds.get(first):
            length = int.from_bytes(packed[place : place + width], "big")
            place += width
            return (place, per_length * length) if per_length else (place + length + extra, 0)
    raise ValueError(f"no item begins with {first:#x}")
