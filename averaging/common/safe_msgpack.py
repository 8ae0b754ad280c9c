"""Encodes msgpack, and decodes what other peers have packed: whatever they send is a value or a ValueError. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeGuard

import msgspec
from msgspec.msgpack import Decoder, Encoder, Ext

MAX_DEPTH = 64
"""Maximum nesting of lists and maps that a peer reads."""

_BUILT_IN: dict[type, Callable[[Any], object]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}
"""How the value of a subclass is read as that of the built-in class."""

_TOO_DEEP = f"it is deeper than {MAX_DEPTH}, or contains itself"

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
    check_portable(value)
    return pack(value)


def unpack(packed: bytes) -> Any:
    """Decodes msgpack of another peer; the caller bounds its length.

    Returns:
        The value; a timestamp becomes a datetime, any other extension an `Ext`.

    Raises:
        ValueError: `packed` is not msgpack, is deeper than `MAX_DEPTH`, or a map has a key that is neither text, bytes
            nor an integer.
    """
    try:
        value = _DECODER.decode(packed)
    except msgspec.DecodeError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_portable(value)
    return value


def check_portable(value: object, levels: int = MAX_DEPTH) -> None:
    """Raises a TypeError or ValueError unless every peer accepts `value` and reads what was written."""
    if not isinstance(value, dict | list | tuple):
        if not isinstance(value, _PLAIN) and not (isinstance(value, datetime) and value.tzinfo):
            raise TypeError(f"can not serialize {type(value).__name__!r} object")
        return
    if value and not levels:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | bytes | int):
                raise ValueError(f"a dict has the key {key!r:.100}; keys can be text, bytes or integers")
    for item in value.values() if isinstance(value, dict) else value:
        check_portable(item, levels - 1)


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
