"""`averaging.direct.v1.Direct/Open`: how a connection is granted, on both sides, and how the caller makes it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from averaging.errors import CallRefusedError, PeerUnreachableError, ProtocolViolationError, RefusalCause
from averaging.transport.direct.frames import (
    DIGEST_BYTES,
    FROM_CALLEE,
    NONCE_BYTES,
    TICKET_BYTES,
    VERSION,
    BufferPool,
    FrameKind,
    commitment_to,
    pack_hello,
    proof_of,
)
from averaging.transport.direct.lanes import NOT_SERVED
from averaging.transport.direct.link import Link
from averaging.transport.direct.sealing import (
    KEY_BYTES,
    VALID_SECONDS,
    Admission,
    Ciphers,
    Tickets,
    derive_keys,
    shared_secret,
)
from averaging.transport.grpc import (
    CONNECT_SECONDS,
    SMALL_BYTES,
    Callers,
    Context,
    Dialling,
    Method,
    decode_nothing,
    encode_nothing,
    host_of,
    parse,
    unary,
    write_all,
)
from averaging.wire import direct_pb2

SERVICE = "averaging.direct.v1.Direct"

MAX_ADDRESSES = 4
"""Addresses of one host to which a connection is tried, one after the other."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller asks for.

    Attributes:
        commitment: digest of the nonce that it will send, 32 bytes.
        public_key: of this connection; empty without TLS.
        version: of the caller's lane.
    """

    commitment: bytes
    public_key: bytes = b""
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Grant:
    """What the callee answers.

    Attributes:
        port: on the host of the callee's endpoint.
        ticket: for one connection.
        public_key: of this connection; empty without TLS.
        version: of the callee's lane.
    """

    port: int
    ticket: bytes
    public_key: bytes = b""
    version: int = VERSION


def _encode_request(request: Request) -> bytes:
    return direct_pb2.OpenRequest(
        public_key=request.public_key, version=request.version, commitment=request.commitment
    ).SerializeToString()


def _decode_request(raw: bytes) -> Request:
    wire = parse(direct_pb2.OpenRequest(), raw)
    if wire.version != VERSION:  # version 1 did not tell it
        raise ProtocolViolationError(f"version {wire.version or 1} of the direct lane; this peer has version {VERSION}")
    if len(wire.commitment) != DIGEST_BYTES:
        raise ProtocolViolationError(f"a commitment of {len(wire.commitment)} bytes instead of {DIGEST_BYTES}")
    return Request(wire.commitment, wire.public_key, wire.version)


def _encode_reply(grant: Grant) -> bytes:
    return direct_pb2.OpenReply(
        port=grant.port,
        ticket=grant.ticket,
        seconds=VALID_SECONDS,
        public_key=grant.public_key,
        version=grant.version,
    ).SerializeToString()


def _decode_reply(raw: bytes) -> Grant:
    wire = parse(direct_pb2.OpenReply(), raw)
    if not 0 < wire.port < 1 << 16 or len(wire.ticket) != TICKET_BYTES:
        raise ProtocolViolationError(f"port {wire.port} and a ticket of {len(wire.ticket)} bytes for a connection")
    return Grant(wire.port, wire.ticket, wire.public_key, wire.version)


OPEN: Method[Request, Grant] = Method(
    SERVICE,
    "Open",
    _encode_request,
    _decode_request,
    _encode_reply,
    _decode_reply,
    max_reply_bytes=SMALL_BYTES,
)


ECHO: Method[bytes, None] = Method(
    SERVICE,
    "Echo",
    lambda ticket: direct_pb2.EchoRequest(ticket=ticket).SerializeToString(),
    lambda raw: parse(direct_pb2.EchoRequest(), raw).ticket,
    encode_nothing,
    decode_nothing,
    max_reply_bytes=SMALL_BYTES,
)


def echo_handler(echo: Callable[[bytes], None], callers: Callers) -> grpc.RpcMethodHandler[bytes, bytes]:
    """The callee's side of `Echo`; `echo` sends an ALIVE frame over the connection with a ticket."""

    async def answer(ticket: bytes) -> None:
        echo(ticket)

    return unary(ECHO, callers, answer)


