"""The three shapes of a call to another peer. Each ends, on both sides, when its caller closes it."""

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
"""After a failed write, the true status of the call is asked for so often, a millisecond apart."""


async def call_unary(channels: Channels, endpoint: str, method: Method[Request, Reply], request: Request) -> Reply:
    """One request, one reply."""
    async with channels.call(endpoint) as line:
        start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = line.channel.unary_unary(method.path)
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
    """One request, with headers of its own besides those of every call, and many replies."""
    async with channels.call(endpoint) as line:
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = line.channel.unary_stream(method.path)
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
    """Many requests, many replies: `messages` go up in a task of their own, and are closed with the call."""
    async with channels.call(endpoint) as line:
        start: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = line.channel.stream_stream(method.path)
        call = start(metadata=channels.metadata)
        replies = aiter(call)
        upload = _Upload(call, method.encode_request, messages)
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
    """The next reply; None after the last."""
    with calling(endpoint, sent_token=bool(channels.metadata)):
        try:
            return await anext(replies, None)
        except grpc.aio.AioRpcError as error:
            if not is_failed_write(error.details()):
                raise
        await raise_for_true_status(call)
    return None


async def raise_for_true_status(call: StreamCall) -> None:
    """Raises unless the callee ended the call without an error.

    When a write fails because the call is over, grpcio (1.85) sets the status INTERNAL until the callee's own arrives.
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


class _Upload:
    """Writes messages as fast as the network takes them, until the call is over.

    Attributes:
        failure: what the iterator of messages raised; the call is cancelled then.
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
        # A write that is still waiting then would fail, and grpcio would put that in the place of the status.
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
        """Whether it was written. If not, the call is over, and whoever reads it learns why."""
        try:
            await self._call.write(raw)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True

    def _end(self, _: object = None) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Ends it, whether or not all is written, and forgets how it ended.

        A task keeps what it ended with, and that the frames it came through, this object and the call among them. Such
        a circle waits for the garbage collector, and as long as a call exists gRPC keeps the connection of its channel,
        even if that is closed.
        """
        self._end()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait({task})
        self.failure = None


async def _close(iterator: AsyncIterator[object]) -> None:
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()
