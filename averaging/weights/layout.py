"""What a version of weights consists of: tensors or parts of them, pieces, and the manifest, also as a message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from averaging.common import CLIENT_PREFIX, is_count, is_endpoint, pack, spelled
from averaging.errors import ProtocolViolationError, TensorError
from averaging.tensors import WEIGHT_DTYPES, TensorInfo, check_size, check_tensors, dtype_name, nbytes_of, objection_to
from averaging.wire import weights_pb2 as wire

# Small pieces pass sooner through a chain of followers, and each costs a message and a hash of its own.
PIECE_BYTES, LARGE_PIECE_BYTES = 1 << 20, 1 << 22  # the second for states of `LARGE_BYTES` or more
LARGE_BYTES = 512 << 20
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 12, 1 << 23  # that are accepted from others; multiples of 16
MAX_SHARDS = 4096
DIGEST_BYTES, OPENED_BYTES = 32, 16


@dataclass(frozen=True, slots=True)
class WeightSpec(TensorInfo):
    """A tensor, or a rectangular part of one, which `shape` is about."""

    whole: tuple[int, ...] = ()  # shape of the whole tensor if this is a part; empty otherwise
    offset: tuple[int, ...] = ()  # index of the first element in each dimension if this is a part; empty otherwise

    @property
    def key(self) -> object:  # parts of one tensor have one name
        return self.name, self.offset

    def __str__(self) -> str:
        part = f" at {list(self.offset)} of {list(self.whole)}" if self.whole else ""
        return f"{TensorInfo.__str__(self)}{part}"


class Bucket(NamedTuple):
    """Successive tensors whose bytes follow one another in one buffer: a single one, or several small ones."""

    first: int  # number of the first tensor
    stop: int  # one after the last one
    nbytes: int
    itemsize: int  # of an element of each tensor


class Piece(NamedTuple):
    """A range of bytes of one bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of a state dict in order, divided into pieces."""

    tensors: tuple[WeightSpec, ...]  # with unique names, except for parts of one tensor
    piece_bytes: int = PIECE_BYTES  # size of a piece; the last one of a bucket may be smaller

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Successive tensors share a bucket if their elements have one size and all fit in a piece."""
        buckets: list[Bucket] = []
        for number, spec in enumerate(self.tensors):
            itemsize, nbytes = spec.torch_dtype.itemsize, spec.nbytes
            if buckets:
                last = buckets[-1]
                if last.itemsize == itemsize and last.nbytes + nbytes <= self.piece_bytes:
                    buckets[-1] = Bucket(last.first, number + 1, last.nbytes + nbytes, itemsize)
                    continue
            buckets.append(Bucket(number, number + 1, nbytes, itemsize))
        return tuple(buckets)

    @cached_property
    def places(self) -> tuple[Piece, ...]:
        """The bytes of each tensor: its bucket, and where in that it begins and ends."""
        places = []
        for number, bucket in enumerate(self.buckets):
            end = 0
            for spec in self.tensors[bucket.first : bucket.stop]:
                start, end = end, end + spec.nbytes
                places.append(Piece(number, start, end))
        return tuple(places)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        size = self.piece_bytes
        return tuple(
            Piece(number, start, min(start + size, bucket.nbytes))
            for number, bucket in enumerate(self.buckets)
            for start in range(0, bucket.nbytes, size)
        )

    @cached_property
    def nbytes(self) -> int:
        return nbytes_of(self.tensors)

    @cached_property
    def has_parts(self) -> bool:
        return any(spec.whole for spec in self.tensors)

    @property
    def count(self) -> int:  # of the pieces
        return len(self.pieces)

    def of_bucket(self, bucket: int) -> range:  # the indices of its pieces
        return self._ranges[bucket]

    @cached_property
    def _ranges(self) -> tuple[range, ...]:
        ends = [0, *accumulate(-(-bucket.nbytes // self.piece_bytes) for bucket in self.buckets)]
        return tuple(range(start, stop) for start, stop in pairwise(ends))

    def in_bucket(self, bucket: int) -> tuple[WeightSpec, ...]:
        return self.tensors[self.buckets[bucket].first : self.buckets[bucket].stop]

    @cached_property
    def packed(self) -> bytes:
        """The layout as bytes; equal layouts have equal bytes."""
        specs = [
            [spec.name, spec.dtype, list(spec.shape), list(spec.whole), list(spec.offset)] for spec in self.tensors
        ]
        return pack([self.piece_bytes, specs])


@dataclass(frozen=True, slots=True)
class Shard:
    endpoint: str  # of its publisher
    digest: bytes  # of its manifest


@dataclass(frozen=True)
class WeightManifest:
    """What identifies one version."""

    version: int
    layout: WeightLayout
    piece_digests: tuple[bytes, ...]  # SHA-256; empty for a version that was announced before they are known
    shards: tuple[Shard, ...] = ()  # all parts of a divided model, this one first; not in the digest
    opened: bytes = b""  # 16 random bytes that name a version that was announced so; empty for others

    @property
    def is_described(self) -> bool:
        return len(self.piece_digests) == self.layout.count

    @property
    def name(self) -> bytes:  # in requests
        return self.opened or self.digest

    def described(self, piece_digests: Sequence[bytes], digest: bytes) -> WeightManifest:
        """The same with all digests, unless they do not fit together (ProtocolViolationError)."""
        manifest = replace(self, piece_digests=tuple(piece_digests))
        if not manifest.is_described or manifest.digest != digest:
            raise ProtocolViolationError(f"the digest of version {self.version} does not match its pieces")
        return manifest

    @property
    def is_divided(self) -> bool:
        """Whether this is not the whole model, but a part of it."""
        return len(self.shards) > 1 or self.layout.has_parts

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the layout and the digests of all pieces, so of the whole state; without the version."""
        return hashlib.sha256(self.layout.packed + b"".join(self.piece_digests)).digest()


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> WeightSpec:
    """Describes a whole tensor; raises TensorError if tensors like this are not published."""
    if objection := objection_to(tensor, WEIGHT_DTYPES, "published", dtype):
        raise TensorError(f"{name!r} {objection}; leave it out")
    return _spec_of(name, dtype or tensor.dtype, tuple(tensor.shape))


@lru_cache(maxsize=1 << 16)  # the same for each version; equal ones that are the same object compare faster
def _spec_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(name, dtype_name(dtype), shape)


def layout_for(tensors: Sequence[WeightSpec]) -> WeightLayout:
    large = nbytes_of(tensors) >= LARGE_BYTES
    return WeightLayout(tuple(tensors), LARGE_PIECE_BYTES if large else PIECE_BYTES)


def check_layout(tensors: Sequence[WeightSpec], piece_bytes: int, max_bytes: int) -> WeightLayout:
    """Checks a layout from another peer before memory is allocated for it (ProtocolViolationError)."""
    if not MIN_PIECE_BYTES <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes % 16:
        raise ProtocolViolationError(f"pieces of {piece_bytes} bytes")
    check_tensors(tensors, WEIGHT_DTYPES)
    for spec in tensors:
        if spec.whole or spec.offset:
            check_size(spec.whole)
            sizes = (spec.shape, spec.whole, spec.offset)
            if len({len(size) for size in sizes}) != 1 or any(
                start + extent > all_of for extent, all_of, start in zip(*sizes, strict=True)
            ):
                raise ProtocolViolationError(f"{spec.name!r} is {spec}, which is outside of the tensor")
    layout = WeightLayout(tuple(tensors), piece_bytes)
    if layout.nbytes > max_bytes:
        raise ProtocolViolationError(f"{layout.nbytes} bytes of weights, more than {spelled('max_bytes', max_bytes)}")
    return layout


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
        if spec is not theirs[name] and spec != theirs[name]:
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
    """The reverse of `ranges_of`, for ranges from another peer, which are refused if they are not below `count`."""
    indices: list[int] = []
    end = 0
    for first, number in ranges:
        if first < end or number < 1 or first + number > count:
            raise ProtocolViolationError(f"pieces {first} to {first + number} of {count}, after {end}")
        indices.extend(range(first, end := first + number))
    return indices


def version_message(manifest: WeightManifest, known: WeightLayout | None = None) -> wire.Version:
    """Encodes a manifest. Without digests it leaves out the layout if that was in the message before (`known`)."""
    if not manifest.is_described and manifest.layout is known:
        return wire.Version(version=manifest.version, opened=manifest.opened)
    return wire.Version(
        version=manifest.version,
        digest=manifest.digest if manifest.is_described else b"",
        opened=manifest.opened,
        piece_bytes=manifest.layout.piece_bytes,
        tensors=[
            wire.Tensor(name=spec.name, dtype=spec.dtype, shape=spec.shape, whole=spec.whole, offset=spec.offset)
            for spec in manifest.layout.tensors
        ],
        piece_digests=b"".join(manifest.piece_digests),
        shards=[wire.Shard(endpoint=shard.endpoint, digest=shard.digest) for shard in manifest.shards],
    )


def read_version(message: wire.Version, max_bytes: int, known: WeightLayout | None = None) -> WeightManifest | None:
    """Decodes a manifest from another peer; None if it has no version yet. An equal layout that is known is reused.

    Raises:
        ProtocolViolationError: it is malformed, larger than `max_bytes`, or its digest does not match.
    """
    if not message.digest and not message.opened:
        return None
    if len(message.opened) not in (0, OPENED_BYTES):
        raise ProtocolViolationError(f"a version with a name of {len(message.opened)} bytes")
    if not is_count(message.version):
        raise ProtocolViolationError(f"version {message.version}")
    layout = _read_layout(message, max_bytes, known)
    manifest = WeightManifest(message.version, layout, (), _read_shards(message), message.opened)
    if not message.digest:
        return replace(manifest, shards=())
    digests = read_digests(message.piece_digests, layout.count)
    if len(digests) != layout.count:
        raise ProtocolViolationError(f"{len(message.piece_digests)} bytes of digests for {layout.count} pieces")
    manifest = manifest.described(digests, message.digest)
    if manifest.shards and manifest.shards[0].digest != manifest.digest:
        raise ProtocolViolationError(f"version {message.version}, which is not the first of its own parts")
    return manifest


def _read_layout(message: wire.Version, max_bytes: int, known: WeightLayout | None) -> WeightLayout:
    if known is not None and not message.digest and not message.piece_bytes:
        return known
    specs = [
        WeightSpec(each.name, each.dtype, tuple(each.shape), tuple(each.whole), tuple(each.offset))
        for each in message.tensors
    ]
    layout = check_layout(specs, message.piece_bytes, max_bytes)
    return known if known is not None and layout == known else layout


def read_digests(joined: bytes, most: int) -> tuple[bytes, ...]:
    """The digests of successive pieces, from another peer, which are refused if they are not whole, or too many."""
    if len(joined) % DIGEST_BYTES or len(joined) > DIGEST_BYTES * most:
        raise ProtocolViolationError(f"{len(joined)} bytes of digests for {most} pieces")
    return tuple(joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES))


def _read_shards(message: wire.Version) -> tuple[Shard, ...]:
    if len(message.shards) > MAX_SHARDS:
        raise ProtocolViolationError(f"{len(message.shards)} parts; at most {MAX_SHARDS} are accepted")
    shards = tuple(Shard(each.endpoint, each.digest) for each in message.shards)
    if any(len(shard.digest) != DIGEST_BYTES for shard in shards):
        raise ProtocolViolationError(f"version {message.version} with a part without a digest")
    for number, shard in enumerate(shards):
        if (number or shard.endpoint) and (not is_endpoint(shard.endpoint) or shard.endpoint.startswith(CLIENT_PREFIX)):
            raise ProtocolViolationError(f"part {number} at {shard.endpoint[:80]!r}, which is no address")
    return shards
