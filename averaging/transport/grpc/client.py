"""The three kinds of calls to another peer. A call ends on both sides when its caller closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeAlias, TypeVar

import grpc

from averaging.errors import PeerUnreachableError
from averaging.transport.grpc.channels import Channels
from averaging.transport.grpc.error_mapping import calling, is_failed_write, read_reply
from averaging.transport.grpc.methods import Method

Request = TypeVar("Request")
Reply = TypeVar("Reply")

StreamCall: TypeAlias = "grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]"

STATUS_TRIES = 1000
"""After a failed write, the callee's status of the call is polled this many times, once per millisecond."""


async def call_unary(channels: Channels, endpoint: str, method: Method[Request, Reply], request: Request) -> Reply:
    """Sends one request and returns the reply."""
    async with channels.call(endpoint) as connection:
        start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.channel.unary_unary(method.path)
        with calling(endpoint, sent_token=bool(channels.metadata)):
            raw = await start(method.encode_request(request), metadata=channels.metadata)
        return read_reply(endpoint, method.read_reply, raw)


async def call_stream(
    channels: Channels,
    endpoint: str,
    method: Method[Request, Reply],
    request: Request,
    headers: tuple[tuple[str, str], ...] = (),
) -> AsyncGenerator[Reply, None]:
    """Sends one request, with additional headers, and yields the replies."""
    async with channels.call(endpoint) as connection:
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = connection.channel.unary_stream(method.path)
        call = start(method.encode_request(request), metadata=(*channels.metadata, *headers))
        replies = aiter(call)
        try:
            while (raw := await _next(channels, endpoint, call, replies)) is not None:
                yield read_reply(endpoint, method.read_reply, raw)
        finally:
            call.cancel()
            await _close(replies)


async def call_both_ways(
    channels: Channels, endpoint: str, method: Method[Request, Reply], messages: AsyncIterator[Request]
) -> AsyncGenerator[Reply, None]:
    """Sends `messages` from a background task and yields the replies. `messages` is closed with the call."""
    async with channels.call(endpoint) as connection:
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = connection.channel.stream_stream(method.path)
        call = start(metadata=channels.metadata)
        replies = aiter(call)
        upload = _GrpcUpload(call, method.encode_request, messages)
        try:
            while (raw := await _next(channels, endpoint, call, replies)) is not None:
                yield read_reply(endpoint, method.read_reply, raw)
        except PeerUnreachableError:
            if upload.failure is not None:
                raise upload.failure from None
            raise
        finally:
            call.cancel()
            await upload.close()
            await _close(replies)


async def _next(channels: Channels, endpoint: str, call: StreamCall, replies: AsyncIterator[bytes]) -> bytes | None:
    """Returns the next reply; None after the last."""
    with calling(endpoint, sent_token=bool(channels.metadata)):
        try:
            return await anext(replies, None)
        except grpc.aio.AioRpcError as error:
            if not is_failed_write(error.details()):
                raise
        await raise_for_callee_status(call)
    return None


async def raise_for_callee_status(call: StreamCall) -> None:
    """Raises unless the callee ended the call without an error.

    If a write fails because the call has ended, grpcio (1.85) reports INTERNAL until the callee's status arrives.
    """
    for _ in range(STATUS_TRIES):
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            return
        if not is_failed_write(details):
            raise _status(code, details)
        await asyncio.sleep(0.001)
    raise _status(grpc.StatusCode.UNAVAILABLE, "")


def _status(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


class _GrpcUpload:
    """Writes messages with the network's backpressure until the call ends.

    Attributes:
        failure: the exception of the iterator of messages, which cancels the call.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
        encode: Callable[[Request], bytes],
        messages: AsyncIterator[Request],
    ) -> None:
        self.failure: Exception | None = None
        self._call = call
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run(encode, messages))
        # A write still waiting at the end of the call would fail, and grpcio would report that as the status.
        call.add_done_callback(self._end)

    async def _run(self, encode: Callable[[Request], bytes], messages: AsyncIterator[Request]) -> None:
        try:
            async for message in messages:
                if not await self._write(encode(message)):
                    return
            await self._call.done_writing()
        except Exception as error:
            self.failure = error
            self._call.cancel()
        finally:
            await _close(messages)

    async def _write(self, raw: bytes) -> bool:
        """Returns whether the message was written. If not, the call has ended and the reader gets the reason."""
        try:
            await self._call.write(raw)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    def _end(self, _: object = None) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Ends the upload and drops its exception.

        The task keeps its exception, whose frames keep this object and the call. That reference cycle would keep the
        call alive until a garbage collection, and gRPC keeps the connection of a closed channel while a call exists.
        """
        self._end()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait({task})
        self.failure = None


async def _close(iterator: AsyncIterator[object]) -> None:
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()
