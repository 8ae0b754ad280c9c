"""The calling side: `Channels` calls methods of any endpoint, `RpcChannel` those of one.

A connection is shared by all calls to its endpoint. A call ends on both sides when its caller closes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeAlias, TypeVar, cast
from urllib.parse import quote
from weakref import WeakKeyDictionary

import grpc

from averaging.common import CLIENT_PREFIX, chosen_proxy, is_endpoint, parse_address, parse_ip, proxy_for
from averaging.errors import ClosedError, ConfigError, PeerUnreachableError, ProtocolViolationError
from averaging.security import Credentials
from averaging.transport import RpcMethod, Upload, close
from averaging.transport.grpc.authentication import call_metadata, channel_credentials
from averaging.transport.grpc.channel_options import UNUSED_SECONDS, channel_options
from averaging.transport.grpc.dialling import Dialling
from averaging.transport.grpc.error_mapping import calling, is_failed_write, read_reply

Request = TypeVar("Request")
Reply = TypeVar("Reply")

StreamCall: TypeAlias = "grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.StreamStreamCall[bytes, bytes]"

STATUS_TRIES = 1000  # after a failed write, the callee's status of the call is polled so often, once per millisecond
MAX_MESSAGE_BYTES = 32 << 20  # default maximum size of a message in bytes
MAX_IDLE = 256  # channels kept open without a call in progress. Of more, the least recently used is closed.
END_SECONDS = 1.0  # maximum seconds for gRPC to report to an event loop that its operations have ended

_users: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()
"""The number of open `Channels` of each event loop."""


@dataclass(slots=True, eq=False)
class PeerConnection:
    channel: grpc.aio.Channel
    users: int = 0
    unused_since: float = 0.0


class Channels:
    """Calls methods of any endpoint. Opens channels on demand, and closes broken and unused ones."""

    def __init__(
        self,
        max_message_bytes: int,
        *,
        credentials: Credentials | None = None,
        dialling: Dialling | None = None,
    ) -> None:
        credentials = credentials or Credentials()
        self._options = channel_options(max_message_bytes)
        self._credentials = channel_credentials(credentials.tls) if credentials.tls else None
        self._dialling = dialling or Dialling()
        self._proxy = chosen_proxy()
        self._metadata = call_metadata(credentials.tokens)
        self._connections: dict[str, PeerConnection] = {}  # least recently used first
        self._replaced: set[PeerConnection] = set()  # broken or unused; each is closed when its last call ends
        self._loop: asyncio.AbstractEventLoop | None = None  # once it has opened a channel
        self._closed = False

    async def call(self, endpoint: str, method: RpcMethod[Request, Reply], request: Request) -> Reply:
        async with self.connection(endpoint) as connection:
            start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = connection.channel.unary_unary(method.path)
            with calling(endpoint, sent_token=bool(self._metadata), proxy=self._proxy_of(endpoint)):
                raw = await start(method.request.SerializeToString(request), metadata=self._metadata)
            return read_reply(endpoint, method.read_reply, raw)

    async def stream(
        self,
        endpoint: str,
        method: RpcMethod[Request, Reply],
        request: Request | AsyncIterator[Request],
        headers: tuple[tuple[str, str], ...] = (),
    ) -> AsyncGenerator[Reply, None]:
        """Sends one request, or all of an iterator in the background, and yields the replies.

        The iterator is closed with the call, and its exceptions are raised here. So are those of `error_mapping`.
        """
        async with self.connection(endpoint) as connection:
            metadata = (*self._metadata, *headers)
            upload: Upload[Request] | None = None
            call: StreamCall
            if method.requests_stream:
                both: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = connection.channel.stream_stream(method.path)
                call = exchange = both(metadata=metadata)
                upload = Upload(
                    cast("AsyncIterator[Request]", request),
                    lambda message: (method.request.SerializeToString(message),),
                    exchange.write,
                    exchange.done_writing,
                    exchange.cancel,
                    (grpc.aio.AioRpcError, asyncio.InvalidStateError),
                )
                upload.task = asyncio.create_task(upload.run())
                # A write still waiting at the end of the call would fail, and grpcio would report that as the status.
                exchange.add_done_callback(upload.cancel)
            else:
                start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = connection.channel.unary_stream(method.path)
                call = start(method.request.SerializeToString(cast("Request", request)), metadata=metadata)
            replies: AsyncIterator[bytes] = aiter(call)
            try:
                while (raw := await self._next(endpoint, call, replies)) is not None:
                    yield read_reply(endpoint, method.read_reply, raw)
            except PeerUnreachableError:
                if upload is not None and upload.failure is not None:
                    raise upload.failure from None
                raise
            finally:
                call.cancel()
                if upload is not None:
                    await upload.close()
                await close(replies)

    async def _next(self, endpoint: str, call: StreamCall, replies: AsyncIterator[bytes]) -> bytes | None:
        with calling(endpoint, sent_token=bool(self._metadata), proxy=self._proxy_of(endpoint)):
            try:
                return await anext(replies, None)
            except grpc.aio.AioRpcError as error:
                if not is_failed_write(error.details()):
                    raise
            await raise_for_callee_status(call)
        return None

    @asynccontextmanager
    async def connection(self, endpoint: str) -> AsyncIterator[PeerConnection]:
        """Provides a connection to `endpoint` for one call.

        A channel on which the peer was unreachable is not used again. A new channel dials at once, whereas the old one
        would back off and return its last error meanwhile.
        """
        now = asyncio.get_running_loop().time
        known = self._connections.get(endpoint)
        if known is not None and not known.users and now() - known.unused_since > UNUSED_SECONDS:
            # A router may have dropped its connection silently in such a long pause.
            self._replaced.add(self._connections.pop(endpoint))
        if endpoint not in self._connections:
            target(endpoint)  # checks the address before any look-up
            await self._dialling.check(endpoint)
        # Another call may have opened one meanwhile.
        connection = self._connections.pop(endpoint, None) or PeerConnection(self._open(endpoint))
        self._connections[endpoint] = connection
        connection.users += 1
        try:
            yield connection
        except PeerUnreachableError:
            if self._connections.get(endpoint) is connection:
                del self._connections[endpoint]
                self._replaced.add(connection)
            raise
        finally:
            connection.users -= 1
            connection.unused_since = now()
            await self._close_unused()

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        if self._closed:
            raise ClosedError(f"{endpoint} cannot be called: this peer has been closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            _users[self._loop] = _users.get(self._loop, 0) + 1
        where, proxy = target(self._dialling.reachable(endpoint)), self._proxy_of(endpoint)
        options: list[tuple[str, int | str]] = [*self._options, ("grpc.enable_http_proxy", int(proxy is not None))]
        if proxy is not None:
            options.append(("grpc.http_proxy", proxy))
        if self._credentials is None:
            return grpc.aio.insecure_channel(where, options)
        name = self._dialling.names.get(endpoint)
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(where, self._credentials, options)

    def _proxy_of(self, endpoint: str) -> str | None:
        return proxy_for(parse_address(endpoint)[0], self._proxy)

    async def _close_unused(self) -> None:
        for connection in [connection for connection in self._replaced if not connection.users]:
            self._replaced.discard(connection)
            await connection.channel.close()
        idle = [endpoint for endpoint, connection in self._connections.items() if not connection.users]
        for endpoint in idle[: max(0, len(idle) - MAX_IDLE)]:
            await self._connections.pop(endpoint).channel.close()

    async def close(self) -> None:
        self._closed = True
        connections = [*self._connections.values(), *self._replaced]
        self._connections.clear()
        self._replaced.clear()
        for connection in connections:
            await connection.channel.close()
        loop, self._loop = self._loop, None
        if loop is not None:
            _users[loop] -= 1
        if not _users.get(asyncio.get_running_loop()):
            await _last_reports()


class RpcChannel:
    """Calls the methods of one server or peer over one connection, which is reopened after a loss.

    It is an async context manager and belongs to one event loop.

    Args:
        endpoint: `host:port` of the server.
        credentials: Certificates and tokens, see `read_credentials`.
        named_by_peer: Whether another peer and not the user has named the endpoint. Addresses at which no peer can be,
            such as link-local ones, are not dialled then.
        loopback: Whether an endpoint that another peer has named may be on this machine's loopback.
        certified_host: The host for which the server's certificate must be valid; None for that of the endpoint.

    Raises:
        ConfigError: The endpoint is malformed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        credentials: Credentials | None = None,
        named_by_peer: bool = False,
        loopback: bool = False,
        certified_host: str | None = None,
    ) -> None:
        if parse_address(endpoint)[1] == 0:
            raise ConfigError(f"{endpoint} has port 0; give the port on which the server listens")
        self.endpoint = endpoint
        names = {endpoint: certified_host} if certified_host else {}
        dialling = Dialling(() if named_by_peer else (endpoint,), loopback=loopback, names=names)
        self._channels = Channels(MAX_MESSAGE_BYTES, credentials=credentials, dialling=dialling)

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


