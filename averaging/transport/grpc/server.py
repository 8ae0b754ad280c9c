"""The listening side: a gRPC server that hands each call to the peer's services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from averaging.config import Inspection
from averaging.errors import ListenError
from averaging.protocol import Record
from averaging.receipts import PeerStatus
from averaging.security import Credentials
from averaging.tensors import Schema
from averaging.transport import AveragingService, GossipService, RpcHandler
from averaging.transport.grpc import channel_options as headers
from averaging.transport.grpc import methods
from averaging.transport.grpc.authentication import Callers, TokenInterceptor, host_of, server_credentials
from averaging.transport.grpc.channel_options import held_limits, server_options
from averaging.transport.grpc.methods import Method
from averaging.transport.grpc.request_intake import IntakeInterceptor, RequestReader
from averaging.transport.grpc.rpc_channel import method_of
from averaging.transport.grpc.unfinished_calls import UnfinishedCalls
from averaging.transport.grpc.unread_replies import write_average

logger = logging.getLogger("averaging.transport")

Request = TypeVar("Request")
Reply = TypeVar("Reply")

Context = grpc.aio.ServicerContext[bytes, bytes]
Handlers: TypeAlias = "dict[Method[Any, Any], grpc.RpcMethodHandler[Any, Any]]"


END_DOUBT_SECONDS = 0.02
"""Wait after the last message: gRPC reports the loss of a caller as that, and cancels the call a millisecond later."""

LINGER_SECONDS = 0.5
"""Seconds for which the stream of a refused sender is read: some clients lose the reply if a write fails."""


class Server:
    """Listens when it is created, and answers calls after `start`."""

    def __init__(self, address: str, max_message_bytes: int, credentials: Credentials | None = None) -> None:
        """Binds the port.

        Raises:
            ListenError: the port cannot be bound.
        """
        self._calls = _Calls()
        self._credentials = credentials = credentials or Credentials()
        self._callers = Callers(authenticated=credentials.tls is not None)
        self._unfinished = UnfinishedCalls(held_limits(max_message_bytes))
        self._callers.unread.hang_up = self._unfinished.hang_up
        interceptors = [
            self._calls,
            IntakeInterceptor(self._callers, self._unfinished),
            TokenInterceptor(credentials, self._callers.refusals),
        ]
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

    async def start(
        self,
        averaging: AveragingService | None,
        gossip: GossipService | None,
        rpcs: Sequence[RpcHandler] = (),
        further: Callable[[Callers], Handlers] | None = None,
    ) -> None:
        """Starts to answer calls, also those of `rpcs`, and those that `further` returns handlers for."""
        handlers = _rpc_handlers(rpcs, self._callers)
        if further is not None:
            handlers |= further(self._callers)
        if averaging is not None:
            handlers |= _averaging_handlers(averaging, self._callers)
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
        self._unfinished.start(self.port)
        await self._server.start()

    async def _add_standard_services(self, services: list[str]) -> None:
        servicer = health.aio.HealthServicer()
        for service in services:  # the whole server, "", serves from the start
            await servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        if self._credentials.inspection is Inspection.OFF:
            return
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
            await self._calls.ended()
            await self._callers.unread.ended()
            self._unfinished.stop()


class _Calls(grpc.aio.ServerInterceptor):
    """The tasks of the calls in progress: a stopped gRPC server cancels them but does not wait for their end."""

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
        methods.AGGREGATE_PART: _parts(service, callers),
        methods.DOWNLOAD_STATE: _download(service, callers),
        methods.GET_STATUS: unary(methods.GET_STATUS, callers, get_status),
        methods.GET_SCHEMA: unary(methods.GET_SCHEMA, callers, get_schema),
        methods.WATCH_ROUNDS: _stream(methods.WATCH_ROUNDS, callers, service.watch_rounds),
    }


def _gossip_handlers(service: GossipService, callers: Callers) -> Handlers:
    async def list_records(key: str) -> tuple[Record, ...]:
        return service.list_records(key)

    return {
        methods.EXCHANGE: _stream(methods.EXCHANGE, callers, service.exchange),
        methods.PUSH: unary(methods.PUSH, callers, lambda request: service.push(*request)),
        methods.SUBSCRIBE: _stream(methods.SUBSCRIBE, callers, service.subscribe),
        methods.LIST_RECORDS: unary(methods.LIST_RECORDS, callers, list_records),
    }


def _rpc_handlers(rpcs: Sequence[RpcHandler], callers: Callers) -> Handlers:
    def handler(rpc: RpcHandler) -> tuple[Method[Any, Any], grpc.RpcMethodHandler[Any, Any]]:
        method, answer = method_of(rpc.method), rpc.answer

        async def one_reply(messages: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
            yield await answer(messages)

        if rpc.method.requests_stream:
            return method, _both_ways(method, callers, answer if rpc.method.replies_stream else one_reply)
        return method, (_stream if rpc.method.replies_stream else unary)(method, callers, answer)

    return dict(map(handler, rpcs))


def unary(
    method: Method[Request, Reply], callers: Callers, answer: Callable[[Request], Awaitable[Reply]]
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A handler of one request with one reply."""

    async def handle(raw: bytes, context: Context) -> None:
        # Written and not returned, so that the server sees when the caller has read the reply.
        await write_all(context, method, callers, one(callers.read(method, context)(raw)))

    async def one(request: Request) -> AsyncGenerator[Reply, None]:
        yield await answer(request)

    return grpc.unary_unary_rpc_method_handler(handle)


