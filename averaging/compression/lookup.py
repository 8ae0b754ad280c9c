"""UNIFORM_8BIT and QUANTILE_8BIT: 256 buckets, each number replaced by the mean of its bucket.

Layout: 256 float32, the means, 0 for an empty bucket; then one uint8 per element, the number of its bucket. The decoder
looks up and need not know where the borders of the buckets were.
"""

from __future__ import annotations

from abc import abstractmethod
from math import prod, sqrt

import numpy as np
import torch

from averaging.compression.base import Codec, view_bytes, view_memory
from averaging.protocol.messages import Buffer

BUCKETS = 256
"""As many as a byte can count."""

RANGE_IN_SIGMAS = 6
"""What the buckets of UNIFORM_8BIT cover, in standard deviations: three to each side of the mean."""

_TABLE_BYTES = 4 * BUCKETS
_OFFSET = BUCKETS // 2


class Lookup8Bit(Codec):
    """A table of means and indices into it; the subclasses say which element goes into which bucket.

    A bucket with NaN or infinity has a non-finite mean, and so have all its elements after decoding.
    """

    def __init__(self) -> None:
        super().__init__("compressed_float32", 1)

    def nbytes(self, size: tuple[int, ...]) -> int:
        """The table and one byte per element."""
        return _TABLE_BYTES + prod(size)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Sums the buckets in float64, one element after another: exact enough, and the same at every call."""
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
        """The bucket of every element, as uint8; `values` is 1-dim float32 and must not be changed."""


class Uniform8Bit(Lookup8Bit):
    """Buckets of equal width, 6·std/256, of which number 128 has the mean of all elements in its middle.

    std is the unbiased one. Elements more than 3 std from the mean go into the first and the last bucket. An element of
    any other bucket is decoded with an error of at most the width.
    """

    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        mean = values.sum(dtype=torch.float64) / max(count, 1)
        centred = values - mean.to(torch.float32)
        std = torch.linalg.vector_norm(centred, dtype=torch.float64) / sqrt(max(count - 1, 1))
        width = (std * (RANGE_IN_SIGMAS / BUCKETS)).to(torch.float32)
        numbers = centred.div_(width).round_().add_(_OFFSET).clamp_(0, BUCKETS - 1)
        # equal elements divide 0 by 0
        return numbers.nan_to_num_(nan=_OFFSET).to(torch.uint8)


class Quantile8Bit(Lookup8Bit):
    """Buckets of equally many elements; an element is decoded to a number between the least and greatest of its bucket.

    Border k = 1 … 255 is element floor(k·n/256) of the sorted tensor and belongs to the bucket below it. Up to 255
    elements nothing is lost. The borders are exact: sorting a part takes numpy less time than assigning its elements.
    """

    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        if count == 0:
            return values.to(torch.uint8)
        ranks = np.arange(1, BUCKETS, dtype=np.int64) * count // BUCKETS
        borders = torch.from_numpy(np.sort(values.numpy())[ranks])
        return torch.cat([_borders_below(piece, borders) for piece in torch.split(values, 1 << 16)])


def _borders_below(values: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """How many of the 255 sorted borders are less than each element, as uint8.

    It is `torch.bucketize` as a binary search in which all elements take the same steps; without branches for the
    processor to mispredict it is three times as fast.
    """
    found = torch.zeros(values.shape, dtype=torch.int32, device="cpu")
    step = BUCKETS // 2
    while step:
        found.add_(values > borders.index_select(0, found + (step - 1)), alpha=step)
        step //= 2
    return found.to(torch.uint8)
