"""The metadata of a download: version, tensors and digests of the state, and the offset at which its bytes begin.

A reader that has the first bytes of a state from an interrupted download sends their number and a fingerprint of the
tensors they belong to. A donor whose state begins with the same tensors skips these bytes, whatever its version is.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct, convert

from averaging.common import pack as pack_value, pack_user, unpack
from averaging.errors import ProtocolViolationError, StateError
from averaging.protocol import DownloadData, Resume, WireTensor
from averaging.tensors import (
    STATE_DTYPES,
    TensorInfo,
    check_tensors,
    chunks_of,
    dtype_name,
    nbytes_of,
    objection_to,
    view_memory,
)

MAX_METADATA_BYTES = 16 << 20
MAX_VERSION = 1 << 62
"""Highest version accepted in a download. Later versions must still fit into the 64 bits of the messages."""


@dataclass(frozen=True, slots=True)
class StateTensor(TensorInfo):
    """A tensor of a state, with the SHA-256 digest of its bytes."""

    digest: bytes

    @property
    def described(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape)]


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    tensors: tuple[StateTensor, ...]
    user: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0  # bytes that are not sent because the reader has them: the first ones of the state
    # whether the names are those of the application, which a reader with names compares; other software may name
    # tensors in its own way
    named: bool = True

    def pack(self) -> bytes:
        fields: dict[str, Any] = {
            "version": self.version,
            "tensors": [tensor.described for tensor in self.tensors],
            "digest": [tensor.digest for tensor in self.tensors],
            "user": dict(self.user),
            "named": self.named,
        }
        return pack_value(fields | ({"skipped": self.skipped} if self.skipped else {}))


class _Fields(Struct):
    version: int | float
    tensors: list[tuple[str, str, tuple[int, ...]]]
    digest: list[Any]  # bytes, or hex from other software
    user: dict[Any, Any] | None = None
    skipped: int | None = None
    named: Any = None


def read_manifest(packed: bytes) -> Manifest:
    """Reads and validates metadata; raises a StateError if it is unreadable or inconsistent."""
    if not packed or len(packed) > MAX_METADATA_BYTES:
        raise StateError(f"its metadata has {len(packed)} bytes")
    try:
        fields = convert(unpack(packed), _Fields)
        digests = [_digest(digest) for digest in fields.digest]
        infos = [TensorInfo(*tensor) for tensor in fields.tensors]
        check_tensors(infos, STATE_DTYPES)
        version = int(fields.version)
    except (ProtocolViolationError, ArithmeticError, TypeError, ValueError) as error:
        raise StateError(f"its metadata is unreadable: {error}") from None
    if not 0 <= version <= MAX_VERSION:
        raise StateError(f"its version is {version:.3g}; it must be from 0 to {MAX_VERSION:.3g}")
    if len(digests) != len(infos):
        raise StateError(f"its metadata has {len(infos)} tensors and {len(digests)} digests")
    tensors = tuple(StateTensor(i.name, i.dtype, i.shape, digest) for i, digest in zip(infos, digests, strict=True))
    return Manifest(version, tensors, fields.user or {}, fields.skipped or 0, fields.named is True)


def covered(tensors: Sequence[TensorInfo], offset: int) -> tuple[int, int]:
    """How many tensors lie completely in the first `offset` bytes, and how many bytes of the next one do."""
    for number, tensor in enumerate(tensors):
        if tensor.nbytes > offset:
            return number, offset
        offset -= tensor.nbytes
    return len(tensors), 0


def resume_at(tensors: Sequence[StateTensor], offset: int) -> Resume:
    whole, inside = covered(tensors, offset)
    described = [[*tensor.described, tensor.digest] for tensor in tensors[: whole + (inside > 0)]]
    return Resume(offset, hashlib.sha256(pack_value(described)).digest())


def can_skip(tensors: Sequence[StateTensor], resume: Resume | None) -> int:
    """How many of the first bytes can be skipped for a reader with this request."""
    if resume is None or not 0 < resume.offset <= nbytes_of(tensors):
        return 0
    return resume.offset if resume.fingerprint == resume_at(tensors, resume.offset).fingerprint else 0


def _digest(digest: object) -> bytes:
    if isinstance(digest, str):
        return bytes.fromhex(digest)
    if isinstance(digest, bytes):
        return digest
    raise TypeError(f"a digest is {type(digest).__name__}")  # bytes(number) would allocate that many bytes


# A peer's state packed into the messages of a download; `assembler` is the reverse.
#
# A state is what was committed last, under a version that never decreases. The averaged tensors come first, in the
# schema's order. The application's own tensors, such as optimizer statistics, follow, and a small dict.
#
# Pure.


CHUNK_BYTES = 1 << 18
"""Size of one message of a download, which takes 8 s on a link of 256 kbit/s. Larger messages would save 15 % of the
processor time, but take longer on such a link than readers wait for a message."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
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
        if objection := objection_to(tensor, STATE_DTYPES, "shared"):
            raise StateError(
                f"state tensor {name!r} {objection}; leave it out, pass a dense one such as its `to_dense()`, or share "
                "no state with newcomers: share_state=False"
            )
    try:
        return pack_user(dict(user))
    except (TypeError, OverflowError) as error:
        raise StateError(f"msgpack cannot pack the state's user dict: {error}") from None
    except ValueError as error:
        raise StateError(f"newcomers could not read the state's user dict: {error}") from None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state whose tensors are no longer written, with the SHA-256 digest of each tensor's bytes."""

    state: State
    digests: tuple[bytes, ...]

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        named = zip(self.state.tensors.items(), self.digests, strict=True)
        return tuple(
            StateTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape), digest) for (name, tensor), digest in named
        )


