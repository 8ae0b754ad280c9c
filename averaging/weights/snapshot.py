"""The weights of one version in memory: complete, being published, or being received."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from averaging.errors import ProtocolViolationError
from averaging.weights.differences import Bytes, Coding, decode
from averaging.weights.layout import OPENED_BYTES, WeightLayout, WeightManifest, WeightSpec, layout_for, spec_of
from averaging.weights.parts import cut, part_of, put_together, whole_of

SLICE_BYTES = 1 << 22  # that are copied at once, so that digests and senders can follow


class WeightPieces:
    # The pieces of one version, all or those that are here.
    manifest: WeightManifest
    buffers: tuple[Bytes, ...]  # of each bucket
    _digests: list[bytes]
    _firsts: dict[tuple[bytes, int], int]

    @property
    def digests(self) -> Sequence[bytes]:  # of the first pieces, as many as are known
        return self._digests

    @property
    def firsts(self) -> Mapping[tuple[bytes, int], int]:  # the first of all equal pieces, by their key
        return self._firsts

    def has(self, index: int) -> bool:
        """Whether a piece is here and verified."""
        return True

    def key(self, index: int) -> tuple[bytes, int]:
        _, start, stop = self.manifest.layout.pieces[index]
        return self.digests[index], stop - start

    def repeats(self, index: int) -> bool:
        """Whether a piece that is here equals an earlier one."""
        return self.firsts[self.key(index)] != index

    def piece(self, index: int) -> Bytes:
        bucket, start, stop = self.manifest.layout.pieces[index]
        return self.buffers[bucket][start:stop]

    def encoded(self, index: int, base: bytes) -> tuple[Coding, bytes] | None:
        """A piece as it was received, if it is a difference to the version with the digest `base`."""
        return None


@dataclass(frozen=True)
class WeightSnapshot(WeightPieces):
    """All weights of one version, which never change."""

    manifest: WeightManifest
    buffers: tuple[Bytes, ...]  # of each bucket; versions share those of buckets that are equal

    @property
    def digests(self) -> Sequence[bytes]:
        return self.manifest.piece_digests

    @cached_property
    def firsts(self) -> Mapping[tuple[bytes, int], int]:
        return {self.key(index): index for index in reversed(range(self.manifest.layout.count))}

    def arranged(self, layout: WeightLayout) -> WeightSnapshot:
        """The same weights in the order of another layout, and only the parts that it has of them.

        They are unchanged if the layout has other tensors.
        """
        here = dict(self.parts())
        tensors = []
        for spec in layout.tensors:
            tensor, whole = here.get(spec), here.get(whole_of(spec))
            if tensor is None and whole is not None:
                tensor = cut(whole, spec)
            if tensor is None:
                return self
            tensors.append(tensor)
        if len(tensors) != len(here) and not layout.has_parts:
            return self
        buffers = view_tensors(layout, tensors).buffers
        # A tensor with a bucket of its own is the same memory in both orders, so its digests are known.
        known = {_memory(self.piece(index)): digest for index, digest in enumerate(self.manifest.piece_digests)}
        pieces = [buffers[bucket][start:stop] for bucket, start, stop in layout.pieces]
        digests = tuple(known.get(_memory(piece)) or _sha256(piece) for piece in pieces)
        return WeightSnapshot(replace(self.manifest, layout=layout, piece_digests=digests, opened=b""), buffers)

    def of_tensor(self, number: int) -> Bytes:
        bucket, start, stop = self.manifest.layout.places[number]
        return self.buffers[bucket][start:stop]

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one with its description; not to be written, as with `tensors`."""
        for number, spec in enumerate(self.manifest.layout.tensors):
            yield spec, spec.over(self.of_tensor(number).data)

    def whole(self) -> WeightSnapshot:
        layout = self.manifest.layout
        return self.arranged(replace(layout, tensors=tuple(sorted(layout.tensors, key=lambda spec: spec.name))))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, on the CPU. They share the memory of this snapshot and must not be written."""
        return {spec.name: tensor for spec, tensor in self.parts()}


@dataclass(frozen=True)
class DividedSnapshot:
    """A version in parts, all that this follower wants of it."""

    manifest: WeightManifest  # of the joined publisher
    snapshots: tuple[WeightSnapshot, ...]  # one for each part

    def parts(self) -> Iterator[tuple[WeightSpec, torch.Tensor]]:
        """Each tensor or part of one. They share the memory of the snapshots and must not be written."""
        for snapshot in self.snapshots:
            yield from snapshot.parts()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole tensors by name, put together if no part is left out."""
        return put_together(self.parts())

    def whole(self) -> WeightSnapshot:
        return seal(view_state(dict(sorted(self.tensors().items()))), self.manifest.version, None)


