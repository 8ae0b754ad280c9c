"""How the parts of a tensor travel in a round: with all of their elements, or with the largest of each block.

The form of a tensor says how it is cut into parts, how contributions are encoded and decoded, what combines them, and
how their average is sent and read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from averaging.allreduce.shard_reducer import MeanReducer, PartReducer, RobustReducer, SparseReducer
from averaging.errors import ConfigError
from averaging.protocol import MEAN, Aggregation, CompressionType, TopK, WireTensor
from averaging.tensors import (
    BlockLayout,
    Contribution,
    Schema,
    SparsePart,
    SparseTensor,
    TensorSpec,
    bytes_per_element,
    decode,
    decode_as,
    decode_top_k,
    decode_union,
    encode,
    encode_union,
    finite_as,
    top_k_nbytes,
    union_limit,
)

Prepared: TypeAlias = "torch.Tensor | SparseTensor"
"""A tensor as its member contributes it: flat, on the CPU; read and never written."""

Averaged: TypeAlias = "torch.Tensor | SparsePart"
"""The average or the delta of a part: 1-D, on the CPU, read-only; of a sparse tensor in tile order."""

Tensor = TypeVar("Tensor", torch.Tensor, SparseTensor)
Contributed = TypeVar("Contributed", torch.Tensor, Contribution)
Average = TypeVar("Average", torch.Tensor, "list[Contribution]")
Result = TypeVar("Result", torch.Tensor, SparsePart)


class PartForm(ABC, Generic[Tensor, Contributed, Average, Result]):
    """The form of one tensor. A part is given by its first element and one past its last."""

    @abstractmethod
    def cuts(self, part_size_bytes: int) -> Iterator[tuple[int, int]]:
        """The parts of the tensor, in order.

        Raises:
            ConfigError: an element is larger than a part.
        """

    @abstractmethod
    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of a contribution on the wire, without the overhead per part, row or block of a dense codec."""

    @abstractmethod
    def packed_size(self, part_size_bytes: int, members: int) -> int:
        """Bytes of the whole tensor in the larger direction if so many members contribute, without that overhead."""

    @abstractmethod
    def encode(self, tensor: Tensor, start: int, stop: int) -> WireTensor:
        """A contribution."""

    @abstractmethod
    def own(self, tensor: Tensor, start: int, stop: int) -> Contributed:
        """This member's own contribution to a part that it reduces itself."""

    @abstractmethod
    def decode(self, wire: WireTensor, start: int, stop: int) -> Contributed:
        """Decodes a contribution.

        Raises:
            ProtocolViolationError: it is invalid. Its number of elements is checked by the caller.
        """

    @abstractmethod
    def reducer(self) -> PartReducer[Contributed, Average]:
        """What combines the contributions to one part."""

    @abstractmethod
    def answer(
        self, average: Average, compression: CompressionType, start: int, stop: int
    ) -> tuple[WireTensor, Result]:
        """Encodes an average, and returns it also as it is decoded."""

    @abstractmethod
    def decode_answer(self, wire: WireTensor, start: int, stop: int) -> Result:
        """Decodes an average.

        Raises:
            ProtocolViolationError: it is invalid. Its number of elements is checked by the caller.
        """

    @abstractmethod
    def is_finite(self, values: Contributed | Result) -> bool:
        """Whether all values are finite in the dtype of the tensor."""


AnyForm: TypeAlias = "PartForm[Any, Any, Any, Any]"


