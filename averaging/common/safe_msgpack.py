"""Values of strangers: msgpack as a value or a ValueError, and text that is safe for JSON and terminals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeGuard

import msgspec
from msgspec.msgpack import Decoder, Encoder, Ext

from averaging.errors import printable

MAX_DEPTH = 64  # maximum nesting of lists and maps that a peer reads

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


MAX_SHOWN_DEPTH = 16  # deeper levels are replaced by `...`
MAX_NAMES = 4  # peers listed by name; further ones are only counted


def plain(value: Any, depth: int = 0) -> Any:
    """A value from the network in a form that JSON can hold: bytes in hex, NaN and infinity as null, keys as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if depth >= MAX_SHOWN_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    return str(value)


def size(count: float) -> str:
    """A number of bytes, such as `1.5 MiB`."""
    if count < 1024:
        return counted(round(count), "byte")
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds in a suitable unit: `0.4 ms`, `3 ms`, `0.53 s`, `12.1 s`, `14 min`, `3.2 h`."""
    if 0 < seconds < 0.001:
        return f"{1000 * seconds:.1g} ms"
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(number: int, noun: str) -> str:
    """`1 round`, `2 rounds`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """`a, b`, or the first few and `and 3 more`, without control characters."""
    first = printable(", ".join(names[:MAX_NAMES]))
    return f"{first} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else first
