"""Values and text that other peers may have written, made fit for JSON, terminals and notebooks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from averaging.errors import printable

MAX_DEPTH = 16
"""Deeper levels of what other members gathered are left out."""

MAX_NAMES = 4
"""More peers than this are counted, not listed."""


def plain(value: Any, depth: int = 0) -> Any:
    """A value from the network as JSON can tell it: bytes in hex, NaN and infinity as null, keys as text."""
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
    """A number of bytes."""
    if count < 1024:
        return counted(round(count), "byte")
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits: `0.4 ms`, `3 ms`, `0.53 s`, `12.1 s`, `14 min`, `3.2 h`."""
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
    """`a, b`; of many the first few and how many more. Without what a terminal would obey."""
    first = printable(", ".join(names[:MAX_NAMES]))
    return f"{first} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else first


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """A table of names and values, whatever strangers may have written into them."""

    def cell(text: object) -> str:
        return escape(printable(str(text)))

    lines = "".join(f"<tr><th>{cell(name)}</th><td>{cell(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{cell(title)}</caption>{lines}</table>"
