"""The weights of one version in memory: complete, or being received."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from averaging.errors import ProtocolViolationError, TensorError
from averaging.weights.differences import Bytes, Coding, decode
from averaging.weights.layout import (
    OPENED_BYTES,
    WeightLayout,
    WeightManifest,
    WeightSpec,
    cut,
    layout_for,
    part_of,
    put_together,
    spec_of,
    whole_of,
)


class WeightPieces:
    """The pieces of one version, all or those that are here.

    Attributes:
        manifest: what identifies the version.
        buffers: the bytes of each bucket.
    """

    manifest: WeightManifest
    buffers: tuple[Bytes, ...]

    @property
    def digests(self) -> Sequence[bytes]:
        """The digests of the first pieces, as many as are known."""
        return self.manifest.piece_digests

    def has(self, index: int) -> bool:
        """Whether a piece is here and verified."""
        return True

    def repeats(self, index: int) -> bool:
        """Whether a piece that is here equals an earlier one."""
        raise NotImplementedError

    def piece(self, index: int) -> Bytes:
        """The bytes of a piece that is here, as a view."""
        bucket, start, stop = self.manifest.layout.pieces[index]
        return self.buffers[bucket][start:stop]

    def encoded(self, index: int, base: bytes) -> tuple[Coding, bytes] | None:
        """A piece as it was received, if it is a difference to the version with the digest `base`."""
        return None


@dataclass(frozen=True)
class WeightSnapshot(WeightPieces):
    """All weights of one version, which never change.

    Attributes:
        manifest: what identifies them.
        buffers: the bytes of each bucket. Versions share the buffers of buckets that are equal.
    """

    manifest: WeightManifest
    buffers: tuple[Bytes, ...]

    @property
    def manifests(self) -> list[WeightManifest]:
        """The manifest, as that of a version in parts."""
        return [self.manifest]

    @cached_property
    def _repeating(self) -> frozenset[int]:
        pieces, seen = self.manifest.layout.pieces, set[tuple[bytes, int]]()
        found = set()
        for index, digest in enumerate(self.manifest.piece_digests):
            key = digest, pieces[index].stop - pieces[index].start
            if key in seen:
                found.add(index)
            seen.add(key)
        return frozenset(found)

    def repeats(self, index: int) -> bool:
        return index in self._repeating

    def under(self, version: int) -> WeightSnapshot:
        """The same weights under another version."""
        return WeightSnapshot(replace(self.manifest, version=version), self.buffers)

    def arranged(self, layout: WeightLayout) -> WeightSnapshot:
        """The same weights in the order of another layout, and only the parts that it has of them.

        They are unchanged if the layout has other tensors.
        """
        own = self.manifest.layout
        numbers = {(spec.name, spec.offset): number for number, spec in enumerate(own.tensors)}
        divided = any(spec.whole for spec in layout.tensors)
        if own.piece_bytes != layout.piece_bytes or (len(layout.tensors) != len(numbers) and not divided):
            return self
        buffers: list[Bytes] = []
        digests: list[bytes] = []
        for number, bucket in enumerate(layout.buckets):
            specs = layout.in_bucket(number)
            first = numbers.get((specs[0].name, specs[0].offset))
            same = None if first is None else own.places[first].bucket
            if same is not None and own.in_bucket(same) == specs:
                buffers.append(self.buffers[same])
                digests.extend(self.manifest.piece_digests[index] for index in own.of_bucket(same))
                continue
            parts = [self._part(numbers, spec) for spec in specs]
            if any(part is None for part in parts):
                return self
            joined = np.concatenate([part for part in parts if part is not None])
            starts = range(0, bucket.nbytes, layout.piece_bytes)
            buffers.append(joined)
            digests.extend(_sha256(joined[start : start + layout.piece_bytes]) for start in starts)
        manifest = WeightManifest(self.manifest.version, layout, tuple(digests), self.manifest.shards)
        return WeightSnapshot(manifest, tuple(buffers))

    def _part(self, numbers: Mapping[tuple[str, tuple[int, ...]], int], spec: WeightSpec) -> Bytes | None:
        """The bytes of a tensor, or of a part of one; None if they are not here."""
        own = self.manifest.layout.tensors
        number = numbers.get((spec.name, spec.offset))
        if number is not None and own[number] == spec:
            return self.of_tensor(number)
        number = numbers.get((spec.name, ()))
        if number is None or own[number] != whole_of(spec):
            return None
        return _bytes(cut(own[number].over(self.of_tensor(number).data), spec))

    def of_tensor(self, number: int) -> Bytes:
        """The bytes of a tensor, as a view."""
        bucket, start, stop = self.manifest.layout.places[number]
        return self.buffers[bucket][start:stop]

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one with its description; not to be written, as with `tensors`."""
        for number, spec in enumerate(self.manifest.layout.tensors):
            yield spec, spec.over(self.of_tensor(number).data)

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


