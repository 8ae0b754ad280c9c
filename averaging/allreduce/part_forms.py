"""How the parts of a tensor travel in a round: with all of their elements, or with some of each block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from averaging.allreduce.shard_reducer import MeanReducer, RobustReducer, SparseReducer
from averaging.errors import ConfigError
from averaging.protocol import MEAN, Aggregation, AggregationKind, CompressionType, TopK, WireTensor
from averaging.tensors import (
    OBJECTS_AT_ONCE,
    BlockLayout,
    Contribution,
    Schema,
    SparsePart,
    SparseTensor,
    StagedTensor,
    TensorSpec,
    VisibleTensor,
    codec_of,
    decode_slices,
    decode_top_k,
    decode_union,
    decode_visible,
    encode_slices,
    encode_union,
    finite_as,
    top_k_nbytes,
    union_limit,
    visible_limit,
)

Prepared: TypeAlias = "torch.Tensor | StagedTensor | SparseTensor | VisibleTensor"
"""A tensor as its member contributes it: flat, on the CPU; read and never written."""

Averaged: TypeAlias = "torch.Tensor | SparsePart"
"""The average or the delta of a part: 1-D, on the CPU, read-only; of a sparse tensor in tile order."""


class Slice(NamedTuple):
    """A slice of one tensor of the schema, flattened; a sparse one in tile order. `start` is below `stop`."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """What travels in one message: a slice of one tensor, or several small slices of tensors of one form."""

    slices: tuple[Slice, ...]  # at least one; their elements follow one another in the part
    # index of the first tensor, whose form all others have as well
    tensor: int = field(init=False, compare=False, repr=False)
    numel: int = field(init=False, compare=False, repr=False)  # number of elements

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", self.slices[0].tensor)
        object.__setattr__(self, "numel", sum(piece.stop - piece.start for piece in self.slices))

    @classmethod
    def of(cls, tensor: int, start: int, stop: int) -> Part:
        return cls((Slice(tensor, start, stop),))

    def divide(self, values: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Each slice with its elements, given those of the part in 1-D."""
        if len(self.slices) == 1:
            yield self.slices[0], values
            return
        start = 0
        for first in range(0, len(self.slices), OBJECTS_AT_ONCE):
            slices = self.slices[first : first + OBJECTS_AT_ONCE]
            lengths = [piece.numel for piece in slices]
            stop = start + sum(lengths)
            yield from zip(slices, torch.split(values[start:stop], lengths), strict=True)
            start = stop


def have_arrived(tensors: Sequence[Prepared], part: Part) -> bool:
    """Whether this member's elements of a part are here, which may come from a device."""
    for number, _, stop in part.slices:
        tensor = tensors[number]
        if isinstance(tensor, StagedTensor) and not tensor.has(stop):
            return False
    return True


