"""The weights of one version in memory: complete, or being received."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from averaging.errors import ProtocolViolationError
from averaging.weights.differences import Bytes, Coding, decode
from averaging.weights.layout import (
    WeightLayout,
    WeightManifest,
    WeightSpec,
    cut,
    part_of,
    put_together,
    spec_of,
    whole_of,
)


class WeightPieces:
    """The pieces of one version, all or those that are here.

    Attributes:
        manifest: what identifies the version.
        buffers: the bytes of each tensor.
    """

    manifest: WeightManifest
    buffers: tuple[Bytes, ...]

    def has(self, index: int) -> bool:
        """Whether a piece is here and verified."""
        return True

    def piece(self, index: int) -> Bytes:
        """The bytes of a piece that is here, as a view."""
        tensor, start, stop = self.manifest.layout.pieces[index]
        return self.buffers[tensor][start:stop]

    def encoded(self, index: int, base: bytes) -> tuple[Coding, bytes] | None:
        """A piece as it was received, if it is a difference to the version with the digest `base`."""
        return None


@dataclass(frozen=True)
class WeightSnapshot(WeightPieces):
    """All weights of one version, which never change.

    Attributes:
        manifest: what identifies them.
        buffers: the bytes of each tensor. Versions share the buffers of tensors that are equal.
    """

    manifest: WeightManifest
    buffers: tuple[Bytes, ...]

    @property
    def manifests(self) -> list[WeightManifest]:
        """The manifest, as that of a version in parts."""
        return [self.manifest]

    def under(self, version: int) -> WeightSnapshot:
        """The same weights under another version."""
        return WeightSnapshot(replace(self.manifest, version=version), self.buffers)

    def arranged(self, layout: WeightLayout) -> WeightSnapshot:
        """The same weights in the order of another layout, and only the parts that it has of them.

        They are unchanged if the layout has other tensors.
        """
        own = self.manifest.layout
        places = {(spec.name, spec.offset): number for number, spec in enumerate(own.tensors)}
        divided = any(spec.whole for spec in layout.tensors)
        if own.piece_bytes != layout.piece_bytes or (len(layout.tensors) != len(places) and not divided):
            return self
        buffers: list[Bytes] = []
        digests: list[bytes] = []
        for number, spec in enumerate(layout.tensors):
            place = places.get((spec.name, spec.offset))
            if place is not None and own.tensors[place] == spec:
                buffers.append(self.buffers[place])
                digests.extend(self.manifest.piece_digests[index] for index in own.of_tensor(place))
                continue
            place = places.get((spec.name, ()))
            if place is None or own.tensors[place] != whole_of(spec):
                return self
            part = _bytes(cut(own.tensors[place].over(self.buffers[place].data), spec))
            pieces = (layout.pieces[index] for index in layout.of_tensor(number))
            buffers.append(part)
            digests.extend(_sha256(part[piece.start : piece.stop]) for piece in pieces)
        manifest = WeightManifest(self.manifest.version, layout, tuple(digests), self.manifest.shards)
        return WeightSnapshot(manifest, tuple(buffers))

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one with its description; not to be written, as with `tensors`."""
        for spec, buffer in zip(self.manifest.layout.tensors, self.buffers, strict=True):
            yield spec, spec.over(buffer.data)

    def whole(self) -> WeightSnapshot:
        """The same weights with the tensors sorted by name."""
        layout = self.manifest.layout
        return self.arranged(replace(layout, tensors=tuple(sorted(layout.tensors, key=lambda spec: spec.name))))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, on the CPU. They share the memory of this snapshot and must not be written."""
        return {spec.name: tensor for spec, tensor in self.parts()}


@dataclass(frozen=True)
class DividedSnapshot:
    """A version in parts, all that this follower wants of it.

    Attributes:
        manifest: manifest of the joined publisher.
        snapshots: one for each part.
    """

    manifest: WeightManifest
    snapshots: tuple[WeightSnapshot, ...]

    @property
    def manifests(self) -> list[WeightManifest]:
        """The manifests of the parts."""
        return [snapshot.manifest for snapshot in self.snapshots]

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one. They share the memory of the snapshots and must not be written."""
        for snapshot in self.snapshots:
            yield from snapshot.parts()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole tensors by name, put together if no part is left out."""
        return put_together(self.parts())

    def whole(self) -> WeightSnapshot:
        """All tensors of the model, sorted by name."""
        return seal(view_state(dict(sorted(self.tensors().items()))), self.manifest.version, None)


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A copy of a state dict, without digests yet."""

    specs: tuple[WeightSpec, ...]
    buffers: tuple[Bytes, ...]


