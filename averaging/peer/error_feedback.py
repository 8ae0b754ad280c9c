"""Error feedback: the error of a lossy codec in one round is added to what is sent in the next one.

Seide et al., 2014 (1-bit SGD); Karimireddy et al., 2019, arXiv:1901.09847.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from averaging.allreduce.partition import Part
from averaging.compression import decode, encode
from averaging.protocol.schema import Schema


class ErrorFeedback:
    """The residuals of one peer's tensors: all that was sent plus the residuals equals the sum of all inputs.

    It takes as much memory as the tensors, and twice as much during a round. For float16 and bfloat16 it uses float32,
    since a residual is usually too small to be added in the tensor's dtype. It does not include the error of a reducer
    that encodes an average, because that is the same at all members.

    Args:
        schema: schema of the tensors.

    Attributes:
        residuals: one per tensor, 1-D, on the CPU, float32 or float64.
    """

    def __init__(self, schema: Schema) -> None:
        self.residuals = [
            torch.zeros(spec.numel, dtype=torch.promote_types(spec.torch_dtype, torch.float32), device="cpu")
            for spec in schema.tensors
        ]
        self._exact: list[torch.Tensor] = []  # inputs of the round in progress, before rounding
        self._codes = [spec.compression for spec in schema.tensors]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to send: `tensors` plus the residuals, 1-D, in the dtypes of `tensors`."""
        self._exact = [tensor + residual for tensor, residual in zip(tensors, self.residuals, strict=True)]
        return [exact.to(tensor.dtype) for exact, tensor in zip(self._exact, tensors, strict=True)]

    def sent(self, inputs: Sequence[torch.Tensor], encoded: Iterable[Part], plain: Iterable[Part]) -> None:
        """Updates the residuals after a round. Parts in neither list were not averaged; their residuals do not change.

        Args:
            inputs: what `inputs` returned last.
            encoded: parts that another member has reduced, so that they went through the codec.
            plain: parts that this member has reduced itself, without the codec.
        """
        for part in encoded:
            values = inputs[part.tensor][part.start : part.stop]
            self._set_residual(part, decode(encode(values, self._codes[part.tensor])))
        for part in plain:
            self._set_residual(part, inputs[part.tensor][part.start : part.stop])
        self._exact = []

    def _set_residual(self, part: Part, sent: torch.Tensor) -> None:
        exact = self._exact[part.tensor][part.start : part.stop]
        torch.sub(exact, sent.to(exact.dtype), out=self.residuals[part.tensor][part.start : part.stop])
