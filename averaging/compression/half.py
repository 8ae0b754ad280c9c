"""FLOAT16 and BFLOAT16: each number rounded to the nearest 16-bit number.

| compression | maximum error of a finite x | range |
|---|---|---|
| FLOAT16 | 2^-11 of x, at least 2^-25 | clamped to ±65504, also infinities; NaN is kept |
| BFLOAT16 | 2^-8 of x, at least 2^-134 | that of float32, except that numbers above 3.39e38 become infinite |
"""

from __future__ import annotations

from math import prod

import torch

from averaging.compression.base import Codec, view_bytes, view_memory
from averaging.protocol.messages import Buffer

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
