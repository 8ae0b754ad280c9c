"""Encodes and decodes tensors for the wire by the number of a code; docs/reference/protocol.md has the layouts.

Read in this order: `Codec` (what a code implements), one class for each code, the table of codes, `encode`, `decode`.

| code | maximum error of a finite x | range |
|---|---|---|
| FLOAT16 | 2^-11 of x, at least 2^-25 | clamped to ±65504, also infinities; NaN is kept |
| BFLOAT16 | 2^-8 of x, at least 2^-134 | that of float32, except that numbers above 3.39e38 become infinite |
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod, sqrt

import numpy as np
import torch

from averaging.errors import ProtocolViolationError, TensorError
from averaging.protocol import Buffer, CompressionType, WireTensor
from averaging.tensors.manifest import AVERAGED_DTYPES, check_size, dtype_name, view_bytes, view_memory
from averaging.tensors.staging import on_cpu


class Codec(ABC):
    """Encodes a tensor to bytes. All numbers are little-endian; big-endian machines are not supported.

    `wire_dtype` is the value of the tensor's `dtype` field on the wire, `bytes_per_element` the compressed size without
    the overhead per tensor, row or block. Larger elements than `limit` are clamped. If `elementwise`, each element is
    encoded without regard to the others, so that two encoded tensors one behind the other are both of them encoded
    together.
    """

    elementwise = False
    limit = math.inf

    def __init__(self, wire_dtype: str, bytes_per_element: int) -> None:
        self.wire_dtype = wire_dtype
        self.bytes_per_element = bytes_per_element

    @abstractmethod
    def nbytes(self, size: tuple[int, ...]) -> int:
        """Exact length in bytes of the buffer of a tensor of shape `size`, which passed `check_size`."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Encodes a dense CPU tensor of a floating dtype and any shape, detached from autograd."""

    @abstractmethod
    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """Decodes the tensor of shape `size` from a buffer of exactly `nbytes(size)` bytes."""


FLOAT16_MAX = 65504.0  # the largest finite float16
_AT_ONCE = 1 << 17  # elements; small enough for the processor's cache


class Half(Codec):
    """Float32 rounded to a 16-bit dtype, and clamped to a limit.

    The `wire_dtype` is `clamped_float32` for FLOAT16, as the protocol requires; `rounded_float32` for BFLOAT16, since
    `bfloat16` denotes uncompressed bfloat16 tensors.
    """

    elementwise = True

    def __init__(self, wire_dtype: str, dtype: torch.dtype, limit: float = math.inf) -> None:
        super().__init__(wire_dtype, dtype.itemsize)
        self._dtype = dtype
        self.limit = limit

    def nbytes(self, size: tuple[int, ...]) -> int:
        return prod(size) * self._dtype.itemsize

    def pack(self, tensor: torch.Tensor) -> Buffer:
        values = tensor.to(torch.float32)
        if math.isinf(self.limit):
            return view_memory(values.to(self._dtype))
        flat = values.reshape(-1)
        packed = torch.empty(flat.shape, dtype=self._dtype, device="cpu")
        clamped = torch.empty(min(_AT_ONCE, flat.numel()), dtype=torch.float32, device="cpu")
        for first in range(0, flat.numel(), _AT_ONCE):
            piece = flat[first : first + _AT_ONCE]
            room = clamped[: piece.numel()]
            packed[first : first + _AT_ONCE].copy_(torch.clamp(piece, -self.limit, self.limit, out=room))
        return view_memory(packed)

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        return view_bytes(buffer, self._dtype).to(torch.float32).view(size)


# MEANSTD_16BIT: every row normalised by its mean and standard deviation, in float16.
#
# A row is the last axis; a 0-dim tensor is one row of one element. Layout: float16 data, float32 means, float32
# standard deviations, one of each per row, even for rows of no elements.
#
# The error of x is at most std · (|z|·2^-11 + 2^-25) with z = (x - mean) / std, plus the rounding of float32.


