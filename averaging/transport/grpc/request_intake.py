"""Receives the requests of all services: counts the calls, refuses those without a token, and limits their time.

gRPC reads the request of a unary method before it calls the handler, without a time limit. Every method is therefore
registered with a stream of requests, from which gRPC reads nothing before the handler does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from inspect import isawaitable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from averaging.errors import ProtocolViolationError
from averaging.security import Credentials
from averaging.transport import CALLER, RpcCaller
from averaging.transport.grpc.authentication import Callers, denial, host_of
from averaging.transport.grpc.channel_options import REQUEST_SECONDS
from averaging.transport.grpc.error_mapping import refuse

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

END_DOUBT_SECONDS = 0.02
"""Wait after the last message: gRPC reports the loss of a caller as that, and cancels the call a millisecond later."""


class Requests:
    """The requests of one call, each read from gRPC when it is asked for.

    Attributes:
        decode: Decodes a request; None leaves the bytes.
    """

    def __init__(self, context: Context, path: str, decode: Callable[[bytes], Any] | None) -> None:
        self._context, self._path, self.decode = context, path, decode
        self._reading = False

    async def only(self) -> Any:
        """Returns the request of a unary method."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                raw = await self._read()
        except TimeoutError:
            raise ProtocolViolationError(
                f"the request to {self._path} was not complete within {REQUEST_SECONDS:.0f} s"
            ) from None
        if raw is None:
            raise ProtocolViolationError(f"no message in a request to {self._path}, which takes one")
        return self._decoded(raw)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        raw = await self._read()
        if raw is None:
            await asyncio.sleep(END_DOUBT_SECONDS)
            raise StopAsyncIteration
        return self._decoded(raw)

    async def drop(self) -> bool:
        """Drops a request; returns whether another one may follow."""
        return not self._reading and await self._read() is not None

    async def _read(self) -> bytes | None:
        self._reading = True  # still so after a cancellation: gRPC continues to read, and allows no second read
        raw = await self._context.read()
        self._reading = False
        return raw if isinstance(raw, bytes) else None

    def _decoded(self, raw: bytes) -> Any:
        if self.decode is None:
            return raw
        try:
            return self.decode(raw)
        except DecodeError:
            raise ProtocolViolationError(f"a malformed request to {self._path}") from None


class Intake(grpc.aio.ServerInterceptor):
    """Receives all calls: admits their callers, and calls the handlers of their methods.

    It keeps the tasks of the calls in progress, since a stopped gRPC server cancels them but does not wait for their
    end.
    """

    def __init__(self, callers: Callers, credentials: Credentials) -> None:
        self._callers, self._credentials = callers, credentials
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Called in the task of each call, before its handler."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        handler = await continuation(handler_call_details) or _UNKNOWN
        serve = partial(self._serve, handler_call_details.method, handler)
        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    async def ended(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, path: str, handler: Handler, _: object, context: Context) -> None:
        caller = RpcCaller(host_of(context), context.peer(), tuple(context.invocation_metadata() or ()))
        CALLER.set(caller)  # each call is served in a task of its own
        try:
            with self._callers.call(context, path):
                # Refused without reading a message, also if there is no such method.
                if refusal := denial(path, caller.headers, self._credentials):
                    self._callers.refusals.note(caller.host, refusal)
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)
                await _answer(handler, Requests(context, path, handler.request_deserializer), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await refuse(context, path, error)


async def _answer(handler: Handler, requests: Requests, context: Context) -> None:
    """Calls a handler of any kind, and writes the reply that it returns or the replies that it yields, if any."""
    kinds: tuple[Any, ...] = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    (behaviour,) = filter(None, kinds)
    request = requests if handler.request_streaming else await requests.only()
    answer = behaviour(request, context)
    del request  # some calls last for days
    if isawaitable(answer):
        reply = await answer
        if reply is not None:
            await context.write(reply)
        return
    async with aclosing(answer) as replies:
        async for reply in replies:
            await context.write(reply)


async def _refuse_unknown(_: object, context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this peer serves no such method")


_UNKNOWN: Handler = grpc.stream_stream_rpc_method_handler(_refuse_unknown)
