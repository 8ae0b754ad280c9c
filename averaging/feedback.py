"""Error feedback: what a lossy code loses in one round is added to what is sent in the next.

Seide et al., 2014 (1-bit SGD); Karimireddy et al., 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from averaging.allreduce.partition import Part
from averaging.compression import decode, encode
from averaging.schema import Schema


class Feedback:
    """The residuals of one peer's tensors; the sum of what was sent plus the residual is the sum of the inputs.

    It takes as much memory again as the tensors, and once more while a round is in progress. What the reducer of a part
    loses when it encodes the average is not in it: all members lose the same there.

    Args:
        schema: of the tensors.

    Attributes:
        residuals: 1-D on the CPU, one per tensor.
    """

    def __init__(self, schema: Schema) -> None:
        self.residuals = [torch.zeros(spec.numel, dtype=spec.torch_dtype) for spec in schema.tensors]
        self._codes = [spec.compression for spec in schema.tensors]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is to be sent instead of `tensors`: with the residuals added, 1-D each."""
        return [tensor + residual for tensor, residual in zip(tensors, self.residuals, strict=True)]

    def sent(self, inputs: Sequence[torch.Tensor], encoded: Iterable[Part], plain: Iterable[Part]) -> None:
        """The round is done.

        Args:
            inputs: what `inputs` returned.
            encoded: parts that another member has reduced; what was lost in them stays behind.
            plain: parts that this member has reduced itself, so that nothing was lost. What is in neither was not
                averaged, and its residual stays as it was.
        """
        for part in encoded:
            values = inputs[part.tensor][part.start : part.stop]
            self._residual(part).copy_(values - decode(encode(values, self._codes[part.tensor])))
        for part in plain:
            self._residual(part).zero_()

    def _residual(self, part: Part) -> torch.Tensor:
        return self.residuals[part.tensor][part.start : part.stop]
