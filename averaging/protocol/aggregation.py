"""The rule by which contributions to a part are averaged: the mean, or a robust alternative.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from averaging.errors import ConfigError

MAX_TRIM = 4096


class AggregationKind(StrEnum):
    """The aggregation rules, see docs/operate/robust.md."""

    MEAN = "mean"
    """The weighted mean."""
    MEDIAN = "median"
    """The median of each coordinate."""
    TRIMMED = "trimmed"
    """The weighted mean of each coordinate without its F smallest and F largest values."""
    CLIP = "clip"
    """CenteredClip: a mean in which each contribution's distance from the result is clipped to tau."""


class ReplyForm(StrEnum):
    """What a reducer returns for a part."""

    AVERAGE = "average"
    """The average, which all members adopt byte for byte."""
    DELTA = "delta"
    """The average minus the sender's part. The sender adds it to its tensor."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """A rule and its parameter; part of what a group agrees on.

    Attributes:
        kind: the rule.
        parameter: F of `trimmed`, tau of `clip` (a distance, in the tensors' own unit); 0 for the others.
    """

    kind: AggregationKind = AggregationKind.MEAN
    parameter: float = 0.0

    def __str__(self) -> str:
        if self.kind in _PARAMETERS:
            return f"{self.kind.value}:{self.parameter!r}".removesuffix(".0")
        return self.kind.value


MEAN = Aggregation()

_PARAMETERS = {AggregationKind.TRIMMED: "F", AggregationKind.CLIP: "TAU"}


def parse_aggregation(text: str) -> Aggregation:
    """Parses `mean`, `median`, `trimmed:F` or `clip:TAU`.

    Raises:
        ConfigError: `text` is none of them.
    """
    name, colon, number = text.partition(":")
    try:
        kind = AggregationKind(name)
        parameter = float(number) if colon else 0.0
    except ValueError:
        raise ConfigError(f"aggregation {text!r} must be mean, median, trimmed:F or clip:TAU") from None
    if bool(colon) != (kind in _PARAMETERS):
        problem = f"needs a number: {name}:{_PARAMETERS[kind]}" if kind in _PARAMETERS else "takes no number"
        raise ConfigError(f"aggregation {text!r}: {name} {problem}")
    if kind is AggregationKind.TRIMMED and not (parameter.is_integer() and 1 <= parameter <= MAX_TRIM):
        raise ConfigError(
            f"aggregation {text!r}: F, the number of values to drop on each side, must be 1 to {MAX_TRIM}"
        )
    if kind is AggregationKind.CLIP and not (math.isfinite(parameter) and parameter > 0):
        raise ConfigError(f"aggregation {text!r}: TAU, the clipping distance, must be finite and above 0")
    return Aggregation(kind, parameter)
