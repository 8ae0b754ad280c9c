"""TOP_K, VISIBLE and TOP_K_UNION: some elements of each block, and the average of such contributions.

Read in this order: `BlockLayout` (how a tensor is cut into blocks), `SparseTensor` and `VisibleTensor` (a contribution,
and its parts on the wire), `decode_top_k`, `decode_visible`, `combine` (the average of a part), `encode_union`,
`decode_union`. Where the options of TOP_K may be None, None stands for VISIBLE, which has none: any number of elements
of a block, and the mean over all members. docs/reference/protocol.md has the layouts of the bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import ceil, prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from averaging.errors import ProtocolViolationError, TensorError
from averaging.protocol import Buffer, CompressionType, MeanOver, TopK, WireTensor
from averaging.tensors.compression import RANGE_IN_SIGMAS
from averaging.tensors.manifest import check_size, view_bytes, view_memory

Bytes: TypeAlias = npt.NDArray[np.uint8]

TILE = 64  # rows and columns of a full block of a matrix
BLOCK_ELEMENTS = TILE * TILE  # elements of a full block, so that an index takes 12 bits

TOP_K_DTYPE = "top_k_float32"  # the value of the tensor's `dtype` field on the wire


# How a tensor is cut into blocks.


@dataclass(frozen=True, slots=True)
class BlockRun:  # blocks of one size, one after the other
    start: int  # first element, in tile order
    count: int  # number of blocks, at least 1
    size: int  # elements of each block

    @property
    def stop(self) -> int:
        return self.start + self.count * self.size


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a tensor, and the order of its elements in which each block is contiguous (tile order).

    A matrix consists of tiles of 64 × 64, with narrower ones at the right edge and lower ones at the bottom edge. In
    tile order come first all full tiles, row by row, then the right edge, the bottom edge, and the corner. A tensor of
    more dimensions is a matrix with the rows of its first one. One of fewer dimensions consists of blocks of 4,096
    elements and a smaller rest.
    """

    shape: tuple[int, ...]  # the shape of the tensor

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def runs(self) -> tuple[BlockRun, ...]:
        if len(self.shape) < 2:
            counts = [(self.numel // BLOCK_ELEMENTS, BLOCK_ELEMENTS), (1, self.numel % BLOCK_ELEMENTS)]
        else:
            tiles = product(*map(_tiles, self._matrix))
            counts = [(down * across, height * width) for (down, height), (across, width) in tiles]
        runs: list[BlockRun] = []
        for count, size in counts:
            if count * size:
                runs.append(BlockRun(runs[-1].stop if runs else 0, count, size))
        return tuple(runs)

    @property
    def _matrix(self) -> tuple[int, int]:
        return self.shape[0], prod(self.shape[1:])

    # Both return new float32 tensors on the CPU: in tile order, 1-D; and in the shape of the tensor.
    def to_blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.empty(self.numel, dtype=torch.float32, device="cpu")
        for there, here in self._regions(flat, tensor.detach()):
            there.copy_(here)
        return flat

    def from_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        for here, there in self._regions(flat, tensor):
            there.copy_(here)
        return tensor

    def _regions(self, flat: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same elements in tile order and in the tensor, of equal shapes."""
        if len(self.shape) < 2:
            yield flat, tensor.reshape(-1)
            return
        matrix = tensor.reshape(self._matrix)
        start, top = 0, 0
        for down, height in _tiles(self._matrix[0]):
            left = 0
            for across, width in _tiles(self._matrix[1]):
                shape = (down, across, height, width)
                region = matrix[top : top + down * height, left : left + across * width]
                if stop := prod(shape):
                    tiles = region.view(down, height, across, width).transpose(1, 2)
                    yield flat[start : start + stop].view(shape), tiles
                start, left = start + stop, left + across * width
            top += down * height

    def cuts(self, elements_per_part: int) -> Iterator[tuple[int, int]]:
        """Cuts the tensor into parts, each of whole blocks of one size, of at most so many elements or a single block.

        Yields the first element of each part and one past its last, in tile order.
        """
        for run in self.runs:
            step = max(1, elements_per_part // run.size) * run.size
            for start in range(run.start, run.stop, step):
                yield start, min(start + step, run.stop)

    def block_size(self, start: int) -> int:
        return next(run.size for run in self.runs if start < run.stop)


def _tiles(extent: int) -> list[tuple[int, int]]:
    return [(extent // TILE, TILE), (1, extent % TILE)]


# A contribution.


@dataclass(frozen=True, slots=True, eq=False)
class SparsePart:
    """Some elements of a part; the others are 0."""

    numel: int  # number of elements of the part
    indices: torch.Tensor  # 1-D, int64, ascending, each once, at least 0 and below `numel`
    values: torch.Tensor  # 1-D, float32, of the same length, finite

    def dense(self) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=torch.float32, device="cpu").index_copy_(0, self.indices, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class SparseTensor:
    """The largest elements of each block of a tensor, quantised together."""

    layout: BlockLayout  # the blocks of the tensor
    top_k: TopK  # how many elements are kept, and with how many bits
    _indices: torch.Tensor = field(repr=False)  # int16, within the block; ascending in each block
    _codes: torch.Tensor = field(repr=False)  # uint8
    _table: torch.Tensor = field(repr=False)  # float32, the value of each code

    @classmethod
    def of(cls, flat: torch.Tensor, layout: BlockLayout, top_k: TopK) -> SparseTensor:
        """Chooses the elements of a tensor, `flat` in tile order, 1-D, float32, on the CPU, and quantises them.

        NaN or infinity is a TensorError.
        """
        chosen, kept = [_NO_INDICES], [_NO_VALUES]
        for blocks, count in _pieces(flat, layout, top_k):
            indices = _largest(blocks, count)
            chosen.append(indices.view(-1))
            kept.append(blocks.gather(1, indices.to(torch.int64)).view(-1))
        values = torch.cat(kept)
        if not torch.isfinite(values).all():  # the largest magnitudes of a block include NaN and infinity
            raise TensorError("NaN or infinity cannot be sent in top_k")
        table, codes = quantise(values, top_k.bits)
        return cls(layout, top_k, torch.cat(chosen), codes, table)

    @property
    def numel(self) -> int:
        return self.layout.numel

    def wire(self, start: int, stop: int) -> WireTensor:
        """The elements from `start` to `stop`, one of the layout's `cuts`, as they are sent."""
        kept = self._kept(start, stop)
        codes, indices = self._codes[kept], _pack_indices(self._indices[kept].numpy())
        if len(codes) < len(self._table):
            pieces = [_view(self._decoded(codes)), indices]
        else:
            pieces = [_view(self._table), indices, _pack_codes(codes.numpy(), self.top_k.bits)]
        return WireTensor(np.concatenate(pieces).data, (stop - start,), TOP_K_DTYPE, CompressionType.TOP_K)

    def values(self, start: int, stop: int) -> SparsePart:
        """What the receiver of `wire(start, stop)` decodes, bit for bit; of any whole blocks."""
        kept = self._kept(start, stop)
        origins = [
            torch.arange(max(run.start, start), min(run.stop, stop), run.size, device="cpu")
            .sub_(start)
            .repeat_interleave(self.top_k.kept(run.size))
            for run in self.layout.runs
            if run.start < stop and start < run.stop
        ]
        origin = torch.cat(origins) if origins else torch.empty(0, dtype=torch.int64, device="cpu")
        return SparsePart(stop - start, origin.add_(self._indices[kept]), self._decoded(self._codes[kept]))

    def dense(self) -> torch.Tensor:
        return self.values(0, self.numel).dense()

    def _decoded(self, codes: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, codes.to(torch.int32))

    def _kept(self, start: int, stop: int) -> slice:
        return slice(self._kept_before(start), self._kept_before(stop))

    def _kept_before(self, position: int) -> int:
        count = 0
        for run in self.layout.runs:
            if position < run.stop:
                blocks, inside = divmod(position - run.start, run.size)
                if inside or blocks < 0:
                    break
                return count + blocks * self.top_k.kept(run.size)
            count += run.count * self.top_k.kept(run.size)
        else:
            if position == self.numel:
                return count
        raise ValueError(f"element {position} does not begin a block of {self.layout}")


@dataclass(frozen=True, slots=True, eq=False)
class VisibleTensor:
    """The elements of a change that are visible in the weights in bfloat16, with values in bfloat16.

    Engines and forward passes in bfloat16 see nothing of the other elements (PULSELoCo, arXiv:2602.03839).
    """

    layout: BlockLayout  # the blocks of the tensor
    _part: SparsePart = field(repr=False)  # of the whole tensor, in tile order

    @classmethod
    def of(cls, flat: torch.Tensor, layout: BlockLayout, weights: torch.Tensor) -> VisibleTensor:
        """Chooses the elements of a change for which bfloat16(weight - change) is not bfloat16(weight).

        `flat` and `weights` are in tile order, 1-D, float32, on the CPU. NaN or infinity in `flat` is a TensorError.
        """
        chosen = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for start in range(0, layout.numel, _AT_ONCE):
            change, weight = flat[start : start + _AT_ONCE], weights[start : start + _AT_ONCE]
            changes = (weight - change).to(torch.bfloat16) != weight.to(torch.bfloat16)
            chosen.append(changes.nonzero().view(-1).add_(start))
        indices = torch.cat(chosen)
        values = flat.index_select(0, indices)
        if not torch.isfinite(values).all():  # such a change is visible
            raise TensorError("NaN or infinity cannot be sent in visible")
        return cls(layout, SparsePart(layout.numel, indices, _to_bfloat16(values).to(torch.float32)))

    @property
    def numel(self) -> int:
        return self.layout.numel

    def wire(self, start: int, stop: int) -> WireTensor:
        """See `SparseTensor.wire`."""
        part, size = self.values(start, stop), self.layout.block_size(start)
        sizes = _union_sizes(part.numel, size, len(part.indices), None)
        packed, _ = _pack(part, size, min(sizes, key=lambda form: sizes[form]))
        return WireTensor(packed.data, (part.numel,), TOP_K_DTYPE, CompressionType.VISIBLE)

    def values(self, start: int, stop: int) -> SparsePart:
        """What the receiver of `wire(start, stop)` decodes, bit for bit."""
        whole = self._part
        first, end = np.searchsorted(whole.indices.numpy(), [start, stop]).tolist()
        return SparsePart(stop - start, whole.indices[first:end] - start, whole.values[first:end])

    def dense(self) -> torch.Tensor:
        return self._part.dense()


_AT_ONCE = 1 << 16  # elements; few enough for the processor's cache
_NO_INDICES = torch.empty(0, dtype=torch.int16, device="cpu")
_NO_VALUES = torch.empty(0, dtype=torch.float32, device="cpu")


def _pieces(flat: torch.Tensor, layout: BlockLayout, top_k: TopK) -> Iterator[tuple[torch.Tensor, int]]:
    for run in layout.runs:
        blocks = flat[run.start : run.stop].view(run.count, run.size)
        for piece in torch.split(blocks, max(1, _AT_ONCE // run.size)):
            yield piece, top_k.kept(run.size)


def _largest(blocks: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k largest magnitudes of each block, ascending: shape (blocks, k), int16.

    Each block is divided into groups of a few elements. The k largest elements lie in the k groups with the largest
    maxima: any other group is outdone by k elements. So the choice has two steps, each among a fraction of the
    elements, which takes less time than `torch.topk` of all.
    """
    magnitudes = blocks.abs()
    rows = _rows_of_groups(blocks.shape[1], k)
    if rows == 1:
        chosen = magnitudes.topk(k, dim=1, sorted=False).indices
    else:
        # Group g consists of the elements g, g + groups, g + 2 * groups, ..., so that the maxima are those of columns.
        groups = blocks.shape[1] // rows
        best = magnitudes.view(-1, rows, groups).amax(dim=1).topk(k, dim=1, sorted=False).indices
        steps = torch.arange(0, blocks.shape[1], groups, device="cpu").view(1, rows, 1)
        candidates = (best.unsqueeze(1) + steps).view(len(blocks), rows * k)
        among = magnitudes.gather(1, candidates).topk(k, dim=1, sorted=False).indices
        chosen = candidates.gather(1, among)
    return torch.from_numpy(np.sort(chosen.to(torch.int16).numpy(), axis=1))  # faster than torch.sort


def _rows_of_groups(size: int, k: int) -> int:
    return next((rows for rows, share in ((8, 32), (4, 16)) if size % rows == 0 and k * share <= size), 1)


def quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Assigns 1-D, finite float32 values to 2^bits bins, at most 256, each represented by the mean of its values.

    The bins are 6·std / 2^bits wide, the one with the number 2^bits / 2 is centred at the mean of all values, and the
    first and the last bin are open. If there are at most 2^bits values, each has a bin of its own, so that nothing is
    lost. Returns the means, float32, 0 for an empty bin, and the bin of each value, uint8.
    """
    count, bins = len(values), 1 << bits
    if count <= bins:
        table = torch.zeros(bins, dtype=torch.float32, device="cpu")
        table[:count] = values
        return table, torch.arange(count, dtype=torch.uint8, device="cpu")
    exact = values.to(torch.float64)  # squares of large float32 numbers overflow float32
    centred = exact - exact.mean()
    width = torch.linalg.vector_norm(centred) * (RANGE_IN_SIGMAS / bins / (count - 1) ** 0.5)
    numbers = centred.div_(width).round_().add_(bins // 2).clamp_(0, bins - 1)
    codes = numbers.nan_to_num_(nan=bins // 2).to(torch.uint8)  # if all are equal, they became 0 / 0
    counts = torch.bincount(codes, minlength=bins).clamp_min_(1)
    sums = torch.bincount(codes, weights=exact, minlength=bins)
    return (sums / counts).to(torch.float32), codes


def top_k_nbytes(numel: int, block_size: int, top_k: TopK) -> int:
    count = _kept_of(numel, block_size, top_k)
    if count < 1 << top_k.bits:
        return 4 * count + _index_bytes(count)
    return (4 << top_k.bits) + _index_bytes(count) + _code_bytes(count, top_k.bits)


def decode_top_k(wire: WireTensor, block_size: int, top_k: TopK) -> SparsePart:
    """Decodes a part that `SparseTensor.wire` encoded, whose size was compared with that of the part.

    Raises:
        ProtocolViolationError: the part has another compression, dtype or size, the wrong length, indices that are out
            of range or not ascending, or a value that is not finite.
    """
    numel = _checked_numel(wire, CompressionType.TOP_K, block_size)
    _check_length(wire, top_k_nbytes(numel, block_size, top_k))
    return _unpack_top_k(_view_buffer(wire.buffer), numel, block_size, top_k)


def decode_visible(wire: WireTensor, block_size: int) -> SparsePart:
    """Decodes a part that `VisibleTensor.wire` encoded; see `decode_top_k`."""
    numel = _checked_numel(wire, CompressionType.VISIBLE, block_size)
    return _unpack(wire, numel, block_size, numel, None)


def visible_limit(numel: int, block_size: int) -> int:
    """The most bytes that `VisibleTensor.wire` returns for a part."""
    return min(_union_sizes(numel, block_size, numel, None).values())


def _unpack_top_k(raw: Bytes, numel: int, block_size: int, top_k: TopK) -> SparsePart:
    count = _kept_of(numel, block_size, top_k)
    few = count < 1 << top_k.bits
    table, rest = _cut(raw, 4 * count if few else 4 << top_k.bits)
    packed, codes = _cut(rest, _index_bytes(count))
    starts = np.repeat(np.arange(0, numel, block_size, dtype=np.int64), top_k.kept(block_size))
    indices = _unpack_indices(packed, starts, block_size)
    values = _finite(table.view(np.float32))
    if not few:
        values = values[_unpack_codes(codes, count, top_k.bits)]
    return SparsePart(numel, torch.from_numpy(indices), torch.from_numpy(values.copy()))


# The average of contributions, and its form on the wire.


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """The part of one member."""

    part: SparsePart  # its elements
    buffer: Buffer  # the same as they came, or as `SparseTensor.wire` encodes them
    weight: float = 1.0  # the member's weight in the mean, above 0 and finite; rounded to float32
    scale: float = 1.0  # factor of its values, which limits their norm; from 0 to 1; rounded to float32

    def __post_init__(self) -> None:
        for name in ("weight", "scale"):
            object.__setattr__(self, name, float(np.float32(getattr(self, name))))

    @property
    def shape(self) -> tuple[int]:
        return (self.part.numel,)


def combine(contributions: Sequence[Contribution], mean_over: MeanOver) -> SparsePart:
    """The weighted mean of at least one contribution to a part, in their order.

    Every element that a member sent is in the result, also if the mean is 0. All peers compute the same bits.
    """
    numel = contributions[0].part.numel
    present = np.zeros(numel, dtype=np.bool_)
    for contribution in contributions:
        present[contribution.part.indices.numpy()] = True
    indices = np.flatnonzero(present)
    # Sums only of the elements that somebody sent: they fit into the processor's cache, all elements do not.
    slots = np.empty(numel, dtype=np.int32)
    slots[indices] = np.arange(len(indices), dtype=np.int32)
    sums, weights = torch.zeros(2, len(indices), dtype=torch.float64, device="cpu")
    for contribution in contributions:
        places = torch.from_numpy(slots[contribution.part.indices.numpy()])
        values = contribution.part.values.to(torch.float64).mul_(contribution.scale).mul_(contribution.weight)
        sums.index_add_(0, places, values)
        weights.index_add_(0, places, torch.full_like(values, contribution.weight))
    total = weights if mean_over is MeanOver.SENDERS else sum(contribution.weight for contribution in contributions)
    return SparsePart(numel, torch.from_numpy(indices), sums.div_(total).to(torch.float32))


_AS_THEY_CAME, _INDICES_8BIT, _INDICES_BFLOAT16, _BITMAP_8BIT, _BITMAP_BFLOAT16 = range(5)
"""The forms of a reply; its first byte."""

_TABLE_BYTES = 4 << 8
_MAX_FLOAT32 = torch.finfo(torch.float32).max
_MAX_BFLOAT16 = torch.finfo(torch.bfloat16).max
_HEAD = np.dtype([("form", "u1"), ("count", "<u2")])  # of the contributions as they came
_FACTORS = np.dtype([("weight", "<f4"), ("scale", "<f4")])


class EncodedUnion(NamedTuple):  # the average of a part
    wire: WireTensor  # the same bytes for all members
    part: SparsePart  # what they decode
    loss: torch.Tensor | None  # what was lost of each element of `part`, 1-D, float32; None if nothing was


def union_limit(numel: int, block_size: int, top_k: TopK | None, members: int) -> int:
    """The most bytes that `encode_union` returns for a part with contributions of at most `members`."""
    most = _most_of(numel, block_size, top_k, members)
    return min(_reply_sizes(numel, block_size, most, top_k, members).values())


def encode_union(
    contributions: Sequence[Contribution], block_size: int, top_k: TopK | None, residual: torch.Tensor | None = None
) -> EncodedUnion:
    """Encodes the mean of contributions to a part as they came, or as one union with coarser values.

    Takes the form with the fewest bytes. The contributions, at least one, are in the group's order. `residual` is what
    earlier replies have lost, of each element of the part, 1-D, float32; not changed. It is added to the elements of a
    union, and ignored if the contributions are sent as they came.
    """
    mean = combine(contributions, MeanOver.ALL if top_k is None else top_k.mean_over)
    sizes = _reply_sizes(mean.numel, block_size, len(mean.indices), top_k, len(contributions))
    form = min(sizes, key=lambda form: sizes[form])
    if form == _AS_THEY_CAME:
        return EncodedUnion(_reply_of(mean.numel, _pack_contributions(contributions)), mean, None)
    exact = mean.values
    if residual is not None:
        exact = (exact + residual.index_select(0, mean.indices)).clamp_(-_MAX_FLOAT32, _MAX_FLOAT32)
    packed, decoded = _pack(SparsePart(mean.numel, mean.indices, exact), block_size, form)
    return EncodedUnion(_reply_of(mean.numel, packed), SparsePart(mean.numel, mean.indices, decoded), exact - decoded)


def _pack(part: SparsePart, block_size: int, form: int) -> tuple[Bytes, torch.Tensor]:
    """A part in one of the forms that hold a single one; and its values as they are decoded, float32."""
    if form in (_INDICES_8BIT, _BITMAP_8BIT):
        table, codes = quantise(part.values, 8)
        decoded, values = table.index_select(0, codes.to(torch.int32)), [_view(table), codes.numpy()]
    else:
        short = _to_bfloat16(part.values)
        decoded, values = short.to(torch.float32), [_view(short)]
    places = _bitmap_of if form in (_BITMAP_8BIT, _BITMAP_BFLOAT16) else _counts_and_indices
    return np.concatenate([np.array([form], dtype=np.uint8), places(part, block_size), *values]), decoded


def _to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_MAX_BFLOAT16, _MAX_BFLOAT16).to(torch.bfloat16)


def decode_union(wire: WireTensor, block_size: int, top_k: TopK | None, members: int) -> SparsePart:
    """Decodes a reply of `encode_union`, whose size was compared with that of the part, of at most so many members.

    Raises:
        ProtocolViolationError: the reply has another compression, dtype or size, an unknown form, the wrong length,
            more contributions than members, indices that are out of range or not ascending, or a number that is not
            finite.
    """
    numel = _checked_numel(wire, CompressionType.TOP_K_UNION, block_size)
    if top_k is not None and wire.buffer[:1] == bytes([_AS_THEY_CAME]):
        return _unpack_contributions(wire, _view_buffer(wire.buffer), numel, block_size, top_k, members)
    return _unpack(wire, numel, block_size, _most_of(numel, block_size, top_k, members), top_k)


def _unpack(wire: WireTensor, numel: int, block_size: int, most: int, top_k: TopK | None) -> SparsePart:
    raw = _view_buffer(wire.buffer)
    form = int(raw[0]) if len(raw) else -1
    if top_k is None and form not in (_INDICES_BFLOAT16, _BITMAP_BFLOAT16):
        raise ProtocolViolationError(f"a part in visible has the unknown form {form}")
    if form in (_INDICES_8BIT, _INDICES_BFLOAT16):
        indices, rest = _read_indices(raw[1:], numel, block_size, most)
    elif form in (_BITMAP_8BIT, _BITMAP_BFLOAT16):
        indices, rest = _read_bitmap(raw[1:], numel, most)
    else:
        raise ProtocolViolationError(f"a reply in top_k has the unknown form {form}")
    if form in (_INDICES_8BIT, _BITMAP_8BIT):
        _check_length(wire, len(raw) - len(rest) + _TABLE_BYTES + len(indices))
        table, codes = _cut(rest, _TABLE_BYTES)
        values = torch.from_numpy(_finite(table.view(np.float32))[codes])
    else:
        _check_length(wire, len(raw) - len(rest) + 2 * len(indices))
        values = view_bytes(rest.copy().data, torch.bfloat16).to(torch.float32)
        _finite(values.numpy())
    return SparsePart(numel, torch.from_numpy(indices), values)


def _most_of(numel: int, block_size: int, top_k: TopK | None, members: int) -> int:
    return numel if top_k is None else min(numel, members * _kept_of(numel, block_size, top_k))


def _reply_sizes(numel: int, block_size: int, count: int, top_k: TopK | None, members: int) -> dict[int, int]:
    sizes = _union_sizes(numel, block_size, count, top_k)
    if top_k is None:
        return sizes
    return {_AS_THEY_CAME: _raw_size(numel, block_size, top_k, members)} | sizes


def _union_sizes(numel: int, block_size: int, count: int, top_k: TopK | None) -> dict[int, int]:
    indices, bitmap = 1 + 2 * (numel // block_size) + _index_bytes(count), 1 + ceil(numel / 8)
    if top_k is None:
        return {_INDICES_BFLOAT16: indices + 2 * count, _BITMAP_BFLOAT16: bitmap + 2 * count}
    return {
        _INDICES_8BIT: indices + _TABLE_BYTES + count,
        _INDICES_BFLOAT16: indices + 2 * count,
        _BITMAP_8BIT: bitmap + _TABLE_BYTES + count,
        _BITMAP_BFLOAT16: bitmap + 2 * count,
    }


def _raw_size(numel: int, block_size: int, top_k: TopK, count: int) -> int:
    return _HEAD.itemsize + count * (_FACTORS.itemsize + top_k_nbytes(numel, block_size, top_k))


def _reply_of(numel: int, packed: Bytes) -> WireTensor:
    return WireTensor(packed.data, (numel,), TOP_K_DTYPE, CompressionType.TOP_K_UNION)


def _pack_contributions(contributions: Sequence[Contribution]) -> Bytes:
    head = np.array([(_AS_THEY_CAME, len(contributions))], dtype=_HEAD)
    factors = np.array([(contribution.weight, contribution.scale) for contribution in contributions], dtype=_FACTORS)
    buffers = [_view_buffer(contribution.buffer) for contribution in contributions]
    return np.concatenate([head.view(np.uint8), factors.view(np.uint8), *buffers])


def _unpack_contributions(
    wire: WireTensor, raw: Bytes, numel: int, block_size: int, top_k: TopK, members: int
) -> SparsePart:
    if len(raw) < _HEAD.itemsize:
        raise ProtocolViolationError("a reply in top_k ends before the number of its contributions")
    head, rest = _cut(raw, _HEAD.itemsize)
    count = int(head.view(_HEAD)["count"][0])
    if not 1 <= count <= members:
        raise ProtocolViolationError(f"a reply in top_k has {count} contributions; there are {members} members")
    _check_length(wire, _raw_size(numel, block_size, top_k, count))
    factors, rest = _cut(rest, count * _FACTORS.itemsize)
    weights, scales = (np.ascontiguousarray(factors.view(_FACTORS)[name]) for name in ("weight", "scale"))
    if not (_finite(weights) > 0).all() or not ((scales >= 0) & (scales <= 1)).all():
        raise ProtocolViolationError("a reply in top_k has a weight that is not above 0 or a scale outside 0 to 1")
    buffers = rest.reshape(count, -1)
    return combine(
        [
            Contribution(_unpack_top_k(buffer, numel, block_size, top_k), buffer.data, weight, scale)
            for buffer, weight, scale in zip(buffers, weights.tolist(), scales.tolist(), strict=True)
        ],
        top_k.mean_over,
    )


def _counts_and_indices(part: SparsePart, block_size: int) -> Bytes:
    """The number of elements of each block, two bytes each, and their indices within it."""
    indices = part.indices.numpy()
    counts = np.bincount(indices // block_size, minlength=part.numel // block_size).astype("<u2")
    return np.concatenate([counts.view(np.uint8), _pack_indices((indices % block_size).astype(np.int16))])


def _read_indices(raw: Bytes, numel: int, block_size: int, most: int) -> tuple[npt.NDArray[np.int64], Bytes]:
    blocks = numel // block_size
    if len(raw) < 2 * blocks:
        raise ProtocolViolationError("a reply in top_k ends before the numbers of its elements")
    head, rest = _cut(raw, 2 * blocks)
    counts = head.view("<u2").astype(np.int64)
    total = int(counts.sum())
    if total > most or len(rest) < _index_bytes(total):
        raise ProtocolViolationError(f"a reply in top_k has {total} elements in {len(rest)} bytes; at most {most} fit")
    packed, rest = _cut(rest, _index_bytes(total))
    starts = np.repeat(np.arange(0, numel, block_size, dtype=np.int64), counts)
    return _unpack_indices(packed, starts, block_size), rest


def _bitmap_of(part: SparsePart, block_size: int) -> Bytes:
    present = np.zeros(part.numel, dtype=np.bool_)
    present[part.indices.numpy()] = True
    return np.packbits(present, bitorder="little")


def _read_bitmap(raw: Bytes, numel: int, most: int) -> tuple[npt.NDArray[np.int64], Bytes]:
    if len(raw) < ceil(numel / 8):
        raise ProtocolViolationError("a reply in top_k ends before the end of its bitmap")
    packed, rest = _cut(raw, ceil(numel / 8))
    present = np.unpackbits(packed, bitorder="little").view(np.bool_)  # numpy is faster with bool than with uint8
    indices = np.flatnonzero(present)
    if len(indices) > most or (len(indices) and indices[-1] >= numel):
        raise ProtocolViolationError(f"a reply in top_k has {len(indices)} elements; at most {most} of {numel} fit")
    return indices, rest


# Bytes. All numbers are little-endian; big-endian machines are not supported.


def _kept_of(numel: int, block_size: int, top_k: TopK) -> int:
    return numel // block_size * top_k.kept(block_size)


def _index_bytes(count: int) -> int:
    return ceil(count * 3 / 2)


def _code_bytes(count: int, bits: int) -> int:
    return ceil(count * bits / 8)


def _checked_numel(wire: WireTensor, compression: CompressionType, block_size: int) -> int:
    check_size(wire.size)
    if (wire.compression, wire.dtype, len(wire.size)) != (compression, TOP_K_DTYPE, 1) or wire.size[0] % block_size:
        raise ProtocolViolationError(
            f"a part in {compression.name} has compression {wire.compression}, dtype {wire.dtype!r:.40} and size "
            f"{tuple(wire.size)} for blocks of {block_size}"
        )
    return wire.size[0]


def _check_length(wire: WireTensor, nbytes: int) -> None:
    if len(wire.buffer) != nbytes:
        raise ProtocolViolationError(
            f"a part of size {tuple(wire.size)} in top_k takes {nbytes} bytes, but {len(wire.buffer)} were received"
        )


def _finite(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if not np.isfinite(numbers).all():
        raise ProtocolViolationError("a part in top_k has NaN or infinity")
    return numbers


def _view(tensor: torch.Tensor) -> Bytes:
    return np.frombuffer(view_memory(tensor), dtype=np.uint8)


def _view_buffer(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, dtype=np.uint8)


def _cut(raw: Bytes, nbytes: int) -> tuple[Bytes, Bytes]:
    return raw[:nbytes].copy(), raw[nbytes:]


def _pack_indices(indices: npt.NDArray[np.int16]) -> Bytes:
    """Two indices below 4,096 in three bytes, the first in the lower 12 bits; an odd last one takes two."""
    pairs = np.zeros((len(indices) + 1) // 2 * 2, dtype=np.uint32)
    pairs[: len(indices)] = indices
    packed = (pairs[0::2] | pairs[1::2] << 12).view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)
    return packed[: _index_bytes(len(indices))]


def _unpack_indices(packed: Bytes, starts: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    pairs = np.zeros(((len(starts) + 1) // 2, 4), dtype=np.uint8)
    whole = packed if len(packed) % 3 == 0 else np.append(packed, np.uint8(0))
    pairs[:, :3] = whole.reshape(-1, 3)
    both = pairs.view("<u4").reshape(-1)
    inside = np.stack([both & 0xFFF, both >> 12], axis=1).reshape(-1)
    if len(starts) % 2 and inside[-1]:
        raise ProtocolViolationError("a part in top_k has more bits than indices")
    inside = inside[: len(starts)]
    indices = starts + inside
    if len(starts) and (int(inside.max()) >= block_size or not (np.diff(indices) > 0).all()):
        raise ProtocolViolationError("a part in top_k has indices that are out of range, come twice or are not sorted")
    return indices


def _pack_codes(codes: Bytes, bits: int) -> Bytes:
    """Numbers of `bits` bits, the first in the lowest bits of a byte; `bits` divides 8."""
    per_byte = 8 // bits
    padded = np.zeros(_code_bytes(len(codes), bits) * per_byte, dtype=np.uint8)
    padded[: len(codes)] = codes
    packed = padded[0::per_byte].copy()
    for place in range(1, per_byte):
        packed |= padded[place::per_byte] << (bits * place)
    return packed


def _unpack_codes(packed: Bytes, count: int, bits: int) -> Bytes:
    mask = np.uint8((1 << bits) - 1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return ((packed[:, None] >> shifts) & mask).reshape(-1)[:count]
