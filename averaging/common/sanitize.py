"""Formats values and text, which other peers may have written, safely for JSON and terminals. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from averaging.errors import printable

MAX_DEPTH = 16
"""Deeper levels are replaced by `...`."""

MAX_NAMES = 4
"""Peers listed by name; further ones are only counted."""


def plain(value: Any, depth: int = 0) -> Any:
    """A value from the network in a form that JSON can hold: bytes in hex, NaN and infinity as null, keys as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if depth >= MAX_DEPTH:
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
