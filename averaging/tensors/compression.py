"""Encodes and decodes tensors for the wire. One module per family of codecs; docs/reference/protocol.md has layouts."""

from __future__ import annotations

import torch

from averaging.errors import ProtocolViolationError
from averaging.protocol import CompressionType, WireTensor
from averaging.tensors.codec import Codec, check_size
from averaging.tensors.half_precision import FLOAT16_MAX, Half, MeanStd16Bit, Raw
from averaging.tensors.quantised import BlockwiseInt8, Quantile8Bit, Uniform8Bit
from averaging.tensors.schema import DTYPES, dtype_name

__all__ = ["bytes_per_element", "decode", "decode_as", "decoder", "encode"]

_RAW: dict[str, Codec] = {name: Raw(name, dtype) for name, dtype in DTYPES.items()}

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
    """Encodes a whole tensor: dense, on the CPU, of any shape; float16, bfloat16, float32 or float64.

    With NONE the buffer **shares the tensor's memory** if the tensor is contiguous; otherwise it is new. Lossy codecs
    convert to float32 first. Non-finite numbers raise no error: FLOAT16 clamps infinities, and codecs with rows,
    buckets or blocks may decode the whole row, bucket or block to NaN.

    Raises:
        TensorError: the dtype cannot be averaged.
    """
    codec = _codec(compression, tensor.dtype)
    return WireTensor(
        buffer=codec.pack(tensor.detach()),
        size=tuple(tensor.shape),
        dtype=codec.wire_dtype,
        compression=compression,
    )


def decode(wire: WireTensor) -> torch.Tensor:
    """Decodes a whole tensor of shape `wire.size`; `chunks` and `requires_grad` are ignored.

    With NONE the result has the dtype that was encoded and **shares the memory of `wire.buffer`: it must not be
    written**. Otherwise it is a new float32 tensor.

    Raises:
        ProtocolViolationError: the compression, dtype or size is invalid, or the buffer has the wrong length. This is
            checked before anything is allocated.
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
    """Returns the codec that decodes a tensor; `wire.buffer` is ignored.

    Raises:
        ProtocolViolationError: the compression, dtype or size is invalid.
    """
    codec = _DECODERS.get((wire.compression, wire.dtype))
    if codec is None:
        known = sorted(dtype for code, dtype in _DECODERS if code == wire.compression)
        reason = f"the dtype must be {', '.join(known)}" if known else "this compression is unknown"
        raise ProtocolViolationError(f"a tensor has compression {wire.compression} and dtype {wire.dtype!r}; {reason}")
    check_size(wire.size)
    return codec


def decode_as(wire: WireTensor, dtype: torch.dtype) -> torch.Tensor:
    """Like `decode`, for a tensor whose dtype is known.

    Raises:
        ProtocolViolationError: as `decode`; or the tensor was sent uncompressed in another dtype, whose values might
            not fit into `dtype`.
    """
    if wire.compression == CompressionType.NONE and wire.dtype != dtype_name(dtype):
        raise ProtocolViolationError(f"a tensor of {dtype_name(dtype)} was sent as {wire.dtype!r}")
    return decode(wire)


def bytes_per_element(compression: CompressionType, dtype: torch.dtype) -> int:
    """Bytes of one element on the wire, without the overhead per tensor, row or block.

    Raises:
        TensorError: `dtype` cannot be averaged.
    """
    return _codec(compression, dtype).bytes_per_element


def _codec(compression: CompressionType, dtype: torch.dtype) -> Codec:
    name = dtype_name(dtype)
    return _RAW[name] if compression == CompressionType.NONE else _LOSSY[compression]
