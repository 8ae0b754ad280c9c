"""NONE: the array itself, in its own dtype, of which bfloat16 is one. Nothing is lost, and decoding copies nothing."""

from __future__ import annotations

from math import prod

import torch

from averaging.compression.base import Codec, to_bytes, view_bytes


class Raw(Codec):
    """NONE for one dtype."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name, dtype.itemsize)
        self._dtype = dtype

    def nbytes(self, size: tuple[int, ...]) -> int:
        """One item per element."""
        return prod(size) * self._dtype.itemsize

    def pack(self, tensor: torch.Tensor) -> bytes:
        """One copy."""
        return to_bytes(tensor)

    def unpack(self, buffer: bytes, size: tuple[int, ...]) -> torch.Tensor:
        """A view into `buffer`; it must not be written."""
        return view_bytes(buffer).view(self._dtype).view(size)
