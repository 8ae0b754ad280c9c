"""All-reduce rounds in TOP_K on the memory network, and a reference of what they should bring."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from averaging.allreduce import Part, Prepared, ReplyResidual, RoundResult
from averaging.allreduce.partition import partition, shares
from averaging.protocol import CompressionType, MeanOver, Member, TopK
from averaging.tensors import BlockLayout, Schema, SparsePart, SparseTensor, VisibleTensor
from tests.support.rounds import Simulation

SHAPES: tuple[tuple[int, ...], ...] = ((66, 70), (100,), (), (0, 3), (64, 64))


class SparseSimulation(Simulation):
    """One group whose members send the largest elements of each block.

    Attributes:
        sent: what each member sends of each tensor.
        dense: numbers of the tensors of which all elements are sent.
        is_applied: whether the members apply the result.
        averages: by member, the average of each tensor, flat, in tile order; None in parts without one are NaN.
        residuals: what each member's replies have lost.
    """

    def __init__(
        self,
        seed: int,
        members: Sequence[Member],
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        *,
        top_k: TopK | None = None,
        part_size_bytes: int = 4096,
        residuals: Mapping[str, ReplyResidual] | None = None,
        dense: Sequence[int] = (),
        visible_in: float | None = None,
        **options: Any,
    ) -> None:
        self.top_k, self.is_applied = top_k or TopK(), True
        self.weights = visible_in  # with VISIBLE, the value of all weights that the tensors change
        self.dense = frozenset(dense)
        self.residuals = residuals or {member.endpoint: ReplyResidual() for member in members}
        super().__init__(
            seed,
            members,
            shapes,
            compression=CompressionType.TOP_K if visible_in is None else CompressionType.VISIBLE,
            sparse=self.top_k if visible_in is None else None,
            part_size_bytes=part_size_bytes,
            **options,
        )
        self.layouts = [BlockLayout(spec.shape) for spec in self.schema.tensors]
        self.averages: dict[str, list[torch.Tensor]] = {}
        self.sent: dict[str, list[Prepared]] = {
            name: [
                tensor.reshape(-1) if number in self.dense else self._sparse(layout.to_blocks(tensor), layout)
                for number, (layout, tensor) in enumerate(zip(self.layouts, tensors, strict=True))
            ]
            for name, tensors in self.tensors.items()
        }

    def _sparse(self, flat: torch.Tensor, layout: BlockLayout) -> SparseTensor | VisibleTensor:
        if self.weights is None:
            return SparseTensor.of(flat, layout, self.top_k)
        return VisibleTensor.of(flat, layout, torch.full_like(flat, self.weights))

    def describe(self, names: Sequence[str], **options: Any) -> Schema:
        """See `Simulation`."""
        schema = super().describe(names, **options)
        specs = [
            replace(spec, compression=CompressionType.NONE) if number in self.dense else spec
            for number, spec in enumerate(schema.tensors)
        ]
        return replace(schema, tensors=tuple(specs))

    def residual_of(self, name: str) -> ReplyResidual | None:
        """See `Simulation`."""
        return self.residuals[name]

    def contributed(self, name: str) -> Sequence[Prepared]:
        """See `Simulation`."""
        return self.sent[name]

    def adopt(self, name: str, result: RoundResult) -> None:
        """Keeps the averages."""
        self.averages[name] = [torch.full((layout.numel,), torch.nan) for layout in self.layouts]
        for part, values in result.parts:
            assert isinstance(values, SparsePart) is (part.tensor not in self.dense)
            whole = values.dense() if isinstance(values, SparsePart) else values
            self.averages[name][part.tensor][part.slices[0].start : part.slices[0].stop] = whole
        if self.is_applied:
            self.residuals[name].applied()

    @property
    def parts(self) -> dict[Part, str]:
        """All parts, and who reduces each."""
        shards = partition(self.schema, shares(self.group.members))
        return {part: name for name, shard in zip(self.group.endpoints, shards, strict=True) for part in shard}

    def residual(self, part: Part) -> torch.Tensor:
        """What the reducer of a part has lost of it."""
        residual = self.residuals[self.parts[part]].of(*part.slices[0])
        return torch.zeros(part.numel) if residual is None else residual.clone()

    def expected(self, part: Part, names: Sequence[str] = ()) -> np.ndarray[Any, Any]:
        """The average of a part in float64, of the named members or of all that send; NaN where nobody sent."""
        members = [m for m in self.group.members if (m.endpoint in names if names else m.sends)]
        sent = []
        for member in members:
            tensor = self.sent[member.endpoint][part.tensor]
            assert isinstance(tensor, SparseTensor | VisibleTensor)
            sent.append(tensor.values(part.slices[0].start, part.slices[0].stop))
        weights = [member.weight for member in members]
        if self.weights is None:
            return dumb_average(sent, weights, self.top_k.mean_over)
        return dumb_average(sent, weights, MeanOver.ALL, limits=False)


def dumb_average(
    sent: Sequence[SparsePart], weights: Sequence[float], mean_over: MeanOver, *, limits: bool = True
) -> np.ndarray[Any, Any]:
    """The average of a part as the documents say it, element by element in float64; NaN where nobody sent."""
    given = [(one, weight) for one, weight in zip(sent, weights, strict=True) if weight > 0]
    norms = [float(np.sqrt(sum(value**2 for value in one.values.tolist()))) for one, _ in given]
    median = statistics.median_low([norm for norm in norms if norm] or [0.0])
    sums, counted = np.zeros(sent[0].numel), np.zeros(sent[0].numel)
    for (one, weight), norm in zip(given, norms, strict=True):
        for index, value in zip(one.indices.tolist(), one.values.tolist(), strict=True):
            sums[index] += weight * value * (min(1.0, median / norm) if norm and limits else 1.0)
            counted[index] += weight
    whole = sum(weight for _, weight in given)
    with np.errstate(invalid="ignore"):
        return np.where(counted > 0, sums / (whole if mean_over is MeanOver.ALL else counted), np.nan)