MIN_STD = 1e-6  # lower bound of the standard deviation of a row, so that rows of equal elements are not divided by 0
_STATISTICS_BYTES = 8  # a mean and a standard deviation


class MeanStd16Bit(Codec):
    """The standard deviation is sqrt(sum(x²) / n) of the centred values, at least 1e-6.

    Normalised values are clamped to ±65504. |z| cannot exceed sqrt(n), so this affects only rows of more than 4·10^9
    elements, rows with infinities, and rows in which x - mean overflows float32 (beyond 1.7e38). A row with NaN or
    infinity decodes to non-finite numbers.
    """

    def __init__(self) -> None:
        super().__init__("compressed_float32", 2)

    def nbytes(self, size: tuple[int, ...]) -> int:
        rows, columns = _matrix(size)
        return rows * (2 * columns + _STATISTICS_BYTES)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Sums in float64, since squares of ordinary float32 numbers overflow float32."""
        rows, columns = _matrix(tuple(tensor.shape))
        values = tensor.to(torch.float32).reshape(rows, columns)
        count = max(columns, 1)
        means = (values.sum(dim=1, keepdim=True, dtype=torch.float64) / count).to(torch.float32)
        centred = values - means
        norms = torch.linalg.vector_norm(centred, dim=1, keepdim=True, dtype=torch.float64)
        stds = (norms / sqrt(count)).clamp_min_(MIN_STD).to(torch.float32)
        data = centred.div_(stds).clamp_(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)
        return b"".join((view_memory(data), view_memory(means), view_memory(stds)))

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        rows, columns = _matrix(size)
        end_of_data = 2 * rows * columns
        data = view_bytes(buffer)[:end_of_data].view(torch.float16).to(torch.float32).view(rows, columns)
        # Copied, since an odd number of elements leaves the statistics misaligned in the buffer.
        statistics = np.frombuffer(buffer, dtype="<f4", offset=end_of_data, count=2 * rows).copy()
        means, stds = torch.from_numpy(statistics).view(2, rows, 1)
        return data.mul_(stds).add_(means).view(size)


def _matrix(size: tuple[int, ...]) -> tuple[int, int]:
    return prod(size[:-1]), prod(size[-1:])


# NONE: the array itself in its own dtype, without loss and without a copy.


class Raw(Codec):
    elementwise = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name, dtype.itemsize)
        self._dtype = dtype

    def nbytes(self, size: tuple[int, ...]) -> int:
        return prod(size) * self._dtype.itemsize

    def pack(self, tensor: torch.Tensor) -> Buffer:
        return view_memory(tensor).toreadonly()

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        """A view into `buffer`; it must not be written unless `buffer` may be."""
        flat = view_bytes(buffer, self._dtype)
        return flat if len(size) == 1 else flat.view(size)


# BLOCKWISE_INT8: the flattened tensor in blocks of 1024 elements, each scaled to a largest magnitude of 127.
#
# Layout: one float32 per block, its largest magnitude; then one int8 per element. The scales come first because float32
# needs alignment and int8 does not. The last block may be shorter. An element is decoded as int8 · largest / 127.
#
# The error is at most largest / 254, plus the rounding of float32. An outlier affects only its own block
# (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861).


BLOCK = 1024  # elements of a block
_BLOCKS_AT_ONCE = 256  # blocks
_STEPS = 127  # -128 is not used, so that the code is symmetric


class BlockwiseInt8(Codec):
    """A block with NaN or infinity decodes to non-finite numbers; other blocks are not affected."""

    def __init__(self) -> None:
        super().__init__("compressed_float32", 1)

    def nbytes(self, size: tuple[int, ...]) -> int:
        count = prod(size)
        return count + 4 * _block_count(count)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Divides by the largest magnitude and multiplies by 127, since largest / 127 could underflow to 0."""
        values = tensor.to(torch.float32).reshape(-1)
        count = values.numel()
        buffer = torch.empty(self.nbytes((count,)), dtype=torch.uint8, device="cpu")
        scales, data = _split(buffer, count)
        room = torch.empty(min(_BLOCKS_AT_ONCE, _block_count(count)), BLOCK, dtype=torch.float32, device="cpu")
        for blocks, elements in _pieces(count):
            piece = _padded(values[elements])
            packed = _pack_piece(piece, scales[blocks, None], room[: len(piece)])
            data[elements].copy_(packed.view(-1)[: elements.stop - elements.start])
        return view_memory(buffer)

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        count = prod(size)
        scales, data = _split(view_bytes(buffer), count)
        values = torch.empty(_block_count(count), BLOCK, dtype=torch.float32, device="cpu")
        flat = values.view(-1)
        for blocks, elements in _pieces(count):
            flat[elements].copy_(data[elements])  # convert first: int8 times float32 is slow in torch
            values[blocks].mul_(scales[blocks, None] / _STEPS)
        return flat[:count].view(size)