class DenseForm:
    """All elements of a part, in any dense codec. Each slice is encoded by itself, as if it were alone in its part."""

    def __init__(self, spec: TensorSpec, aggregation: Aggregation, residual: ReplyResidual | None = None) -> None:
        self._spec, self._dtype, self._aggregation, self._residual = spec, spec.torch_dtype, aggregation, residual
        self._codec = codec_of(spec.compression, self._dtype)
        self._per_element = self._codec.bytes_per_element
        # Whether a slice and the next one of the tensor may be one slice, without any effect on the result.
        self.continues = self._codec.elementwise and aggregation.kind is not AggregationKind.CLIP

    def cuts(self, part_size_bytes: int) -> Iterator[tuple[int, int]]:
        length = part_size_bytes // self._per_element
        if length < 1:
            raise ConfigError(
                f"an element of {self._spec} exceeds a part of {part_size_bytes} bytes; make parts larger"
            )
        for start in range(0, self._spec.numel, length):
            yield start, min(start + length, self._spec.numel)

    def joins(self, other: AnyForm) -> bool:
        """Whether a slice of a tensor of the form `other` may follow one of this form in the same part."""
        return (
            isinstance(other, DenseForm)
            and self._codec is other._codec
            and self._aggregation.kind is not AggregationKind.CLIP
        )

    def encoded_size(self, piece: Slice) -> int:
        return self._codec.nbytes((piece.numel,))

    def nbytes(self, part: Part) -> int:
        """Bytes of a contribution on the wire, without the overhead per slice, row or block of the codec."""
        return part.numel * self._per_element

    def packed_size(self, part_size_bytes: int, members: int) -> int:
        """Bytes of the whole tensor in the larger direction if so many members contribute, without that overhead."""
        return self._spec.numel * self._per_element

    def encode(self, tensors: Sequence[Any], part: Part) -> WireTensor:
        return self._encode(self.own(tensors, part), part)

    def _encode(self, values: torch.Tensor, part: Part) -> WireTensor:
        codec, compression = self._codec, self._spec.compression
        if len(part.slices) == 1 or codec.elementwise:
            return WireTensor(codec.pack(values), (part.numel,), codec.wire_dtype, compression)
        return encode_slices(values, compression, _lengths(part))

    def own(self, tensors: Sequence[Any], part: Part) -> torch.Tensor:
        if len(part.slices) == 1:
            ((number, start, stop),) = part.slices
            values: torch.Tensor = tensors[number][start:stop]
            return values
        pieces = []
        for first in range(0, len(part.slices), OBJECTS_AT_ONCE):
            slices = part.slices[first : first + OBJECTS_AT_ONCE]
            pieces.append(_joined([tensors[number][start:stop] for number, start, stop in slices]))
        return _joined(pieces)

    def decode(self, wire: WireTensor, part: Part) -> torch.Tensor:
        codec = self._codec
        as_usual = wire.compression == self._spec.compression and wire.dtype == codec.wire_dtype
        if as_usual and (codec.elementwise or len(part.slices) == 1):
            size = (part.numel,)
            if len(wire.buffer) == codec.nbytes(size):
                return codec.unpack(wire.buffer, size)
        # From other software, or invalid.
        return decode_slices(wire, self._dtype, _lengths(part))

    def reducer(self) -> MeanReducer | RobustReducer:
        return MeanReducer() if self._aggregation == MEAN else RobustReducer(self._aggregation)

    def answer(
        self, average: torch.Tensor, compression: CompressionType, part: Part
    ) -> tuple[WireTensor, torch.Tensor]:
        """Encodes an average, and returns it also as it is decoded. Only uncompressed values get the tensor's dtype.

        The residual of the part is added, and what is lost now is recorded.
        """
        exact = average if self._residual is None else self._residual.added(average, part)
        values = exact.to(self._dtype) if compression is CompressionType.NONE else exact
        usual = compression is self._spec.compression
        wire = self._encode(values, part) if usual else encode_slices(values, compression, _lengths(part))
        kept = values if compression is CompressionType.NONE else self.decode(wire, part)
        if usual and self._residual is not None and kept is not exact:
            loss = torch.sub(exact, kept).to(torch.float32).nan_to_num_(0.0, 0.0, 0.0)  # a part may overflow
            for (number, start, stop), lost in part.divide(loss):
                self._residual.lost(number, self._spec.numel, slice(start, stop), lost)
        return wire, kept

    def decode_answer(self, wire: WireTensor, part: Part) -> torch.Tensor:
        return self.decode(wire, part)

    def is_finite(self, values: Any) -> bool:
        return finite_as(values, self._dtype)

    def clamped(self, values: Any) -> int:
        limit = self._codec.limit
        if math.isinf(limit) or not values.numel() or torch.linalg.vector_norm(values, math.inf).item() < limit:
            return 0
        return int((values.abs() >= limit).sum())


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _lengths(part: Part) -> list[int]:
    return [piece.numel for piece in part.slices]


