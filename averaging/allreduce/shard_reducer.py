"""The average of one member's shard, part by part, from senders that may be dropped. Pure."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from averaging.errors import ProtocolViolationError
from averaging.protocol import Aggregation, AggregationKind
from averaging.tensors import Contribution

# The reducer of a part takes the contributions to it until all have arrived: `add(values, weight, place, spare=…)`
# and, once, `finish()`. Weights are above 0; `place` is that of the member in the group's order, this peer last.
# Values may be kept until `finish`, so the caller must not write to them. Nor does the reducer, unless they are spare:
# then it may return them as the average.
AnyReducer: TypeAlias = "MeanReducer | SparseReducer | RobustReducer"


class ShardReducer:
    """Combines the contributions to a shard as they arrive; `reducer_of` creates the reducer of a part.

    A part is complete when every sender that is not dropped has delivered it. A dropped sender stays in the parts it
    has delivered and is left out of the others. `sizes` are the elements of each part, in order; `weights` those of
    every sender whose parts come over the network, in the group's order.
    """

    def __init__(
        self,
        sizes: list[int],
        weights: Mapping[str, float],
        reducer_of: Callable[[int], AnyReducer] = lambda _: MeanReducer(),
    ) -> None:
        self._sizes = sizes
        self._weights = dict(weights)
        self._places = {name: place for place, name in enumerate(weights)}
        self._next = dict.fromkeys(weights, 0)  # number of the part that each sender delivers next
        self._reducer_of = reducer_of
        self._parts: dict[int, AnyReducer] = {}  # those with a contribution
        self._completed = 0

    def add(self, sender: str, values: Any, *, spare: bool = False) -> None:
        """Adds the next part of a sender that has not been dropped; see `AnyReducer` for `values` and `spare`.

        Raises:
            ProtocolViolationError: the shape is wrong, or the shard has no further part.
        """
        number = self._next[sender]
        if number >= len(self._sizes):
            raise ProtocolViolationError(f"sent more than the {len(self._sizes)} parts of this shard", sender)
        if tuple(values.shape) != (self._sizes[number],):
            raise ProtocolViolationError(
                f"{sender} sent part {number} with shape {list(values.shape)} instead of [{self._sizes[number]}]"
            )
        self._next[sender] = number + 1
        self._add(number, values, self._weights[sender], self._places[sender], spare)

    def drop(self, sender: str) -> None:
        self._next.pop(sender, None)

    def take_complete(self) -> range:
        """The parts that have become complete since the last call, in order."""
        # Senders deliver in order.
        reached = min(self._next.values(), default=len(self._sizes))
        complete = range(self._completed, reached)
        self._completed = reached
        return complete

    def finish(self, number: int, local: Any, local_weight: float) -> Any:
        """The average of a complete part, which is released; None if no member with a weight above 0 contributed.

        `local` is this member's own contribution, like those of others; None if it has none.
        """
        if local is not None:
            self._add(number, local, local_weight, len(self._places))
        part = self._parts.pop(number, None)
        return None if part is None else part.finish()

    def _add(self, number: int, values: Any, weight: float, place: int, spare: bool = False) -> None:
        if weight == 0:
            return  # 0 times NaN would be NaN
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = self._reducer_of(number)
        part.add(values, weight, place, spare=spare)


class MeanReducer:
    """The weighted mean of a part, of which only the sum is kept."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._is_borrowed = True  # the sum is still one sender's own tensor
        # Of the contributors so far: the largest weight, and the sum of all weights relative to it. Weights are claims
        # of the members, so this must not depend on the weight of a member that has delivered nothing.
        self._unit, self._relative_weight = 0.0, 0.0

    def add(self, values: torch.Tensor, weight: float, place: int, *, spare: bool = False) -> None:
        if values.dtype not in (torch.float32, torch.float64):
            values, spare = values.to(torch.float32), True
        total, unit = self._sum, self._unit
        if total is None:
            # If it is not spare, the next addition allocates the sum, which saves a copy here.
            self._sum, self._unit, self._relative_weight, self._is_borrowed = values, weight, 1.0, not spare
            return
        # In memory that is in the processor's cache already, and was not taken for the sum alone.
        out = total if not self._is_borrowed else values if spare else None
        self._is_borrowed = False
        if weight <= unit:
            self._sum = torch.add(total, values, alpha=weight / unit, out=out)
            self._relative_weight += weight / unit
        else:
            self._sum = torch.add(values, total, alpha=unit / weight, out=out)
            self._relative_weight = 1.0 + self._relative_weight * (unit / weight)
            self._unit = weight

    def finish(self) -> torch.Tensor:
        total = torch.empty(0, device="cpu") if self._sum is None else self._sum
        return torch.div(total, self._relative_weight, out=None if self._is_borrowed else total)