SLICE_BYTES = 1 << 22
"""Bytes that are copied at once, so that digests and senders can follow."""


class StateCopy:
    """A copy of a state dict, without digests yet. It is made in slices, so that a reader need not wait for all of it.

    Args:
        layout: the tensors.
        buffers: the bytes of each bucket.
        sources: what to copy to the buffers; empty if they are filled.

    Attributes:
        filled_elsewhere: whether another thread than the reader's calls `fill`. If not, `wait` copies.
    """

    def __init__(
        self,
        layout: WeightLayout,
        buffers: Sequence[Bytes],
        sources: Sequence[torch.Tensor],
    ) -> None:
        self.layout, self.buffers = layout, tuple(buffers)
        self.filled_elsewhere = False
        self._changed = threading.Condition()
        self._done = (0, 0) if sources else (len(self.buffers), 0)  # up to this byte of this bucket
        self._failed = False
        self._slices = self._copied(sources)

    def fill(self) -> StateCopy:
        """Copies all."""
        try:
            for done in self._slices:
                self._advance(done)
        except BaseException:
            self._advance(self._done, failed=True)
            raise
        return self

    def wait(self, bucket: int, stop: int) -> None:
        """Returns when a bucket is copied up to a byte.

        Raises:
            TensorError: the thread that copies has failed.
        """
        if not self.filled_elsewhere:
            while self._done < (bucket, stop):
                self._done = next(self._slices)
            return
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._done >= (bucket, stop))
        if self._done < (bucket, stop):
            raise TensorError("the weights could not be copied")

    def _slice(self, buffers: Sequence[Bytes], number: int) -> torch.Tensor:
        """A tensor in 1-D over its bytes in `buffers`."""
        bucket, start, stop = self.layout.places[number]
        return torch.from_numpy(buffers[bucket][start:stop]).view(self.layout.tensors[number].torch_dtype)

    def _advance(self, done: tuple[int, int], *, failed: bool = False) -> None:
        with self._changed:
            self._done, self._failed = done, failed
            self._changed.notify_all()

    def _copied(self, sources: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
        """Copies the tensors and converts them. Yields how far it is."""
        if not sources:
            return
        for bucket, (first, stop, _, _) in enumerate(self.layout.buckets):
            if stop - first == 1:
                for done in self._copied_in_slices(first, sources[first]):
                    yield bucket, done
            else:
                self._copy_all(range(first, stop), sources)
                yield bucket, self.layout.buckets[bucket].nbytes
        yield len(self.buffers), 0

    def _copy_all(self, numbers: range, sources: Sequence[torch.Tensor]) -> None:
        """Copies the small tensors of a bucket, at once if their bytes are taken as they are."""
        specs, here = self.layout.tensors[numbers.start : numbers.stop], sources[numbers.start : numbers.stop]
        dtype = specs[0].torch_dtype
        if all(
            spec.torch_dtype is dtype is source.dtype and source.is_cpu
            for spec, source in zip(specs, here, strict=True)
        ):
            buffer = self.buffers[self.layout.places[numbers.start].bucket]
            torch.cat([source.reshape(-1) for source in here], out=torch.from_numpy(buffer).view(dtype))
            return
        for number, source in zip(numbers, here, strict=True):
            for _ in self._copied_in_slices(number, source):
                pass

    def _copied_in_slices(self, number: int, source: torch.Tensor) -> Iterator[int]:
        """Copies a tensor. Yields how many bytes of it are copied."""
        spec = self.layout.tensors[number]
        if not spec.nbytes:
            return
        target = self._slice(self.buffers, number)
        if not source.is_contiguous():
            target.reshape(spec.shape).copy_(source)
            yield spec.nbytes
            return
        flat, count = source.reshape(-1), SLICE_BYTES // spec.torch_dtype.itemsize
        for start in range(0, len(flat), count):
            target[start : start + count].copy_(flat[start : start + count])
            yield min(spec.nbytes, (start + count) * spec.torch_dtype.itemsize)


def copy_state(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> StateCopy:
    """Copies a state dict to the CPU, see `begin_copy`."""
    return begin_copy(state, dtype).fill()


def begin_copy(
    state: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    before: WeightSnapshot | None = None,
) -> StateCopy:
    """Prepares the copy of a state dict to the CPU.

    Args:
        state: tensors by name, on any device; values that are no tensors are left out. Of a divided tensor, this rank's
            part is copied.
        dtype: floating-point tensors are converted to it; None keeps their dtype.
        before: an earlier version, whose layout is shared if it is the same.

    Raises:
        TensorError: a tensor cannot be published.
    """
    specs, parts = [], []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        spec, part = part_of(name, tensor, wanted)
        specs.append(spec)
        parts.append(part)
    # numpy asks the system for large pages, which are four times faster to fill for the first time.
    same = before is not None and before.manifest.layout.tensors == tuple(specs)
    layout = before.manifest.layout if before is not None and same else layout_for(specs)
    buffers = [np.empty(bucket.nbytes, np.uint8) for bucket in layout.buckets]
    return StateCopy(layout, buffers, parts)


def view_state(state: Mapping[str, torch.Tensor]) -> StateCopy:
    """Like `copy_state`, of contiguous tensors on the CPU that nobody changes; it shares the memory of large ones."""
    return view_specs([spec_of(name, tensor) for name, tensor in state.items()], list(state.values()))


def view_specs(specs: Sequence[WeightSpec], tensors: Sequence[torch.Tensor]) -> StateCopy:
    """The same of tensors, or parts of them, with these descriptions."""
    layout, each = layout_for(specs), list(map(_bytes, tensors))
    joined = (each[bucket.first : bucket.stop] for bucket in layout.buckets)
    return StateCopy(layout, [some[0] if len(some) == 1 else np.concatenate(some) for some in joined], ())


def _known(layout: WeightLayout, before: WeightSnapshot | None) -> WeightLayout:
    """The layout of the version before if it is equal."""
    if before is not None and before.manifest.layout is layout:
        return layout
    return before.manifest.layout if before is not None and before.manifest.layout == layout else layout


class OpenedVersion(WeightPieces):
    """A version that is announced and sent while it is copied and its digests are computed.

    One thread adds pieces in their order; the event loop reads those that are there.

    Args:
        copy: the copy.
        version: its number.
        before: the version before.
    """

    def __init__(self, copy: StateCopy, version: int, before: WeightSnapshot | None) -> None:
        self.manifest = WeightManifest(version, _known(copy.layout, before), (), opened=os.urandom(OPENED_BYTES))
        self.buffers = copy.buffers
        self._copy, self._before = copy, before
        self._digests: list[bytes] = []
        self._seen: set[tuple[bytes, int]] = set()
        self._repeating: set[int] = set()

    @property
    def digests(self) -> Sequence[bytes]:
        return self._digests

    def has(self, index: int) -> bool:
        return index < len(self._digests)

    def repeats(self, index: int) -> bool:
        return index in self._repeating

    def describe(self) -> Iterator[int]:
        """Computes the digests, each as soon as the piece is copied. Yields the bytes up to there.

        Raises:
            TensorError: the copy has failed.
        """
        done = 0
        for index, (bucket, start, stop) in enumerate(self.manifest.layout.pieces):
            self._copy.wait(bucket, stop)
            digest = _sha256(self.buffers[bucket][start:stop])
            if (digest, stop - start) in self._seen:
                self._repeating.add(index)
            self._seen.add((digest, stop - start))
            self._digests.append(digest)  # last, since the event loop may read it now
            done += stop - start
            yield done

    def finish(self) -> WeightSnapshot:
        """Returns the complete weights."""
        manifest = replace(self.manifest, piece_digests=tuple(self._digests))
        before = self._before
        if before is None or before.manifest.layout is not manifest.layout:
            return WeightSnapshot(manifest, self.buffers)
        return WeightSnapshot(manifest, _sharing(manifest, self.buffers, before))


def seal(copy: StateCopy, version: int, before: WeightSnapshot | None) -> WeightSnapshot:
    """Computes the digests of a copy, about 1 s for each GiB."""
    copy.wait(len(copy.buffers), 0)
    layout = _known(copy.layout, before)
    digests = tuple(_sha256(copy.buffers[bucket][start:stop]) for bucket, start, stop in layout.pieces)
    manifest = WeightManifest(version, layout, digests)
    if before is None or before.manifest.layout is not layout:
        return WeightSnapshot(manifest, copy.buffers)
    return WeightSnapshot(manifest, _sharing(manifest, copy.buffers, before))


class Incoming(WeightPieces):
    """The weights of a version while they are received. Every piece is verified when it arrives.

    Args:
        manifest: manifest of the version, from its publisher, with or without digests.
        base: weights that the receiver has already; pieces that are equal there are not received again.
        earlier: what has arrived of a version that is received no more, for the same.

    Attributes:
        received: bytes of the encoded pieces that were received.
        left: bytes of the missing pieces, before they are encoded.
    """

    def __init__(self, manifest: WeightManifest, base: WeightSnapshot | None, earlier: Incoming | None = None) -> None:
        self.manifest, self.base = manifest, base
        self.received = 0
        layout = manifest.layout
        self.left = layout.nbytes
        self._digests: list[bytes] = []
        self._has = bytearray(layout.count)
        self._count = 0  # of the pieces that are there
        self._encoded: dict[int, tuple[Coding, bytes]] = {}
        self._places: dict[tuple[bytes, int], list[int]] = {}  # of the pieces of one digest and length
        self._known: dict[tuple[bytes, int], Bytes] = {}  # pieces that are here already
        for other in (earlier, base):
            self._known |= {} if other is None else _by_digest(other)
        self.buffers = self._allocate()
        self.learn(manifest.piece_digests)
        if manifest.is_described:
            self._known = {}

    @property
    def digests(self) -> Sequence[bytes]:
        return self._digests

    @property
    def differs_from(self) -> WeightSnapshot | None:
        """The base, if pieces can be sent as differences to it."""
        base = self.base
        return base if base is not None and base.manifest.layout == self.manifest.layout else None

    @property
    def complete(self) -> bool:
        """Whether all pieces are there, and the digest of the whole is verified."""
        return self._count == len(self._has) and self.manifest.is_described

    def has(self, index: int) -> bool:
        return bool(self._has[index])

    def repeats(self, index: int) -> bool:
        return self._places[self._key(index)][0] != index

    def knows(self, index: int) -> bool:
        """Whether the digest of a piece is known, without which the piece cannot be verified."""
        return index < len(self._digests)

    def learn(self, digests: Sequence[bytes]) -> None:
        """Takes the digests of the next pieces from the publisher, and the pieces that are here already."""
        for digest in digests:
            index = len(self._digests)
            self._digests.append(digest)
            key = self._key(index)
            places = self._places.setdefault(key, [])
            places.append(index)
            if len(places) > 1:  # it is not received
                self.left -= key[1]
            if self._has[index]:  # its buffer is that of the base
                self._took(index)
            elif self._has[places[0]]:
                self._take(index, self.piece(places[0]))
            elif (known := self._known.get(key)) is not None:
                self._take(index, known)

    def describe(self, digest: bytes) -> None:
        """Takes the digest of the version, after those of all pieces.

        Raises:
            ProtocolViolationError: they do not fit together.
        """
        self.manifest = self.manifest.described(self._digests, digest)
        self._known = {}

    def missing(self) -> list[int]:
        """The pieces to ask for, in ascending order; of pieces that are known to be equal only the first."""
        known = len(self._digests)
        wanted = [places[0] for places in self._places.values() if not self._has[places[0]]]
        return [*sorted(wanted), *range(known, len(self._has))]

    def add(self, index: int, coding: int, data: bytes) -> None:
        """Takes a piece from another peer, whose digest is known.

        Raises:
            ProtocolViolationError: it was not asked for, is malformed, or does not match its digest.
        """
        if index >= len(self._has):
            raise ProtocolViolationError(f"piece {index} of {len(self._has)}")
        if not self.knows(index):
            raise ProtocolViolationError(f"piece {index}, whose digest is not known")
        if self._has[index]:
            return
        layout, digest = self.manifest.layout, self._digests[index]
        base, piece = self.differs_from, self.piece(index)
        bucket = layout.pieces[index].bucket
        itemsize = layout.buckets[bucket].itemsize
        decode(coding, data, None if base is None else base.piece(index), itemsize, piece)
        if _sha256(piece) != digest:
            first, *rest = (spec.name for spec in layout.in_bucket(bucket))
            of = f"tensors {first!r} to {rest[-1]!r}" if rest else f"tensor {first!r}"
            raise ProtocolViolationError(f"a piece of {of} that does not match its digest")
        self.received += len(data)
        if coding != Coding.RAW:
            self._encoded[index] = Coding(coding), data
        places = self._places[self._key(index)]
        for place in places:
            if not self._has[place]:
                self._take(place, piece)

    def encoded(self, index: int, base: bytes) -> tuple[Coding, bytes] | None:
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

    def _key(self, index: int) -> tuple[bytes, int]:
        _, start, stop = self.manifest.layout.pieces[index]
        return self._digests[index], stop - start

    def _take(self, index: int, data: Bytes) -> None:
        piece = self.piece(index)
        if piece is not data:
            piece[:] = data
        self._took(index)

    def _took(self, index: int) -> None:
        self._has[index] = True
        self._count += 1
        if not self.repeats(index):
            self.left -= self._key(index)[1]

    def _allocate(self) -> tuple[Bytes, ...]:
        """Buffers, which are those of the base for buckets that are known to be equal there."""
        layout, base = self.manifest.layout, self.differs_from
        buffers = []
        for number, bucket in enumerate(layout.buckets):
            pieces = layout.of_bucket(number)
            if base is not None and self.manifest.is_described and _same(self.manifest, base.manifest, pieces):
                buffers.append(base.buffers[number])
                self._has[pieces.start : pieces.stop] = b"\1" * len(pieces)
            else:
                buffers.append(np.empty(bucket.nbytes, np.uint8))
        return tuple(buffers)


def _sha256(piece: Bytes) -> bytes:
    return hashlib.sha256(piece.data).digest()


def _bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _same(manifest: WeightManifest, other: WeightManifest, pieces: range) -> bool:
    """Whether two versions of one layout have the same bytes in these pieces."""
    place = slice(pieces.start, pieces.stop)
    return manifest.piece_digests[place] == other.piece_digests[place]


def _sharing(manifest: WeightManifest, buffers: Sequence[Bytes], before: WeightSnapshot) -> tuple[Bytes, ...]:
    """The buffers, replaced by those of an earlier version where the buckets are equal."""
    return tuple(
        before.buffers[number] if _same(manifest, before.manifest, manifest.layout.of_bucket(number)) else buffer
        for number, buffer in enumerate(buffers)
    )


def _by_digest(pieces: WeightPieces) -> dict[tuple[bytes, int], Bytes]:
    """The pieces that are here, as views."""
    here = {}
    for index, digest in enumerate(pieces.digests):
        if pieces.has(index):
            piece = pieces.piece(index)
            here[digest, len(piece)] = piece
    return here
