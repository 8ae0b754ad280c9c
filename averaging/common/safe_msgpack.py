"""Reading msgpack of strangers without first becoming large, or slow.

A few bytes can ask for lists of many empty lists. And keys of maps can be chosen so that their hashes clash: each then
takes as long as there are keys before it. The hashes of text and of bytes are random in each process; a map with
integers as keys takes a bounded number of them; other keys are refused.

Pure.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import msgpack

MAX_DEPTH = 64
"""Lists and maps inside each other."""

MAX_INTEGER_KEYS = 1024
"""Integers among the keys of one map. Those of 64 bits can be chosen so that each is compared with a third of the
others: 80,000 in one map took 8 s. Of so few it costs about as much as it does to check them."""

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


_NO_MAP = -1

_NO_KEY, _TEXT, _INTEGER = range(3)
_KEYS = bytes(
    _INTEGER
    if first <= 0x7F or first >= 0xE0 or 0xCC <= first <= 0xD3
    else _TEXT
    if 0xA0 <= first <= 0xBF or first in _COUNTED
    else _NO_KEY
    for first in range(256)
)
"""What an item that begins with this byte is as a key; text stands for bytes, too."""


def unpack(packed: bytes, max_items: int) -> Any:
    """What msgpack reads there, in a time that is at most proportional to the number of bytes.

    Args:
        packed: bytes from anybody.
        max_items: numbers, texts, lists and so on, at any depth, that it may consist of.

    Raises:
        ValueError: it is not msgpack, has more items or is deeper than `MAX_DEPTH`, or a map has a key that is neither
            text, bytes nor an integer, or more integers than `MAX_INTEGER_KEYS`; nothing was allocated for it then.
    """
    _check(packed, max_items)
    try:
        return msgpack.unpackb(packed, strict_map_key=False)
    except msgpack.UnpackException as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def check_keys(value: object) -> None:
    """Whether others read the dicts in `value`, at any depth, once msgpack has packed it, which it has to be able to.

    Raises:
        ValueError: they do not; it names the key.
    """
    if isinstance(value, dict):
        integers = 0
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, str | bytes | int):
                raise ValueError(f"a dict has the key {key!r:.100}; keys can be text, bytes or integers")
            integers += isinstance(key, int)
            check_keys(item)
        if integers > MAX_INTEGER_KEYS:
            raise ValueError(f"a dict has {_too_many(integers)}; use text for them")
    elif isinstance(value, list | tuple):
        for item in value:
            check_keys(item)


def is_number(value: object) -> TypeGuard[float]:
    """Whether what was read is a finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(packed: bytes, max_items: int) -> None:
    """Goes over the items without making them."""
    place, items = 0, 1
    left, integers = [1], [_NO_MAP]  # of each list or map that is open: items still to come, integers among its keys
    while left:
        if not left[-1]:
            left.pop()
            integers.pop()
            continue
        if place >= len(packed):
            raise ValueError("it is cut short")
        first = packed[place]
        if integers[-1] != _NO_MAP and left[-1] % 2 == 0:
            kind = _KEYS[first]
            if kind == _NO_KEY:
                raise ValueError("a map has a key that is neither text, bytes nor an integer")
            if kind == _INTEGER:
                integers[-1] += 1
                if integers[-1] > MAX_INTEGER_KEYS:
                    raise ValueError(f"a map has {_too_many(integers[-1])}")
        left[-1] -= 1
        place, inside = _step(packed, place)
        items += inside
        if items > max_items:
            raise ValueError(f"it has more than {max_items} items")
        if inside:
            if len(left) > MAX_DEPTH:
                raise ValueError(f"it is deeper than {MAX_DEPTH}")
            left.append(inside)
            integers.append(0 if first >> 4 == 0x8 or first in _MAPS else _NO_MAP)


def _too_many(integers: int) -> str:
    return f"{integers} integers as keys, more than {MAX_INTEGER_KEYS}"


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
