"""Error feedback: what a lossy code loses in one round is added to what is sent in the next.

Seide et al., 2014 (1-bit SGD); Karimireddy et al., 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from averaging.allreduce.partition import Part
from averaging.compression import decode, encode
from averaging.protocol.schema import Schema


class ErrorFeedback:
    """The residuals of one peer's tensors; the sum of what was sent plus the residual is the sum of the inputs.

    It takes as much memory again as the tensors, and once more while a round is in progress; for float16 and bfloat16
    both are float32, since a residual is mostly too small to be added to its tensor in these. What the reducer of a
    part loses when it encodes the average is not in it: all members lose the same there.

    Args:
        schema: of the tensors.

    Attributes:
        residuals: 1-D on the CPU, one per tensor, float32 or float64.
    """

    def __init__(self, schema: Schema) -> None:
        self.residuals = [
            torch.zeros(spec.numel, dtype=torch.promote_types(spec.torch_dtype, torch.float32), device="cpu")
            for spec in schema.tensors
        ]
        self._exact: list[torch.Tensor] = []  # the inputs of the round in progress before they were rounded
        self._codes = [spec.compression for spec in schema.tensors]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is to be sent instead of `tensors`: with the residuals added, 1-D each, in the tensors' own dtypes."""
        self._exact = [tensor + residual for tensor, residual in zip(tensors, self.residuals, strict=True)]
        return [exact.to(tensor.dtype) for exact, tensor in zip(self._exact, tensors, strict=True)]

    def sent(self, inputs: Sequence[torch.Tensor], encoded: Iterable[Part], plain: Iterable[Part]) -> None:
        """The round is done.

        Args:
            inputs: what `inputs` returned last.
            encoded: parts that another member has reduced; what was lost in them stays behind.
            plain: parts that this member has reduced itself, so that no code lost anything. What is in neither was not
                averaged, and its residual stays as it was.
        """
        for part in encoded:
            values = inputs[part.tensor][part.start : part.stop]
            self._stays(part, decode(encode(values, self._codes[part.tensor])))
        for part in plain:
            self._stays(part, inputs[part.tensor][part.start : part.stop])
        self._exact = []

    def _stays(self, part: Part, sent: torch.Tensor) -> None:
        exact = self._exact[part.tensor][part.start : part.stop]
        torch.sub(exact, sent.to(exact.dtype), out=self._residual(part))

    def _residual(self, part: Part) -> torch.Tensor:
        return self.residuals[part.tensor][part.start : part.stop]
