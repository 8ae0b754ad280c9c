"""The weights of one version as a stream of messages: their names and shapes, their bytes, and a digest of all.

A reader gets all tensors of one version or an error. Nothing is allocated before the layout has been checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from averaging.errors import BusyError, ProtocolViolationError, TensorError
from averaging.rpc import check_size
from averaging.tensors import offload
from averaging.wire import synchronizer_pb2 as wire

StateDict: TypeAlias = "dict[str, torch.Tensor]"
ModelState: TypeAlias = "StateDict | str | None"
"""Tensors by name, a path, or None if the weights are elsewhere."""

Meta: TypeAlias = list[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of each tensor."""

PIECE_BYTES = 1 << 18
"""As in a download of a state: 8 s on a link of 256 kbit/s, so that the messages of a session are not held up."""

MAX_PART_BYTES = 16 << 20
"""Maximum size of a message. The first one describes all tensors."""

MAX_TENSORS, MAX_NAME, MAX_PATH = 100_000, 1024, 4096

_DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 int64 int32 int16 int8 uint8 bool"
)
DTYPES: Mapping[str, torch.dtype] = {
    name: dtype for name in _DTYPES.split(" ") if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The dtypes that can be sent, by name."""


def copy_of(state: object) -> ModelState:
    """Returns a copy on the CPU that its owner no longer changes.

    Raises:
        TensorError: An item is no tensor, has no dense values, or has a dtype that cannot be sent.
    """
    if state is None or isinstance(state, str):
        return state
    if not isinstance(state, Mapping):
        raise TensorError(f"a state must be a dict of tensors, a path or None, not {type(state).__name__}")
    copied: StateDict = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TensorError(f"{name!r} of the state is {type(tensor).__name__}; give tensors by name")
        if tensor.layout is not torch.strided or tensor.is_meta or _name_of(tensor.dtype) not in DTYPES:
            raise TensorError(f"tensor {name!r} ({tensor.dtype}, {tensor.layout}) cannot be sent; give a dense one")
        copied[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copied


async def copy_in_thread(state: object) -> ModelState:
    """Does the same in a thread if it takes long."""
    nbytes = 0
    if isinstance(state, Mapping):
        tensors = (tensor for tensor in state.values() if isinstance(tensor, torch.Tensor))
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return await offload(lambda: copy_of(state), nbytes)


def meta_of(state: StateDict) -> Meta:
    """Returns the name, dtype and shape of each tensor."""
    return [(name, _name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()]


def tensors_of(meta: Meta) -> list[wire.Tensor]:
    """Returns the messages that describe the tensors."""
    return [wire.Tensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in meta]


def meta_from(tensors: Sequence[wire.Tensor]) -> Meta:
    """Reads and checks what describes the tensors.

    Raises:
        ProtocolViolationError: There are too many, two have the same name, or a dtype or shape is invalid.
    """
    if len(tensors) > MAX_TENSORS:
        raise ProtocolViolationError(f"a state of {len(tensors)} tensors; at most {MAX_TENSORS} are accepted")
    meta: Meta = []
    for tensor in tensors:
        if not tensor.name or len(tensor.name) > MAX_NAME or tensor.dtype not in DTYPES:
            raise ProtocolViolationError(f"a tensor of dtype {tensor.dtype[:20]!r} and a name of {len(tensor.name)}")
        try:
            check_size(tensor.shape)
        except ProtocolViolationError as error:
            raise ProtocolViolationError(f"tensor {tensor.name[:80]!r} has an invalid shape: {error}") from None
        meta.append((tensor.name, tensor.dtype, tuple(tensor.shape)))
    if len({name for name, _, _ in meta}) != len(meta):
        raise ProtocolViolationError("two tensors of a state have the same name")
    return meta


def parts_of(state: ModelState, version: int = 0) -> Iterator[wire.StatePart]:
    """Yields the messages of a state: the head, the bytes of the tensors in order, and the digest.

    Args:
        state: It must not be written meanwhile.
        version: Its version.
    """
    head = wire.StateHead(version=version)
    if isinstance(state, str):
        head.path = state
    if not isinstance(state, dict):
        yield wire.StatePart(head=head)
        return
    meta = meta_of(state)
    head.has_tensors = True
    head.tensors.extend(tensors_of(meta))
    yield wire.StatePart(head=head)
    digest = _digest_of(meta)
    for tensor in state.values():
        raw = _raw(tensor)
        for begin in range(0, len(raw), PIECE_BYTES):
            piece = bytes(raw[begin : begin + PIECE_BYTES])
            digest.update(piece)
            yield wire.StatePart(data=piece)
    yield wire.StatePart(digest=digest.digest())


@dataclass(frozen=True, slots=True)
class ReceivedTensors:
    """A state and the version that its sender gave it."""

    state: ModelState
    version: int


class TensorAssembler:
    """Puts the messages of one state together.

    Args:
        max_bytes: Maximum size of the tensors together.

    Attributes:
        finished: Whether the state is complete and its digest is right.
        nbytes: Bytes of all tensors; 0 before the head has come.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head: wire.StateHead | None = None
        self._meta: Meta = []
        self._state: StateDict = {}
        self._raw = memoryview(b"")  # the bytes of the present tensor that have not arrived
        self.finished = False
        self.nbytes = 0

    def add(self, part: wire.StatePart) -> None:
        """Takes the next message.

        Raises:
            ProtocolViolationError: The message is invalid, or the digest is not that of the bytes.
            BusyError: There is no memory for the next tensor.
        """
        if self.finished:
            raise ProtocolViolationError("a state with a message after its end")
        if self._head is None:
            self._begin(part)
        elif part.data:
            self._add(part.data)
        elif self._raw or len(self._state) < len(self._meta):
            raise ProtocolViolationError("a state with fewer bytes than its tensors have")
        elif part.digest != self._digest.digest():
            raise ProtocolViolationError("a state whose digest is not that of its bytes")
        else:
            self.finished = True

    def result(self) -> ReceivedTensors:
        """Returns the whole state.

        Raises:
            ProtocolViolationError: Messages are missing.
        """
        if self._head is None or not self.finished:
            raise ProtocolViolationError("a state that ends before its digest")
        if self._head.has_tensors:
            return ReceivedTensors(self._state, self._head.version)
        return ReceivedTensors(self._head.path or None, self._head.version)

    def _begin(self, part: wire.StatePart) -> None:
        if not part.HasField("head"):
            raise ProtocolViolationError("a state without a head")
        head = part.head
        self._meta = meta_from(head.tensors)
        nbytes = sum(prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self._meta)
        if nbytes > self._max_bytes:
            raise ProtocolViolationError(
                f"a state of {nbytes} bytes; at most {self._max_bytes} are accepted (`max_state_bytes`)"
            )
        if len(head.path) > MAX_PATH or (head.has_tensors and head.path) or (self._meta and not head.has_tensors):
            raise ProtocolViolationError("a state with an invalid path")
        self.nbytes = nbytes
        self._head = head
        self._digest = _digest_of(self._meta)
        self.finished = not head.has_tensors
        self._next_tensors()

    def _add(self, data: bytes) -> None:
        if len(data) > len(self._raw):
            raise ProtocolViolationError("a state with more bytes than its tensors have")
        self._digest.update(data)
        self._raw[: len(data)] = data
        self._raw = self._raw[len(data) :]
        self._next_tensors()

    def _next_tensors(self) -> None:
        """Creates the tensors up to the next one that has bytes, unless the present one is incomplete."""
        while not self._raw and len(self._state) < len(self._meta):
            name, dtype, shape = self._meta[len(self._state)]
            try:
                tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
            except RuntimeError:
                raise BusyError(f"there is no memory here for tensor {name[:80]!r} of shape {list(shape)}") from None
            self._state[name] = tensor
            self._raw = _raw(tensor)


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest_of(meta: Meta) -> hashlib._Hash:
    digest = hashlib.sha256()
    for name, dtype, shape in meta:
        digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\n".encode())
    return digest
