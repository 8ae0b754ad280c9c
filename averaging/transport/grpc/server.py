"""The listening side: a gRPC server that hands each call to the peer's services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from averaging.config import Inspection
from averaging.errors import ListenError
from averaging.observe.status import PeerStatus
from averaging.protocol.messages import Record
from averaging.protocol.schema import Schema
from averaging.security.credentials import Credentials
from averaging.transport.base import AveragingService, GossipService
from averaging.transport.grpc import headers, methods
from averaging.transport.grpc.authentication import Callers, TokenInterceptor, host_of, server_credentials
from averaging.transport.grpc.channel_options import server_options
from averaging.transport.grpc.error_mapping import refuse
from averaging.transport.grpc.methods import Method

logger = logging.getLogger("averaging.transport")

Request = TypeVar("Request")
Reply = TypeVar("Reply")

Context = grpc.aio.ServicerContext[bytes, bytes]
Handlers: TypeAlias = "dict[Method[Any, Any], grpc.RpcMethodHandler[Any, Any]]"


class _LostEnds(logging.Filter):
    """Keeps one error of grpcio's out of the log: a caller that goes away while its call ends, which harms nobody."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is another one."""
        return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


_LOST_ENDS = _LostEnds()

END_DOUBT_SECONDS = 0.02
"""gRPC shows the loss of a caller first as the end of its messages and, within a millisecond, as a cancellation."""


class Server:
    """Listens from its making on, and answers from `start` on."""

    def __init__(self, address: str, max_message_bytes: int, credentials: Credentials | None = None) -> None:
        """Takes the port.

        Raises:
            ListenError: it cannot be had.
        """
        logging.getLogger("grpc._cython.cygrpc").addFilter(_LOST_ENDS)
        self._calls = _Calls()
        self._credentials = credentials = credentials or Credentials()
        self._callers = Callers(authenticated=credentials.tls is not None)
        interceptors = [self._calls, TokenInterceptor(credentials, self._callers.refusals)]
        self._server = grpc.aio.server(options=server_options(max_message_bytes), interceptors=interceptors)
        try:
            if credentials.tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(credentials.tls))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise ListenError(f"cannot listen on {address}; choose another port, or port 0 for a free one")
        self._started = False

    async def start(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        """Starts to answer calls."""
        handlers = _averaging_handlers(averaging, self._callers)
        if gossip is not None:
            handlers |= _gossip_handlers(gossip, self._callers)
        if self._credentials.inspection is Inspection.OFF:
            for method in (methods.GET_STATUS, methods.GET_SCHEMA, methods.WATCH_ROUNDS, methods.LIST_RECORDS):
                handlers.pop(method, None)
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
        for method, handler in handlers.items():
            services.setdefault(method.service, {})[method.name] = handler
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, members) for name, members in services.items()]
        )
        await self._add_standard_services(list(services))
        self._started = True
        await self._server.start()

    async def _add_standard_services(self, services: list[str]) -> None:
        servicer = health.aio.HealthServicer()
        for service in services:  # "", the whole, serves from the start
            await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        if self._credentials.inspection is Inspection.OFF:
            return
        channelz.add_channelz_servicer(self._server)
        channelz_name = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
        names = [*services, health.SERVICE_NAME, channelz_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)

    async def stop(self, grace: float) -> None:
        """Gives the port back at once, and calls in progress `grace` seconds to end; returns when all have ended."""
        if not self._started:
            self._started = True
            await self._server.start()  # a server that never ran would keep its port
        try:
            await self._server.stop(grace or None)
        except asyncio.CancelledError:
            await self._server.stop(None)
            raise
        finally:
            await self._calls.ended()
            await self._callers.unread.ended()


class _Calls(grpc.aio.ServerInterceptor):
    """The tasks of the calls in progress: gRPC cancels them when it stops, but does not wait until they have ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called in the task of each call, before its handler."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def ended(self) -> None:
        """Returns when no call is in progress."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def _averaging_handlers(service: AveragingService, callers: Callers) -> Handlers:
    async def get_status(_: None) -> PeerStatus:
        return service.get_status()

    async def get_schema(_: None) -> Schema:
        return service.get_schema()

    return {
        methods.JOIN_GROUP: _join(service, callers),
        methods.AGGREGATE_PART: _both_ways(methods.AGGREGATE_PART, callers, service.aggregate_part),
        methods.DOWNLOAD_STATE: _download(service, callers),
        methods.GET_STATUS: _unary(methods.GET_STATUS, callers, get_status),
        methods.GET_SCHEMA: _unary(methods.GET_SCHEMA, callers, get_schema),
        methods.WATCH_ROUNDS: _stream(methods.WATCH_ROUNDS, callers, service.watch_rounds),
    }


