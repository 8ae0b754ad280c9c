"""NONE: the array itself in its own dtype, without loss and without a copy."""

from __future__ import annotations

from math import prod

import torch

from averaging.compression.base import Codec, view_bytes, view_memory
from averaging.protocol.messages import Buffer


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
