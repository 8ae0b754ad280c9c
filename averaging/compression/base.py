"""What every code shares: its contract, the check of a shape from the network, and a view into received bytes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import Buffer

MAX_DIMS = 64
"""As many dimensions as numpy and torch handle."""

MAX_ELEMENTS = 1 << 40
"""Far above any tensor that travels, and far below where the strides of a tensor overflow 64 bits."""


class Codec(ABC):
    """One way to pack a tensor into bytes. All numbers are little-endian, and so must be the machine.

    Attributes:
        wire_dtype: the name that stands in the tensor's `dtype` field.
        bytes_per_element: after compression, without what is stored once per tensor, row or block.
    """

    def __init__(self, wire_dtype: str, bytes_per_element: int) -> None:
        self.wire_dtype = wire_dtype
        self.bytes_per_element = bytes_per_element

    @abstractmethod
    def nbytes(self, size: tuple[int, ...]) -> int:
        """Exact length in bytes of the buffer of a tensor of shape `size`, which has been checked."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Packs a dense CPU tensor of a floating dtype, detached from autograd, of any shape."""

    @abstractmethod
    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """The tensor of shape `size` in a buffer of exactly `nbytes(size)` bytes."""


def check_size(size: Sequence[int]) -> None:
    """Checks a shape from the network.

    Raises:
        ProtocolViolationError: a dimension is negative, or there are too many dimensions or elements. The dimensions
            beside a 0 count too, since they overflow the strides of an empty tensor as well.
    """
    if len(size) > MAX_DIMS:
        raise ProtocolViolationError(f"a tensor has {len(size)} dimensions, more than the {MAX_DIMS} allowed")
    bound = 1
    for extent in size:
        if extent < 0:
            raise ProtocolViolationError(f"a tensor has size {tuple(size)}; no dimension can be negative")
        bound *= max(extent, 1)
        if bound > MAX_ELEMENTS:
            raise ProtocolViolationError(
                f"a tensor has size {tuple(size)}, more than the {MAX_ELEMENTS} elements allowed"
            )


def view_bytes(buffer: Buffer, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A 1-D tensor over the memory of `buffer` itself, all of it, which it keeps alive.

    Nothing may write to it: `bytes` are immutable, and torch has no read-only tensors that would refuse.
    """
    return torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype, device="cpu")


def view_memory(tensor: torch.Tensor) -> Buffer:
    """The elements of a CPU tensor, in order, in its own dtype; without a copy if they lie in memory so."""
    if not tensor.numel():
        return b""
    # numpy has no bfloat16
    same_size = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return same_size.contiguous().numpy().data.cast("B")


with warnings.catch_warnings():
    # torch tells once in a process that nobody may write to such memory. This is that once: while threads decode,
    # warnings cannot be silenced for one of them alone.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)