def open_handler(
    tickets: Tickets, port: Callable[[], int], callers: Callers, clock: Callable[[], float], *, sealed: bool
) -> grpc.RpcMethodHandler[bytes, bytes]:
    """The callee's side.

    Args:
        tickets: where the connection is admitted.
        port: returns the port at which callers reach this peer.
        callers: of the gRPC server.
        clock: of the tickets.
        sealed: whether this peer has TLS, so that the connection is sealed.
    """

    async def handle(raw: bytes, context: Context) -> None:
        request = callers.read(OPEN, context)(raw)
        ticket, public_key, seal = os.urandom(TICKET_BYTES), b"", None
        if sealed:
            own = X25519PrivateKey.generate()
            public_key = _public_bytes(own)
            seal = partial(_ciphers_of_callee, shared_secret(own, request.public_key), request.public_key, public_key)
        admission = Admission(host_of(context), ticket, callers.checker(context), seal)
        tickets.grant(admission, request.commitment, clock())

        async def reply() -> Any:
            yield Grant(port(), ticket, public_key)

        await write_all(context, OPEN, callers, reply())

    return grpc.unary_unary_rpc_method_handler(handle)


def _ciphers_of_callee(secret: bytes, caller: bytes, callee: bytes, proof: bytes) -> Ciphers:
    return Ciphers.of_callee(derive_keys(secret, caller, callee, proof))


async def open_link(
    endpoint: str,
    ask: Callable[[Request], Awaitable[Grant]],
    dialling: Dialling,
    *,
    sealed: bool,
    max_body: int,
    buffers: BufferPool,
) -> Link:
    """Opens a connection to `endpoint`; the caller's side.

    Args:
        endpoint: of the callee.
        ask: calls `Open`.
        dialling: decides which addresses are dialled.
        sealed: whether this peer has TLS, so that the connection is sealed.
        max_body: bytes of the largest body that is accepted.
        buffers: where bodies are received.

    Raises:
        CallRefusedError: the callee has no direct lane, or one of another version.
        TransportError: the callee does not grant it, or cannot be reached at its direct port.
        ProtocolViolationError: the answer is malformed, or the address must not be dialled.
    """
    own = X25519PrivateKey.generate() if sealed else None
    public_key = b"" if own is None else _public_bytes(own)
    nonce = os.urandom(NONCE_BYTES)
    try:
        grant = await ask(Request(commitment_to(nonce), public_key))
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
        secret, proof = shared_secret(own, grant.public_key), proof_of(nonce, grant.ticket)
        ciphers = Ciphers.of_caller(derive_keys(secret, public_key, grant.public_key, proof))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await _connect(loop, await dialling.addresses(endpoint), grant.port)
            try:
                await loop.sock_sendall(connection, pack_hello(nonce, grant.ticket))
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
            link.ticket = grant.ticket
            return link
    except TimeoutError:
        reason = f"no answer at its direct port {grant.port} within {CONNECT_SECONDS:g} s"
    except PeerUnreachableError as error:
        reason = f"its direct port {grant.port} did not accept the connection ({error.reason})"
    except OSError as error:
        reason = f"its direct port {grant.port} cannot be reached ({error.strerror or error})"
    raise PeerUnreachableError(endpoint, reason)


async def _connect(loop: asyncio.AbstractEventLoop, hosts: Sequence[str], port: int) -> socket.socket:
    failure: OSError | None = None
    numeric = socket.AI_NUMERICHOST  # names were resolved and their addresses checked before
    for host in hosts[:MAX_ADDRESSES]:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
        for family, kind, protocol, _, where in found:
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