def copy_state(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> StateCopy:
    """Copies a state dict to the CPU.

    Args:
        state: tensors by name, on any device; values that are no tensors are left out. Of a divided tensor, this rank's
            part is copied.
        dtype: floating-point tensors are converted to it; None keeps their dtype.

    Raises:
        TensorError: a tensor cannot be published.
    """
    specs, buffers = [], []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        spec, part = part_of(name, tensor, wanted)
        copy = torch.empty(spec.shape, dtype=spec.torch_dtype, device="cpu")
        copy.copy_(part)
        specs.append(spec)
        buffers.append(_bytes(copy))
    return StateCopy(tuple(specs), tuple(buffers))


def view_state(state: Mapping[str, torch.Tensor]) -> StateCopy:
    """Like `copy_state`, of contiguous tensors on the CPU that nobody changes; it shares their memory."""
    specs = tuple(spec_of(name, tensor) for name, tensor in state.items())
    return StateCopy(specs, tuple(map(_bytes, state.values())))


def seal(copy: StateCopy, version: int, before: WeightSnapshot | None) -> WeightSnapshot:
    """Computes the digests of a copy, about 1 s for each GiB.

    Args:
        copy: the copy; it must not change any more.
        version: its number.
        before: the version before, whose buffers are shared where the tensors are equal.
    """
    layout = WeightLayout(copy.specs)
    if before is not None and before.manifest.layout == layout:
        layout = before.manifest.layout
    digests = tuple(_sha256(copy.buffers[piece.tensor][piece.start : piece.stop]) for piece in layout.pieces)
    manifest = WeightManifest(version, layout, digests)
    if before is None or before.manifest.layout is not layout:
        return WeightSnapshot(manifest, copy.buffers)
    return WeightSnapshot(manifest, _sharing(manifest, copy.buffers, before))


class Incoming(WeightPieces):
    """The weights of a version while they are received. Every piece is verified when it arrives.

    Args:
        manifest: manifest of the version, from its publisher.
        base: weights that the receiver has already; pieces that are equal there are not received again.

    Attributes:
        received: bytes of the encoded pieces that were received.
        left: bytes of the missing pieces, before they are encoded.
    """

    def __init__(self, manifest: WeightManifest, base: WeightSnapshot | None) -> None:
        self.manifest, self.base = manifest, base
        self.received = 0
        layout = manifest.layout
        self._has = bytearray(layout.count)
        self._count = 0  # of the pieces that are there
        self._encoded: dict[int, tuple[Coding, bytes]] = {}
        self._places: dict[tuple[bytes, int], list[int]] = {}  # of the pieces of one digest and length
        self.buffers = self._allocate()
        known = {} if base is None else _by_digest(base)
        for index, digest in enumerate(manifest.piece_digests):
            _, start, stop = layout.pieces[index]
            self._places.setdefault((digest, stop - start), []).append(index)
            if not self._has[index] and base is not None and (old := known.get((digest, stop - start))) is not None:
                self.piece(index)[:] = base.piece(old)
                self._has[index] = True
        self._count = sum(self._has)
        self.left = sum(stop - start for _, start, stop in map(layout.pieces.__getitem__, self.missing()))

    @property
    def differs_from(self) -> WeightSnapshot | None:
        """The base, if pieces can be sent as differences to it."""
        base = self.base
        return base if base is not None and base.manifest.layout == self.manifest.layout else None

    @property
    def complete(self) -> bool:
        """Whether all pieces are there."""
        return self._count == len(self._has)

    def has(self, index: int) -> bool:
        """See `WeightPieces`."""
        return bool(self._has[index])

    def missing(self) -> list[int]:
        """The pieces to ask for, in ascending order; of equal pieces only the first."""
        return sorted(places[0] for places in self._places.values() if not self._has[places[0]])

    def add(self, index: int, coding: int, data: bytes) -> None:
        """Takes a piece from another peer.

        Raises:
            ProtocolViolationError: it was not asked for, is malformed, or does not match its digest.
        """
        if index >= len(self._has):
            raise ProtocolViolationError(f"piece {index} of {len(self._has)}")
        if self._has[index]:
            return
        layout, digest = self.manifest.layout, self.manifest.piece_digests[index]
        base, piece = self.differs_from, self.piece(index)
        itemsize = layout.tensors[layout.pieces[index].tensor].torch_dtype.itemsize
        decode(coding, data, None if base is None else base.piece(index), itemsize, piece)
        if _sha256(piece) != digest:
            name = layout.tensors[layout.pieces[index].tensor].name
            raise ProtocolViolationError(f"a piece of tensor {name!r} that does not match its digest")
        self.received += len(data)
        self.left -= len(piece)
        if coding != Coding.RAW:
            self._encoded[index] = Coding(coding), data
        for place in self._places[digest, len(piece)]:
            if place != index:
                self.piece(place)[:] = piece
            self._count += not self._has[place]
            self._has[place] = True

    def encoded(self, index: int, base: bytes) -> tuple[Coding, bytes] | None:
        """See `WeightPieces`."""
        own = self.differs_from
        return self._encoded.get(index) if own is not None and own.manifest.digest == base else None

    def finish(self) -> WeightSnapshot:
        """Returns the complete weights."""
        if not self.complete:
            raise RuntimeError("pieces are missing")
        base = self.differs_from
        if base is None:
            return WeightSnapshot(self.manifest, self.buffers)
        return WeightSnapshot(self.manifest, _sharing(self.manifest, self.buffers, base))

    def _allocate(self) -> tuple[Bytes, ...]:
        """Buffers, which are those of the base for tensors that are equal there."""
        layout, base = self.manifest.layout, self.differs_from
        buffers = []
        for number, spec in enumerate(layout.tensors):
            pieces = layout.of_tensor(number)
            if base is not None and _same(self.manifest, base.manifest, pieces):
                buffers.append(base.buffers[number])
                self._has[pieces.start : pieces.stop] = b"\1" * len(pieces)
            else:
                buffers.append(np.empty(spec.nbytes, np.uint8))
        return tuple(buffers)


def _sha256(piece: Bytes) -> bytes:
    return hashlib.sha256(piece.data).digest()


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor on the CPU, as a view."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _same(manifest: WeightManifest, other: WeightManifest, pieces: range) -> bool:
    """Whether two versions of one layout have the same bytes in these pieces."""
    place = slice(pieces.start, pieces.stop)
    return manifest.piece_digests[place] == other.piece_digests[place]


def _sharing(manifest: WeightManifest, buffers: Sequence[Bytes], before: WeightSnapshot) -> tuple[Bytes, ...]:
    """The buffers, replaced by those of an earlier version where the tensors are equal."""
    return tuple(
        before.buffers[number] if _same(manifest, before.manifest, manifest.layout.of_tensor(number)) else buffer
        for number, buffer in enumerate(buffers)
    )


def _by_digest(snapshot: WeightSnapshot) -> dict[tuple[bytes, int], int]:
    pieces = snapshot.manifest.layout.pieces
    digests = enumerate(snapshot.manifest.piece_digests)
    return {(digest, pieces[index].stop - pieces[index].start): index for index, digest in digests}
