"""Encodes msgpack, and decodes it from untrusted peers in bounded memory and time.

A few bytes can encode lists of many empty lists. Keys of a map can be chosen so that their hashes collide, which makes
decoding quadratic. The hashes of text and bytes are randomised per process, the number of integer keys is limited, and
other keys are refused.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeGuard

import msgspec
from msgspec.msgpack import Decoder, Encoder, Ext

MAX_DEPTH = 64
"""Maximum nesting of lists and maps."""

MAX_INTEGER_KEYS = 1024
"""Maximum number of integer keys in one map. 80,000 colliding 64-bit keys in one map took 8 s to decode; at this limit
the collisions cost about as much as the check itself."""

_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **{0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8},
    **{0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17},
}
"""Payload bytes after the first byte of nil, booleans, numbers and extensions of fixed length."""

_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
"""Size of the length field after the first byte of bytes and text, of extensions, of arrays and of maps."""

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
"""Kind of key by the first byte of an item; `_TEXT` includes bytes."""


_BUILT_IN: dict[type, Callable[[Any], object]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
"""How the value of a subclass is read as that of the built-in class."""

MAX_NESTING = 512
"""Nesting of lists and dicts of the application that can be encoded. Other peers accept less, see `MAX_DEPTH`."""

_TOO_DEEP = "it is nested too deeply, or contains itself"

_PLAIN = (type(None), int, float, str, bytes, bytearray, memoryview, Ext)


def _as_built_in(value: object) -> object:
    """Converts subclasses of numbers, text and bytes, such as `numpy.float64`, which msgspec does not encode."""
    for kind, convert in _BUILT_IN.items():
        if isinstance(value, kind):
            return convert(value)
    raise TypeError(f"can not serialize {type(value).__name__!r} object")


_ENCODER, _DECODER = Encoder(enc_hook=_as_built_in), Decoder()


def pack(value: object) -> bytes:
    """Encodes a value that this library has built; equal values have equal bytes if their maps have one order.

    Raises:
        TypeError: `value` contains an object that msgpack has no form for.
        OverflowError: it contains an integer below -2^63 or above 2^64 - 1.
        ValueError: it contains text with surrogates, is nested too deeply, or contains itself.
    """
    try:
        return _ENCODER.encode(value)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def pack_user(value: object) -> bytes:
    """Like `pack`, for a value of the application: numbers, text, bytes, lists, dicts, aware datetimes and `Ext`.

    msgspec encodes more, for example a set as a list, but a receiver would then get something else than was sent.
    """
    _check_types(value, MAX_NESTING)
    return pack(value)


def _check_types(value: object, levels: int) -> None:
    if not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_types(key, levels - 1)
            _check_types(item, levels - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_types(item, levels - 1)
    elif not isinstance(value, _PLAIN) and not (isinstance(value, datetime) and value.tzinfo):
        raise TypeError(f"can not serialize {type(value).__name__!r} object")


def unpack(packed: bytes, max_items: int) -> Any:
    """Decodes msgpack in time proportional to the number of bytes.

    Args:
        packed: untrusted bytes.
        max_items: maximum number of items (numbers, texts, lists, maps ...) at all depths together.

    Returns:
        The value; a timestamp becomes a datetime, any other extension an `Ext`.

    Raises:
        ValueError: `packed` is not msgpack, has more than `max_items` items or is deeper than `MAX_DEPTH`; or a map has
            a key that is neither text, bytes nor an integer, or more integer keys than `MAX_INTEGER_KEYS`. This is
            checked before anything is allocated.
    """
    _check(packed, max_items)
    try:
        return _DECODER.decode(packed)
    except msgspec.DecodeError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def check_keys(value: object) -> None:
    """Checks that other peers accept the keys of the dicts in `value`, at any depth.

    Raises:
        ValueError: they refuse a key; the message names it.
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
    """Whether `value` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def all_numbers_finite(*values: object) -> bool:
    """Whether no number in `values`, at any depth of their lists and maps, is NaN or infinite."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)
    return True


def _check(packed: bytes, max_items: int) -> None:
    """Checks the items without creating them."""
    place, items = 0, 1
    left, integers = [1], [_NO_MAP]  # per open list or map: items still to come, and integer keys so far
    while left:
        if not left[-1]:
            left.pop()
            integers.pop()
            continue
        if place >= len(packed):
            raise ValueError("it is truncated")
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
        place, children = _skip(packed, place)
        items += children
        if items > max_items:
            raise ValueError(f"it has more than {max_items} items")
        if children:
            if len(left) > MAX_DEPTH:
                raise ValueError(f"it is deeper than {MAX_DEPTH}")
            left.append(children)
            integers.append(0 if first >> 4 == 0x8 or first in _MAPS else _NO_MAP)


def _too_many(integers: int) -> str:
    return f"{integers} integers as keys, more than {MAX_INTEGER_KEYS}"


def _skip(packed: bytes, place: int) -> tuple[int, int]:
    """Skips the item at `place`, but not the items inside a list or map.

    Returns:
        Where the next item begins, and the number of items inside this one.
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
