"""A peer's state packed into the messages of a download; `assembler` is the reverse.

A state is what was committed last, under a version that never decreases. The averaged tensors come first, in the
schema's order. The application's own tensors, such as optimizer statistics, follow, and a small dict.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from averaging.common.safe_msgpack import check_keys
from averaging.errors import StateError
from averaging.protocol.messages import DownloadData, Resume, WireTensor
from averaging.state.manifest import DTYPE_NAMES, STATE_DTYPES, Manifest, TensorInfo, can_skip, covered

CHUNK_BYTES = 1 << 18
"""Size of one message of a download, which takes 8 s on a link of 256 kbit/s. Larger messages would save 15 % of the
processor time, but take longer on such a link than readers wait for a message."""


@dataclass(frozen=True, slots=True)
class State:
    """A committed state.

    Attributes:
        version: never decreases at one peer.
        tensors: dense CPU tensors by name; the averaged ones first, in the schema's order.
        user: the application's own small dict, packable with msgpack; its keys are text, bytes or integers.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    user: Mapping[str, Any] = field(default_factory=dict)


def check_state(averaged: Collection[str], tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> bytes:
    """Checks that the application's tensors and dict can be part of a state; returns the dict packed with msgpack.

    Raises:
        StateError: a tensor has the name of an averaged one or a dtype or layout that cannot be sent, or the dict
            cannot be packed, or newcomers would refuse its keys.
    """
    for name, tensor in tensors.items():
        if name in averaged:  # newcomers would confuse the two
            raise StateError(f"state tensor {name!r} has the name of an averaged tensor; rename it")
        if tensor.dtype not in DTYPE_NAMES:
            raise StateError(
                f"state tensor {name!r} is {tensor.dtype}; {', '.join(STATE_DTYPES)} can be shared; leave it out, or "
                "share no state with newcomers: share_state=False"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise StateError(f"state tensor {name!r} has no dense values; pass a dense one, such as its `to_dense()`")
    try:
        packed: bytes = msgpack.packb(dict(user))
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"msgpack cannot pack the state's user dict: {error}") from None
    try:
        check_keys(dict(user))
    except ValueError as error:
        raise StateError(f"newcomers could not read the state's user dict: {error}") from None
    return packed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state whose tensors are no longer written, with the SHA-256 digest of each tensor's bytes."""

    state: State
    digests: tuple[bytes, ...]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors as they are announced in the metadata."""
        named = zip(self.state.tensors.items(), self.digests, strict=True)
        return tuple(TensorInfo(name, t.dtype, tuple(t.shape), digest) for (name, t), digest in named)


def seal(state: State) -> Snapshot:
    """Computes the digests. The tensors must not be written afterwards."""
    return Snapshot(state, tuple(hashlib.sha256(_raw(tensor)).digest() for tensor in state.tensors.values()))


def pack(snapshot: Snapshot, resume: Resume | None = None) -> Iterator[DownloadData]:
    """Yields the messages of a download. The first one also has the metadata.

    Args:
        snapshot: the state to send.
        resume: the part that the reader has. It is skipped if this state begins with the same.
    """
    state, announced = snapshot.state, snapshot.tensors
    skipped = can_skip(announced, resume)
    metadata = Manifest(state.version, announced, state.user, skipped).pack()
    whole, inside = covered(announced, skipped) if skipped else (0, 0)
    for tensor in list(state.tensors.values())[whole:]:
        buffer = _raw(tensor)[inside:]
        inside = 0
        chunks = max(1, -(-len(buffer) // CHUNK_BYTES))
        for number in range(chunks):
            piece = buffer[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            if number:
                wire = WireTensor(piece)
            else:
                wire = WireTensor(piece, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype], chunks=chunks)
            yield DownloadData(metadata, wire)
            metadata = b""
    if metadata:
        yield DownloadData(metadata)


def _raw(tensor: torch.Tensor) -> memoryview:
    """Bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
