"""One stream of parts over a connection: its messages as frames, and the callee's side of it.

A connection carries one stream after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import lru_cache

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
    ViolationKind,
    printable,
    refusal_cause,
)
from averaging.protocol import AveragingData, Buffer, MessageCode, WireTensor
from averaging.transport import AveragingService, linger, parse
from averaging.transport.direct.frames import MAX_HEAD_BYTES, Admission, FrameKind
from averaging.transport.direct.link import FRAMES_AHEAD, Link
from averaging.transport.grpc import AVERAGING_DATA, IDLE_SECONDS
from averaging.wire import direct_pb2

logger = logging.getLogger("averaging.transport")

MAX_HEADS = 256
"""Heads that are kept: more than the number of part sizes in a model. If there are more, all are forgotten."""

MAX_REASON = 300  # maximum length of an error message, in characters

IDLE_GRACE_SECONDS = 60.0
"""A callee keeps an idle connection for this much longer than its caller, so that only the caller ends it."""

_DEFINITE, _WRONG_RUN, _OTHER = 1, 2, 3


def frame_of(data: AveragingData) -> tuple[FrameKind, bytes, Buffer]:
    return FrameKind.PART, encode_head(data), b"" if data.tensor_part is None else data.tensor_part.buffer


def encode_head(data: AveragingData) -> bytes:  # without the buffer of the tensor
    tensor = data.tensor_part
    if tensor is None or data.endpoint:  # the first or the last message of a stream
        return _encode(data)
    return _encode_usual(data.code, data.group_id, tensor.size, tensor.dtype, tensor.compression)


@lru_cache(maxsize=MAX_HEADS)
def _encode_usual(code: MessageCode, group_id: bytes, size: tuple[int, ...], dtype: str, compression: int) -> bytes:
    return _encode(AveragingData(code, group_id, "", WireTensor(b"", size, dtype, compression)))


def _encode(data: AveragingData) -> bytes:
    tensor = data.tensor_part
    head = AVERAGING_DATA.SerializeToString(data.with_tensor(None if tensor is None else tensor.with_buffer(b"")))
    if len(head) > MAX_HEAD_BYTES:
        raise ProtocolViolationError(f"a message with {len(head)} bytes besides its tensor; at most {MAX_HEAD_BYTES}")
    return head


class HeaderCache:
    """Decodes heads. Those of the parts of one round are few, so they are kept."""

    def __init__(self) -> None:
        self._known: dict[bytes, AveragingData] = {}

    def decode(self, head: bytes, body: Buffer) -> AveragingData:
        like = self._known.get(head)
        if like is None:
            like = parse(AVERAGING_DATA, head)
            if like.tensor_part is not None and len(like.tensor_part.buffer):
                raise ProtocolViolationError("a frame with a part of its tensor in the head")
            if len(self._known) >= MAX_HEADS:
                self._known.clear()
            self._known[head] = like
        if like.tensor_part is not None:
            return like.with_tensor(like.tensor_part.with_buffer(body))
        if len(body):
            raise ProtocolViolationError("a frame with bytes that belong to no tensor")
        return like


def encode_error(error: AveragingError | None) -> bytes:
    kind, reason = _OTHER, "internal error; see the log of that peer"  # an unexpected one is not described
    if error is not None:
        if isinstance(error, ProtocolViolationError) and error.kind is ViolationKind.FOREIGN_ENDPOINT:
            kind = _DEFINITE
        elif refusal_cause(error) is RefusalCause.WRONG_RUN:
            kind = _WRONG_RUN
        reason = printable(str(error), MAX_REASON)
    return direct_pb2.DirectError(kind=kind, reason=reason).SerializeToString()


def decode_error(endpoint: str, head: bytes) -> CallRefusedError:
    wire = parse(direct_pb2.DirectError, head)
    reason = printable(wire.reason, MAX_REASON) or "refused"
    if wire.kind == _WRONG_RUN:
        return CallRefusedError(endpoint, reason, RefusalCause.WRONG_RUN)
    return CallRefusedError(endpoint, reason, definite=wire.kind == _DEFINITE)


class Stream:
    """The callee's side: the messages of one stream of parts; `ended` once the caller has sent the last one."""

    def __init__(self, link: Link, admission: Admission, heads: HeaderCache) -> None:
        self._link, self._admission, self._heads = link, admission, heads
        self._begun = self.ended = False
        link.ahead = 0

    async def begin(self) -> bool:
        """Waits until the stream begins; False if the connection ends instead."""
        try:
            async with asyncio.timeout(IDLE_SECONDS + IDLE_GRACE_SECONDS):
                await self._link.activity()
        except TimeoutError:
            return False
        return not self._link.lost

    def __aiter__(self) -> AsyncIterator[AveragingData]:
        return self

    async def __anext__(self) -> AveragingData:
        if self._begun:  # a round has accepted the sender, and bounds what is read from now on
            self._link.ahead = FRAMES_AHEAD
        if self.ended:
            raise StopAsyncIteration
        kind, head, body = await self._link.read()
        self._begun = True
        if kind is FrameKind.END:
            self.ended = True
            raise StopAsyncIteration
        if kind is not FrameKind.PART:
            raise ProtocolViolationError(f"sent {kind.name} in a stream of parts")
        message = self._heads.decode(head, body)
        if message.endpoint:
            self._admission.check(message.endpoint)
        return message

    async def drop(self) -> bool:  # of a frame that nobody wants; whether another one may follow
        self.ended = self.ended or (await self._link.read()).kind is FrameKind.END
        return not self.ended


async def serve_stream(link: Link, stream: Stream, service: AveragingService) -> None:
    with suppress(PeerUnreachableError):
        await _answer(link, stream, service)
        await linger(stream.drop)


async def _answer(link: Link, stream: Stream, service: AveragingService) -> None:
    try:
        async with aclosing(service.aggregate_part(stream)) as replies:
            async for reply in replies:
                await link.send(*frame_of(reply))
    except PeerUnreachableError:
        raise
    except AveragingError as error:
        await link.send(FrameKind.ERROR, encode_error(error))
    except Exception:
        logger.exception("a stream of parts from %s failed", link.name)
        await link.send(FrameKind.ERROR, encode_error(None))
    else:
        await link.send(FrameKind.END)
