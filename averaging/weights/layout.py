"""The layout of a model's weights, its division into pieces, and the manifest of one version. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from averaging.common import pack, spelled
from averaging.errors import ProtocolViolationError, TensorError
from averaging.tensors import (
    WEIGHT_DTYPES,
    TensorInfo,
    check_distinct,
    check_tensors,
    dtype_name,
    nbytes_of,
    objection_to,
)

PIECE_BYTES = 1 << 20
"""Size of the pieces of a publisher."""

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 12, 1 << 23
"""Sizes of pieces that are accepted from others; multiples of 16."""

MAX_SHARDS = 4096

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class WeightSpec(TensorInfo):
    """A tensor, or a rectangular part of one.

    Attributes:
        shape: of what is published.
        whole: for a part, the shape of the whole tensor; empty otherwise.
        offset: for a part, the index of its first element in each dimension; empty otherwise.
    """

    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()

    def __str__(self) -> str:
        part = f" at {list(self.offset)} of {list(self.whole)}" if self.whole else ""
        return f"{TensorInfo.__str__(self)}{part}"


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
        return nbytes_of(self.tensors)

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
    if objection := objection_to(tensor, WEIGHT_DTYPES, "published", dtype):
        raise TensorError(f"{name!r} {objection}; leave it out")
    return WeightSpec(name, dtype_name(dtype or tensor.dtype), tuple(tensor.shape))


def whole_of(spec: WeightSpec) -> WeightSpec:
    """The whole tensor of which this may be a part."""
    return WeightSpec(spec.name, spec.dtype, spec.whole or spec.shape)


def check_layout(tensors: Sequence[WeightSpec], piece_bytes: int, max_bytes: int) -> WeightLayout:
    """Checks a layout from another peer before memory is allocated for it.

    Raises:
        ProtocolViolationError: it is malformed, or has more than `max_bytes`.
    """
    if not MIN_PIECE_BYTES <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes % 16:
        raise ProtocolViolationError(f"pieces of {piece_bytes} bytes")
    check_tensors(tensors, WEIGHT_DTYPES)
    check_tensors([whole_of(spec) for spec in tensors if spec.whole], WEIGHT_DTYPES)
    check_distinct([(spec.name, spec.offset) for spec in tensors])
    for spec in tensors:
        _check_part(spec)
    layout = WeightLayout(tuple(tensors), piece_bytes)
    if layout.nbytes > max_bytes:
        raise ProtocolViolationError(f"{layout.nbytes} bytes of weights, more than {spelled('max_bytes', max_bytes)}")
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
