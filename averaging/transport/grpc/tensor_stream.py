"""Tensors in the messages of rooms above the core: `Tensor` of runtime.proto, in one message or several chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from averaging.errors import ConfigError, ProtocolViolationError
from averaging.protocol import TENSOR_COMPRESSION, CompressionType, WireTensor
from averaging.tensors import (
    AVERAGED_DTYPES,
    STATE_DTYPES,
    Codec,
    Raw,
    TensorBuffer,
    check_size,
    chunks_of,
    decoder,
    dtype_name,
    encode,
)
from averaging.transport.grpc.channel_options import MAX_DIMENSIONS, check_count
from averaging.wire.runtime_pb2 import CompressionType as WireCompression
from averaging.wire.runtime_pb2 import Tensor as TensorMessage

__all__ = ["CHUNK_BYTES", "TensorMessage", "TensorReader", "tensor_messages"]

CHUNK_BYTES = 4 << 20
"""Default maximum bytes of a tensor in one message."""

_INTEGERS = {name: Raw(name, dtype) for name, dtype in STATE_DTYPES.items() if name not in AVERAGED_DTYPES}


def tensor_messages(
    tensor: torch.Tensor, compression: CompressionType | str = CompressionType.NONE, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[TensorMessage]:
    """Encodes a dense tensor of any shape and device as one or more messages, to be read by a `TensorReader` in order.

    Args:
        tensor: A tensor of one of `STATE_DTYPES`. Integers and bool are never compressed.
        compression: As the option `compression` of a peer.
        chunk_bytes: Maximum bytes of the tensor in one message.

    Raises:
        ConfigError: The dtype cannot be sent, or there is no such compression.
    """
    name, code = dtype_name(tensor.dtype), TENSOR_COMPRESSION.check("compression", compression)
    if name not in STATE_DTYPES:
        raise ConfigError(f"{tensor.dtype} cannot be sent; {', '.join(STATE_DTYPES)} can")
    tensor = tensor.detach().cpu()
    if name in _INTEGERS:
        wire = WireTensor(_INTEGERS[name].pack(tensor), tuple(tensor.shape), name)
    else:
        wire = encode(tensor, code)
    for chunk in chunks_of(wire, chunk_bytes):
        yield TensorMessage(
            buffer=bytes(chunk.buffer),
            size=chunk.size,
            dtype=chunk.dtype,
            compression=WireCompression.ValueType(chunk.compression),
            chunks=chunk.chunks if chunk.chunks > 1 else 0,
        )


class TensorReader:
    """Decodes tensors from the messages of `tensor_messages`.

    The first message of a tensor gives its size, dtype and compression, and so the bytes that it takes. A message with
    more bytes or chunks than fit is refused. Memory is taken as bytes arrive, not when they are announced.

    Args:
        max_bytes: Maximum bytes of one tensor on the wire; larger ones are refused at their first message.
    """

    def __init__(self, max_bytes: int = 1 << 32) -> None:
        self._max_bytes = max_bytes
        self._wire: WireTensor | None = None
        self._buffer = TensorBuffer(0, bytearray())

    @property
    def complete(self) -> bool:
        return self._wire is None

    def read(self, message: TensorMessage) -> torch.Tensor | None:
        """Returns the tensor that is complete with this message, or None if more messages follow.

        The tensor is new and on the CPU. Its dtype is the one that was sent, or float32 if it was compressed.

        Raises:
            ProtocolViolationError: The message is not the next one of a tensor, or the tensor is malformed or large.
        """
        if self._wire is None:
            self._wire = self._begin(message)
        elif message.size or message.dtype:
            raise ProtocolViolationError("a tensor begins before the last chunk of the one before")
        buffer = self._buffer
        if buffer.nbytes and not message.buffer:
            raise ProtocolViolationError(f"a tensor of {buffer.nbytes} bytes with an empty chunk")
        if not buffer.add(message.buffer):
            return None
        wire, self._wire = replace(self._wire, buffer=memoryview(buffer.data or b"")), None
        return _decode(wire)

    def _begin(self, first: TensorMessage) -> WireTensor:
        """Checks what the first message of a tensor announces."""
        size = tuple(check_count(first.size, MAX_DIMENSIONS, "dimensions"))
        wire = WireTensor(b"", size, first.dtype, first.compression)
        nbytes, chunks = _codec(wire).nbytes(size), max(1, first.chunks)
        if nbytes > self._max_bytes:
            raise ProtocolViolationError(f"a tensor of {nbytes} bytes, more than {self._max_bytes} bytes")
        if first.chunks < 0 or chunks > max(1, nbytes):
            raise ProtocolViolationError(f"a tensor of {nbytes} bytes in {first.chunks} chunks")
        self._buffer = TensorBuffer(nbytes, bytearray(), chunks)
        return wire


def _codec(wire: WireTensor) -> Codec:
    raw = _INTEGERS.get(wire.dtype)
    if raw is None or wire.compression != CompressionType.NONE:
        return decoder(wire)
    check_size(wire.size)
    return raw


def _decode(wire: WireTensor) -> torch.Tensor:
    """Decodes a tensor of the right length, which may share the memory of its buffer."""
    if wire.dtype == "bool":  # bytes other than 0 and 1 are no bools
        return _INTEGERS["uint8"].unpack(wire.buffer, wire.size) != 0
    return _codec(wire).unpack(wire.buffer, wire.size)
