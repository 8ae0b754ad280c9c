"""BLOCKWISE_INT8: the flattened tensor in blocks of 1024 elements, each scaled to a largest magnitude of 127.

Layout: one float32 per block, its largest magnitude; then one int8 per element. The scales come first because float32
needs alignment and int8 does not. The last block may be shorter. An element is decoded as int8 · largest / 127.

The error is at most largest / 254, plus the rounding of float32. An outlier affects only its own block
(Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod

import torch

from averaging.compression.base import Codec, view_bytes, view_memory
from averaging.protocol.messages import Buffer

BLOCK = 1024
"""Elements of a block."""

_AT_ONCE = 256  # blocks

_STEPS = 127  # -128 is not used, so that the code is symmetric


class BlockwiseInt8(Codec):
    """A block with NaN or infinity decodes to non-finite numbers; other blocks are not affected."""

    def __init__(self) -> None:
        super().__init__("compressed_float32", 1)

    def nbytes(self, size: tuple[int, ...]) -> int:
        """One byte per element and four per block."""
        count = prod(size)
        return count + 4 * _block_count(count)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Divides by the largest magnitude and multiplies by 127, since largest / 127 could underflow to 0."""
        values = tensor.to(torch.float32).reshape(-1)
        count = values.numel()
        buffer = torch.empty(self.nbytes((count,)), dtype=torch.uint8, device="cpu")
        scales, data = _split(buffer, count)
        room = torch.empty(min(_AT_ONCE, _block_count(count)), BLOCK, dtype=torch.float32, device="cpu")
        for blocks, elements in _pieces(count):
            piece = _padded(values[elements])
            packed = _pack_piece(piece, scales[blocks, None], room[: len(piece)])
            data[elements].copy_(packed.view(-1)[: elements.stop - elements.start])
        return view_memory(buffer)

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A new float32 tensor."""
        count = prod(size)
        scales, data = _split(view_bytes(buffer), count)
        values = torch.empty(_block_count(count), BLOCK, dtype=torch.float32, device="cpu")
        flat = values.view(-1)
        for blocks, elements in _pieces(count):
            flat[elements].copy_(data[elements])  # convert first: int8 times float32 is slow in torch
            values[blocks].mul_(scales[blocks, None] / _STEPS)
        return flat[:count].view(size)


def _pack_piece(piece: torch.Tensor, scale: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Quantises whole blocks, shape (n, 1024), into `room`, and writes their scales to `scale`, shape (n, 1)."""
    torch.amax(torch.abs(piece, out=room), dim=1, keepdim=True, out=scale)
    torch.div(piece, torch.where(scale > 0, scale, 1.0), out=room)
    if not math.isfinite(scale.sum().item()):
        room.nan_to_num_()
    return room.mul_(_STEPS).round_()


def _pieces(count: int) -> Iterator[tuple[slice, slice]]:
    """Slices of blocks, and of their elements, that are small enough for the processor's cache."""
    for first in range(0, _block_count(count), _AT_ONCE):
        elements = slice(first * BLOCK, min((first + _AT_ONCE) * BLOCK, count))
        yield slice(first, first + _AT_ONCE), elements


def _padded(values: torch.Tensor) -> torch.Tensor:
    """The values as whole blocks, padded with zeros."""
    missing = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _split(buffer: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales (float32) and of the `count` elements (int8) in a buffer."""
    end_of_scales = 4 * _block_count(count)
    return buffer[:end_of_scales].view(torch.float32), buffer[end_of_scales:].view(torch.int8)


def _block_count(count: int) -> int:
    return -(-count // BLOCK)
