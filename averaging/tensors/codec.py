"""The interface of a codec, the check of shapes from the network, and views between tensors and bytes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from averaging.errors import ProtocolViolationError
from averaging.protocol import Buffer

MAX_DIMS = 64
"""The limit of numpy and torch."""

MAX_ELEMENTS = 1 << 40
"""Far above any real tensor, and far below where the strides of a tensor overflow 64 bits."""


class Codec(ABC):
    """Encodes a tensor to bytes. All numbers are little-endian; big-endian machines are not supported.

    Attributes:
        wire_dtype: the value of the tensor's `dtype` field on the wire.
        bytes_per_element: compressed size, without the overhead per tensor, row or block.
    """

    def __init__(self, wire_dtype: str, bytes_per_element: int) -> None:
        self.wire_dtype = wire_dtype
        self.bytes_per_element = bytes_per_element

    @abstractmethod
    def nbytes(self, size: tuple[int, ...]) -> int:
        """Exact length in bytes of the buffer of a tensor of shape `size`, which passed `check_size`."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Encodes a dense CPU tensor of a floating dtype and any shape, detached from autograd."""

    @abstractmethod
    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """Decodes the tensor of shape `size` from a buffer of exactly `nbytes(size)` bytes."""


def check_size(size: Sequence[int]) -> None:
    """Checks a shape from the network.

    Raises:
        ProtocolViolationError: a dimension is negative, or there are too many dimensions or elements. A dimension of 0
            counts as 1, because the others can overflow the strides of an empty tensor too.
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
    """A 1-D tensor that shares the memory of `buffer` and keeps it alive.

    It must not be written: `bytes` are immutable, and torch has no read-only tensors.
    """
    return torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype, device="cpu")


def view_memory(tensor: torch.Tensor) -> Buffer:
    """The elements of a CPU tensor, in order, in its own dtype; without a copy if it is contiguous."""
    if not tensor.numel():
        return b""
    # numpy has no bfloat16
    same_size = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return same_size.contiguous().numpy().data.cast("B")


with warnings.catch_warnings():
    # torch warns once per process that such memory must not be written. Trigger the warning here, since filters cannot
    # be set for one thread alone later.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)
