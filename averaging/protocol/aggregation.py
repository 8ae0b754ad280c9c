"""How the contributions to a part become one: their mean, or something that a few false ones cannot carry away.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from averaging.errors import ConfigError

MAX_TRIM = 4096


class Kind(StrEnum):
    """The rules, see docs/robust.md."""

    MEAN = "mean"
    """The weighted mean."""
    MEDIAN = "median"
    """The median of each coordinate."""
    TRIMMED = "trimmed"
    """The mean of each coordinate without its F smallest and F largest values."""
    CLIP = "clip"
    """CenteredClip: the point to which the contributions pull equally, none of them by more than tau."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A rule and its parameter; part of what a group agrees on.

    Attributes:
        kind: the rule.
        parameter: F of `trimmed`, tau of `clip` (a distance, in the tensors' own unit); 0 for the others.
    """

    kind: Kind = Kind.MEAN
    parameter: float = 0.0

    def __str__(self) -> str:
        if self.kind in _TAKES:
            return f"{self.kind.value}:{self.parameter!r}".removesuffix(".0")
        return self.kind.value


MEAN = Aggregation()

_TAKES = {Kind.TRIMMED: "F", Kind.CLIP: "TAU"}


def parse_aggregation(text: str) -> Aggregation:
    """Reads `mean`, `median`, `trimmed:F` or `clip:TAU`.

    Raises:
        ConfigError: it is none of them.
    """
    name, colon, number = text.partition(":")
    try:
        kind = Kind(name)
        parameter = float(number) if colon else 0.0
    except ValueError:
        raise ConfigError(f"aggregation {text!r} must be mean, median, trimmed:F or clip:TAU") from None
    if bool(colon) != (kind in _TAKES):
        told = f"needs a number: {name}:{_TAKES[kind]}" if kind in _TAKES else "takes no number"
        raise ConfigError(f"aggregation {text!r}: {name} {told}")
    if kind is Kind.TRIMMED and not (parameter.is_integer() and 1 <= parameter <= MAX_TRIM):
        raise ConfigError(f"aggregation {text!r}: F, how many to leave out on each side, must be from 1 to {MAX_TRIM}")
    if kind is Kind.CLIP and not (math.isfinite(parameter) and parameter > 0):
        raise ConfigError(f"aggregation {text!r}: TAU, the distance to which a pull is clipped, must be above 0")
    return Aggregation(kind, parameter)