class StateCopy:
    """A copy of a state dict in `buffers`, made in slices, so that senders need not wait for all of it.

    Without sources the buffers are filled already.
    """

    def __init__(self, layout: WeightLayout, buffers: Sequence[Bytes], sources: Sequence[torch.Tensor] = ()) -> None:
        self.layout, self.buffers = layout, tuple(buffers)
        self._end = (len(self.buffers), 0)
        self._done = (0, 0) if sources else self._end  # up to this byte of this bucket
        self._slices = self._copied(sources)

    def copy_all(self) -> StateCopy:
        self.copy_up_to(*self._end)
        return self

    def copy_up_to(self, bucket: int, stop: int) -> None:
        while self._done < (bucket, stop):
            self._done = next(self._slices)

    def _copied(self, sources: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
        for bucket, (first, stop, nbytes, _) in enumerate(self.layout.buckets):
            specs, here = self.layout.tensors[first:stop], sources[first:stop]
            dtype = specs[0].torch_dtype
            if stop - first == 1:
                yield from ((bucket, done) for done in self._copied_in_slices(first, here[0]))
            elif all(spec.torch_dtype is dtype is each.dtype for spec, each in zip(specs, here, strict=True)) and all(
                each.is_cpu for each in here
            ):  # many small tensors at once
                target = torch.from_numpy(self.buffers[bucket]).view(dtype)
                torch.cat([each.reshape(-1) for each in here], out=target)
            else:
                for number, each in enumerate(here, first):
                    list(self._copied_in_slices(number, each))
            yield bucket, nbytes
        yield self._end

    def _copied_in_slices(self, number: int, source: torch.Tensor) -> Iterator[int]:
        spec = self.layout.tensors[number]
        if not spec.nbytes:
            return
        bucket, start, stop = self.layout.places[number]
        target = torch.from_numpy(self.buffers[bucket][start:stop]).view(spec.torch_dtype)
        if not source.is_contiguous():
            target.reshape(spec.shape).copy_(source)
            yield spec.nbytes
            return
        flat, count = source.reshape(-1), SLICE_BYTES // spec.torch_dtype.itemsize
        for begin in range(0, len(flat), count):
            target[begin : begin + count].copy_(flat[begin : begin + count])
            yield min(spec.nbytes, (begin + count) * spec.torch_dtype.itemsize)


def begin_copy(
    state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, before: WeightSnapshot | None = None
) -> StateCopy:
    """Prepares the copy of a state dict to the CPU, of floating-point tensors in `dtype` unless it is None.

    Of divided tensors this rank's parts are copied. Values that are no tensors are left out. The layout of the version
    `before` is shared if it is the same.
    """
    specs, parts = [], []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        spec, part = part_of(name, tensor, wanted)
        specs.append(spec)
        parts.append(part)
    same = before is not None and before.manifest.layout.tensors == tuple(specs)
    layout = before.manifest.layout if before is not None and same else layout_for(specs)
    # numpy asks the system for large pages, which are four times faster to fill for the first time.
    return StateCopy(layout, _empty(layout), parts)


def view_state(state: Mapping[str, torch.Tensor]) -> StateCopy:
    """Stands for a copy of contiguous tensors on the CPU that nobody changes; it shares the memory of large ones."""
    return view_tensors(layout_for([spec_of(name, tensor) for name, tensor in state.items()]), list(state.values()))


def view_tensors(layout: WeightLayout, tensors: Sequence[torch.Tensor]) -> StateCopy:
    """The same of tensors, or parts of them, in the order of a layout."""
    each = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors]
    joined = (each[bucket.first : bucket.stop] for bucket in layout.buckets)
    return StateCopy(layout, [some[0] if len(some) == 1 else np.concatenate(some) for some in joined])


class OpenedVersion(WeightPieces):
    """A version that is announced and sent while it is copied and its digests are computed.

    One thread adds pieces in their order; the event loop reads those that are there. Requests name it by random bytes,
    since its digest is not known yet, unless another `name` is given.
    """

    def __init__(self, copy: StateCopy, version: int, before: WeightSnapshot | None, name: bytes | None = None) -> None:
        layout = copy.layout
        if before is not None and before.manifest.layout == layout:
            layout = before.manifest.layout  # the same object, so that versions are compared fast
        self.manifest = WeightManifest(version, layout, (), opened=os.urandom(OPENED_BYTES) if name is None else name)
        self.buffers = copy.buffers
        self._copy, self._before = copy, before
        self._digests: list[bytes] = []
        self._firsts: dict[tuple[bytes, int], int] = {}

    def has(self, index: int) -> bool:
        return index < len(self._digests)

    def describe(self) -> Iterator[int]:
        """Computes the digests, each as soon as the piece is copied. Yields the bytes up to there."""
        done = 0
        for index, (bucket, start, stop) in enumerate(self.manifest.layout.pieces):
            self._copy.copy_up_to(bucket, stop)
            digest = _sha256(self.buffers[bucket][start:stop])
            self._firsts.setdefault((digest, stop - start), index)
            self._digests.append(digest)  # last, since the event loop may read it now
            done += stop - start
            yield done

    def finish(self) -> WeightSnapshot:
        self.manifest = replace(self.manifest, piece_digests=tuple(self._digests))
        return WeightSnapshot(self.manifest, _sharing(self.manifest, self.buffers, self._before))


