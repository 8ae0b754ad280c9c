"""Calls methods of packages above the core, on the same kind of connections as between peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError

from averaging.errors import PeerUnreachableError, ProtocolViolationError
from averaging.security import Credentials
from averaging.transport import Message, RpcMethod
from averaging.transport.grpc.channel_options import channel_options
from averaging.transport.grpc.channels import Channels
from averaging.transport.grpc.client import call_both_ways, call_stream, call_unary
from averaging.transport.grpc.dialling import Dialling
from averaging.transport.grpc.methods import Method

Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)
Result = TypeVar("Result")


def method_of(method: RpcMethod[Request, Reply]) -> Method[Request, Reply]:
    """Returns the method with functions that encode and decode its messages."""
    return Method(
        method.service,
        method.name,
        _encode,
        lambda raw: _decode(method.request, raw, method.path),
        _encode,
        lambda raw: _decode(method.reply, raw, method.path),
        max_request_bytes=method.max_request_bytes,
        max_reply_bytes=method.max_reply_bytes,
    )


class Caller:
    """Calls the methods of one endpoint; belongs to the event loop in which it is first used."""

    def __init__(self, endpoint: str, max_message_bytes: int, credentials: Credentials, dialling: Dialling) -> None:
        self.endpoint = endpoint
        self._methods: dict[RpcMethod[Any, Any], Method[Any, Any]] = {}
        self._channels = Channels(channel_options(max_message_bytes), credentials=credentials, dialling=dialling)

    async def call(
        self, method: RpcMethod[Request, Reply], request: Request | AsyncIterator[Request], timeout: float
    ) -> Reply:
        """Sends the request, or all of them, and returns the reply."""
        if method.requests_stream:
            return await _within(timeout, self.endpoint, self._collected(method, request))
        one = call_unary(self._channels, self.endpoint, self._method(method), cast("Request", request))
        return await _within(timeout, self.endpoint, one)

    def stream(
        self, method: RpcMethod[Request, Reply], request: Request | AsyncIterator[Request]
    ) -> AsyncGenerator[Reply, None]:
        """Sends the request, or all of them, and yields the replies."""
        own = self._method(method)
        if method.requests_stream:
            return call_both_ways(self._channels, self.endpoint, own, cast("AsyncIterator[Request]", request))
        return call_stream(self._channels, self.endpoint, own, cast("Request", request))

    async def close(self) -> None:
        """Closes the connection; calls in progress end."""
        await self._channels.close()

    def _method(self, method: RpcMethod[Request, Reply]) -> Method[Request, Reply]:
        if method not in self._methods:
            self._methods[method] = method_of(method)
        return self._methods[method]

    async def _collected(self, method: RpcMethod[Request, Reply], requests: Request | AsyncIterator[Request]) -> Reply:
        async with aclosing(self.stream(method, requests)) as replies:
            async for reply in replies:
                return reply
        raise ProtocolViolationError(f"answered {method.path} with nothing", self.endpoint)


async def _within(timeout: float, endpoint: str, reply: Awaitable[Result]) -> Result:
    try:
        async with asyncio.timeout(timeout):
            return await reply
    except TimeoutError:
        raise PeerUnreachableError(endpoint, f"no answer within {timeout:g} s") from None


def _encode(message: Message) -> bytes:
    return message.SerializeToString()


def _decode(kind: type[Reply], raw: bytes, path: str) -> Reply:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise ProtocolViolationError(f"a message in {path} that is no {kind.__name__}") from None