def seal(state: State) -> Snapshot:
    return Snapshot(state, tuple(hashlib.sha256(view_memory(tensor)).digest() for tensor in state.tensors.values()))


def pack(snapshot: Snapshot, resume: Resume | None = None) -> Iterator[DownloadData]:
    """Yields the messages of a download. The first one also has the metadata.

    Args:
        snapshot: the state to send.
        resume: the part that the reader has. It is skipped if this state begins with the same. If the reader takes
            several tensors in a message, whole ones of at most `CHUNK_BYTES` together travel so, without a description.
    """
    state, tensors = snapshot.state, snapshot.tensors
    skipped = can_skip(tensors, resume)
    metadata = Manifest(state.version, tensors, state.user, skipped).pack()
    whole, inside = covered(tensors, skipped) if skipped else (0, 0)
    rest = list(zip(tensors, state.tensors.values(), strict=True))[whole:]
    for wire in _wires(rest, inside, joins=resume is not None and resume.joins):
        yield DownloadData(metadata, wire)
        metadata = b""
    if metadata:
        yield DownloadData(metadata)


MAX_JOINED = 512
"""Tensors in one message at most, so that reading it does not keep the reader's event loop for long."""


def _wires(tensors: Iterable[tuple[StateTensor, torch.Tensor]], skipped: int, *, joins: bool) -> Iterator[WireTensor]:
    joined: list[memoryview] = []
    nbytes = 0
    for info, tensor in tensors:
        memory = view_memory(tensor)
        small = joins and not skipped and info.nbytes < CHUNK_BYTES
        if joined and not (small and nbytes + info.nbytes <= CHUNK_BYTES and len(joined) < MAX_JOINED):
            yield WireTensor(b"".join(joined))
            joined, nbytes = [], 0
        if small:
            joined.append(memory)
            nbytes += info.nbytes
            continue
        yield from chunks_of(WireTensor(memory[skipped:], info.shape, info.dtype), CHUNK_BYTES)
        skipped = 0
    if joined:
        yield WireTensor(b"".join(joined))
