"""The weighted average of one member's shard, part by part, from senders that may be dropped. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from averaging.errors import ProtocolViolationError
from averaging.protocol import Aggregation, AggregationKind


class ShardReducer:
    """Sums the parts of a shard as they arrive.

    A part is complete when every sender that is not dropped has delivered it. A dropped sender stays in the parts it
    has delivered and is left out of the others.

    Args:
        sizes: number of elements of each part, in order.
        weights: weight of every sender whose parts come over the network, by name.
    """

    def __init__(self, sizes: list[int], weights: Mapping[str, float]) -> None:
        self._sizes = sizes
        self._weights = dict(weights)
        self._next = dict.fromkeys(weights, 0)  # number of the part that each sender delivers next
        self._sums: dict[int, torch.Tensor] = {}
        self._borrowed: set[int] = set()  # parts whose sum is still one sender's own tensor
        # Per part, of its contributors so far: the largest weight, and the sum of all weights relative to it. Weights
        # are claims of the members, so this must not depend on the weight of a member that has delivered nothing.
        self._units: dict[int, float] = {}
        self._relative_weights: dict[int, float] = {}
        self._completed = 0

    def add(self, sender: str, values: torch.Tensor) -> None:
        """Adds the next part of `sender`.

        Args:
            sender: a name in `weights` that has not been dropped.
            values: 1-D, of the part's size; any floating-point dtype. The reducer may keep a reference until the part
                is finished, so the caller must not write to it. The reducer does not write to it either.

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
        self._add(number, values, self._weights[sender])

    def drop(self, sender: str) -> None:
        """Stops waiting for `sender`."""
        self._next.pop(sender, None)

    def take_complete(self) -> range:
        """The parts that have become complete since the last call, in order."""
        # Senders deliver in order.
        reached = min(self._next.values(), default=len(self._sizes))
        complete = range(self._completed, reached)
        self._completed = reached
        return complete

    def finish(self, number: int, local: torch.Tensor | None, local_weight: float) -> torch.Tensor | None:
        """Returns the average of a complete part and releases it.

        Args:
            number: the part, from `take_complete`.
            local: this member's own contribution, 1-D; None if it has none.
            local_weight: its weight.

        Returns:
            1-D, float32 or float64; None if no member with a weight above 0 contributed.
        """
        if local is not None:
            self._add(number, local, local_weight)
        weight = self._relative_weights.pop(number, None)
        self._units.pop(number, None)
        total = self._sums.pop(number, None)
        borrowed = number in self._borrowed
        self._borrowed.discard(number)
        if total is None or weight is None:
            return None
        return torch.div(total, weight, out=None if borrowed else total)

    def _add(self, number: int, values: torch.Tensor, weight: float) -> None:
        if weight == 0:
            return  # 0 times NaN would be NaN
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(torch.float32)
        total = self._sums.get(number)
        if total is None:
            self._sums[number], self._units[number], self._relative_weights[number] = values, weight, 1.0
            self._borrowed.add(number)  # the next addition allocates the sum, which saves a copy here
            return
        out = None if number in self._borrowed else total
        self._borrowed.discard(number)
        unit = self._units[number]
        if weight <= unit:
            self._sums[number] = torch.add(total, values, alpha=weight / unit, out=out)
            self._relative_weights[number] += weight / unit
        else:
            self._sums[number] = torch.add(values, total, alpha=unit / weight, out=out)
            self._relative_weights[number] = 1.0 + self._relative_weights[number] * (unit / weight)
            self._units[number] = weight


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


def reducer_for(aggregation: Aggregation, sizes: list[int], weights: Mapping[str, float]) -> ShardReducer:
    """The reducer of a shard for an aggregation rule; see `ShardReducer` for the other arguments."""
    if aggregation.kind is AggregationKind.MEAN:
        return ShardReducer(sizes, weights)
    return RobustReducer(aggregation, sizes, weights)


class RobustReducer(ShardReducer):
    """Keeps the contributions to each part and aggregates them when the part is complete."""

    def __init__(self, aggregation: Aggregation, sizes: list[int], weights: Mapping[str, float]) -> None:
        super().__init__(sizes, weights)
        self._aggregation = aggregation
        self._kept: dict[int, list[tuple[float, torch.Tensor]]] = {}

    def finish(self, number: int, local: torch.Tensor | None, local_weight: float) -> torch.Tensor | None:
        """The aggregate of a complete part, see `ShardReducer.finish`; forgets it."""
        if local is not None:
            self._add(number, local, local_weight)
        kept = self._kept.pop(number, [])
        if not kept:
            return None
        return aggregate(self._aggregation, [values for _, values in kept], [weight for weight, _ in kept])

    def _add(self, number: int, values: torch.Tensor, weight: float) -> None:
        if weight == 0:
            return  # 0 times NaN would be NaN
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        self._kept.setdefault(number, []).append((weight, values))


def aggregate(aggregation: Aggregation, values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """One robust aggregate of a part.

    Args:
        aggregation: any rule but the mean.
        values: one tensor per contributing member, at least one: 1-D, of one size, float32 or float64.
        weights: the weights of those members, above 0.

    Returns:
        1-D, in the widest dtype of `values`.
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