async def _last_reports() -> None:
    """Waits until gRPC has reported the end of each call to this event loop, the last user of which has closed.

    A cancelled call is over for its caller at once, and gRPC reports its end to the loop later. If the loop is closed
    by then, the report raises an error in whichever loop of this process has received it, and that loop does not see
    the reports behind it until gRPC wakes it again (grpcio 1.85).
    """
    tasks = {task for task in asyncio.all_tasks() if _awaits_end(task)}
    if tasks:
        await asyncio.wait(tasks, timeout=END_SECONDS)


def _awaits_end(task: asyncio.Task[object]) -> bool:
    """Whether this is the task in which gRPC waits for the end of a call, at its caller or at its server."""
    name = getattr(task.get_coro(), "__qualname__", "")
    return name.endswith(("_AioCall._handle_status_once_received", "_handle_cancellation_from_core"))


def target(endpoint: str) -> str:
    """Returns the gRPC target of a peer. No endpoint can inject anything but a host and a port."""
    if endpoint.startswith(CLIENT_PREFIX):
        raise ProtocolViolationError("is a client, which is never dialled", endpoint)
    if not is_endpoint(endpoint):
        raise ProtocolViolationError(f"{endpoint!r} is not the address of a peer; it must be HOST:PORT")
    host, port = parse_address(endpoint)
    if (address := parse_ip(host)) is None:
        return f"dns:///{quote(host)}:{port}"
    return f"ipv4:{address}:{port}" if address.version == 4 else f"ipv6:{quote(f'[{address}]:{port}')}"
