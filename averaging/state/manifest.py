"""What a donor announces of its state before the bytes: version, tensors, digests, and from where on they come.

A reader that has the first bytes of a state from an attempt that was cut names their number and a fingerprint of the
tensors they belong to. A donor that has the very same there leaves them out, whatever its version is.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import msgpack
import torch

from averaging.common.safe_msgpack import unpack
from averaging.compression.base import check_size
from averaging.errors import ProtocolViolationError, StateError
from averaging.protocol.messages import Resume
from averaging.protocol.schema import DTYPES, Schema

MAX_METADATA_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_VERSION = 1 << 62
"""The highest version that a download may have: those that follow still fit into the messages, which hold 64 bits."""
MAX_ITEMS = 1 << 20
BASE_ITEMS, ITEMS_PER_TENSOR = 1 << 16, 256
"""Items that the metadata may have, see `unpacking`: some, and more for each averaged tensor, since its optimizer has
its own."""

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

DTYPE_NAMES = {dtype: name for name, dtype in STATE_DTYPES.items()}


class Described(NamedTuple):
    """A tensor of a state, with the SHA-256 digest of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def nbytes_of(tensors: Sequence[Described]) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The metadata of a download.

    Attributes:
        skipped: bytes of the first tensors that are left out since the reader has them.
    """

    version: int
    tensors: tuple[Described, ...]
    user: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0

    def pack(self) -> bytes:
        """As it travels."""
        told: dict[str, Any] = {
            "version": self.version,
            "tensors": [[name, DTYPE_NAMES[dtype], list(shape)] for name, dtype, shape, _ in self.tensors],
            "digest": [tensor.digest for tensor in self.tensors],
            "user": dict(self.user),
        }
        packed: bytes = msgpack.packb(told | ({"skipped": self.skipped} if self.skipped else {}))
        return packed


def max_items(schema: Schema | None) -> int:
    """What the metadata of a state that begins with the schema's tensors may consist of."""
    return MAX_ITEMS if schema is None else min(MAX_ITEMS, BASE_ITEMS + ITEMS_PER_TENSOR * len(schema.tensors))


def read_manifest(packed: bytes, max_items: int) -> Manifest:
    """Reads metadata; it is consistent in itself then.

    Raises:
        StateError: it is not.
    """
    if not packed or len(packed) > MAX_METADATA_BYTES:
        raise StateError(f"its metadata has {len(packed)} bytes")
    try:
        told = unpack(packed, max_items)
        digests = [_digest(digest) for digest in told["digest"]]
        specs = [(_name(name), STATE_DTYPES[dtype], _shape(shape)) for name, dtype, shape in told["tensors"]]
        version, user, skipped = _whole(told["version"]), _user(told.get("user")), _whole(told.get("skipped") or 0)
    except ProtocolViolationError as error:
        raise StateError(f"its metadata is unreadable: {error}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise StateError(f"its metadata is unreadable: {type(error).__name__}: {error}") from None
    if not 0 <= version <= MAX_VERSION:
        raise StateError(f"its version is {version:.3g}; it must be from 0 to {MAX_VERSION:.3g}")
    if len(digests) != len(specs) or len(specs) > MAX_TENSORS:
        raise StateError(f"its metadata tells {len(specs)} tensors and {len(digests)} digests")
    if len({name for name, _, _ in specs}) != len(specs):
        raise StateError("two of its tensors have the same name")
    tensors = tuple(Described(*spec, digest) for spec, digest in zip(specs, digests, strict=True))
    return Manifest(version, tensors, user, skipped)


def covered(tensors: Sequence[Described], offset: int) -> tuple[int, int]:
    """How many tensors lie wholly in the first `offset` bytes, and how many bytes of the next one do."""
    for number, tensor in enumerate(tensors):
        if tensor.nbytes > offset:
            return number, offset
        offset -= tensor.nbytes
    return len(tensors), 0


def resume_at(tensors: Sequence[Described], offset: int) -> Resume:
    """What is asked for by a reader that has the first `offset` bytes of these tensors."""
    whole, inside = covered(tensors, offset)
    told = [
        [name, DTYPE_NAMES[dtype], list(shape), digest]
        for name, dtype, shape, digest in tensors[: whole + (inside > 0)]
    ]
    return Resume(offset, hashlib.sha256(msgpack.packb(told)).digest())


def can_skip(tensors: Sequence[Described], resume: Resume | None) -> int:
    """How many of the first bytes may be left out for a reader that asks so."""
    if resume is None or not 0 < resume.offset <= nbytes_of(tensors):
        return 0
    return resume.offset if resume == resume_at(tensors, resume.offset) else 0


def _name(name: object) -> str:
    if isinstance(name, str):
        return name
    raise TypeError(f"a name is {type(name).__name__}")


def _whole(number: object) -> int:
    if isinstance(number, int | float):
        return int(number)
    raise TypeError(f"a number is {type(number).__name__}")  # a text may be one that no message can hold


def _user(user: object) -> dict[str, Any]:
    if isinstance(user, dict):
        return user
    if not user:
        return {}
    raise TypeError(f"user is {type(user).__name__}, not a map")  # bytes in a gather, but not here


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
