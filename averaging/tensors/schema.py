"""The schema that all members of a group must share, its hash, and the first difference between two schemas. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch

from averaging.common import digest_of_names, first_other_name
from averaging.errors import ConfigError, TensorError
from averaging.protocol import MEAN, Aggregation, CompressionType, ReplyForm, TopK
from averaging.tensors.manifest import AVERAGED_DTYPES, TensorInfo, dtype_name, nbytes_of, objection_to


@dataclass(frozen=True, slots=True)
class TensorSpec(TensorInfo):
    """One tensor of the schema. `name` is not part of the hash."""

    compression: CompressionType = CompressionType.NONE

    def __str__(self) -> str:
        return f"{TensorInfo.__str__(self)} as {self.compression.name}"


@dataclass(frozen=True)
class Schema:
    """What is averaged, and how."""

    tensors: tuple[TensorSpec, ...]  # the tensors in order
    part_size_bytes: int  # size of a part on the wire
    reply: ReplyForm = ReplyForm.AVERAGE  # form of the reducers' replies
    # keeps apart tensors of equal shapes, for example the gradients of one step or a fragment of the model. Empty for
    # the peer's own tensors.
    topic: str = ""
    aggregation: Aggregation = MEAN  # rule by which reducers combine the contributions
    # how tensors with the compression TOP_K are sent and averaged; None if no tensor has it
    sparse: TopK | None = None

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 over everything that all members must agree on; names and devices are not included."""
        tensors = ";".join(f"{t.dtype}:{'x'.join(map(str, t.shape))}:{int(t.compression)}" for t in self.tensors)
        topic = f"|{self.topic}" if self.topic else ""
        # The mean is left out, so that the hash equals that of software without other rules.
        rule = "" if self.aggregation == MEAN else f"/{self.aggregation}"
        if (top_k := self.sparse) is not None:
            rule += f"/top_k:{top_k.density!r}:{top_k.bits}:{top_k.mean_over.value}"
        return hashlib.sha256(f"1|{tensors}|{self.part_size_bytes}|{self.reply.value}{rule}{topic}".encode()).digest()

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def names(self) -> str:
        return digest_of_names(spec.name for spec in self.tensors)

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.tensors)


def describe(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    *,
    compression: CompressionType = CompressionType.NONE,
    part_size_bytes: int,
    reply: ReplyForm = ReplyForm.AVERAGE,
    topic: str = "",
    aggregation: Aggregation = MEAN,
    sparse: TopK | None = None,
) -> Schema:
    """The schema of `tensors`, or a TensorError that names one that cannot be averaged.

    With TOP_K it is a ConfigError if `sparse` is missing; with TOP_K and VISIBLE if another option excludes them.
    """
    if compression is CompressionType.TOP_K and sparse is None:
        raise ConfigError("compression='top_k' needs a TopK, which says how many elements of each block are sent")
    if compression.is_sparse:
        _check_sparse(compression.name.lower(), reply, aggregation)
    specs = []
    for name, tensor in zip(names, tensors, strict=True):
        if objection := objection_to(tensor, AVERAGED_DTYPES, "averaged"):
            raise TensorError(f"tensor {name!r} {objection}")
        specs.append(TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), compression))
    return Schema(tuple(specs), part_size_bytes, reply, topic, aggregation, sparse)


def _check_sparse(compression: str, reply: ReplyForm, aggregation: Aggregation) -> None:
    if aggregation != MEAN:
        limits = ": with top_k it limits each contribution to the median of their norms"
        raise ConfigError(
            f"aggregation={str(aggregation)!r} does not work with compression={compression!r}: of most elements it "
            "would see the value of one member only, and take the zeros of the others for the truth. Use "
            f"aggregation='mean'{limits if compression == 'top_k' else ''}",
            "aggregation",
        )
    if reply is not ReplyForm.AVERAGE:
        raise ConfigError(
            f"reducers cannot answer with differences to what was sent with compression={compression!r}: a member has "
            "sent only some elements, so they say nothing about the others"
        )


def first_difference(ours: Schema, theirs: Schema) -> str | None:
    """A description of the first difference between two schemas; None if their hashes are equal and their names fit."""
    if ours.topic != theirs.topic:
        here, there = (schema.topic or "the peer's own tensors" for schema in (ours, theirs))
        return f"{here} are averaged here and {there} there"
    for number, (our, their) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if (our.dtype, our.shape, our.compression) != (their.dtype, their.shape, their.compression):
            same_name = our.name == their.name
            named = (
                f"tensor {our.name!r}" if same_name else f"tensor {number} ({our.name!r} here, {their.name!r} there)"
            )
            return f"{named} is {our} here and {their} there"
    if len(ours.tensors) != len(theirs.tensors):
        longer, where = (ours, "only here") if len(ours.tensors) > len(theirs.tensors) else (theirs, "only there")
        extra = longer.tensors[min(len(ours.tensors), len(theirs.tensors))]
        return f"{len(ours.tensors)} tensors here and {len(theirs.tensors)} there; {extra.name!r} ({extra}) is {where}"
    if ours.part_size_bytes != theirs.part_size_bytes:
        return f"parts are {ours.part_size_bytes} bytes here and {theirs.part_size_bytes} there"
    if ours.reply != theirs.reply:
        return f"reducers answer with the {ours.reply.value} here and with the {theirs.reply.value} there"
    if ours.aggregation != theirs.aggregation:
        return f"contributions are aggregated by {ours.aggregation} here and by {theirs.aggregation} there"
    if ours.sparse != theirs.sparse:
        return _sparse_difference(ours.sparse, theirs.sparse)
    if other := first_other_name([spec.name for spec in ours.tensors], [spec.name for spec in theirs.tensors]):
        here, there = other
        return f"tensor {here!r} is {there!r} there; parameters and buffers need the same names in the same order"
    return None


def _sparse_difference(ours: TopK | None, theirs: TopK | None) -> str:
    if ours is None or theirs is None:
        return "top_k is used only " + ("there" if ours is None else "here")
    for option in ("density", "bits", "mean_over"):
        here, there = getattr(ours, option), getattr(theirs, option)
        if here != there:
            return f"{option} of top_k is {_fraction(here)} here and {_fraction(there)} there"
    return "top_k differs"


def _fraction(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    fraction = Fraction(value).limit_denominator(1 << 16)
    return str(fraction) if fraction.numerator == 1 and float(fraction) == value else f"{value:g}"
