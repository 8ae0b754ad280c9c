"""A peer's state as newcomers download it, packed into chunks; `reader` puts it together again.

The state is what was committed last, under a version that never goes back. The averaged tensors come first, in the
schema's order; whatever the application adds (optimizer statistics, say) follows, with a small dict of its own.

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
from averaging.state.manifest import DTYPE_NAMES, STATE_DTYPES, Described, Manifest, can_skip, covered

CHUNK_BYTES = 1 << 18
"""Size of one message of a download: over a link of 256 kbit/s it takes 8 s. Larger ones would save 15 % of the
processor time, and on such a link a donor would be silent for longer than readers wait."""


@dataclass(frozen=True, slots=True)
class State:
    """A committed state.

    Attributes:
        version: never goes back at one peer.
        tensors: dense CPU tensors by name; the averaged ones first, in the schema's order.
        user: the application's own small dict, of what msgpack can pack; its keys are text, bytes or integers.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    user: Mapping[str, Any] = field(default_factory=dict)


def check_state(averaged: Collection[str], tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> bytes:
    """Whether a state of the averaged tensors and further ones could be packed; returns the user dict as msgpack.

    Raises:
        StateError: a tensor of the name of an averaged one, or of a dtype or a layout that cannot travel, or a user
            dict that msgpack cannot pack, or with keys that newcomers do not read.
    """
    for name, tensor in tensors.items():
        if name in averaged:  # newcomers would take it for the averaged one
            raise StateError(f"state tensor {name!r} has the name of an averaged one; give it another")
        if tensor.dtype not in DTYPE_NAMES:
            raise StateError(
                f"state tensor {name!r} is {tensor.dtype}; {', '.join(STATE_DTYPES)} can be shared; leave it out, or "
                "give newcomers nothing: share_state=False"
            )
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise StateError(f"state tensor {name!r} has no dense values; give one that has, such as its `to_dense()`")
    try:
        packed: bytes = msgpack.packb(dict(user))
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"the state's user dict must be what msgpack can pack: {error}") from None
    try:
        check_keys(dict(user))
    except ValueError as error:
        raise StateError(f"newcomers could not read the state's user dict: {error}") from None
    return packed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state that nobody writes any more, with the SHA-256 digest of each tensor's bytes."""

    state: State
    digests: tuple[bytes, ...]

    @property
    def tensors(self) -> tuple[Described, ...]:
        """As they are announced."""
        named = zip(self.state.tensors.items(), self.digests, strict=True)
        return tuple(Described(name, t.dtype, tuple(t.shape), digest) for (name, t), digest in named)


def seal(state: State) -> Snapshot:
    """Computes the digests; the tensors must not be written afterwards."""
    return Snapshot(state, tuple(hashlib.sha256(_raw(tensor)).digest() for tensor in state.tensors.values()))


def pack(snapshot: Snapshot, resume: Resume | None = None) -> Iterator[DownloadData]:
    """The messages of a download: metadata with the first chunk, then the rest.

    Args:
        snapshot: what is sent.
        resume: what the reader has; it is left out if this state has the same there.
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
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
