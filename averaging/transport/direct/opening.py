"""`averaging.direct.v1.Direct/Open`: how a connection is granted, on both sides, and how the caller makes it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from averaging.errors import CallRefusedError, PeerUnreachableError, ProtocolViolationError, RefusalCause
from averaging.transport import RpcHandler, RpcMethod
from averaging.transport.direct.frames import (
    FROM_CALLEE,
    MAGIC,
    TICKET_BYTES,
    VERSION,
    BufferPool,
    FrameKind,
)
from averaging.transport.direct.lanes import NOT_SERVED
from averaging.transport.direct.link import Link
from averaging.transport.direct.listener import Listener
from averaging.transport.direct.sealing import (
    KEY_BYTES,
    Admission,
    Cipher,
    Ciphers,
    derive_keys,
    shared_secret,
)
from averaging.transport.grpc import (
    CONNECT_SECONDS,
    SMALL_BYTES,
    Dialling,
    MessageCopier,
    claim_checker,
)
from averaging.wire import direct_pb2

SERVICE = "/averaging.direct.v1.Direct"

MAX_ADDRESSES = 4
"""Addresses of one host to which a connection is tried, one after the other."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asks for."""

    public_key: bytes = b""  # of this connection; empty without TLS
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Grant:
    """What the callee answers."""

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
    """The callee's side; `port` returns the port at which callers reach `listener`."""

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
        reason = (
            f"its direct port {grant.port} cannot be reached ({os.strerror(error.errno) if error.errno else error})"
        )
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
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
    raise failure or OSError("its host is unknown")


def _public_bytes(key: X25519PrivateKey) -> bytes:
    raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    if len(raw) != KEY_BYTES:
        raise ValueError("not a key of X25519")
    return raw
