"""Calls methods of one server, for rooms that are no transport of a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Self, TypeVar, cast

from averaging.common import parse_address
from averaging.errors import ConfigError, PeerUnreachableError, ProtocolViolationError
from averaging.security import Credentials
from averaging.transport import RpcMethod
from averaging.transport.grpc.channels import Channels
from averaging.transport.grpc.dialling import Dialling

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MAX_MESSAGE_BYTES = 32 << 20
"""Default maximum size of a message in bytes."""


class RpcChannel:
    """Calls the methods of one server or peer over one connection, which is reopened after a loss.

    It is an async context manager and belongs to one event loop.

    Args:
        endpoint: `host:port` of the server.
        credentials: Certificates and tokens, see `read_credentials`.
        max_message_bytes: Maximum size of a message.
        named_by_peer: Whether another peer and not the user has named the endpoint. Addresses at which no peer can be,
            such as link-local ones, are not dialled then.
        loopback: Whether an endpoint that another peer has named may be on this machine's loopback.
        certified_host: The host for which the server's certificate must be valid; None for that of the endpoint.
        proxy: URL of the HTTP proxy; None for that of `AVERAGING_PROXY`, if any.

    Raises:
        ConfigError: The endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        credentials: Credentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        named_by_peer: bool = False,
        loopback: bool = False,
        certified_host: str | None = None,
        proxy: str | None = None,
    ) -> None:
        if parse_address(endpoint)[1] == 0:
            raise ConfigError(f"{endpoint} has port 0; give the port on which the server listens")
        self.endpoint = endpoint
        names = {endpoint: certified_host} if certified_host else {}
        dialling = Dialling(() if named_by_peer else (endpoint,), loopback=loopback, names=names)
        self._channels = Channels(max_message_bytes, credentials=credentials, dialling=dialling, proxy=proxy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Calls in progress end with a `PeerUnreachableError`."""
        await self._channels.close()

    async def call(
        self,
        method: RpcMethod[Request, Reply],
        request: Request | AsyncIterator[Request],
        timeout: float,
    ) -> Reply:
        """Calls a method with one reply.

        Args:
            method: The method.
            request: The request, or an iterator of them if the method takes a stream.
            timeout: Seconds for the whole call.

        Raises:
            PeerUnreachableError: There is no answer within `timeout`, or the connection broke.
            CallRefusedError: The server refused the call, for example because it requires another token.
            ProtocolViolationError: The reply is malformed or too long.
            ClosedError: The channel was closed.
        """
        if method.replies_stream:
            raise ConfigError(f"{method.path} answers with a stream; use stream()")
        try:
            async with asyncio.timeout(timeout):
                if not method.requests_stream:
                    return await self._channels.call(self.endpoint, method, cast("Request", request))
                async with aclosing(self._channels.stream(self.endpoint, method, request)) as replies:
                    async for reply in replies:
                        return reply
        except TimeoutError:
            raise PeerUnreachableError(self.endpoint, f"no answer within {timeout:g} s") from None
        raise ProtocolViolationError(f"answered {method.path} with nothing", self.endpoint)

    def stream(
        self,
        method: RpcMethod[Request, Reply],
        request: Request | AsyncIterator[Request],
        headers: tuple[tuple[str, str], ...] = (),
    ) -> AsyncGenerator[Reply, None]:
        """Calls a method with many replies. Close the generator (`contextlib.aclosing`) to end the call.

        Args:
            method: The method.
            request: The request, or an iterator of them if the method takes a stream.
            headers: Sent with the call.

        Raises:
            AveragingError: From the generator, as `call`; there is no time limit.
        """
        if not method.replies_stream:
            raise ConfigError(f"{method.path} answers with one message; use call()")
        return self._channels.stream(self.endpoint, method, request, headers)
