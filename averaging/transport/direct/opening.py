"""`averaging.direct.v1.Direct/Open`: how a connection is granted, made and accepted."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from averaging.common import HostQuota, parse_address
from averaging.errors import (
    AveragingError,
    BusyError,
    CallRefusedError,
    ListenError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
)
from averaging.transport import AveragingService, RpcHandler, RpcMethod
from averaging.transport.direct.frames import (
    FROM_CALLEE,
    FROM_CALLER,
    HELLO_BYTES,
    MAGIC,
    TICKET_BYTES,
    VERSION,
    Admission,
    BufferPool,
    Cipher,
    Ciphers,
    FrameKind,
    derive_keys,
    read_hello,
    shared_secret,
)
from averaging.transport.direct.link import Link
from averaging.transport.direct.streams import HeaderCache, Stream, serve_stream
from averaging.transport.grpc import (
    CONNECT_SECONDS,
    HANDSHAKE_SECONDS,
    SMALL_BYTES,
    WRITE_BYTES_PER_SECOND,
    WRITE_SECONDS,
    Dialling,
    MessageCopier,
    claim_checker,
)
from averaging.wire import direct_pb2

SERVICE = "/averaging.direct.v1.Direct"

MAX_ADDRESSES = 4  # addresses of one host to which a connection is tried, one after the other


@dataclass(frozen=True, slots=True)
class Request:  # of the caller
    public_key: bytes = b""  # of this connection; empty without TLS
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Grant:  # of the callee
    port: int  # on the host of its endpoint
    ticket: bytes
    public_key: bytes = b""
    version: int = VERSION


class _RequestCopier(MessageCopier[Request]):
    def read(self, message: Any) -> Request:
        request = super().read(message)
        if request.version != VERSION:  # version 1 did not tell it
            raise ProtocolViolationError(
                f"version {request.version or 1} of the direct lane; this peer has version {VERSION}"
            )
        return request


class _GrantCopier(MessageCopier[Grant]):
    def read(self, message: Any) -> Grant:
        grant = super().read(message)
        if not 0 < grant.port < 1 << 16 or len(grant.ticket) != TICKET_BYTES:
            raise ProtocolViolationError(
                f"port {grant.port} and a ticket of {len(grant.ticket)} bytes for a connection"
            )
        return grant


OPEN = RpcMethod(
    f"{SERVICE}/Open",
    _RequestCopier(Request, direct_pb2.OpenRequest),
    _GrantCopier(Grant, direct_pb2.OpenReply),
    max_reply_bytes=SMALL_BYTES,
)


def direct_handlers(listener: Listener, port: Callable[[], int], *, sealed: bool) -> list[RpcHandler]:
    async def grant(request: Request) -> Grant:
        ticket, public_key, ciphers = os.urandom(TICKET_BYTES), b"", None
        if sealed:
            own = X25519PrivateKey.generate()
            public_key = _public_bytes(own)
            secret = shared_secret(own, request.public_key)
            to_callee, to_caller = derive_keys(secret, request.public_key, public_key, ticket)
            ciphers = Ciphers(Cipher(to_caller), Cipher(to_callee))
        listener.grant(ticket, Admission(claim_checker(), ciphers))
        return Grant(port(), ticket, public_key)

    return [OPEN.answers(grant)]


async def open_link(
    endpoint: str,
    ask: Callable[[Request], Awaitable[Grant]],
    dialling: Dialling,
    *,
    sealed: bool,
    max_body: int,
    buffers: BufferPool,
) -> Link:
    """Opens a connection to `endpoint`; the caller's side. `ask` calls `Open`."""
    own = X25519PrivateKey.generate() if sealed else None
    public_key = b"" if own is None else _public_bytes(own)
    try:
        grant = await ask(Request(public_key))
    except CallRefusedError as error:
        if error.cause is not RefusalCause.NOT_SERVED:
            raise
        raise CallRefusedError(endpoint, NOT_SERVED, RefusalCause.NOT_SERVED) from None
    if grant.version != VERSION:
        raise CallRefusedError(
            endpoint,
            f"its direct lane has version {grant.version or 1}, and this peer's {VERSION}",
            RefusalCause.NOT_SERVED,
        )
    ciphers = None
    if own is not None:
        secret = shared_secret(own, grant.public_key)
        to_callee, to_caller = derive_keys(secret, public_key, grant.public_key, grant.ticket)
        ciphers = Ciphers(Cipher(to_callee), Cipher(to_caller))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await _connect(loop, await dialling.addresses(endpoint), grant.port)
            try:
                await loop.sock_sendall(connection, MAGIC + grant.ticket)
                link = Link(
                    connection, endpoint, accepted=FROM_CALLEE, max_body=max_body, buffers=buffers, ciphers=ciphers
                )
            except BaseException:
                connection.close()
                raise
            try:
                await link.send(FrameKind.READY)
                if (await link.read()).kind is not FrameKind.WELCOME:
                    raise ProtocolViolationError(f"what answers at the direct port {grant.port} is not a peer")
            except BaseException:
                link.close()
                raise
            return link
    except TimeoutError:
        reason = f"no answer at its direct port {grant.port} within {CONNECT_SECONDS:g} s"
    except PeerUnreachableError as error:
        reason = f"its direct port {grant.port} did not accept the connection ({error.reason})"
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        reason = f"its direct port {grant.port} cannot be reached ({why})"
    raise PeerUnreachableError(endpoint, reason)


async def _connect(loop: asyncio.AbstractEventLoop, hosts: Sequence[str], port: int) -> socket.socket:
    failure: OSError | None = None
    numeric = socket.AI_NUMERICHOST  # names were resolved and their addresses checked before
    for host in hosts[:MAX_ADDRESSES]:
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
        for family, kind, protocol, _, where in addresses:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                await loop.sock_connect(connection, where)
                return connection
            except BaseException as error:
                connection.close()
                if not isinstance(error, OSError):
                    raise
                failure = error
    raise failure or OSError("its host is unknown")


