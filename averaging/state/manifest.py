"""The state that a peer shares: its snapshots under a growing version, copied only when necessary, and the metadata.

The metadata of a download are version, tensors and digests of the state, and the offset at which its bytes begin.

A reader that has the first bytes of a state from an interrupted download sends their number and a fingerprint of the
tensors they belong to. A donor whose state begins with the same tensors skips these bytes, whatever its version is.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec import Struct, convert, msgpack

from averaging.common import pack as pack_value, pack_user, unpack
from averaging.errors import ProtocolViolationError, StateError
from averaging.protocol import DownloadData, Resume, WireTensor
from averaging.tensors import (
    STATE_DTYPES,
    HostCopies,
    SharedTensors,
    TensorInfo,
    check_tensors,
    chunks_of,
    copy_to_cpu,
    dtype_name,
    finish,
    host_memory,
    in_thread,
    is_on_device,
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


INLINE_BYTES = 1 << 20
"""Digests of a state up to this size are computed on the event loop, those of a larger state in a thread."""


@dataclass(frozen=True, slots=True)
class ExtraState:
    """The application's additions to a state: further tensors by name, and a small dict that msgpack can pack.

    The dict has numbers, strings, bytes, lists and dicts; keys are text, bytes or integers.
    """

    tensors: Mapping[str, torch.Tensor]
    user: Mapping[str, Any]


NO_EXTRA_STATE = ExtraState({}, {})


class _Copies:
    """Makes the copies of states, whose memory is used again once nobody holds the state before."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._holder: Callable[[], State | None] = lambda: None

    def of(self, version: int, named: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> _Copied:
        """A copy; of what is on a device it is complete later, and the tensors may be written at once."""
        tensors = list(named.values())
        if not any(map(is_on_device, tensors)):
            return _Copied(State(version, {name: copy_to_cpu(tensor) for name, tensor in named.items()}, user), None)
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._holder() is not None or kinds != [(memory.shape, memory.dtype) for memory in self._memory]:
            self._memory = []  # before as much is taken again
            self._memory = host_memory(tensors, [tensor.dtype for tensor in tensors])
        arriving = HostCopies(tensors, self._memory)
        arriving.begin(keep=True)
        state = State(version, dict(zip(named, self._memory, strict=True)), user)
        self._holder = weakref.ref(state)
        return _Copied(state, arriving)


@dataclass(frozen=True, slots=True)
class _Copied:
    state: State
    arriving: HostCopies | None


class Snapshots:
    """The last committed state of one peer.

    A commit copies nothing. The first download makes the copy, or the next write of the application to the tensors. So
    a peer that only averages holds no second set of its tensors, and one whose state is not `shared` never copies.
    `extras` is called under the tensors' lock for the application's additions to the state.
    """

    def __init__(self, tensors: SharedTensors, extras: Callable[[], ExtraState] | None, *, shared: bool) -> None:
        self._tensors = tensors
        self._extras = extras or (lambda: NO_EXTRA_STATE)
        self.shared = shared
        self.version = 0
        self._committed_extras = NO_EXTRA_STATE
        self._committed_user = b""  # packed, because the application may change its dict later
        self._copies = _Copies()
        self._copy: _Copied | None = None
        self._sealed: Snapshot | None = None  # possibly of an earlier copy
        if shared:
            tensors.before_application_writes = self._copy_once

    def commit(self, version: int) -> None:
        """Commits the present values of the tensors under `version`, or the last version if that is greater.

        The caller holds the tensors' lock. Raises a StateError if the extras cannot be shared.
        """
        if self.shared:
            extras = self._extras()
            self._committed_user = check_state(self._tensors.names, extras.tensors, extras.user)
            self._committed_extras = extras
        self._copy = self._sealed = None
        self.version = max(version, self.version)

    async def latest(self, timeout: float) -> Snapshot:
        """Returns the committed state with its digests. It waits at most `timeout` seconds for the tensors' lock.

        Call it once at a time, so that downloads do not use up the loop's threads. If it is cancelled, the copy and the
        digests are still completed, because the reader of a large state will ask again.
        """
        copy, sealed = self._copy, self._sealed
        if copy is not None and sealed is not None and sealed.state is copy.state:
            return sealed
        nbytes = sum(tensor.nbytes for tensor in self._named().values())
        if copy is None:
            copy = await self._tensors.while_locked(self._copy_for_reader, timeout, nbytes)
        seal_it = partial(self._seal, copy)
        return await in_thread(seal_it) if nbytes > INLINE_BYTES or copy.arriving is not None else seal_it()

    def _copy_for_reader(self) -> _Copied:
        """Copies in another thread than that of training, on whose stream the next write may come at once."""
        self._tensors.wait_for_computed()
        copy = self._copy_once()
        finish(self._tensors.tensors)
        return copy

    def _copy_once(self) -> _Copied:
        if self._copy is None:
            self._copy = self._copies.of(self.version, self._named(), msgpack.decode(self._committed_user))
        return self._copy

    def _named(self) -> dict[str, torch.Tensor]:
        own = zip(self._tensors.names, self._tensors.tensors, strict=True)
        return dict(own) | dict(self._committed_extras.tensors)

    def _seal(self, copy: _Copied) -> Snapshot:
        state = copy.state
        if copy.arriving is not None:
            copy.arriving.wait()
        sealed = seal(state)
        if self._copy is copy:  # else another state was committed meanwhile; this snapshot is still valid
            self._sealed = sealed
        return sealed
