"""BLOCKWISE_INT8: the flattened tensor in blocks of 1024, each scaled so that its largest magnitude becomes 127.

Layout: one float32 per block, the largest magnitude in it; then one int8 per element. The scales come first because
float32 wants alignment and int8 does not. The last block may be shorter. An element is decoded as int8 · largest / 127.

The error is at most largest / 254, plus the rounding of float32. The scale per block keeps an outlier's damage local
(Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).
"""

from __future__ import annotations

from math import prod

import torch

from averaging.compression.base import Codec, to_bytes, view_bytes
from averaging.messages import Buffer

BLOCK = 1024
"""Elements of a block."""

_STEPS = 127  # -128 is not used, so that the code is symmetric


class BlockwiseInt8(Codec):
    """A block with NaN or infinity decodes to non-finite numbers; other blocks are not touched by it."""

    def __init__(self) -> None:
        super().__init__("compressed_float32", 1)

    def nbytes(self, size: tuple[int, ...]) -> int:
        """One byte per element and four per block."""
        count = prod(size)
        return count + 4 * _block_count(count)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Divides by the largest magnitude, not by a 127th of it, which could be 0 where the former is not."""
        values = tensor.to(torch.float32).reshape(-1)
        scales = torch.empty(_block_count(values.numel()))
        data = torch.empty(values.numel(), dtype=torch.int8)
        for block, scale, packed in _blocks(values, scales, data):
            torch.amax(block.abs(), dim=1, keepdim=True, out=scale)
            ratios = block / torch.where(scale > 0, scale, 1.0)
            if not scale.isfinite().all():
                ratios.nan_to_num_()
            packed.copy_(ratios.mul_(_STEPS).round_())
        return b"".join((to_bytes(scales), to_bytes(data)))

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A new float32 tensor."""
        raw = view_bytes(buffer)
        end_of_scales = 4 * _block_count(prod(size))
        scales = raw[:end_of_scales].view(torch.float32)
        data = raw[end_of_scales:].view(torch.int8)
        values = torch.empty(data.numel())
        for block, scale, packed in _blocks(values, scales, data):
            torch.mul(packed, scale / _STEPS, out=block)
        return values.view(size)


def _block_count(count: int) -> int:
    return -(-count // BLOCK)


def _blocks(
    values: torch.Tensor, scales: torch.Tensor, data: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of the full blocks, shapes (n, 1024), (n, 1) and (n, 1024), and of the last one if it is shorter."""
    whole = values.numel() // BLOCK
    split = whole * BLOCK
    views = [(values[:split].view(-1, BLOCK), scales[:whole, None], data[:split].view(-1, BLOCK))]
    if split < values.numel():
        views.append((values[None, split:], scales[whole:, None], data[None, split:]))
    return views
