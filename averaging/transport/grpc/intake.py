"""How requests are taken in, of every service on the port: counted, in limited time, and within limited memory.

gRPC reads the request of a method with one request before it calls the handler, for as long as that takes. So here
every method is served as a stream of requests, which gRPC does not read by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from inspect import isawaitable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from averaging.errors import ProtocolViolationError
from averaging.transport.grpc import counts, methods
from averaging.transport.grpc.faults import refuse
from averaging.transport.grpc.options import REQUEST_BYTES_PER_SECOND, REQUEST_SECONDS
from averaging.transport.grpc.security import Callers, Continuation
from averaging.transport.grpc.unfinished import Unfinished, UnfinishedCall

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def seconds_for(path: str) -> float | None:
    """How long a request of a method may take to arrive; None if the service itself keeps the time."""
    nbytes = methods.REQUEST_BYTES.get(path, counts.SMALL_BYTES)
    return None if nbytes is None else REQUEST_SECONDS + nbytes / REQUEST_BYTES_PER_SECOND


class Incoming:
    """The requests of one call, as bytes or decoded, one by one as they are asked for."""

    def __init__(
        self, context: Context, path: str, decode: Callable[[bytes], Any] | None, call: UnfinishedCall
    ) -> None:
        self._context = context
        self._path = path
        self._decode = decode
        self._call = call
        self._seconds = seconds_for(path)

    def finish(self) -> None:
        """The caller is known: what it sends from now on is bounded by the service that reads it."""
        self._call.finish()

    def forget(self) -> None:
        """What was read is thrown away."""
        self._call.forget()

    async def read(self) -> bytes | None:
        """The next request; None after the last one, or if the caller is gone."""
        raw = await self._context.read()
        if not isinstance(raw, bytes):
            return None
        self._call.took(len(raw))
        return raw

    async def only(self, *, last: bool) -> Any:
        """The one request of a method that has one, decoded.

        Args:
            last: wait until the caller has said that there is no more. Else it could go on to send, to nobody who
                reads, for as long as it is answered.

        Raises:
            ProtocolViolationError: it did not arrive in time, is not alone, or is malformed.
        """
        try:
            async with asyncio.timeout(self._seconds):
                raw = await self.read()
                more = await self.read() if last else None
        except TimeoutError:
            raise ProtocolViolationError(
                f"the request to {self._path} was not complete within {self._seconds:.0f} s"
            ) from None
        if raw is None or more is not None:
            told = "no message" if raw is None else "more than one message"
            raise ProtocolViolationError(f"{told} in a request to {self._path}, which has one")
        if last:
            self._call.finish()
        return self._decoded(raw)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        """The next request, decoded; a caller that does not send it in time is taken to have sent the last one."""
        try:
            async with asyncio.timeout(self._seconds):
                raw = await self.read()
        except TimeoutError:
            raw = None
        if raw is None:
            raise StopAsyncIteration
        return self._decoded(raw)

    def _decoded(self, raw: bytes) -> Any:
        if self._decode is None:
            return raw
        try:
            return self._decode(raw)
        except DecodeError:
            raise ProtocolViolationError(f"a malformed request to {self._path}") from None


class Intake(grpc.aio.ServerInterceptor):
    """Takes in the requests of all calls, also of unknown methods, and of calls that are refused for their headers.

    It must come before interceptors that put another handler in the place of the method's.
    """

    def __init__(self, callers: Callers, unfinished: Unfinished) -> None:
        self._callers = callers
        self._unfinished = unfinished

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Called before the handler of each call."""
        handler = await continuation(handler_call_details) or _NOTHING
        serve = partial(self._serve, handler_call_details.method, handler)
        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(serve, response_serializer=handler.response_serializer)

    async def _serve(self, path: str, handler: Handler, _: object, context: Context) -> Any:
        with self._unfinished.call(context.peer()) as call:
            try:
                async with call.until_hung_up():
                    with self._callers.call(context, path):
                        incoming = Incoming(context, path, handler.request_deserializer, call)
                        return await _answer(handler, incoming, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await refuse(context, path, error)


async def _answer(handler: Handler, incoming: Incoming, context: Context) -> Any:
    """Calls a handler of any shape; returns its reply, or writes what it yields."""
    shapes: tuple[Any, ...] = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    (behaviour,) = filter(None, shapes)
    request = incoming if handler.request_streaming else await incoming.only(last=handler.response_streaming)
    answer = behaviour(request, context)
    del request  # some calls last for days
    if isawaitable(answer):
        return await answer
    async with aclosing(answer) as replies:
        async for reply in replies:
            await context.write(reply)
    return None


async def _unknown(_: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this peer serves no such method")


_NOTHING: Handler = grpc.stream_stream_rpc_method_handler(_unknown)
