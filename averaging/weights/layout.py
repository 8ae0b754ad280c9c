"""The layout of a model's weights, its division into pieces, and the manifest of one version. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from averaging.common import pack
from averaging.errors import ProtocolViolationError, TensorError
from averaging.rpc import check_size

PIECE_BYTES = 1 << 20
"""Size of the pieces of a publisher."""

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 12, 1 << 23
"""Sizes of pieces that are accepted from others; multiples of 16."""

MAX_TENSORS = 100_000

MAX_SHARDS = 4096

DIGEST_BYTES = 32

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""The dtypes that are published, by name on the wire."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A tensor, or a rectangular part of one.

    Attributes:
        name: in the state dict.
        dtype: one of `DTYPES`.
        shape: of what is published.
        whole: for a part, the shape of the whole tensor; empty otherwise.
        offset: for a part, the index of its first element in each dimension; empty otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a `torch.dtype`."""
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        part = f" at {list(self.offset)} of {list(self.whole)}" if self.whole else ""
        return f"{self.dtype}{list(self.shape)}{part}"


class Piece(NamedTuple):
    """A range of bytes of one tensor."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of a state dict in order, divided into pieces.

    Attributes:
        tensors: names are unique, except for parts of one tensor.
        piece_bytes: size of a piece; the last one of a tensor may be smaller.
    """

    tensors: tuple[WeightSpec, ...]
    piece_bytes: int = PIECE_BYTES

    @cached_property
    def _ends(self) -> list[int]:
        """Number of pieces up to and including each tensor."""
        return list(accumulate(-(-spec.nbytes // self.piece_bytes) for spec in self.tensors))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in order."""
        return tuple(self._all_pieces())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return self._ends[-1] if self._ends else 0

    def of_tensor(self, tensor: int) -> range:
        """The indices of the pieces of one tensor."""
        return range(self._ends[tensor - 1] if tensor else 0, self._ends[tensor])

    def _all_pieces(self) -> Iterator[Piece]:
        for number, spec in enumerate(self.tensors):
            for start in range(0, spec.nbytes, self.piece_bytes):
                yield Piece(number, start, min(start + self.piece_bytes, spec.nbytes))

    @cached_property
    def packed(self) -> bytes:
        """The layout as bytes; equal layouts have equal bytes."""
        specs = [
            [spec.name, spec.dtype, list(spec.shape), list(spec.whole), list(spec.offset)] for spec in self.tensors
        ]
        return pack([self.piece_bytes, specs])


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a version: the endpoint of its publisher, and the digest of the part's manifest."""

    endpoint: str
    digest: bytes


@dataclass(frozen=True)
class WeightManifest:
    """What identifies one version.

    Attributes:
        version: its number.
        layout: the tensors.
        piece_digests: SHA-256 of each piece.
        shards: if this is a part of a divided model, all parts, this one first; not in the digest.
    """

    version: int
    layout: WeightLayout
    piece_digests: tuple[bytes, ...]
    shards: tuple[Shard, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the layout and the digests of all pieces, so of the whole state; without the version."""
        return hashlib.sha256(self.layout.packed + b"".join(self.piece_digests)).digest()


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> WeightSpec:
    """Describes a whole tensor.

    Args:
        name: in the state dict.
        tensor: the tensor.
        dtype: in which it is published, if that differs.

    Raises:
        TensorError: tensors like this are not published.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise TensorError(f"{name!r} has no dense values; leave it out, or publish a dense one")
    dtype = dtype or tensor.dtype
    if dtype not in DTYPE_NAMES:
        raise TensorError(f"{name!r} is {dtype}; {', '.join(DTYPES)} can be published; leave it out")
    return WeightSpec(name, DTYPE_NAMES[dtype], tuple(tensor.shape))


def check_layout(tensors: Sequence[WeightSpec], piece_bytes: int, max_bytes: int) -> WeightLayout:
    """Checks a layout from another peer before memory is allocated for it.

    Raises:
        ProtocolViolationError: it is malformed, or has more than `max_bytes`.
    """
    if not MIN_PIECE_BYTES <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes % 16:
        raise ProtocolViolationError(f"pieces of {piece_bytes} bytes")
    if len(tensors) > MAX_TENSORS:
        raise ProtocolViolationError(f"{len(tensors)} tensors; at most {MAX_TENSORS} are accepted")
    for spec in tensors:
        if spec.dtype not in DTYPES:
            raise ProtocolViolationError(f"tensor {spec.name!r} of unknown dtype {spec.dtype[:40]!r}")
        for size in (spec.shape, spec.whole):
            try:
                check_size(size)
            except ProtocolViolationError as error:
                raise ProtocolViolationError(f"tensor {spec.name[:80]!r} has an invalid shape: {error}") from None
        _check_part(spec)
    if len({(spec.name, spec.offset) for spec in tensors}) != len(tensors):
        raise ProtocolViolationError("two tensors of one name")
    layout = WeightLayout(tuple(tensors), piece_bytes)
    if layout.nbytes > max_bytes:
        raise ProtocolViolationError(f"{layout.nbytes} bytes of weights, more than the {max_bytes} of max_bytes")
    return layout


def _check_part(spec: WeightSpec) -> None:
    if not spec.whole and not spec.offset:
        return
    sizes = (spec.shape, spec.whole, spec.offset)
    if len({len(size) for size in sizes}) != 1 or any(
        start + extent > all_of for extent, all_of, start in zip(*sizes, strict=True)
    ):
        raise ProtocolViolationError(f"{spec.name!r} is {spec}, which is outside of the tensor")


def first_difference(
    here: Iterable[WeightSpec], there: Iterable[WeightSpec], names: tuple[str, str] = ("here", "there")
) -> str | None:
    """Describes the first tensor that differs between two layouts, in the order of `here`; None if none does.

    The order of the tensors does not matter. The description calls the layouts by `names`.
    """
    name_here, name_there = names
    ours, theirs = ({spec.name: spec for spec in specs} for specs in (here, there))
    for name, spec in ours.items():
        if name not in theirs:
            return f"tensor {name!r} ({spec}) is only {name_here}"
        if spec != theirs[name]:
            return f"tensor {name!r} is {spec} {name_here} and {theirs[name]} {name_there}"
    extra = next((spec for name, spec in theirs.items() if name not in ours), None)
    return None if extra is None else f"tensor {extra.name!r} ({extra}) is only {name_there}"


def ranges_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending indices as ranges (first, count)."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and sum(ranges[-1]) == index:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + 1
        else:
            ranges.append((index, 1))
    return ranges


def indices_of(ranges: Iterable[tuple[int, int]], count: int) -> list[int]:
    """The reverse of `ranges_of`, for ranges from another peer.

    Raises:
        ProtocolViolationError: they are not ascending, or exceed the number of pieces `count`.
    """
    indices: list[int] = []
    end = 0
    for first, number in ranges:
        if first < end or number < 1 or first + number > count:
            raise ProtocolViolationError(f"pieces {first} to {first + number} of {count}, after {end}")
        indices.extend(range(first, end := first + number))
    return indices
