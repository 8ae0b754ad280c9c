"""Values that users give, as options or as arguments: which of a few is meant, and whether a number is one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeGuard, TypeVar

from averaging.errors import ConfigError

E = TypeVar("E", bound=Enum)

MAX_COUNT = 1 << 62
"""The highest count that is believed: those that follow still fit into messages, which hold 64 bits."""


def one_of(kind: type[E], value: E | str, option: str) -> E:
    """The member of `kind` that is meant, by itself or by its name, in capitals or not.

    Raises:
        ConfigError: there is no such member; the message names the option and lists them.
    """
    return named({member.name.lower(): member for member in kind}, kind, value, option)


def named(names: Mapping[str, E], kind: type[E], value: E | str, option: str) -> E:
    """Like `one_of`, with other names for the members.

    Raises:
        ConfigError: there is no such name.
    """
    if isinstance(value, kind):
        return value
    found = names.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{option} must be one of {', '.join(names)}, not {value!r}")
    return found


def check_weight(weight: float) -> float:
    """Returns `weight` as a float.

    Raises:
        ConfigError: it is negative, infinite, NaN, or no number.
    """
    if not (is_finite(weight) and weight >= 0):
        raise ConfigError(f"weight must be finite and at least 0, not {weight!r}")
    return float(weight)


def is_finite(value: Any) -> bool:
    """Whether a value is a number, and neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number from 0 to `MAX_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