def seal(copy: StateCopy, version: int, before: WeightSnapshot | None) -> WeightSnapshot:
    """Computes the digests of a copy, about 1 s for each GiB."""
    opened = OpenedVersion(copy, version, before, b"")
    for _ in opened.describe():
        pass
    return opened.finish()


class Incoming(WeightPieces):
    """The weights of a version while they are received. Every piece is verified when it arrives.

    Pieces that are equal in `base`, the weights that are here already, or in `earlier`, what has arrived of a version
    that is received no more, are not received again.
    """

    def __init__(self, manifest: WeightManifest, base: WeightSnapshot | None, earlier: Incoming | None = None) -> None:
        self.manifest, self.base = manifest, base
        self.buffers = _empty(manifest.layout)
        self.received = 0  # bytes of pieces, as they were encoded
        self.left = manifest.layout.nbytes  # bytes of the missing pieces, before they are encoded
        self._digests: list[bytes] = []
        self._has = bytearray(manifest.layout.count)
        self._count = 0  # of the pieces that are there
        self._encoded: dict[int, tuple[Coding, bytes]] = {}
        self._firsts: dict[tuple[bytes, int], int] = {}
        self._places: dict[tuple[bytes, int], list[int]] = {}  # of equal pieces
        self._known: dict[tuple[bytes, int], Bytes] = {}  # pieces that are here already
        for other in (earlier, base):
            self._known |= {} if other is None else _by_digest(other)
        self.learn(manifest.piece_digests)
        if manifest.is_described:
            self._known = {}

    @property
    def differs_from(self) -> WeightSnapshot | None:
        """The base, if pieces can be sent as differences to it."""
        base = self.base
        return base if base is not None and base.manifest.layout == self.manifest.layout else None

    @property
    def complete(self) -> bool:
        return self._count == len(self._has) and self.manifest.is_described

    def has(self, index: int) -> bool:
        return bool(self._has[index])

    def knows(self, index: int) -> bool:
        """Whether the digest of a piece is known, without which the piece cannot be verified."""
        return index < len(self._digests)

    def learn(self, digests: Sequence[bytes]) -> None:
        """Takes the digests of the next pieces from the publisher, and the pieces that are here already."""
        for digest in digests:
            index = len(self._digests)
            self._digests.append(digest)
            key = self.key(index)
            self._firsts.setdefault(key, index)
            places = self._places.setdefault(key, [])
            places.append(index)
            if len(places) > 1:  # it is not received
                self.left -= key[1]
            if self._has[places[0]]:
                self._take(index, self.piece(places[0]))
            elif (known := self._known.get(key)) is not None:
                self._take(index, known)

    def describe(self, digest: bytes) -> None:
        """Takes the digest of the version, after those of all pieces; raises ProtocolViolationError if it is wrong."""
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
        for place in self._places[self.key(index)]:
            if not self._has[place]:
                self._take(place, None if place == index else piece)

    def encoded(self, index: int, base: bytes) -> tuple[Coding, bytes] | None:
        own = self.differs_from
        return self._encoded.get(index) if own is not None and own.manifest.digest == base else None

    def finish(self) -> WeightSnapshot:
        if not self.complete:
            raise RuntimeError("pieces are missing")
        return WeightSnapshot(self.manifest, _sharing(self.manifest, self.buffers, self.base))

    def _take(self, index: int, data: Bytes | None) -> None:
        piece = self.piece(index)
        if data is not None:  # else it is in its place already
            piece[:] = data
        self._has[index] = True
        self._count += 1
        if not self.repeats(index):
            self.left -= len(piece)


def _empty(layout: WeightLayout) -> tuple[Bytes, ...]:
    return tuple(np.empty(bucket.nbytes, np.uint8) for bucket in layout.buckets)


def _sha256(piece: Bytes) -> bytes:
    return hashlib.sha256(piece.data).digest()


def _memory(piece: Bytes) -> tuple[int, int]:
    return piece.__array_interface__["data"][0], len(piece)


def _sharing(manifest: WeightManifest, buffers: Sequence[Bytes], before: WeightSnapshot | None) -> tuple[Bytes, ...]:
    """The buffers, replaced by those of an earlier version of the same layout where the buckets are equal."""
    if before is None or before.manifest.layout != manifest.layout:
        return tuple(buffers)
    shared = list(buffers)
    for number in range(len(shared)):
        pieces = manifest.layout.of_bucket(number)
        place = slice(pieces.start, pieces.stop)
        if manifest.piece_digests[place] == before.manifest.piece_digests[place]:
            shared[number] = before.buffers[number]
    return tuple(shared)


def _by_digest(pieces: WeightPieces) -> dict[tuple[bytes, int], Bytes]:
    return {pieces.key(index): pieces.piece(index) for index in range(len(pieces.digests)) if pieces.has(index)}
