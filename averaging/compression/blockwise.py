"""BLOCKWISE_INT8: the flattened tensor in blocks of 1024, each scaled so that its largest magnitude becomes 127.

Layout: one float32 per block, the largest magnitude in it; then one int8 per element. The scales come first because
float32 wants alignment and int8 does not. The last block may be shorter. An element is decoded as int8 · largest / 127.

The error is at most largest / 254, plus the rounding of float32. The scale per block keeps an outlier's damage local
(Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).
"""

from __future__ import annotations

from math import prod

import torch

from averaging.compression.base import Codec, view_bytes, view_memory
from averaging.messages import Buffer

BLOCK = 1024
"""Elements of a block."""

_AT_ONCE = 256  # blocks

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
        buffer = torch.empty(self.nbytes((values.numel(),)), dtype=torch.uint8)
        ratios = torch.empty(min(_AT_ONCE * BLOCK, values.numel()))  # small enough to stay in the processor's cache
        for block, scale, packed in _blocks(values, *_split(buffer, values.numel())):
            for first in range(0, len(block), _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                room = ratios[: block[some].numel()].view_as(block[some])
                _pack_some(block[some], scale[some], packed[some], room)
        return view_memory(buffer)

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A new float32 tensor."""
        scales, data = _split(view_bytes(buffer), prod(size))
        values = data.to(torch.float32)
        for block, scale, _ in _blocks(values, scales, data):
            block.mul_(scale / _STEPS)
        return values.view(size)


def _pack_some(block: torch.Tensor, scale: torch.Tensor, packed: torch.Tensor, room: torch.Tensor) -> None:
    """Packs blocks, shape (n, m), into `scale`, (n, 1), and `packed`, (n, m); `room` is scratch, (n, m)."""
    torch.amax(torch.abs(block, out=room), dim=1, keepdim=True, out=scale)
    torch.div(block, torch.where(scale > 0, scale, 1.0), out=room)
    if not scale.isfinite().all():
        room.nan_to_num_()
    packed.copy_(room.mul_(_STEPS).round_())


def _split(buffer: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales, float32, and of the `count` elements, int8, in the bytes of a buffer."""
    end_of_scales = 4 * _block_count(count)
    return buffer[:end_of_scales].view(torch.float32), buffer[end_of_scales:].view(torch.int8)


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