class DenseForm(PartForm[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]):
    """All elements of a part, in any dense codec."""

    def __init__(self, spec: TensorSpec, aggregation: Aggregation) -> None:
        self._spec, self._dtype, self._aggregation = spec, spec.torch_dtype, aggregation
        self._per_element = bytes_per_element(spec.compression, self._dtype)

    def cuts(self, part_size_bytes: int) -> Iterator[tuple[int, int]]:
        """See `PartForm`."""
        length = part_size_bytes // self._per_element
        if length < 1:
            raise ConfigError(
                f"an element of {self._spec} exceeds a part of {part_size_bytes} bytes; make parts larger"
            )
        for start in range(0, self._spec.numel, length):
            yield start, min(start + length, self._spec.numel)

    def nbytes(self, start: int, stop: int) -> int:
        """See `PartForm`."""
        return (stop - start) * self._per_element

    def packed_size(self, part_size_bytes: int, members: int) -> int:
        """See `PartForm`."""
        return self.nbytes(0, self._spec.numel)

    def encode(self, tensor: torch.Tensor, start: int, stop: int) -> WireTensor:
        """See `PartForm`."""
        return encode(tensor[start:stop], self._spec.compression)

    def own(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """See `PartForm`."""
        return tensor[start:stop]

    def decode(self, wire: WireTensor, start: int, stop: int) -> torch.Tensor:
        """See `PartForm`."""
        return decode_as(wire, self._dtype)

    def reducer(self) -> PartReducer[torch.Tensor, torch.Tensor]:
        """See `PartForm`."""
        return MeanReducer() if self._aggregation == MEAN else RobustReducer(self._aggregation)

    def answer(
        self, average: torch.Tensor, compression: CompressionType, start: int, stop: int
    ) -> tuple[WireTensor, torch.Tensor]:
        """Converts only uncompressed values to the dtype of the tensor."""
        values = average.to(self._dtype) if compression is CompressionType.NONE else average
        wire = encode(values, compression)
        return wire, values if compression is CompressionType.NONE else decode(wire)

    def decode_answer(self, wire: WireTensor, start: int, stop: int) -> torch.Tensor:
        """See `PartForm`."""
        return decode_as(wire, self._dtype)

    def is_finite(self, values: torch.Tensor) -> bool:
        """See `PartForm`."""
        return finite_as(values, self._dtype)


class ReplyResidual:
    """What the replies of this peer, as a reducer, have lost of averages in TOP_K, for the tensors of one topic.

    It is added to the same elements when this peer reduces them the next time, so that all that members have decoded
    plus the residual is the sum of the averages. What a round has lost counts once its result is applied: the replies
    of a round that failed were applied by nobody.

    Attributes:
        tensors: flat float32 tensors in tile order, by the number of the tensor; absent if nothing was lost of it yet.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Forgets what was lost in a round that was not applied."""
        self._pending = []

    def of(self, tensor: int, start: int, stop: int) -> torch.Tensor | None:
        """The residual of a part, not to be written; None if it is 0."""
        residual = self.tensors.get(tensor)
        return None if residual is None else residual[start:stop]

    def lost(self, tensor: int, numel: int, indices: torch.Tensor, loss: torch.Tensor) -> None:
        """Records what a reply has lost.

        Args:
            tensor: number of the tensor.
            numel: its number of elements.
            indices: elements of the tensor that the reply holds, 1-D, int64.
            loss: what it lacks of each of them, 1-D, float32; the residual of that element included.
        """
        self._pending.append((tensor, numel, indices, loss))

    def applied(self) -> None:
        """Called when the result of the round is applied."""
        pending, self._pending = self._pending, []
        for tensor, numel, indices, loss in pending:
            if tensor not in self.tensors:
                # Memory that numpy takes for zeros is used once it is written: only that of this peer's shard.
                self.tensors[tensor] = torch.from_numpy(np.zeros(numel, dtype=np.float32))
            self.tensors[tensor].index_copy_(0, indices, loss)


class SparseForm(PartForm[SparseTensor, Contribution, "list[Contribution]", SparsePart]):
    """The largest elements of each block of a part, of which all blocks have one size.

    Args:
        number: number of the tensor in the schema.
        members: the most members that contribute.
        residual: of this peer's replies; None if what they lose is of no interest.
    """

    def __init__(
        self, number: int, spec: TensorSpec, top_k: TopK, members: int = 1, residual: ReplyResidual | None = None
    ) -> None:
        self._number, self._dtype, self._top_k = number, spec.torch_dtype, top_k
        self._layout, self._members, self._residual = BlockLayout(spec.shape), members, residual

    def cuts(self, part_size_bytes: int) -> Iterator[tuple[int, int]]:
        """Whole blocks with as many elements as a part has bytes; fewer if a contribution has more bytes than that."""
        per_element = self._top_k.density * (12 + self._top_k.bits) / 8
        return self._layout.cuts(int(part_size_bytes / max(1.0, per_element)))

    def nbytes(self, start: int, stop: int) -> int:
        """See `PartForm`."""
        return top_k_nbytes(stop - start, self._block_size(start), self._top_k)

    def packed_size(self, part_size_bytes: int, members: int) -> int:
        """See `PartForm`."""
        return sum(self._packed_size(start, stop, members) for start, stop in self.cuts(part_size_bytes))

    def _packed_size(self, start: int, stop: int, members: int) -> int:
        limit = union_limit(stop - start, self._block_size(start), self._top_k, members)
        return max(self.nbytes(start, stop), limit)

    def encode(self, tensor: SparseTensor, start: int, stop: int) -> WireTensor:
        """See `PartForm`."""
        return tensor.wire(start, stop)

    def own(self, tensor: SparseTensor, start: int, stop: int) -> Contribution:
        """The values are those that other members would decode, so that it is treated like theirs."""
        return Contribution(tensor.values(start, stop), tensor.wire(start, stop).buffer)

    def decode(self, wire: WireTensor, start: int, stop: int) -> Contribution:
        """See `PartForm`."""
        return Contribution(decode_top_k(wire, self._block_size(start), self._top_k), wire.buffer)

    def reducer(self) -> PartReducer[Contribution, list[Contribution]]:
        """See `PartForm`."""
        return SparseReducer()

    def answer(
        self, average: list[Contribution], compression: CompressionType, start: int, stop: int
    ) -> tuple[WireTensor, SparsePart]:
        """Adds the residual of the part, and records what is lost now."""
        residual = None if self._residual is None else self._residual.of(self._number, start, stop)
        reply = encode_union(average, self._block_size(start), self._top_k, residual)
        if self._residual is not None and reply.loss is not None:
            self._residual.lost(self._number, self._layout.numel, reply.part.indices + start, reply.loss)
        return reply.wire, reply.part

    def decode_answer(self, wire: WireTensor, start: int, stop: int) -> SparsePart:
        """See `PartForm`."""
        return decode_union(wire, self._block_size(start), self._top_k, self._members)

    def is_finite(self, values: Contribution | SparsePart) -> bool:
        """See `PartForm`."""
        part = values.part if isinstance(values, Contribution) else values
        return finite_as(part.values, self._dtype)

    def _block_size(self, start: int) -> int:
        return next(run.size for run in self._layout.runs if start < run.stop)


def form_of(schema: Schema, number: int, *, members: int = 1, residual: ReplyResidual | None = None) -> AnyForm:
    """The form of one tensor of the schema; see `SparseForm` for the other arguments.

    Raises:
        ConfigError: the schema does not say how its sparse tensors are sent.
    """
    spec = schema.tensors[number]
    if spec.compression is not CompressionType.TOP_K:
        return DenseForm(spec, schema.aggregation)
    if schema.sparse is None:
        raise ConfigError(f"{spec} needs a schema with the options of top_k")
    return SparseForm(number, spec, schema.sparse, members, residual)
