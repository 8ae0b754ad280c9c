"""The listening side: a gRPC server that receives requests and hands each call to the peer's services.

gRPC reads the request of a unary method before it calls the handler, without a time limit. Every method is therefore
registered with a stream of requests, from which gRPC reads nothing before the handler does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from inspect import isawaitable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from averaging.errors import ListenError, ProtocolViolationError
from averaging.protocol import AveragingData, DownloadData, JoinRequest, MessageFromLeader, Record
from averaging.receipts import PeerStatus
from averaging.security import Credentials
from averaging.tensors import Schema
from averaging.transport import (
    CALLER,
    AveragingService,
    GossipService,
    RpcCaller,
    RpcHandler,
    RpcMethod,
    linger,
    rpc_caller,
)
from averaging.transport.grpc import channel_options as headers, methods
from averaging.transport.grpc.authentication import Callers, claim_checker, denial, host_of, server_credentials
from averaging.transport.grpc.channel_options import (
    REQUEST_SECONDS,
    WRITE_BYTES_PER_SECOND,
    WRITE_SECONDS,
    server_options,
)
from averaging.transport.grpc.error_mapping import refuse

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

END_DOUBT_SECONDS = 0.02
"""Wait after the last message: gRPC reports the loss of a caller as that, and cancels the call a millisecond later."""


class Requests:
    """The requests of one call, each read from gRPC when it is asked for; `decode` None leaves the bytes."""

    def __init__(self, context: Context, path: str, decode: Callable[[bytes], Any] | None) -> None:
        self._context, self._path, self.decode = context, path, decode
        self._reading = False

    async def only(self) -> Any:
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


logger = logging.getLogger("averaging.transport")

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class Server:
    """Listens when it is created, and answers calls after `start`."""

    def __init__(self, address: str, max_message_bytes: int, credentials: Credentials | None = None) -> None:
        self._credentials = credentials = credentials or Credentials()
        self._intake = Intake(Callers(authenticated=credentials.tls is not None), credentials)
        self._server = grpc.aio.server(options=server_options(max_message_bytes), interceptors=[self._intake])
        escaped = address.replace("%", "%25")  # the interface of a link-local address
        try:
            if credentials.tls is None:
                self.port = self._server.add_insecure_port(escaped)
            else:
                self.port = self._server.add_secure_port(escaped, server_credentials(credentials.tls))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ListenError(f"cannot listen on {address}; choose another port, or port 0 for a free one")
        self._started = False

    async def start(self, handlers: Sequence[RpcHandler]) -> None:
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        for handler in handlers:
            members = services.setdefault(handler.method.service, {})
            members[handler.method.name] = _grpc_handler(handler)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, members) for name, members in services.items()]
        )
        await self._add_standard_services(list(services))
        self._started = True
        await self._server.start()

    async def _add_standard_services(self, services: list[str]) -> None:
        servicer = health.aio.HealthServicer()
        for service in services:  # the whole server, "", serves from the start
            await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        channelz.add_channelz_servicer(self._server)
        channelz_name = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
        names = [*services, health.SERVICE_NAME, channelz_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    async def stop(self, grace: float) -> None:
        """Frees the port, gives calls in progress `grace` seconds before it cancels them, and waits for their end."""
        if not self._started:
            self._started = True
            await self._server.start()  # a server that never ran would keep its port
        try:
            await self._server.stop(grace or None)
        except asyncio.CancelledError:
            await self._server.stop(None)
            raise
        finally:
            await self._intake.ended()


def averaging_handlers(service: AveragingService) -> list[RpcHandler]:
    def join_group(request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        return service.join_group(headers.read_join(request, rpc_caller().headers))

    def download_state(_: None) -> AsyncGenerator[DownloadData, None]:
        caller = rpc_caller()
        return service.download_state(headers.read_resume(caller.headers), caller.host)

    async def get_status(request: tuple[int, int, bool]) -> PeerStatus:
        return service.get_status(*request)

    async def get_schema(_: None) -> Schema:
        return service.get_schema()

    return [
        methods.JOIN_GROUP.streams(join_group),
        methods.AGGREGATE_PART.exchanges(service.aggregate_part),
        methods.DOWNLOAD_STATE.streams(download_state),
        methods.GET_STATUS.answers(get_status),
        methods.GET_SCHEMA.answers(get_schema),
        methods.WATCH_ROUNDS.streams(service.watch_rounds),
    ]


def gossip_handlers(service: GossipService) -> list[RpcHandler]:

    async def list_records(key: str) -> tuple[Record, ...]:
        return service.list_records(key)

    return [
        methods.EXCHANGE.streams(service.exchange),
        methods.PUSH.answers(lambda request: service.push(*request)),
        methods.SUBSCRIBE.streams(service.subscribe),
        methods.LIST_RECORDS.answers(list_records),
    ]


def _grpc_handler(rpc: RpcHandler) -> grpc.RpcMethodHandler[bytes, bytes]:
    method, answer = rpc.method, rpc.answer

    async def reply(request: Any) -> AsyncGenerator[Any, None]:
        yield await answer(request)

    replies = answer if method.replies_stream else reply

    async def handle(raw: bytes, context: Context) -> None:
        request = _decoder(method)(raw)
        del raw  # some streams last for days
        # Also a single reply is written and not returned, so that its caller has only so long to read it.
        await _write_all(context, method, replies(request))

    async def handle_stream(requests: Requests, context: Context) -> None:
        requests.decode = _decoder(method)
        last = await _write_all(context, method, replies(requests))
        if isinstance(last, AveragingData) and last.tensor_part is None:  # the sender is refused
            await linger(requests.drop)

    if method.requests_stream:
        return grpc.stream_stream_rpc_method_handler(handle_stream)
    return (grpc.unary_stream_rpc_method_handler if method.replies_stream else grpc.unary_unary_rpc_method_handler)(
        handle
    )


def _decoder(method: RpcMethod[Request, Any]) -> Callable[[bytes], Request]:
    check = claim_checker()  # of the current call

    def decode(raw: bytes) -> Request:
        request = method.read_request(raw)
        if method.sender is not None:
            check(method.sender(request))
        return request

    return decode


async def _write_all(
    context: Context, method: RpcMethod[Any, Reply], replies: AsyncGenerator[Reply, None]
) -> Reply | None:
    """Writes the replies as the caller reads them, closes their generator in any case, and returns the last one."""
    reply = None
    async with aclosing(replies):
        async for reply in replies:
            raw = method.reply.SerializeToString(reply)
            try:
                async with asyncio.timeout(WRITE_SECONDS + len(raw) / WRITE_BYTES_PER_SECOND):
                    await context.write(raw)
            except TimeoutError:
                logger.warning("%s reads no reply to %s and is cut off", context.peer(), method.path)
                raise ProtocolViolationError("the caller took no answer for too long") from None
    return reply
