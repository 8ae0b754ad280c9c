"""The listening side: a gRPC server that hands each call to the peer's services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from averaging.errors import ListenError, ProtocolViolationError
from averaging.protocol import AveragingData, DownloadData, JoinRequest, MessageFromLeader, Record
from averaging.receipts import PeerStatus
from averaging.security import Credentials
from averaging.tensors import Schema
from averaging.transport import AveragingService, GossipService, RpcHandler, RpcMethod, linger, rpc_caller
from averaging.transport.grpc import channel_options as headers
from averaging.transport.grpc import methods
from averaging.transport.grpc.authentication import Callers, claim_checker, server_credentials
from averaging.transport.grpc.channel_options import WRITE_BYTES_PER_SECOND, WRITE_SECONDS, server_options
from averaging.transport.grpc.request_intake import Intake, Requests

logger = logging.getLogger("averaging.transport")

Request = TypeVar("Request")
Reply = TypeVar("Reply")

Context = grpc.aio.ServicerContext[bytes, bytes]


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
    """Returns what decodes the requests of the current call, and checks whom they name as their sender."""
    check = claim_checker()

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
