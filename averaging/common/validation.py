"""Validates values that users pass as options or arguments. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeGuard, TypeVar

from averaging.errors import ConfigError

E = TypeVar("E", bound=Enum)

MAX_COUNT = 1 << 62
"""Maximum count that is accepted from other peers, so that larger ones still fit into the 64 bits of messages."""


def one_of(kind: type[E], value: E | str, option: str) -> E:
    """Returns the member of `kind` that `value` is or names; case does not matter.

    Raises:
        ConfigError: there is no such member; the message names the option and lists the members.
    """
    return named({member.name.lower(): member for member in kind}, kind, value, option)


def named(names: Mapping[str, E], kind: type[E], value: E | str, option: str) -> E:
    """Like `one_of`, with explicit lower-case names for the members.

    Raises:
        ConfigError: there is no such name.
    """
    if isinstance(value, kind):
        return value
    found = names.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{option} must be one of {', '.join(names)}, not {value!r}", option)
    return found


def check_weight(weight: float) -> float:
    """Returns `weight` as a float.

    Raises:
        ConfigError: `weight` is negative, infinite, NaN, or not a number.
    """
    if not (is_finite(weight) and weight >= 0):
        raise ConfigError(f"weight must be finite and at least 0, not {weight!r}")
    return float(weight)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an integer from 0 to `MAX_COUNT` and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
