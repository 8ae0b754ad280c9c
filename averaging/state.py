"""A peer's state as newcomers download it: packed into chunks, verified before anything local is changed.

The state is what was committed last, under a version that never goes back. The averaged tensors come first, in the
schema's order; whatever the application adds (optimizer statistics, say) follows, with a small dict of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import msgpack
import torch

from averaging.compression.base import check_size
from averaging.errors import ProtocolViolationError, StateError
from averaging.messages import Buffer, DownloadData, WireTensor
from averaging.schema import DTYPES, Schema

CHUNK_BYTES = 1 << 20
"""Size of one message of a download."""

MAX_METADATA_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_GROWTH = 16
"""A state may hold so many times the bytes of the averaged tensors (plus 64 MiB) before it is refused."""

STATE_DTYPES: dict[str, torch.dtype] = {
    **DTYPES,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""What a state may hold: more than what can be averaged."""

_DTYPE_NAMES = {dtype: name for name, dtype in STATE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class State:
    """A committed state.

    Attributes:
        version: never goes back at one peer.
        tensors: dense CPU tensors by name; the averaged ones first, in the schema's order.
        user: the application's own small dict, of what msgpack can pack.
    """

    version: int
    tensors: Mapping[str, torch.Tensor]
    user: Mapping[str, Any] = field(default_factory=dict)


def check_state(tensors: Mapping[str, torch.Tensor], user: Mapping[str, Any]) -> None:
    """Whether a state could be packed.

    Raises:
        StateError: a tensor of a dtype that cannot travel, or a user dict that msgpack cannot pack.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise StateError(f"state tensor {name!r} is {tensor.dtype}; {', '.join(STATE_DTYPES)} can be shared")
    try:
        msgpack.packb(dict(user))
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"the state's user dict must be what msgpack can pack: {error}") from None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state that nobody writes any more, with the SHA-256 digest of each tensor's bytes."""

    state: State
    digests: tuple[bytes, ...]


def seal(state: State) -> Snapshot:
    """Computes the digests; the tensors must not be written afterwards."""
    return Snapshot(state, tuple(hashlib.sha256(_raw(tensor)).digest() for tensor in state.tensors.values()))


def pack(snapshot: Snapshot) -> Iterator[DownloadData]:
    """The messages of a download: metadata with the first chunk, then the rest."""
    state = snapshot.state
    metadata: bytes = msgpack.packb(
        {
            "version": state.version,
            "tensors": [[name, _DTYPE_NAMES[t.dtype], list(t.shape)] for name, t in state.tensors.items()],
            "digest": list(snapshot.digests),
            "user": dict(state.user),
        }
    )
    for tensor in state.tensors.values():
        buffer = _raw(tensor)
        chunks = max(1, -(-len(buffer) // CHUNK_BYTES))
        for number in range(chunks):
            piece = buffer[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            if number:
                wire = WireTensor(piece)
            else:
                wire = WireTensor(piece, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], chunks=chunks)
            yield DownloadData(metadata, wire)
            metadata = b""


def _raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies a state as several donors can have it: the version, and the averaged tensors with their digests.

    What the application adds (optimizer statistics, say) may differ from peer to peer and is not in it.
    """

    version: int
    tensors: tuple[tuple[torch.dtype, tuple[int, ...], bytes], ...]

    def __str__(self) -> str:
        digests = b"".join(digest for _, _, digest in self.tensors)
        return f"version {self.version} with digest {hashlib.sha256(digests).hexdigest()[:8]}"


Kept: TypeAlias = "Mapping[tuple[str, torch.dtype, tuple[int, ...], bytes], torch.Tensor]"
"""Tensors that were read whole and verified, by name, dtype, shape and digest."""


class StateReader:
    """Puts a download together again and verifies it. No I/O.

    Args:
        schema: of the tensors that the downloader averages; the state must begin with the same. None takes any tensors.
        max_bytes: what the state may hold at most; if None, `MAX_GROWTH` times the bytes of the schema plus 64 MiB.
        kept: what need not be read again where a state has the very same; see `verified`.
        expected: refuses any other state.

    Attributes:
        version: of the state, as announced.
        received: bytes of tensors so far.

    Raises:
        StateError: from every method, if the state is not what it says or not what is needed.
    """

    def __init__(
        self,
        schema: Schema | None,
        max_bytes: int | None = None,
        kept: Kept | None = None,
        expected: Fingerprint | None = None,
    ) -> None:
        self._schema = schema
        self._kept, self._expected = kept or {}, expected
        own_bytes = schema.nbytes if schema else 0
        self._max_bytes = MAX_GROWTH * own_bytes + (64 << 20) if max_bytes is None else max_bytes
        self.version = 0
        self.received = 0
        self._user: dict[str, Any] = {}
        self._specs: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._digests: list[bytes] = []
        self._done: dict[str, torch.Tensor] = {}
        self._reading = False  # in the midst of a tensor
        self._buffer: bytearray | None = None  # of that tensor; None if it is kept, so that its bytes are passed over
        self._filled = 0
        self._chunks_left = 0
        self._started = False

    @property
    def started(self) -> bool:
        """Whether the metadata has come."""
        return self._started

    @property
    def count(self) -> int:
        """How many tensors are announced."""
        return len(self._specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as announced; 0 before the first message."""
        return sum(prod(shape) * dtype.itemsize for _, dtype, shape in self._specs)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the state, as announced."""
        count = len(self._schema.tensors) if self._schema else len(self._specs)
        told = zip(self._specs[:count], self._digests[:count], strict=True)
        return Fingerprint(self.version, tuple((dtype, shape, digest) for (_, dtype, shape), digest in told))

    @property
    def verified(self) -> Kept:
        """Those tensors of this state that were read whole, or were kept."""
        keys = [(*spec, digest) for spec, digest in zip(self._specs, self._digests, strict=False)]
        done = {key: self._done[key[0]] for key in keys if key[0] in self._done}
        return {key: self._kept[key] for key in keys if key in self._kept} | done

    def feed(self, message: DownloadData) -> None:
        """Takes the next message of the stream."""
        if not self._started:
            self._started = True
            self._read_metadata(message.metadata)
        if (wire := message.tensor_part) is None:
            return
        if wire.dtype:
            self._start_tensor(wire)
        self._add_chunk(wire.buffer)

    def finish(self) -> State:
        """The whole state, once the stream has ended."""
        if not self._started:
            raise StateError("it shares no state")
        if self._reading or len(self._done) != len(self._specs):
            raise StateError(f"its stream ended after {len(self._done)} of {len(self._specs)} tensors")
        return State(self.version, self._done, self._user)

    def _read_metadata(self, packed: bytes) -> None:
        if not packed or len(packed) > MAX_METADATA_BYTES:
            raise StateError(f"its metadata has {len(packed)} bytes")
        try:
            metadata = msgpack.unpackb(packed, strict_map_key=False)
            self.version = int(metadata["version"])
            self._user = dict(metadata.get("user") or {})
            self._digests = [_digest(digest) for digest in metadata["digest"]]
            self._specs = [
                (str(name), STATE_DTYPES[dtype], _shape(shape)) for name, dtype, shape in metadata["tensors"]
            ]
        except ProtocolViolationError as error:
            raise StateError(f"its metadata is unreadable: {error}") from None
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise StateError(f"its metadata is unreadable: {type(error).__name__}: {error}") from None
        self._check_specs()

    def _check_specs(self) -> None:
        specs, own = self._specs, self._schema.tensors if self._schema else ()
        if self.version < 0 or len(self._digests) != len(specs) or len(specs) > MAX_TENSORS:
            raise StateError(f"its metadata tells {len(specs)} tensors and {len(self._digests)} digests")
        if len({name for name, _, _ in specs}) != len(specs):
            raise StateError("two of its tensors have the same name")
        if len(specs) < len(own):
            raise StateError(f"it has {len(specs)} tensors, this peer {len(own)}")
        for (name, dtype, shape), spec in zip(specs, own, strict=False):
            if (dtype, shape) != (spec.torch_dtype, spec.shape):
                there, here = (
                    f"{_DTYPE_NAMES[d]}{list(s)}" for d, s in ((dtype, shape), (spec.torch_dtype, spec.shape))
                )
                raise StateError(f"its tensor {name!r} is {there}, here {spec.name!r} is {here}")
        if self.nbytes > self._max_bytes:
            raise StateError(f"it announces {self.nbytes} bytes, more than the {self._max_bytes} of max_bytes")
        if self._expected is not None and self.fingerprint != self._expected:
            raise StateError(f"it has {self.fingerprint} now, not {self._expected} as when it was compared with others")

    def _start_tensor(self, wire: WireTensor) -> None:
        if self._reading:
            raise StateError(f"tensor {len(self._done)} is cut short")
        if len(self._done) == len(self._specs):
            raise StateError("it sent more tensors than it announced")
        name, dtype, shape = self._specs[len(self._done)]
        if (STATE_DTYPES.get(wire.dtype), tuple(wire.size)) != (dtype, shape) or wire.compression:
            raise StateError(f"tensor {name!r} came as {wire.dtype} {list(wire.size)}, not as announced")
        self._reading = True
        known = (name, dtype, shape, self._digests[len(self._done)]) in self._kept
        self._buffer = None if known else bytearray(prod(shape) * dtype.itemsize)
        self._filled = 0
        self._chunks_left = max(1, wire.chunks)

    def _add_chunk(self, piece: Buffer) -> None:
        if not self._reading:
            raise StateError("a chunk came that belongs to no tensor")
        name, dtype, shape = self._specs[len(self._done)]
        size, end = prod(shape) * dtype.itemsize, self._filled + len(piece)
        self._chunks_left -= 1
        if end > size or self._chunks_left < 0:
            raise StateError(f"tensor {name!r} is longer than announced")
        if self._buffer is not None:
            self._buffer[self._filled : end] = piece
        self._filled = end
        self.received += len(piece)
        if end == size and not self._chunks_left:
            self._complete(name, dtype, shape)

    def _complete(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        digest = self._digests[len(self._done)]
        if self._buffer is None:
            self._done[name] = self._kept[name, dtype, shape, digest]
        elif hashlib.sha256(self._buffer).digest() != digest:
            raise StateError(f"tensor {name!r} does not match its digest")
        else:
            flat = torch.frombuffer(self._buffer, dtype=dtype) if self._buffer else torch.empty(0, dtype=dtype)
            self._done[name] = flat.reshape(shape)
        self._reading, self._buffer = False, None


def _digest(digest: object) -> bytes:
    if isinstance(digest, str):
        return bytes.fromhex(digest)
    if isinstance(digest, bytes):
        return digest
    raise TypeError(f"a digest is {type(digest).__name__}")  # bytes(number) would be so many bytes of memory


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape)
    check_size(sizes)
    return sizes
