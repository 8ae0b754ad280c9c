"""What named tensors look like, and their bytes: dtypes, descriptions, the checks of strangers' descriptions, pieces.

The state for newcomers, weights by version, the states of a synchronizer and the tensors of workers travel in messages
of their own. All of them stand on this file. Pure.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from averaging.errors import BusyError, ProtocolViolationError
from averaging.protocol import Buffer, WireTensor


def _by_name(names: str) -> dict[str, torch.dtype]:
    return {name: getattr(torch, name) for name in names.split()}


AVERAGED_DTYPES = _by_name("float16 bfloat16 float32 float64")
"""The dtypes that can be averaged, by name on the wire. The following tables add to this one."""

STATE_DTYPES = AVERAGED_DTYPES | _by_name("int64 int32 int16 int8 uint8 bool")
"""The dtypes in a state for newcomers, and in the messages of workers."""

WEIGHT_DTYPES = STATE_DTYPES | _by_name("float8_e4m3fn float8_e5m2")  # the dtypes of weights that are published
DTYPES = WEIGHT_DTYPES | _by_name("complex64 complex128")  # all dtypes that can travel
MAX_TENSORS = 100_000  # in one state
MAX_DIMS = 64  # the limit of numpy and torch
MAX_ELEMENTS = 1 << 40  # far above any real tensor, and far below where the strides of a tensor overflow 64 bits


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype (see `DTYPES`) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> object:
        return self.name

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def over(self, buffer: Buffer | bytearray) -> torch.Tensor:
        return view_bytes(buffer, self.torch_dtype).reshape(self.shape)


def nbytes_of(tensors: Iterable[TensorInfo]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def objection_to(
    tensor: torch.Tensor, dtypes: Mapping[str, torch.dtype], verb: str, dtype: torch.dtype | None = None
) -> str | None:
    """Why a tensor cannot travel, as the part of a message that follows its name; None if it can.

    `dtypes` is one of the tables of this file, `verb` one such as `published`; it travels in `dtype`, by default its
    own.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        return f"has no dense values; only dense tensors can be {verb}"
    if (dtype or tensor.dtype) not in dtypes.values():
        return f"is {dtype or tensor.dtype}; {', '.join(dtypes)} can be {verb}"
    return None


def check_size(size: Sequence[int]) -> None:
    """Checks the dimensions and elements of a shape from the network, or raises a ProtocolViolationError.

    A dimension of 0 counts as 1, because the others can overflow the strides of an empty tensor too.
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


def check_tensors(tensors: Sequence[TensorInfo], dtypes: Mapping[str, torch.dtype]) -> None:
    """Checks descriptions from another peer before memory is taken for the tensors, or raises a ProtocolViolationError.

    Their `dtype` may be anything; `dtypes` is one of the tables of this file.
    """
    if len(tensors) > MAX_TENSORS:
        raise ProtocolViolationError(f"{len(tensors)} tensors; at most {MAX_TENSORS} are accepted")
    for tensor in tensors:
        if tensor.dtype not in dtypes:
            raise ProtocolViolationError(f"tensor {tensor.name[:80]!r} of unknown dtype {tensor.dtype[:40]!r}")
        try:
            check_size(tensor.shape)
        except ProtocolViolationError as error:
            raise ProtocolViolationError(f"tensor {tensor.name[:80]!r} has an invalid shape: {error}") from None
    if len({tensor.key for tensor in tensors}) != len(tensors):
        raise ProtocolViolationError("two tensors have the same name")


def view_memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, in order; without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8).numpy().data


def view_bytes(buffer: Buffer | bytearray, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A 1-D tensor that shares the memory of `buffer` and keeps it alive.

    It must not be written if `buffer` must not: `bytes` are immutable, and torch has no read-only tensors.
    """
    return torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype, device="cpu")


def pieces_of(buffer: Buffer, piece_bytes: int) -> Iterator[memoryview]:
    """Views of the pieces in which bytes travel, all of `piece_bytes` but the last; of no bytes a single empty one."""
    whole = memoryview(buffer)
    for start in range(0, max(1, len(whole)), piece_bytes):
        yield whole[start : start + piece_bytes]


def chunks_of(wire: WireTensor, chunk_bytes: int) -> Iterator[WireTensor]:
    """An encoded tensor in messages of at most `chunk_bytes`; only the first describes it."""
    pieces = list(pieces_of(wire.buffer, chunk_bytes))
    yield replace(wire, buffer=pieces[0], chunks=len(pieces))
    yield from map(WireTensor, pieces[1:])


class TensorBuffer:
    """The bytes of one tensor, which arrive in order. Memory is taken as they arrive, not when they are announced.

    It continues `data`, the bytes that are here from an earlier transfer; with None the bytes are counted and dropped.
    With `chunks` they come in as many messages.
    """

    def __init__(self, nbytes: int, data: bytearray | None, chunks: int | None = None) -> None:
        self.nbytes, self.data = nbytes, data
        self.filled = 0 if data is None else len(data)
        self._chunks = chunks

    @property
    def complete(self) -> bool:
        return self.filled == self.nbytes and not self._chunks

    def add(self, piece: Buffer) -> bool:
        """Appends the bytes of one message, and returns whether the tensor is complete.

        There may be no more and no fewer bytes or messages than announced. A BusyError says that there is no memory.
        """
        self.filled += len(piece)
        if self._chunks is not None:
            self._chunks -= 1
        if self.filled > self.nbytes or (self._chunks is not None and self._chunks < (self.filled < self.nbytes)):
            raise ProtocolViolationError(f"a tensor takes {self.nbytes} bytes, but {self.filled} were received")
        try:
            if self.data is not None:
                self.data += piece
        except MemoryError:
            raise BusyError(f"there is no memory here for a tensor of {self.nbytes} bytes") from None
        return self.complete


with warnings.catch_warnings():
    # torch warns once per process that such memory must not be written. Trigger the warning here, since filters cannot
    # be set for one thread alone later.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)
