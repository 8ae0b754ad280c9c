"""What a version of weights consists of: tensors or parts of them, pieces, and the manifest, also as a message."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch

from averaging.common import CLIENT_PREFIX, is_count, is_endpoint, pack, spelled
from averaging.errors import ProtocolViolationError, TensorError
from averaging.rpc import RpcMethod
from averaging.tensors import (
    OBJECTS_AT_ONCE,
    WEIGHT_DTYPES,
    TensorInfo,
    check_size,
    check_tensors,
    dtype_name,
    nbytes_of,
    objection_to,
)
from averaging.wire import weights_pb2 as wire

PIECE_BYTES, LARGE_PIECE_BYTES = 1 << 20, 1 << 22
"""Size of the pieces of a publisher; the second for a state of `LARGE_BYTES` or more. Smaller pieces pass sooner
through a chain of followers. After each, the thread that computes digests waits for the one that sends."""

LARGE_BYTES = 512 << 20

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 12, 1 << 23
"""Sizes of pieces that are accepted from others; multiples of 16."""

MAX_SHARDS = 4096

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class WeightSpec(TensorInfo):
    """A tensor, or a rectangular part of one.

    Attributes:
        shape: shape of the tensor, or of the part.
        whole: shape of the whole tensor if this is a part; empty otherwise.
        offset: index of the first element in each dimension if this is a part; empty otherwise.
    """

    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()

    @property
    def key(self) -> object:
        """Name and offset, since parts of one tensor have one name."""
        return self.name, self.offset

    def __str__(self) -> str:
        part = f" at {list(self.offset)} of {list(self.whole)}" if self.whole else ""
        return f"{TensorInfo.__str__(self)}{part}"


class Bucket(NamedTuple):
    """Successive tensors whose bytes follow one another in one buffer: a single one, or several small ones.

    Attributes:
        first: the first tensor.
        stop: one after the last one.
        nbytes: bytes of all.
        itemsize: bytes of an element, the same for all.
    """

    first: int
    stop: int
    nbytes: int
    itemsize: int


class Piece(NamedTuple):
    """A range of bytes of one bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of a state dict in order, divided into pieces.

    Attributes:
        tensors: names are unique, except for parts of one tensor.
        piece_bytes: size of a piece; the last one of a bucket may be smaller.
    """

    tensors: tuple[WeightSpec, ...]
    piece_bytes: int = PIECE_BYTES

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All buckets in order. Successive tensors share one if their elements have one size and all fit in a piece."""
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
    def _ends(self) -> list[int]:
        return list(accumulate(-(-bucket.nbytes // self.piece_bytes) for bucket in self.buckets))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in order."""
        size = self.piece_bytes
        return tuple(
            Piece(number, start, min(start + size, bucket.nbytes))
            for number, bucket in enumerate(self.buckets)
            for start in range(0, bucket.nbytes, size)
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return nbytes_of(self.tensors)

    @cached_property
    def has_parts(self) -> bool:
        """Whether a tensor is only a part of the model's."""
        return any(spec.whole for spec in self.tensors)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return self._ends[-1] if self._ends else 0

    def of_bucket(self, bucket: int) -> range:
        """The indices of the pieces of one bucket."""
        return range(self._ends[bucket - 1] if bucket else 0, self._ends[bucket])

    def in_bucket(self, bucket: int) -> tuple[WeightSpec, ...]:
        """The tensors of one bucket."""
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
    """A part of a version: the endpoint of its publisher, and the digest of the part's manifest."""

    endpoint: str
    digest: bytes


@dataclass(frozen=True)
class WeightManifest:
    """What identifies one version.

    Attributes:
        version: its number.
        layout: the tensors.
        piece_digests: SHA-256 of each piece; empty for a version that was announced before they are known.
        shards: all parts of a divided model if this is one of them, which comes first; not in the digest.
        opened: 16 random bytes that name a version that was announced so; empty for others.
    """

    version: int
    layout: WeightLayout
    piece_digests: tuple[bytes, ...]
    shards: tuple[Shard, ...] = ()
    opened: bytes = b""

    @property
    def is_described(self) -> bool:
        """Whether the digests of all pieces are known."""
        return len(self.piece_digests) == self.layout.count

    @property
    def name(self) -> bytes:
        """What requests name the version by."""
        return self.opened or self.digest

    def described(self, piece_digests: Sequence[bytes], digest: bytes) -> WeightManifest:
        """The same with all digests.

        Raises:
            ProtocolViolationError: they do not fit together.
        """
        manifest = replace(self, piece_digests=tuple(piece_digests))
        if not manifest.is_described or manifest.digest != digest:
            raise ProtocolViolationError(f"the digest of version {self.version} does not match its pieces")
        return manifest

    @property
    def has_parts(self) -> bool:
        """Whether a tensor of it is only a part of the model's."""
        return self.layout.has_parts

    @property
    def is_divided(self) -> bool:
        """Whether this is not the whole model, but a part of it."""
        return len(self.shards) > 1 or self.has_parts

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the layout and the digests of all pieces, so of the whole state; without the version."""
        return hashlib.sha256(self.layout.packed + b"".join(self.piece_digests)).digest()


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> WeightSpec:
    """Describes a whole tensor.

    Raises:
        TensorError: tensors like this are not published.
    """
    if objection := objection_to(tensor, WEIGHT_DTYPES, "published", dtype):
        raise TensorError(f"{name!r} {objection}; leave it out")
    return _spec_of(name, dtype or tensor.dtype, tuple(tensor.shape))


@lru_cache(maxsize=1 << 16)  # the same for each version; equal ones that are the same object compare faster
def _spec_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(name, dtype_name(dtype), shape)


def whole_of(spec: WeightSpec) -> WeightSpec:
    """The whole tensor of which this may be a part."""
    return WeightSpec(spec.name, spec.dtype, spec.whole) if spec.whole else spec


def layout_for(tensors: Sequence[WeightSpec]) -> WeightLayout:
    """The layout in which a publisher divides these tensors."""
    large = nbytes_of(tensors) >= LARGE_BYTES
    return WeightLayout(tuple(tensors), LARGE_PIECE_BYTES if large else PIECE_BYTES)


def check_layout(tensors: Sequence[WeightSpec], piece_bytes: int, max_bytes: int) -> WeightLayout:
    """Checks a layout from another peer before memory is allocated for it.

    Raises:
        ProtocolViolationError: it is malformed, or has more than `max_bytes`.
    """
    if not MIN_PIECE_BYTES <= piece_bytes <= MAX_PIECE_BYTES or piece_bytes % 16:
        raise ProtocolViolationError(f"pieces of {piece_bytes} bytes")
    check_tensors(tensors, WEIGHT_DTYPES)
    for spec in tensors:
        _check_part(spec)
    layout = WeightLayout(tuple(tensors), piece_bytes)
    if layout.nbytes > max_bytes:
        raise ProtocolViolationError(f"{layout.nbytes} bytes of weights, more than {spelled('max_bytes', max_bytes)}")
    return layout


def _check_part(spec: WeightSpec) -> None:
    if not spec.whole and not spec.offset:
        return
    check_size(spec.whole)
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


# Parts of the tensors of a divided model: which part a rank holds, whether parts are complete, and where they go.

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension."""


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def part_of(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[WeightSpec, torch.Tensor]:
    """What this rank holds of a tensor: its description, and the part itself, which shares its memory.

    Raises:
        TensorError: tensors like this are not published.
    """
    if not is_divided(tensor):
        return spec_of(name, tensor, dtype), tensor.detach()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    divided: Any = tensor
    with torch.no_grad():
        local: torch.Tensor = divided.to_local()
    shape, offset = compute_local_shape_and_global_offset(divided.shape, divided.device_mesh, divided.placements)
    if tuple(local.shape) != tuple(shape):
        raise TensorError(f"{name!r} is placed as {divided.placements}; only shards of fully_shard can be published")
    plain = spec_of(name, local, dtype)
    return WeightSpec(name, plain.dtype, tuple(shape), tuple(tensor.shape), tuple(offset)), local


def box_of(spec: WeightSpec) -> Box:
    """The part of the whole tensor that a description is about."""
    starts = spec.offset or (0,) * len(spec.shape)
    return tuple((start, start + extent) for start, extent in zip(starts, spec.shape, strict=True))


def common(box: Box, other: Box) -> Box | None:
    """The elements in both boxes; None if there are none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def elements(box: Box) -> int:
    """Number of elements in a box."""
    return prod(stop - start for start, stop in box)


def check_own(own: Sequence[WeightSpec], manifest: WeightManifest, *, is_part: bool) -> None:
    """Checks that a version, or a part of one, belongs to the model of the follower.

    Raises:
        TensorError: it belongs to another model; the error names the first tensor that differs.
    """
    theirs = [whole_of(spec) for spec in manifest.layout.tensors]
    names = {spec.name for spec in theirs}
    ours = [whole_of(spec) for spec in own if spec.name in names or not is_part]
    difference = first_difference(ours, theirs)
    if difference is not None:
        raise TensorError(f"the publisher publishes another model: {difference}; follow with the same model")


def missing_part(own: Iterable[WeightSpec], layouts: Sequence[WeightLayout]) -> str | None:
    """What is wrong with the parts of a version for a model; None if they have each of its elements exactly once."""
    there: dict[str, list[WeightSpec]] = {}
    for layout in layouts:
        for spec in layout.tensors:
            known = there.setdefault(spec.name, [])
            if spec not in known:
                known.append(spec)
    for spec in own:
        parts = there.pop(spec.name, [])
        if not parts and spec.shape and 0 in spec.shape:
            continue
        whole = whole_of(spec)
        for part in parts:
            if whole_of(part) != whole:
                return f"tensor {spec.name!r} is {whole} here and {whole_of(part)} there"
        boxes = [shared for part in parts if (shared := common(box_of(spec), box_of(part))) is not None]
        twice = any(common(box, other) for place, box in enumerate(boxes) for other in boxes[:place])
        if twice or sum(map(elements, boxes)) != prod(spec.shape):
            return f"of tensor {spec.name!r} ({whole}) the parts have {'some elements twice' if twice else 'not all'}"
    extra = next(iter(there.values()), None)
    return None if extra is None else f"tensor {extra[0].name!r} ({whole_of(extra[0])}) is only there"


def is_wanted(own: Sequence[WeightSpec], layout: WeightLayout) -> bool:
    """Whether a part has elements of what the follower holds."""
    boxes = {spec.name: box_of(spec) for spec in own}
    return any(spec.name in boxes and _meet(boxes[spec.name], spec) for spec in layout.tensors)


def _meet(box: Box, spec: WeightSpec) -> bool:
    there = box_of(spec)
    return len(box) == len(there) and common(box, there) is not None


def cut(whole: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    """A copy of the part of a tensor that a description is about."""
    return whole[tuple(slice(start, stop) for start, stop in box_of(spec))].clone(memory_format=torch.contiguous_format)


def put_together(parts: Iterable[tuple[WeightSpec, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The whole tensors by name. Those that are not divided share the memory of what is given."""
    wholes: dict[str, torch.Tensor] = {}
    for spec, part in parts:
        if not spec.whole:
            wholes[spec.name] = part
            continue
        whole = whole_of(spec)
        if spec.name not in wholes:
            wholes[spec.name] = torch.empty(whole.shape, dtype=whole.torch_dtype, device="cpu")
        write_part(wholes[spec.name], whole, part, spec)
    return wholes


def write_parts(
    own: Mapping[str, tuple[WeightSpec, torch.Tensor]], parts: Iterable[tuple[WeightSpec, torch.Tensor]]
) -> None:
    """Copies tensors, or parts of them, into what the follower holds, by name; many in one call."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for spec, part in parts:
        if spec.name not in own:
            continue
        mine, tensor = own[spec.name]
        if mine != spec:
            write_part(tensor, mine, part, spec)
            continue
        targets.append(tensor)
        sources.append(part)
        if len(targets) == OBJECTS_AT_ONCE:
            torch._foreach_copy_(targets, sources)
            targets, sources = [], []
    if targets:
        torch._foreach_copy_(targets, sources)


def write_part(target: torch.Tensor, own: WeightSpec, part: torch.Tensor, spec: WeightSpec) -> None:
    """Copies those elements of `part` that `target`, what the follower holds as `own`, has."""
    if own == spec:
        target.copy_(part)
        return
    mine, theirs = box_of(own), box_of(spec)
    shared = common(mine, theirs)
    if shared is None:
        return
    into = tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(shared, mine, strict=True))
    source = tuple(slice(a - base, b - base) for (a, b), (base, _) in zip(shared, theirs, strict=True))
    target[into].copy_(part[source])


# Manifests as messages, and the methods of `averaging.weights.v1.Weights`.

FOLLOW = RpcMethod(
    "/averaging.weights.v1.Weights/Follow",
    wire.FollowRequest,
    wire.Version,
    replies_stream=True,
    max_request_bytes=4096,
)
FETCH = RpcMethod(
    "/averaging.weights.v1.Weights/Fetch", wire.FetchRequest, wire.Reply, replies_stream=True, max_request_bytes=1 << 20
)

DESCRIBE = RpcMethod(
    "/averaging.weights.v1.Weights/Describe",
    wire.DescribeRequest,
    wire.Digests,
    replies_stream=True,
    max_request_bytes=4096,
)

MAX_WARM_BYTES = 4 << 20
"""Bytes that a call of `Warm` sends at most."""

WARM = RpcMethod(
    "/averaging.weights.v1.Weights/Warm", wire.WarmRequest, wire.Filler, replies_stream=True, max_request_bytes=4096
)

NOTHING_YET = wire.Version()
"""The first message of a publisher that has no version yet."""


OPENED_BYTES = 16


def version_message(manifest: WeightManifest, known: WeightLayout | None = None) -> wire.Version:
    """Encodes a manifest.

    Args:
        manifest: the manifest, with or without digests.
        known: the layout of the message before. If it is the same, a message without digests leaves it out.
    """
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
    """Decodes and checks a manifest from another peer.

    Args:
        message: the message.
        max_bytes: largest accepted state.
        known: the layout of an earlier version; it is reused if the new one is equal.

    Returns:
        The manifest; None if the publisher has no version yet.

    Raises:
        ProtocolViolationError: it is malformed, too large, or its digest does not match.
    """
    if not message.digest and not message.opened:
        return None
    if len(message.opened) not in (0, OPENED_BYTES):
        raise ProtocolViolationError(f"a version with a name of {len(message.opened)} bytes")
    if not is_count(message.version):
        raise ProtocolViolationError(f"version {message.version}")
    layout = _read_layout(message, max_bytes, known)
    if not message.digest:
        return WeightManifest(message.version, layout, (), opened=message.opened)
    digests = read_digests(message.piece_digests, layout.count)
    if len(digests) != layout.count:
        raise ProtocolViolationError(f"{len(message.piece_digests)} bytes of digests for {layout.count} pieces")
    manifest = WeightManifest(message.version, layout, digests, _read_shards(message), message.opened)
    if manifest.shards and manifest.shards[0].digest != manifest.digest:
        raise ProtocolViolationError(f"version {message.version}, which is not the first of its own parts")
    if manifest.digest != message.digest:
        raise ProtocolViolationError(f"the digest of version {message.version} does not match its pieces")
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
    """The digests of successive pieces, from another peer.

    Raises:
        ProtocolViolationError: they are not whole, or too many.
    """
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
