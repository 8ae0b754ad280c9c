"""Averages of a part that a minority of false contributions cannot carry away.

Unlike a sum these need all contributions to a part at once, so each is kept until its part is complete. Senders run
ahead by a bounded number of parts, which bounds what is kept.

A weight is a member's own claim. So the ranks of `median` and `trimmed` count members, and where weights count, none is
taken for more than the median of the contributors' weights. A member of weight 0 has no say.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from averaging.allreduce.shard_reducer import ShardReducer
from averaging.protocol.aggregation import Aggregation, Kind

_COLUMNS = 1 << 16  # coordinates that are sorted at a time, which bounds the memory for it

_FEW = 32  # members

_LEAST = 2.0**-64  # of the median weight; less would be 0 in float32, and who is left after trimming has a say

_CLIP_STEPS = 30
_CLIP_PRECISION = 1e-5  # of tau


def reducer_for(aggregation: Aggregation, sizes: list[int], weights: Mapping[str, float]) -> ShardReducer:
    """The reducer of a shard under a rule; see `ShardReducer` for the arguments."""
    if aggregation.kind is Kind.MEAN:
        return ShardReducer(sizes, weights)
    return RobustReducer(aggregation, sizes, weights)


class RobustReducer(ShardReducer):
    """Keeps the contributions to each part, and aggregates them when it is complete."""

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
            return  # not even its NaN counts
        values = values if values.dtype == torch.float64 else values.to(torch.float32)
        self._kept.setdefault(number, []).append((weight, values))


def aggregate(aggregation: Aggregation, values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """One robust aggregate of a part.

    Args:
        aggregation: any but the mean.
        values: of at least one member; 1-D, of one size, float32 or float64 each.
        weights: of those members, above 0.

    Returns:
        1-D, in the widest dtype of `values`.
    """
    counted = cap_weights(weights)
    if aggregation.kind is Kind.MEDIAN:
        return _by_columns(values, lambda columns: _trimmed(columns, [1.0] * len(values), len(values)))
    if aggregation.kind is Kind.TRIMMED:
        return _by_columns(values, lambda columns: _trimmed(columns, counted, int(aggregation.parameter)))
    return centered_clip(values, counted, aggregation.parameter)


def cap_weights(weights: Sequence[float]) -> list[float]:
    """Weights as they count: relative to their (lower) median, none above it, and none so small that it vanishes.

    As long as the false ones are a minority, that median is not above the largest honest weight.
    """
    median = sorted(weights)[(len(weights) - 1) // 2]
    return [max(_LEAST, min(weight, median) / median) for weight in weights]


def centered_clip(values: Sequence[torch.Tensor], weights: Sequence[float], tau: float) -> torch.Tensor:
    """The point v at which the pulls `w_i * (x_i - v) * min(1, tau / |x_i - v|)` cancel out.

    That is the fixed point of CenteredClip, whose steps from the median on are lengthened here to those of a weighted
    mean with the weights `w_i * min(1, tau / |x_i - v|)`, so that a few are enough. With b of n members far away and
    the others at one point it is b * tau / (n - b) off that point, however far they are. Norms are over the part. A
    contribution whose distance is not finite does not pull.

    Source:
        Karimireddy, He, Jaggi: Learning from history for Byzantine robust optimization, arXiv:2012.10333.
    """
    equal = [1.0] * len(values)
    center = _by_columns(values, lambda columns: _trimmed(columns, equal, len(values)))
    pull, step = torch.empty_like(center), torch.empty_like(center)
    for _ in range(_CLIP_STEPS):
        step.zero_()
        total = 0.0
        for one, weight in zip(values, weights, strict=True):
            torch.sub(one, center, out=pull)
            distance = float(torch.linalg.vector_norm(pull))
            if math.isfinite(distance):
                share = weight * (min(1.0, tau / distance) if distance else 1.0)
                step.add_(pull, alpha=share)
                total += share
        if not center.new_tensor(total):
            break  # nobody pulls, as far as the dtype can tell
        settled = float(torch.linalg.vector_norm(step)) <= _CLIP_PRECISION * tau * total
        center.add_(step.div_(total))  # 1 / total can be more than float32 holds
        if settled:
            break
    return center


def _trimmed(columns: torch.Tensor, weights: Sequence[float], trim: int) -> torch.Tensor:
    """The weighted mean of each column (members in dim 0) without its `trim` smallest and largest values.

    At least one value of an odd number of members is left, two of an even number: then it is the median. NaN counts as
    an infinite value.
    """
    count = len(columns)
    trim = min(trim, (count - 1) // 2)
    columns = columns.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    if len(set(weights)) == 1:
        kept = _ordered(columns)[trim : count - trim]
        # Divided before they are added: the sum of two large numbers may be infinite, their mean is not.
        return (kept / len(kept)).sum(dim=0)
    ordered, ranks = torch.sort(columns, dim=0, stable=True)
    shares = torch.tensor(weights, dtype=columns.dtype, device="cpu")[ranks[trim : count - trim]]
    return (ordered[trim : count - trim] * (shares / shares.sum(dim=0))).sum(dim=0)


def _ordered(columns: torch.Tensor) -> torch.Tensor:
    """Each column in order. For few members comparing whole rows is many times faster than a sort of every column."""
    if len(columns) > _FEW:
        return torch.sort(columns, dim=0).values
    rows = list(columns)
    for turn in range(len(rows)):  # odd-even transposition
        for low in range(turn % 2, len(rows) - 1, 2):
            rows[low], rows[low + 1] = torch.minimum(rows[low], rows[low + 1]), torch.maximum(rows[low], rows[low + 1])
    return torch.stack(rows)


def _by_columns(values: Sequence[torch.Tensor], rule: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies a rule for coordinates to a bounded number of them at a time."""
    result = torch.empty_like(values[0], dtype=_widest(values))
    for start in range(0, len(result), _COLUMNS):
        end = start + _COLUMNS
        result[start:end] = rule(torch.stack([one[start:end].to(result.dtype) for one in values]))
    return result


def _widest(values: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(one.dtype == torch.float64 for one in values) else torch.float32
