"""BLOCKWISE_INT8: the flattened tensor in blocks of 1024 elements, each scaled to a largest magnitude of 127.

Layout: one float32 per block, its largest magnitude; then one int8 per element. The scales come first because float32
needs alignment and int8 does not. The last block may be shorter. An element is decoded as int8 · largest / 127.

The error is at most largest / 254, plus the rounding of float32. An outlier affects only its own block
(Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from math import prod, sqrt

import numpy as np
import torch

from averaging.protocol import Buffer
from averaging.tensors.codec import Codec, view_bytes, view_memory

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


# UNIFORM_8BIT and QUANTILE_8BIT: 256 buckets, each number replaced by the mean of its bucket.
#
# Layout: 256 float32, the means, 0 for an empty bucket; then one uint8 per element, the number of its bucket. The
# decoder
# does not need the borders of the buckets.


BUCKETS = 256
"""One per value of a byte."""

RANGE_IN_SIGMAS = 6
"""Standard deviations that the buckets of UNIFORM_8BIT cover: three on each side of the mean."""

_TABLE_BYTES = 4 * BUCKETS
_OFFSET = BUCKETS // 2


class Lookup8Bit(Codec):
    """A table of means and indices into it; subclasses assign elements to buckets.

    If a bucket contains NaN or infinity, all its elements decode to a non-finite number.
    """

    def __init__(self) -> None:
        super().__init__("compressed_float32", 1)

    def nbytes(self, size: tuple[int, ...]) -> int:
        """The table and one byte per element."""
        return _TABLE_BYTES + prod(size)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Sums the buckets sequentially in float64, so that the result is accurate and deterministic."""
        values = tensor.to(torch.float32).reshape(-1)
        indices = self._assign(values)
        counts = torch.bincount(indices, minlength=BUCKETS).clamp_min_(1)
        sums = torch.bincount(indices, weights=values.to(torch.float64), minlength=BUCKETS)
        table = (sums / counts).to(torch.float32)
        return b"".join((view_memory(table), view_memory(indices)))

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A new float32 tensor."""
        raw = view_bytes(buffer)
        table = raw[:_TABLE_BYTES].view(torch.float32)
        return table.index_select(0, raw[_TABLE_BYTES:].to(torch.int32)).view(size)

    @abstractmethod
    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        """The bucket of every element, as uint8; `values` is 1-D float32 and must not be changed."""


class Uniform8Bit(Lookup8Bit):
    """Buckets of equal width, 6·std/256; bucket 128 is centred at the mean of all elements.

    std is the unbiased standard deviation. Elements more than 3 std from the mean go into the first or the last bucket.
    In the other buckets the error is at most the width.
    """

    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        mean = values.sum(dtype=torch.float64) / max(count, 1)
        centred = values - mean.to(torch.float32)
        std = torch.linalg.vector_norm(centred, dtype=torch.float64) / sqrt(max(count - 1, 1))
        width = (std * (RANGE_IN_SIGMAS / BUCKETS)).to(torch.float32)
        numbers = centred.div_(width).round_().add_(_OFFSET).clamp_(0, BUCKETS - 1)
        # If all elements are equal, they became 0 / 0.
        return numbers.nan_to_num_(nan=_OFFSET).to(torch.uint8)


class Quantile8Bit(Lookup8Bit):
    """Buckets with equal numbers of elements. An element decodes to a number within the range of its bucket.

    Border k = 1 … 255 is element floor(k·n/256) of the sorted tensor and belongs to the bucket below it. Tensors of up
    to 255 elements are encoded without loss. The borders are exact, since sorting a part is faster than assigning it.
    """

    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        if count == 0:
            return values.to(torch.uint8)
        ranks = np.arange(1, BUCKETS, dtype=np.int64) * count // BUCKETS
        borders = torch.from_numpy(np.sort(values.numpy())[ranks])
        return torch.cat([_borders_below(piece, borders) for piece in torch.split(values, 1 << 16)])


def _borders_below(values: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """The number of the 255 sorted borders that are less than each element, as uint8.

    A branch-free binary search over all elements at once, three times as fast as `torch.bucketize`.
    """
    found = torch.zeros(values.shape, dtype=torch.int32, device="cpu")
    step = BUCKETS // 2
    while step:
        found.add_(values > borders.index_select(0, found + (step - 1)), alpha=step)
        step //= 2
    return found.to(torch.uint8)