def _stream(
    method: Method[Request, Reply], callers: Callers, answer: Callable[[Request], AsyncGenerator[Reply, None]]
) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(raw: bytes, context: Context) -> None:
        request = callers.read(method, context)(raw)
        del raw  # some streams last for days
        await write_all(context, method, callers, answer(request))

    return grpc.unary_stream_rpc_method_handler(handle)


def _both_ways(
    method: Method[Request, Reply],
    callers: Callers,
    answer: Callable[[AsyncIterator[Request]], AsyncGenerator[Reply, None]],
) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def handle(incoming: RequestReader, context: Context) -> None:
        await write_all(context, method, callers, answer(_Messages(incoming, callers.read(method, context))))

    return grpc.stream_stream_rpc_method_handler(handle)


def _join(service: AveragingService, callers: Callers) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = methods.JOIN_GROUP

    async def handle(raw: bytes, context: Context) -> None:
        given = context.invocation_metadata() or ()
        least, names = headers.read_min_group_size(given), headers.read_names(given)
        request = replace(callers.read(method, context)(raw), min_group_size=least, names=names)
        await write_all(context, method, callers, service.join_group(request))

    return grpc.unary_stream_rpc_method_handler(handle)


def _download(service: AveragingService, callers: Callers) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = methods.DOWNLOAD_STATE

    async def handle(raw: bytes, context: Context) -> None:
        callers.read(method, context)(raw)
        resume = headers.read_resume(context.invocation_metadata() or ())
        await write_all(context, method, callers, service.download_state(resume, host_of(context)))

    return grpc.unary_stream_rpc_method_handler(handle)


def _parts(service: AveragingService, callers: Callers) -> grpc.RpcMethodHandler[bytes, bytes]:
    method = methods.AGGREGATE_PART

    async def handle(incoming: RequestReader, context: Context) -> None:
        messages = _Messages(incoming, callers.read(method, context))
        refused = False
        async with aclosing(service.aggregate_part(messages)) as replies:
            async for reply in replies:
                refused = reply.tensor_part is None
                await write_average(context, method.path, method.encode_reply(reply))
        if refused:
            await messages.read_to_the_end()

    return grpc.stream_stream_rpc_method_handler(handle)


async def write_all(
    context: Context, method: Method[Any, Reply], callers: Callers, replies: AsyncGenerator[Reply, None]
) -> None:
    """Writes the replies as the caller reads them, and closes their generator however the call ends."""
    host = host_of(context)
    async with aclosing(replies):
        callers.unread.check(host, context.peer())
        async for reply in replies:
            await callers.unread.write(context, host, method.path, method.encode_reply(reply))


class _Messages(Generic[Request]):
    """The decoded messages of one caller, each read from gRPC when it is asked for."""

    def __init__(self, incoming: RequestReader, decode: Callable[[bytes], Request]) -> None:
        self._incoming = incoming
        self._decode = decode
        self._begun = False
        self._reading = False

    def __aiter__(self) -> AsyncIterator[Request]:
        return self

    async def __anext__(self) -> Request:
        if self._begun:  # the service has accepted the sender
            self._incoming.call.finish()
        raw = await self._read()
        self._begun = True
        if raw is not None:
            return self._decode(raw)
        await asyncio.sleep(END_DOUBT_SECONDS)
        raise StopAsyncIteration

    async def read_to_the_end(self) -> None:
        """Discards what the caller still sends, for at most `LINGER_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._reading and await self._read() is not None:
                    self._incoming.call.release()

    async def _read(self) -> bytes | None:
        self._reading = True  # still so after a cancellation: gRPC continues to read, and allows no second read
        raw = await self._incoming.read()
        self._reading = False
        return raw
