"""Encodes and decodes the heads of frames: a message without the buffer of its tensor, and errors."""

from __future__ import annotations

from functools import lru_cache

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ProtocolViolationError,
    RefusalCause,
    ViolationKind,
    printable,
    refusal_cause,
)
from averaging.protocol import AveragingData, Buffer, MessageCode, WireTensor
from averaging.transport.direct.frames import MAX_HEAD_BYTES
from averaging.transport.grpc import decode_averaging_data, parse
from averaging.wire import averaging_pb2, direct_pb2, runtime_pb2

MAX_HEADS = 256
"""Decoded heads that are kept: more than the number of part sizes in a model. If there are more, all are forgotten."""

MAX_REASON = 300
"""Maximum length of an error message, in characters."""

_DEFINITE, _WRONG_RUN, _OTHER = 1, 2, 3


def encode_head(data: AveragingData) -> bytes:
    """Encodes a message without the buffer of its tensor.

    Raises:
        ProtocolViolationError: the result is longer than other peers accept.
    """
    tensor = data.tensor_part
    head = _encode(
        data.code,
        data.group_id,
        data.endpoint,
        data.metadata,
        None
        if tensor is None
        else (tensor.size, tensor.dtype, tensor.compression, tensor.chunks, tensor.requires_grad),
    )
    if len(head) > MAX_HEAD_BYTES:
        raise ProtocolViolationError(f"a message with {len(head)} bytes besides its tensor; at most {MAX_HEAD_BYTES}")
    return head


@lru_cache(maxsize=MAX_HEADS)
def _encode(
    code: MessageCode,
    group_id: bytes,
    endpoint: str,
    metadata: bytes,
    tensor: tuple[tuple[int, ...], str, int, int, bool] | None,
) -> bytes:
    part = None
    if tensor is not None:
        size, dtype, compression, chunks, requires_grad = tensor
        part = runtime_pb2.Tensor(
            size=size,
            requires_grad=requires_grad,
            dtype=dtype,
            compression=runtime_pb2.CompressionType.ValueType(compression),
            chunks=chunks,
        )
    return averaging_pb2.AveragingData(
        code=averaging_pb2.MessageCode.ValueType(code),
        group_id=group_id,
        endpoint=endpoint,
        metadata=metadata,
        tensor_part=part,
    ).SerializeToString()


class HeaderCache:
    """Decodes heads. Those of the parts of one round are few, so they are kept."""

    def __init__(self) -> None:
        self._known: dict[bytes, AveragingData] = {}

    def decode(self, head: bytes, body: Buffer) -> AveragingData:
        """Returns the message; its tensor shares the memory of `body`.

        Raises:
            ProtocolViolationError: the head is malformed, has a buffer of its own, or there is a body without a tensor.
        """
        like = self._known.get(head)
        if like is None:
            like = decode_averaging_data(head)
            if like.tensor_part is not None and len(like.tensor_part.buffer):
                raise ProtocolViolationError("a frame with a part of its tensor in the head")
            if len(self._known) >= MAX_HEADS:
                self._known.clear()
            self._known[head] = like
        tensor = like.tensor_part
        if tensor is None:
            if len(body):
                raise ProtocolViolationError("a frame with bytes that belong to no tensor")
            return like
        part = WireTensor(body, tensor.size, tensor.dtype, tensor.compression, tensor.chunks, tensor.requires_grad)
        return AveragingData(like.code, like.group_id, like.endpoint, part, like.metadata)


def encode_error(error: AveragingError | None) -> bytes:
    """Encodes the error with which the callee ends a stream; None for an unexpected one, which is not described."""
    if error is None:
        return direct_pb2.DirectError(
            kind=_OTHER, reason="internal error; see the log of that peer"
        ).SerializeToString()
    kind = _OTHER
    if isinstance(error, ProtocolViolationError) and error.kind is ViolationKind.FOREIGN_ENDPOINT:
        kind = _DEFINITE
    elif refusal_cause(error) is RefusalCause.WRONG_RUN:
        kind = _WRONG_RUN
    return direct_pb2.DirectError(kind=kind, reason=printable(str(error), MAX_REASON)).SerializeToString()


def decode_error(endpoint: str, head: bytes) -> CallRefusedError:
    """Returns the error that `endpoint` sent.

    Raises:
        ProtocolViolationError: it is malformed.
    """
    wire = parse(direct_pb2.DirectError(), head)
    reason = printable(wire.reason, MAX_REASON) or "refused"
    if wire.kind == _WRONG_RUN:
        return CallRefusedError(endpoint, reason, RefusalCause.WRONG_RUN)
    return CallRefusedError(endpoint, reason, definite=wire.kind == _DEFINITE)