# The mean of sparse contributions. All of a part are kept until it is complete, since a reply may hold them as they
# came, and since their norms are compared.


_MIN_RELATIVE_WEIGHT = 2.0**-100  # of the largest one; smaller weights could be 0 in float32


class SparseReducer:
    """Limits the norm of each contribution to the (lower) median of all that are not 0.

    So no member moves the average by more than an ordinary one, whatever values it sends. Norms are taken over the
    part, which the reducer has received, and not over the tensor, of which it would have to believe the member.
    Weights are claims as well: they decide how much of the average is whose, but not how long it is. Without `limits`
    all contributions count as they are: of VISIBLE a member may have one element of a part, and another one hundreds.
    """

    def __init__(self, *, limits: bool = True) -> None:
        self._limits = limits
        self._kept: dict[int, tuple[Contribution, float]] = {}

    def add(self, values: Contribution, weight: float, place: int, *, spare: bool = False) -> None:
        self._kept[place] = values, weight

    def finish(self) -> list[Contribution]:
        kept = [self._kept[place] for place in sorted(self._kept)]
        largest = max(weight for _, weight in kept)
        scales = [1.0] * len(kept)
        if self._limits:
            scales = limit_norms([_norm_of(contribution.part.values) for contribution, _ in kept])
        return [
            replace(contribution, weight=max(_MIN_RELATIVE_WEIGHT, weight / largest), scale=scale)
            for (contribution, weight), scale in zip(kept, scales, strict=True)
        ]


def limit_norms(norms: Sequence[float]) -> list[float]:
    """The factors that reduce norms to the lower median of those above 0."""
    above_zero = [norm for norm in norms if norm > 0]
    if not above_zero:
        return [1.0] * len(norms)
    median = statistics.median_low(above_zero)
    factors = (min(1.0, median / norm) if norm else 1.0 for norm in norms)
    # Factors below the smallest normal number have few digits, so they could be too large.
    return [factor if factor >= sys.float_info.min else 0.0 for factor in factors]