def _pack_piece(piece: torch.Tensor, scale: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Quantises whole blocks, shape (n, 1024), into `room`, and writes their scales to `scale`, shape (n, 1)."""
    torch.amax(torch.abs(piece, out=room), dim=1, keepdim=True, out=scale)
    torch.div(piece, torch.where(scale > 0, scale, 1.0), out=room)
    if not math.isfinite(scale.sum().item()):
        room.nan_to_num_()
    return room.mul_(_STEPS).round_()


def _pieces(count: int) -> Iterator[tuple[slice, slice]]:
    """Slices of blocks, and of their elements, that are small enough for the processor's cache."""
    for first in range(0, _block_count(count), _BLOCKS_AT_ONCE):
        elements = slice(first * BLOCK, min((first + _BLOCKS_AT_ONCE) * BLOCK, count))
        yield slice(first, first + _BLOCKS_AT_ONCE), elements


def _padded(values: torch.Tensor) -> torch.Tensor:
    missing = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)


def _split(buffer: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the scales (float32) and of the `count` elements (int8) in a buffer."""
    end_of_scales = 4 * _block_count(count)
    return buffer[:end_of_scales].view(torch.float32), buffer[end_of_scales:].view(torch.int8)


def _block_count(count: int) -> int:
    return -(-count // BLOCK)


# UNIFORM_8BIT and QUANTILE_8BIT: 256 buckets, each number replaced by the mean of its bucket.
#
# Layout: 256 float32, the means, 0 for an empty bucket; then one uint8 per element, the number of its bucket. The
# decoder does not need the borders of the buckets.


BUCKETS = 256  # one per value of a byte
RANGE_IN_SIGMAS = 6  # standard deviations that the buckets of UNIFORM_8BIT cover: three on each side of the mean

_TABLE_BYTES = 4 * BUCKETS
_OFFSET = BUCKETS // 2


class Lookup8Bit(Codec):
    """A table of means and indices into it; subclasses assign elements to buckets.

    If a bucket contains NaN or infinity, all its elements decode to a non-finite number.
    """

    def __init__(self) -> None:
        super().__init__("compressed_float32", 1)

    def nbytes(self, size: tuple[int, ...]) -> int:
        return _TABLE_BYTES + prod(size)

    def pack(self, tensor: torch.Tensor) -> Buffer:
        """Sums the buckets sequentially in float64, so that the result is accurate and deterministic."""
        values = tensor.to(torch.float32).reshape(-1)
        indices = self._assign(values)
        counts = torch.bincount(indices, minlength=BUCKETS).clamp_min_(1)
        sums = torch.bincount(indices, weights=values.to(torch.float64), minlength=BUCKETS)
        table = (sums / counts).to(torch.float32)
        return b"".join((view_memory(table), view_memory(indices)))

    def unpack(self, buffer: Buffer, size: tuple[int, ...]) -> torch.Tensor:
        raw = view_bytes(buffer)
        table = raw[:_TABLE_BYTES].view(torch.float32)
        return table.index_select(0, raw[_TABLE_BYTES:].to(torch.int32)).view(size)

    @abstractmethod
    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        """The bucket of every element, as uint8; `values` is 1-D float32 and must not be changed."""


class Uniform8Bit(Lookup8Bit):
    """Buckets of equal width, 6·std/256; bucket 128 is centred at the mean of all elements.

    std is the unbiased standard deviation. Elements more than 3 std from the mean go into the first or the last bucket.
    In the other buckets the error is at most the width.
    """

    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        mean = values.sum(dtype=torch.float64) / max(count, 1)
        centred = values - mean.to(torch.float32)
        std = torch.linalg.vector_norm(centred, dtype=torch.float64) / sqrt(max(count - 1, 1))
        width = (std * (RANGE_IN_SIGMAS / BUCKETS)).to(torch.float32)
        numbers = centred.div_(width).round_().add_(_OFFSET).clamp_(0, BUCKETS - 1)
        # If all elements are equal, they became 0 / 0.
        return numbers.nan_to_num_(nan=_OFFSET).to(torch.uint8)


class Quantile8Bit(Lookup8Bit):
    """Buckets with equal numbers of elements. An element decodes to a number within the range of its bucket.

    Border k = 1 … 255 is element floor(k·n/256) of the sorted tensor and belongs to the bucket below it. Tensors of up
    to 255 elements are encoded without loss. The borders are exact, since sorting a part is faster than assigning it.
    """

    def _assign(self, values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        if count == 0:
            return values.to(torch.uint8)
        ranks = np.arange(1, BUCKETS, dtype=np.int64) * count // BUCKETS
        borders = torch.from_numpy(np.sort(values.numpy())[ranks])
        return torch.cat([_borders_below(piece, borders) for piece in torch.split(values, 1 << 16)])


def _borders_below(values: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """The number of the 255 sorted borders that are less than each element, as uint8.

    A branch-free binary search over all elements at once, three times as fast as `torch.bucketize`.
    """
    below = torch.zeros(values.shape, dtype=torch.int32, device="cpu")
    step = BUCKETS // 2
    while step:
        below.add_(values > borders.index_select(0, below + (step - 1)), alpha=step)
        step //= 2
    return below.to(torch.uint8)


_RAW: dict[str, Codec] = {name: Raw(name, dtype) for name, dtype in AVERAGED_DTYPES.items()}

_LOSSY: dict[CompressionType, Codec] = {
    CompressionType.MEANSTD_16BIT: MeanStd16Bit(),
    CompressionType.FLOAT16: Half("clamped_float32", torch.float16, limit=FLOAT16_MAX),
    CompressionType.QUANTILE_8BIT: Quantile8Bit(),
    CompressionType.UNIFORM_8BIT: Uniform8Bit(),
    CompressionType.BFLOAT16: Half("rounded_float32", torch.bfloat16),
    CompressionType.BLOCKWISE_INT8: BlockwiseInt8(),
}

_DECODERS: dict[tuple[int, str], Codec] = {
    **{(CompressionType.NONE, name): codec for name, codec in _RAW.items()},
    **{(code, codec.wire_dtype): codec for code, codec in _LOSSY.items()},
}


def encode(tensor: torch.Tensor, compression: CompressionType) -> WireTensor:
    """Encodes a whole tensor: dense, on any device, of any shape; float16, bfloat16, float32 or float64.

    With NONE the buffer **shares the tensor's memory** if the tensor is contiguous and on the CPU; otherwise it is new.
    Lossy codecs convert to float32 first. Non-finite numbers raise no error: FLOAT16 clamps infinities, and codecs with
    rows, buckets or blocks may decode the whole row, bucket or block to NaN. Another dtype is a TensorError.
    """
    codec = codec_of(compression, tensor.dtype)
    return WireTensor(
        buffer=codec.pack(on_cpu(tensor)),
        size=tuple(tensor.shape),
        dtype=codec.wire_dtype,
        compression=compression,
    )


def decode(wire: WireTensor) -> torch.Tensor:
    """Decodes a whole tensor of shape `wire.size`; `chunks` and `requires_grad` are ignored.

    With NONE the result has the dtype that was encoded and **shares the memory of `wire.buffer`: it must not be
    written**. Otherwise it is a new float32 tensor. A ProtocolViolationError about the compression, dtype, size or
    length comes before anything is allocated.
    """
    codec = decoder(wire)
    size = tuple(wire.size)
    if len(wire.buffer) != codec.nbytes(size):
        raise ProtocolViolationError(
            f"a tensor of size {size}, compression {wire.compression} and dtype {wire.dtype!r} takes "
            f"{codec.nbytes(size)} bytes, but {len(wire.buffer)} were received"
        )
    return codec.unpack(wire.buffer, size)


def decoder(wire: WireTensor) -> Codec:
    """The codec that decodes a tensor, whose buffer is ignored; or raises a ProtocolViolationError."""
    codec = _DECODERS.get((wire.compression, wire.dtype))
    if codec is None:
        known = sorted(dtype for code, dtype in _DECODERS if code == wire.compression)
        reason = f"the dtype must be {', '.join(known)}" if known else "this compression is unknown"
        raise ProtocolViolationError(f"a tensor has compression {wire.compression} and dtype {wire.dtype!r}; {reason}")
    check_size(wire.size)
    return codec


def encode_slices(values: torch.Tensor, compression: CompressionType, lengths: Sequence[int]) -> WireTensor:
    """Encodes slices of tensors, each by itself; the encoded slices follow one another in the buffer.

    `values` are the slices one behind the other, 1-D, see `encode`; `lengths` the numbers of their elements.
    """
    codec = codec_of(compression, values.dtype)
    if len(lengths) == 1 or codec.elementwise:
        return encode(values, compression)
    buffer = b"".join(map(codec.pack, torch.split(values.detach(), list(lengths))))
    return WireTensor(buffer, (values.numel(),), codec.wire_dtype, compression=compression)


def decode_slices(wire: WireTensor, dtype: torch.dtype, lengths: Sequence[int]) -> torch.Tensor:
    """Decodes what `encode_slices` returned, from a stranger, for tensors whose dtype is known.

    `wire` has the shape `[sum(lengths)]`, which the caller has checked. Returns the slices one behind the other, 1-D;
    raises a ProtocolViolationError as `decode`, or if they came uncompressed in another dtype.
    """
    codec = decoder(wire)
    if len(lengths) == 1 or codec.elementwise:
        # Values of another dtype might not fit into this one.
        if wire.compression == CompressionType.NONE and wire.dtype != dtype_name(dtype):
            raise ProtocolViolationError(f"a tensor of {dtype_name(dtype)} was sent as {wire.dtype!r}")
        return decode(wire)
    ends = list(accumulate((codec.nbytes((length,)) for length in lengths), initial=0))
    if len(wire.buffer) != ends[-1]:
        raise ProtocolViolationError(
            f"{len(lengths)} slices of tensors with compression {wire.compression} take {ends[-1]} bytes, but "
            f"{len(wire.buffer)} were received"
        )
    # Copies, since a slice may begin at an odd place, and numbers must not.
    pieces = (bytes(wire.buffer[start:stop]) for start, stop in pairwise(ends))
    return torch.cat([codec.unpack(piece, (length,)) for piece, length in zip(pieces, lengths, strict=True)])


def codec_of(compression: CompressionType, dtype: torch.dtype) -> Codec:
    """The codec that encodes tensors of that dtype; a TensorError if they cannot be averaged, or are sparse."""
    name = dtype_name(dtype)
    if name not in _RAW:
        raise TensorError(f"{dtype} cannot be averaged; {', '.join(_RAW)} can")
    if compression.is_sparse:
        raise TensorError(f"{compression.name} does not encode every element; see averaging.tensors.SparseTensor")
    return _RAW[name] if compression == CompressionType.NONE else _LOSSY[compression]
