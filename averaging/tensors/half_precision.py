"""FLOAT16 and BFLOAT16: each number rounded to the nearest 16-bit number.

| compression | maximum error of a finite x | range |
|---|---|---|
| FLOAT16 | 2^-11 of x, at least 2^-25 | clamped to ±65504, also infinities; NaN is kept |
| BFLOAT16 | 2^-8 of x, at least 2^-134 | that of float32, except that numbers above 3.39e38 become infinite |
"""

from __future__ import annotations

from math import prod, sqrt

import numpy as np
import torch

from averaging.protocol import Buffer
from averaging.tensors.codec import Codec, view_bytes, view_memory

FLOAT16_MAX = 65504.0
"""The largest finite float16."""

_AT_ONCE = 1 << 17  # elements; small enough for the processor's cache


class Half(Codec):
    """Float32 rounded to a 16-bit dtype.

    Args:
        wire_dtype: `clamped_float32` for FLOAT16, as the protocol requires; `rounded_float32` for BFLOAT16, since
            `bfloat16` denotes uncompressed bfloat16 tensors.
        dtype: dtype of the buffer.
        limit: magnitudes are clamped to it first; None: no limit.
    """

    def __init__(self, wire_dtype: str, dtype: torch.dtype, limit: float | None = None) -> None:
        super().__init__(wire_dtype, dtype.itemsize)
        self._dtype = dtype
        self._limit = limit

    def nbytes(self, size: tuple[int, ...]) -> int:
        """Two bytes per element."""
        return prod(size) * self._dtype.itemsize

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Clamps, then rounds to nearest, ties to even."""
        values = tensor.to(torch.float32)
        if self._limit is None:
            return view_memory(values.to(self._dtype))
        flat = values.reshape(-1)
        packed = torch.empty(flat.shape, dtype=self._dtype, device="cpu")
        clamped = torch.empty(min(_AT_ONCE, flat.numel()), dtype=torch.float32, device="cpu")
        for first in range(0, flat.numel(), _AT_ONCE):
            piece = flat[first : first + _AT_ONCE]
            room = clamped[: piece.numel()]
            packed[first : first + _AT_ONCE].copy_(torch.clamp(piece, -self._limit, self._limit, out=room))
        return view_memory(packed)

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A new float32 tensor."""
        return view_bytes(buffer, self._dtype).to(torch.float32).view(size)


# MEANSTD_16BIT: every row normalised by its mean and standard deviation, in float16.
#
# A row is the last axis; a 0-dim tensor is one row of one element. Layout: float16 data, float32 means, float32
# standard
# deviations, one of each per row, even for rows of no elements.
#
# The error of x is at most std · (|z|·2^-11 + 2^-25) with z = (x - mean) / std, plus the rounding of float32.


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


# NONE: the array itself in its own dtype, without loss and without a copy.


class Raw(Codec):
    """NONE for one dtype."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name, dtype.itemsize)
        self._dtype = dtype

    def nbytes(self, size: tuple[int, ...]) -> int:
        """One item per element."""
        return prod(size) * self._dtype.itemsize

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """The tensor's own memory if it is contiguous; the caller sends it before the tensor changes."""
        return view_memory(tensor)

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A view into `buffer`; it must not be written."""
        flat = view_bytes(buffer, self._dtype)
        return flat if len(size) == 1 else flat.view(size)
