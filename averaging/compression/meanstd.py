"""MEANSTD_16BIT: every row normalised by its mean and standard deviation, in float16.

A row is the last axis; a 0-dim tensor is one row of one element. Layout: float16 data, float32 means, float32 standard
deviations, one of each per row, even for rows of no elements.

The error of x is at most std · (|z|·2^-11 + 2^-25) with z = (x - mean) / std, plus the rounding of float32.
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np
import torch

from averaging.compression.base import Codec, view_bytes, view_memory
from averaging.compression.half import FLOAT16_MAX
from averaging.protocol.messages import Buffer

MIN_STD = 1e-6
"""Lower bound of the standard deviation of a row, so that rows of equal elements are not divided by 0."""

_STATISTICS_BYTES = 8  # a mean and a standard deviation


class MeanStd16Bit(Codec):
    """The standard deviation is sqrt(sum(x²) / n) of the centred values, at least 1e-6.

    Normalised values are clamped to ±65504. |z| cannot exceed sqrt(n), so this affects only rows of more than 4·10^9
    elements, rows with infinities, and rows in which x - mean overflows float32 (beyond 1.7e38). A row with NaN or
    infinity decodes to non-finite numbers.
    """

    def __init__(self) -> None:
        super().__init__("compressed_float32", 2)

    def nbytes(self, size: tuple[int, ...]) -> int:
        """Two bytes per element and eight per row."""
        rows, columns = _matrix(size)
        return rows * (2 * columns + _STATISTICS_BYTES)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Sums in float64, since squares of ordinary float32 numbers overflow float32."""
        rows, columns = _matrix(tuple(tensor.shape))
        values = tensor.to(torch.float32).reshape(rows, columns)
        count = max(columns, 1)
        means = (values.sum(dim=1, keepdim=True, dtype=torch.float64) / count).to(torch.float32)
        centred = values - means
        norms = torch.linalg.vector_norm(centred, dim=1, keepdim=True, dtype=torch.float64)
        stds = (norms / sqrt(count)).clamp_min_(MIN_STD).to(torch.float32)
        data = centred.div_(stds).clamp_(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
        return b"".join((view_memory(data), view_memory(means), view_memory(stds)))

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A new float32 tensor."""
        rows, columns = _matrix(size)
        end_of_data = 2 * rows * columns
        data = view_bytes(buffer)[:end_of_data].view(torch.float16).to(torch.float32).view(rows, columns)
        # Copied, since an odd number of elements leaves the statistics misaligned in the buffer.
        statistics = np.frombuffer(buffer, dtype="<f4", offset=end_of_data, count=2 * rows).copy()
        means, stds = torch.from_numpy(statistics).view(2, rows, 1)
        return data.mul_(stds).add_(means).view(size)


def _matrix(size: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a 0-dim tensor is (1, 1)."""
    return prod(size[:-1]), prod(size[-1:])