def _public_bytes(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


NOT_SERVED = "it has no direct lane"

logger = logging.getLogger("averaging.transport")

MAX_CONNECTIONS, MAX_CONNECTIONS_PER_HOST = 1024, 256

VALID_SECONDS = 30.0  # for which a ticket is valid. Callers connect at once.
MAX_TICKETS = 4096  # tickets that are valid and not used

BACKLOG = 128

RETRY_SECONDS = 1.0  # pause before connections are accepted again, if this process has no free descriptor


class Listener:
    """Listens when it is created, and serves connections with a ticket that was granted after `start`."""

    def __init__(self, address: str, *, max_body: int, buffers: BufferPool) -> None:
        self._max_body, self._buffers = max_body, buffers
        self._loop = asyncio.get_running_loop()
        self._sockets = _listening(address)
        self.port: int = self._sockets[0].getsockname()[1]
        self._tickets: dict[bytes, Admission] = {}  # granted in the last `VALID_SECONDS`, and not used
        self._service: AveragingService | None = None
        self._open = HostQuota(MAX_CONNECTIONS, MAX_CONNECTIONS_PER_HOST)
        self._heads = HeaderCache()
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()  # those with a stream in progress

    def start(self, service: AveragingService) -> None:
        self._service = service
        for listening in self._sockets:
            self._listen(listening)

    def grant(self, ticket: bytes, admission: Admission) -> None:
        if len(self._tickets) >= MAX_TICKETS:
            raise BusyError(f"too many direct connections were requested within {VALID_SECONDS:g} s")
        self._tickets[ticket] = admission
        self._loop.call_later(VALID_SECONDS, self._tickets.pop, ticket, None)

    async def stop(self, grace: float) -> None:  # in seconds, for streams in progress
        for listening in self._sockets:
            self._loop.remove_reader(listening)
            listening.close()
        self._sockets.clear()
        for idle in self._connections - self._busy:
            idle.cancel()
        try:
            if self._busy and grace:
                await asyncio.wait(self._busy, timeout=grace)
        finally:
            for connection in self._connections:
                connection.cancel()
            if self._connections:
                await asyncio.wait(self._connections)

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, remote = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("cannot accept a direct connection: %s", error.strerror)
            self._loop.remove_reader(listening)
            self._loop.call_later(RETRY_SECONDS, self._listen, listening)
            return
        host = normalized(str(remote[0]))
        if not self._open.take(host):
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection, f"{host}:{remote[1]}"))
        self._connections.add(task)
        task.add_done_callback(lambda _: self._open.leave(host))
        task.add_done_callback(self._connections.discard)

    def _listen(self, listening: socket.socket) -> None:
        if listening in self._sockets:  # it may have stopped
            self._loop.add_reader(listening, self._accept, listening)

    async def _serve(self, connection: socket.socket, name: str) -> None:
        link: Link | None = None
        try:
            try:
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    admission = self._tickets.pop(await self._read_hello(connection), None)
                    if admission is None:
                        return
                    link = Link(
                        connection,
                        name,
                        accepted=FROM_CALLER,
                        max_body=self._max_body,
                        buffers=self._buffers,
                        ciphers=admission.ciphers,
                    )
                    if (await link.read()).kind is not FrameKind.READY:
                        raise ProtocolViolationError(f"{name} did not begin as a caller does")
                    await link.send(FrameKind.WELCOME)
            except (TimeoutError, OSError, AveragingError) as error:
                logger.debug("a direct connection from %s was not admitted: %s", name, error)
                return
            await self._serve_streams(link, admission)
        finally:
            if link is not None:
                link.close()
            connection.close()

    async def _serve_streams(self, link: Link, admission: Admission) -> None:
        task, service = asyncio.current_task(), self._service
        if task is None or service is None:
            return
        link.on_lost = task.cancel
        link.write_seconds = write_seconds
        while self._sockets:
            stream = Stream(link, admission, self._heads)
            if not await stream.begin():
                return
            self._busy.add(task)
            try:
                await serve_stream(link, stream, service)
            finally:
                self._busy.discard(task)
            if not stream.ended:
                return

    async def _read_hello(self, connection: socket.socket) -> bytes:
        raw = bytearray()
        while len(raw) < HELLO_BYTES and raw.startswith(MAGIC[: len(raw)]):
            received = await self._loop.sock_recv(connection, HELLO_BYTES - len(raw))
            if not received:
                break
            raw += received
        return read_hello(raw)


def write_seconds(nbytes: int) -> float:
    return WRITE_SECONDS + nbytes / WRITE_BYTES_PER_SECOND


def normalized(address: str) -> str:
    """Returns an address without its zone; IPv4 in its own form, also if it is mapped to IPv6."""
    address = address.partition("%")[0]
    return address.removeprefix("::ffff:") if "." in address else address


def _listening(address: str) -> list[socket.socket]:
    """Listens at one port of every address of a host. Nothing is accepted yet."""
    host, port = parse_address(address)
    bound: list[socket.socket] = []
    failure: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"cannot listen on {address} (direct_listen): {error}") from None
    for family, *_, where in addresses:
        chosen = bound[0].getsockname()[1] if bound else port
        try:
            bound.append(socket.create_server((where[0], chosen, *where[2:]), family=family, backlog=BACKLOG))
            bound[-1].setblocking(False)
        except OSError as error:
            failure = error
    if not bound:
        reason = failure.strerror if failure else "no such address"
        raise ListenError(f"cannot listen on {address} (direct_listen): {reason}; choose another port, or port 0")
    return bound
