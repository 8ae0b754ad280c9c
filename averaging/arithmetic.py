"""What strategies compute with tensors: in a precision in which sums lose little, and within a norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from averaging.errors import TensorError


def full_precision(tensor: torch.Tensor) -> torch.dtype:
    """float32 for the half-precision dtypes, in which sums lose too much; else the tensor's own."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def clip(tensors: Iterable[torch.Tensor], max_norm: float) -> None:
    """Scales tensors in place so that their joint norm is at most `max_norm`.

    Raises:
        TensorError: one of them is sparse.
    """
    found = list(tensors)
    if not found:
        return
    if any(tensor.layout is not torch.strided for tensor in found):
        raise TensorError(
            "a sparse gradient cannot be clipped; leave max_norm out, or use Embedding(..., sparse=False)"
        )
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.detach()).float() for t in found]))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    for tensor in found:
        tensor.detach().mul_(scale.to(tensor.device, tensor.dtype))