def _gossip_handlers(service: GossipService, callers: Callers) -> Handlers:
    async def list_records(key: str) -> tuple[Record, ...]:
        return service.list_records(key)

    return {
        methods.EXCHANGE: _stream(methods.EXCHANGE, callers, service.exchange),
        methods.PUSH: _unary(methods.PUSH, callers, lambda request: service.push(*request)),
        methods.SUBSCRIBE: _stream(methods.SUBSCRIBE, callers, service.subscribe),
        methods.LIST_RECORDS: _unary(methods.LIST_RECORDS, callers, list_records),
    }


def _unary(
    method: Method[Request, Reply], callers: Callers, answer: Callable[[Request], Awaitable[Reply]]
) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(raw: bytes, context: Context) -> None:
        await _answer(context, method, callers, raw, one)

    async def one(request: Request) -> AsyncGenerator[Reply, None]:
        yield await answer(request)

    # On the wire it is the same, but this way it is known when the caller has taken the reply.
    return grpc.unary_stream_rpc_method_handler(handle)


def _stream(
    method: Method[Request, Reply], callers: Callers, answer: Callable[[Request], AsyncGenerator[Reply, None]]
) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(raw: bytes, context: Context) -> None:
        await _answer(context, method, callers, raw, answer)

    return grpc.unary_stream_rpc_method_handler(handle)


def _join(service: AveragingService, callers: Callers) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = methods.JOIN_GROUP

    async def handle(raw: bytes, context: Context) -> None:
        least = headers.read_min_group_size(context.invocation_metadata() or ())
        await _answer(
            context, method, callers, raw, lambda request: service.join_group(replace(request, min_group_size=least))
        )

    return grpc.unary_stream_rpc_method_handler(handle)


def _download(service: AveragingService, callers: Callers) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = methods.DOWNLOAD_STATE

    async def handle(raw: bytes, context: Context) -> None:
        resume = headers.read_resume(context.invocation_metadata() or ())
        await _answer(context, method, callers, raw, lambda _: service.download_state(resume, host_of(context)))

    return grpc.unary_stream_rpc_method_handler(handle)


async def _answer(
    context: Context,
    method: Method[Request, Reply],
    callers: Callers,
    raw: bytes,
    answer: Callable[[Request], AsyncGenerator[Reply, None]],
) -> None:
    """Reads one request and writes the replies to it."""
    try:
        with callers.call(context):
            await _write_all(context, method, callers, answer(callers.read(method, context)(raw)))
    except Exception as error:
        await refuse(context, method.path, error)


def _both_ways(
    method: Method[Request, Reply],
    callers: Callers,
    answer: Callable[[AsyncIterator[Request]], AsyncGenerator[Reply, None]],
) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(_: object, context: Context) -> None:
        try:
            with callers.call(context):
                messages = _Messages(context, callers.read(method, context))
                await _write_all(context, method, callers, answer(messages))
        except Exception as error:
            await refuse(context, method.path, error)

    return grpc.stream_stream_rpc_method_handler(handle)


async def _write_all(
    context: Context, method: Method[Any, Reply], callers: Callers, replies: AsyncGenerator[Reply, None]
) -> None:
    """Writes the replies as the caller takes them, and closes their generator however the call ends."""
    host = host_of(context)
    async with aclosing(replies):
        if method is not methods.AGGREGATE_PART:  # of a round, whose members have limits of their own
            callers.unread.check(host)
        async for reply in replies:
            await callers.unread.write(context, host, method.path, method.encode_reply(reply))


class _Messages(Generic[Request]):
    """What the caller sends, one by one as they are asked for, until it says that there is no more."""

    def __init__(self, context: Context, decode: Callable[[bytes], Request]) -> None:
        self._context = context
        self._decode = decode

    def __aiter__(self) -> AsyncIterator[Request]:
        return self

    async def __anext__(self) -> Request:
        raw = await self._context.read()
        if isinstance(raw, bytes):
            return self._decode(raw)
        await asyncio.sleep(END_DOUBT_SECONDS)
        raise StopAsyncIteration
