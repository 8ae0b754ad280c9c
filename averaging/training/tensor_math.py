"""Tensor functions of the strategies: accumulation dtype and clipping. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from averaging.errors import TensorError


def full_precision(tensor: torch.Tensor) -> torch.dtype:
    """float32 for the half-precision dtypes, whose sums are too inexact; else the tensor's dtype."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def clip(
    tensors: Iterable[torch.Tensor], max_norm: float, joint: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Scales tensors in place so that their joint norm is at most `max_norm`.

    Args:
        tensors: the tensors.
        max_norm: limit of their norm.
        joint: returns the norm of all shards of the tensors, given that of this one; None if they are not divided.

    Returns:
        The factor by which they were multiplied, 0-dim.

    Raises:
        TensorError: one of them is sparse.
    """
    found = list(tensors)
    if not found and joint is None:
        return torch.ones(())
    if any(tensor.layout is not torch.strided for tensor in found):
        raise TensorError(
            "a sparse gradient cannot be clipped; leave max_norm out, or use Embedding(..., sparse=False)"
        )
    widest = torch.float64 if any(tensor.dtype is torch.float64 for tensor in found) else torch.float32
    norms = [torch.linalg.vector_norm(t.detach(), dtype=widest).to(found[0].device) for t in found]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if joint is not None:
        norm = joint(norm)
    scale: torch.Tensor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
    for tensor in found:
        tensor.detach().mul_(scale.to(tensor.device, tensor.dtype))
    return scale