def _norm_of(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


# Robust averages of a part, on which a minority of false contributions has a bounded effect.
#
# Unlike a sum, a robust average needs all contributions to a part at once, so they are kept until the part is complete.
# The send window bounds how many parts are kept.
#
# A weight is a member's own claim. Therefore the ranks of `median` and `trimmed` count members, and weights are capped
# at the median of the contributors' weights. A member of weight 0 has no influence.
#
# Pure.


_COLUMNS = 1 << 16  # coordinates sorted at a time, to bound the memory
_MAX_NETWORK = 32  # members up to which rows are sorted by a sorting network

_MIN_WEIGHT = (
    2.0**-64
)  # relative to the median; smaller weights would be 0 in float32, and could sum to 0 after trimming

_CLIP_STEPS = 30
_CLIP_PRECISION = 1e-5  # of tau


class RobustReducer:
    """Keeps the contributions to a part and aggregates them when it is complete."""

    def __init__(self, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
        self._kept: list[tuple[float, torch.Tensor]] = []

    def add(self, values: torch.Tensor, weight: float, place: int, *, spare: bool = False) -> None:
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        self._kept.append((weight, values))

    def finish(self) -> torch.Tensor:
        return aggregate(self._aggregation, [values for _, values in self._kept], [weight for weight, _ in self._kept])


def aggregate(aggregation: Aggregation, values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """One robust aggregate of a part, 1-D, in the widest dtype of `values`; not the mean.

    `values` are one tensor per contributing member: 1-D, of one size, float32 or float64; `weights` are above 0.
    """
    counted = cap_weights(weights)
    if aggregation.kind is AggregationKind.MEDIAN:
        return _by_columns(values, lambda columns: _trimmed(columns, [1.0] * len(values), len(values)))
    if aggregation.kind is AggregationKind.TRIMMED:
        return _by_columns(values, lambda columns: _trimmed(columns, counted, int(aggregation.parameter)))
    return centered_clip(values, counted, aggregation.parameter)


def cap_weights(weights: Sequence[float]) -> list[float]:
    """The weights relative to their (lower) median, capped at it, and at least `_MIN_WEIGHT`.

    While false weights are a minority, the median is at most the largest honest weight.
    """
    median = sorted(weights)[(len(weights) - 1) // 2]
    return [max(_MIN_WEIGHT, min(weight, median) / median) for weight in weights]


def centered_clip(values: Sequence[torch.Tensor], weights: Sequence[float], tau: float) -> torch.Tensor:
    """The point v at which the pulls `w_i * (x_i - v) * min(1, tau / |x_i - v|)` cancel out.

    This is the fixed point of CenteredClip. The iteration starts at the median. Its steps are those of a weighted mean
    with the weights `w_i * min(1, tau / |x_i - v|)`, which are longer than the published ones and converge sooner. If b
    of n members are far away and the others at one point, the result is b * tau / (n - b) off that point, whatever the
    distance. Norms are taken over the part. A contribution at a distance that is not finite is ignored.

    Source:
        Karimireddy, He, Jaggi: Learning from history for Byzantine robust optimization, arXiv:2012.10333.
    """
    equal = [1.0] * len(values)
    center = _by_columns(values, lambda columns: _trimmed(columns, equal, len(values)))
    pull, step = torch.empty_like(center), torch.empty_like(center)
    for _ in range(_CLIP_STEPS):
        step.zero_()
        total = 0.0
        for contribution, weight in zip(values, weights, strict=True):
            torch.sub(contribution, center, out=pull)
            distance = float(torch.linalg.vector_norm(pull))
            if math.isfinite(distance):
                share = weight * (min(1.0, tau / distance) if distance else 1.0)
                step.add_(pull, alpha=share)
                total += share
        if not center.new_tensor(total):
            break  # all weights are 0 in this dtype
        settled = float(torch.linalg.vector_norm(step)) <= _CLIP_PRECISION * tau * total
        center.add_(step.div_(total))  # 1 / total can be more than float32 holds
        if settled:
            break
    return center


def _trimmed(columns: torch.Tensor, weights: Sequence[float], trim: int) -> torch.Tensor:
    """The weighted mean of each column (members in dim 0) without its `trim` smallest and largest values.

    At least one value is left for an odd number of members, at least two for an even number; that is the median. NaN
    counts as +infinity.
    """
    count = len(columns)
    trim = min(trim, (count - 1) // 2)
    columns = columns.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    if len(set(weights)) == 1:
        kept = _ordered(columns)[trim : count - trim]
        # Divide before the sum, which could overflow.
        return (kept / len(kept)).sum(dim=0)
    ordered, ranks = torch.sort(columns, dim=0, stable=True)
    shares = torch.tensor(weights, dtype=columns.dtype, device="cpu")[ranks[trim : count - trim]]
    return (ordered[trim : count - trim] * (shares / shares.sum(dim=0))).sum(dim=0)


def _ordered(columns: torch.Tensor) -> torch.Tensor:
    """Each column sorted. For few members, comparing whole rows is many times faster than `torch.sort`."""
    if len(columns) > _MAX_NETWORK:
        return torch.sort(columns, dim=0).values
    rows = list(columns)
    for stage in range(len(rows)):  # odd-even transposition
        for low in range(stage % 2, len(rows) - 1, 2):
            rows[low], rows[low + 1] = torch.minimum(rows[low], rows[low + 1]), torch.maximum(rows[low], rows[low + 1])
    return torch.stack(rows)


def _by_columns(values: Sequence[torch.Tensor], rule: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies a coordinate-wise rule to a bounded number of coordinates at a time."""
    is_wide = any(tensor.dtype == torch.float64 for tensor in values)
    result = torch.empty_like(values[0], dtype=torch.float64 if is_wide else torch.float32)
    for start in range(0, len(result), _COLUMNS):
        end = start + _COLUMNS
        result[start:end] = rule(torch.stack([tensor[start:end].to(result.dtype) for tensor in values]))
    return result
