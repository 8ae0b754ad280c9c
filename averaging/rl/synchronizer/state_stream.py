"""The weights of one version as a stream of messages: their names and shapes, their bytes, and a digest of all.

A reader gets all tensors of one version or an error. Nothing is allocated before the layout has been checked.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from averaging.errors import ProtocolViolationError, TensorError
from averaging.tensors import (
    DTYPES,
    TensorInfo,
    check_tensors,
    copy_to_cpu,
    dtype_name,
    nbytes_of,
    objection_to,
    offload,
    pieces_of,
    view_memory,
)
from averaging.wire import synchronizer_pb2 as wire

StateDict: TypeAlias = "dict[str, torch.Tensor]"
ModelState: TypeAlias = "StateDict | str | None"  # tensors by name, a path, or None if the weights are elsewhere
Meta: TypeAlias = list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of each tensor

PIECE_BYTES = 1 << 18  # 8 s on a link of 256 kbit/s, so that the messages of a session are not held up
MAX_PART_BYTES = 16 << 20  # of a message. The first one describes all tensors
MAX_NAME, MAX_PATH = 1024, 4096


def copy_of(state: object) -> ModelState:
    """Returns a copy on the CPU that its owner no longer changes."""
    if state is None or isinstance(state, str):
        return state
    if not isinstance(state, Mapping):
        raise TensorError(f"a state must be a dict of tensors, a path or None, not {type(state).__name__}")
    copied: StateDict = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TensorError(f"{name!r} of the state is {type(tensor).__name__}; give tensors by name")
        if objection := objection_to(tensor, DTYPES, "sent"):
            raise TensorError(f"tensor {name!r} {objection}; give another one")
        copied[name] = copy_to_cpu(tensor)
    return copied


async def copy_in_thread(state: object) -> ModelState:
    values = state.values() if isinstance(state, Mapping) else ()
    nbytes = sum(each.numel() * each.element_size() for each in values if isinstance(each, torch.Tensor))
    return await offload(lambda: copy_of(state), nbytes)


def meta_of(state: StateDict) -> Meta:
    return [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()]


def tensors_of(meta: Meta) -> list[wire.Tensor]:
    return [wire.Tensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in meta]


def meta_from(tensors: Sequence[wire.Tensor]) -> Meta:
    infos = [TensorInfo(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    check_tensors(infos, DTYPES)
    if wrong := [len(info.name) for info in infos if not 0 < len(info.name) <= MAX_NAME]:
        raise ProtocolViolationError(f"a tensor with a name of {wrong[0]} characters")
    return [(info.name, info.dtype, info.shape) for info in infos]


def parts_of(state: ModelState, version: int = 0) -> Iterator[wire.StatePart]:
    """Yields the messages of a state, which nobody writes to meanwhile: the head, the bytes in order, the digest."""
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
        for piece in pieces_of(view_memory(tensor), PIECE_BYTES) if tensor.numel() else ():
            digest.update(piece)
            yield wire.StatePart(data=bytes(piece))
    yield wire.StatePart(digest=digest.digest())


class TensorAssembler:
    """Puts the messages of one state of at most `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head: wire.StateHead | None = None
        self._state: StateDict = {}
        self._room: deque[memoryview] = deque()  # the bytes of its tensors that have not arrived
        self.finished = False  # whether the state is complete and its digest is right
        self.nbytes = 0  # of all tensors, once the head has come

    def add(self, part: wire.StatePart) -> None:
        if self.finished:
            raise ProtocolViolationError("a state with a message after its end")
        if self._head is None:
            self._begin(part)
        elif part.data:
            self._add(part.data)
        elif self._room:
            raise ProtocolViolationError("a state with fewer bytes than its tensors have")
        elif part.digest != self._digest.digest():
            raise ProtocolViolationError("a state whose digest is not that of its bytes")
        else:
            self.finished = True

    def result(self) -> tuple[ModelState, int]:
        """Returns the state and the version that its sender gave it."""
        if self._head is None or not self.finished:
            raise ProtocolViolationError("a state that ends before its digest")
        state = self._state if self._head.has_tensors else self._head.path or None
        return state, self._head.version

    def _begin(self, part: wire.StatePart) -> None:
        if not part.HasField("head"):
            raise ProtocolViolationError("a state without a head")
        head, meta = part.head, meta_from(part.head.tensors)
        self.nbytes, most = nbytes_of(TensorInfo(*entry) for entry in meta), self._max_bytes
        if self.nbytes > most:
            text = f"a state of {self.nbytes} bytes; at most {most} are accepted (`max_state_bytes`)"
            raise ProtocolViolationError(text)
        if len(head.path) > MAX_PATH or (head.has_tensors and head.path) or (meta and not head.has_tensors):
            raise ProtocolViolationError("a state with an invalid path")
        self._head, self._digest, self.finished = head, _digest_of(meta), not head.has_tensors
        # Memory is taken from the system when it is written to, so a head alone takes none.
        self._state = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in meta}
        self._room.extend(view_memory(tensor) for tensor in self._state.values() if tensor.numel())

    def _add(self, data: bytes) -> None:
        room = self._room.popleft() if self._room else memoryview(b"")
        if len(data) > len(room):
            raise ProtocolViolationError("a state with more bytes than its tensors have")
        self._digest.update(data)
        room[: len(data)] = data
        if len(data) < len(room):
            self._room.appendleft(room[len(data) :])


def _digest_of(meta: Meta) -> hashlib._Hash:
    digest = hashlib.sha256()
    for name, dtype, shape in meta:
        digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\n".encode())
    return digest