class ReplyResidual:
    """What the replies of this peer, as a reducer, have lost of averages in a lossy code, for the tensors of one topic.

    It is added to the same elements when this peer reduces them the next time, so that all that members have decoded
    plus the residual is the sum of the averages. What a round has lost counts once its result is applied: the replies
    of a round that failed were applied by nobody. `tensors` are flat float32, sparse ones in tile order, by the number
    of the tensor; absent if nothing was lost of it yet.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[int, int, slice | torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        self._pending = []

    def of(self, tensor: int, start: int, stop: int) -> torch.Tensor | None:
        residual = self.tensors.get(tensor)
        return None if residual is None else residual[start:stop]

    def added(self, average: torch.Tensor, part: Part) -> torch.Tensor:
        if not any(piece.tensor in self.tensors for piece in part.slices):
            return average
        exact = average.clone()
        for (number, start, stop), elements in part.divide(exact):
            if (residual := self.of(number, start, stop)) is not None:
                elements.add_(residual)
        return exact

    def lost(self, tensor: int, numel: int, elements: slice | torch.Tensor, loss: torch.Tensor) -> None:
        """Records the `loss`, 1-D float32, of the `elements` of a reply, the residual of those included.

        `elements` are a slice or int64 indices of the tensor of that number, which has `numel` elements.
        """
        self._pending.append((tensor, numel, elements, loss))

    def take(self) -> list[tuple[int, int, slice | torch.Tensor, torch.Tensor]]:
        """What was lost in the round, as `lost` got it; no residual is left of these elements."""
        pending, self._pending = self._pending, []
        for tensor, _, elements, _ in pending:
            if tensor in self.tensors:
                self.tensors[tensor][elements] = 0.0
        return pending

    def applied(self) -> None:
        """Called when the result of the round is applied."""
        for tensor, numel, elements, loss in self.take():
            if tensor not in self.tensors:
                # Memory that numpy takes for zeros is used once it is written: only that of this peer's shard.
                self.tensors[tensor] = torch.from_numpy(np.zeros(numel, dtype=np.float32))
            self.tensors[tensor][elements] = loss


class SparseForm:
    """Some elements of each block of a part, of which all blocks have one size.

    `top_k` is None with VISIBLE, whose parts are reckoned with the most bytes that they can take. At most `members`
    contribute. `residual` is that of this peer's replies; None if what they lose is of no interest.
    """

    continues = False

    def __init__(
        self,
        number: int,
        spec: TensorSpec,
        top_k: TopK | None,
        members: int = 1,
        residual: ReplyResidual | None = None,
    ) -> None:
        self._number, self._dtype, self._top_k = number, spec.torch_dtype, top_k
        self._layout, self._members, self._residual = BlockLayout(spec.shape), members, residual

    def cuts(self, part_size_bytes: int) -> Iterator[tuple[int, int]]:
        """Whole blocks with as many elements as a part has bytes; fewer if a contribution has more bytes than that."""
        top_k = self._top_k
        per_element = 2 + 1 / 8 if top_k is None else top_k.density * (12 + top_k.bits) / 8
        return self._layout.cuts(int(part_size_bytes / max(1.0, per_element)))

    def joins(self, other: AnyForm) -> bool:
        return False

    def encoded_size(self, piece: Slice) -> int:
        return self._nbytes(piece.numel, self._layout.block_size(piece.start))

    def _nbytes(self, numel: int, block_size: int) -> int:
        top_k = self._top_k
        return visible_limit(numel, block_size) if top_k is None else top_k_nbytes(numel, block_size, top_k)

    def nbytes(self, part: Part) -> int:
        return self.encoded_size(part.slices[0])

    def packed_size(self, part_size_bytes: int, members: int) -> int:
        return sum(self._packed_size(start, stop, members) for start, stop in self.cuts(part_size_bytes))

    def _packed_size(self, start: int, stop: int, members: int) -> int:
        numel, size = stop - start, self._layout.block_size(start)
        return max(self._nbytes(numel, size), union_limit(numel, size, self._top_k, members))

    def encode(self, tensors: Sequence[Any], part: Part) -> WireTensor:
        (piece,) = part.slices
        tensor: SparseTensor | VisibleTensor = tensors[piece.tensor]
        return tensor.wire(piece.start, piece.stop)

    def own(self, tensors: Sequence[Any], part: Part) -> Contribution:
        """The values are those that other members would decode, so that it is treated like theirs."""
        (piece,) = part.slices
        values = tensors[piece.tensor].values(piece.start, piece.stop)
        return Contribution(values, self.encode(tensors, part).buffer)

    def decode(self, wire: WireTensor, part: Part) -> Contribution:
        (piece,) = part.slices
        size, top_k = self._layout.block_size(piece.start), self._top_k
        return Contribution(
            decode_visible(wire, size) if top_k is None else decode_top_k(wire, size, top_k), wire.buffer
        )

    def reducer(self) -> SparseReducer:
        return SparseReducer(limits=self._top_k is not None)

    def answer(
        self, average: list[Contribution], compression: CompressionType, part: Part
    ) -> tuple[WireTensor, SparsePart]:
        ((_, start, stop),) = part.slices
        residual = None if self._residual is None else self._residual.of(self._number, start, stop)
        reply = encode_union(average, self._layout.block_size(start), self._top_k, residual)
        if self._residual is not None and reply.loss is not None:
            self._residual.lost(self._number, self._layout.numel, reply.part.indices + start, reply.loss)
        return reply.wire, reply.part

    def decode_answer(self, wire: WireTensor, part: Part) -> SparsePart:
        (piece,) = part.slices
        return decode_union(wire, self._layout.block_size(piece.start), self._top_k, self._members)

    def is_finite(self, values: Any) -> bool:
        part = values.part if isinstance(values, Contribution) else values
        return finite_as(part.values, self._dtype)

    def clamped(self, values: Any) -> int:
        return 0


AnyForm: TypeAlias = "DenseForm | SparseForm"
"""How a tensor is cut into slices, which of them may be one part, how contributions are encoded and decoded, what
combines them, and how their average is sent and read."""


def forms_of(schema: Schema, *, members: int = 1, residual: ReplyResidual | None = None) -> list[AnyForm]:
    """The form of each tensor of the schema; see `SparseForm` for the other arguments."""
    dense: dict[tuple[str, tuple[int, ...], CompressionType], AnyForm] = {}
    forms: list[AnyForm] = []
    for number, spec in enumerate(schema.tensors):
        if spec.compression.is_sparse:
            is_top_k = spec.compression is CompressionType.TOP_K
            if is_top_k and schema.sparse is None:
                raise ConfigError(f"{spec} needs a schema with the options of top_k")
            forms.append(SparseForm(number, spec, schema.sparse if is_top_k else None, members, residual))
            continue
        key = spec.dtype, spec.shape, spec.compression
        if key not in dense:
            dense[key] = DenseForm(spec, schema.aggregation, residual)
        forms.append(dense[key])
    return forms
