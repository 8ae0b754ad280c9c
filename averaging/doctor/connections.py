"""Connections that the doctor itself makes to a peer, and the listener that waits for the peer's connection back."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from averaging.common import duration, parse_address, parse_ip, spelled
from averaging.config import PeerConfig
from averaging.doctor.checks import Finding, failure, ok
from averaging.probe import GREETING_SECONDS, greeting_of, trusting

CONNECT_SECONDS, HANDSHAKE_SECONDS = 5.0, 8.0

SMALL_PACKET, HEADERS = 1280, 60  # the packet that every network carries (IPv6), and the headers of IP and TCP in it

ISSUE = "issue another one (averaging ca issue)"

# Codes of OpenSSL for what is wrong with a certificate (`X509_V_ERR_…`). The others concern its authority.
_NOT_YET, _EXPIRED, _HOST, _IP = 9, 10, 62, 64


@dataclass(frozen=True, slots=True)
class DialledAddress:
    """What came of a TCP connection to an address: the seconds until it was open, or why it failed."""

    address: str
    seconds: float = 0.0
    failed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.address}: {self.failed or f'connected in {duration(self.seconds)}'}"


async def connect(address: str, port: int) -> DialledAddress:
    started = time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        remedy = f"a firewall or router drops it, or no machine is there: let TCP port {port} in"
        return DialledAddress(address, failed=f"no answer within {CONNECT_SECONDS:g} s", remedy=remedy)
    except ConnectionRefusedError:
        remedy = "start the peer, or correct the port"
        return DialledAddress(address, failed="connection refused: nothing listens there", remedy=remedy)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        return DialledAddress(address, failed=reason, remedy="check the address, and the routes of this machine")
    writer.transport.abort()
    return DialledAddress(address, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class Handshake:
    version: str = ""  # of TLS; empty if it failed, or if the peer closed the connection after it
    error: OSError | None = None
    small_pass: bool = False  # whether it works with packets of `SMALL_PACKET` bytes, and not with usual ones

    @property
    def reason(self) -> str:
        return (self.error.reason or "") if isinstance(self.error, ssl.SSLError) else ""


async def shake_hands(config: PeerConfig, address: str, port: int, host: str) -> Handshake:
    """Makes a TLS handshake with a peer as gRPC would; without certificates only to see whether it speaks TLS."""
    context = _client_context(config)
    try:
        return Handshake(await _version(context, address, port, host))
    except TimeoutError as error:
        small = False
        with suppress(OSError):
            small = bool(await _version(context, address, port, host, segment=SMALL_PACKET - HEADERS))
        return Handshake(error=error, small_pass=small)
    except OSError as error:
        return Handshake(error=error)


def _client_context(config: PeerConfig) -> ssl.SSLContext:
    if config.tls_ca is None or config.tls_cert is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
        context.set_alpn_protocols(["h2"])
        return context
    context = trusting(Path(config.tls_ca).read_bytes())
    context.load_cert_chain(config.tls_cert, config.tls_key)
    return context


async def _version(context: ssl.SSLContext, address: str, port: int, host: str, segment: int | None = None) -> str:
    """Returns the version of TLS; empty if the server closes the connection after the handshake.

    With TLS 1.3 a server refuses a certificate only then, and gRPC does so without a reason.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        family, kind, protocol, _, where = (await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM))[0]
        with socket.socket(family, kind, protocol) as own:
            own.setblocking(False)
            if segment is not None:  # the peer is told of it too, and sends no larger ones
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            await loop.sock_connect(own, where)
            reader, writer = await asyncio.open_connection(sock=own, ssl=context, server_hostname=host)
            try:
                begun = await reader.read(1)  # a gRPC server begins with its settings
                return str(writer.get_extra_info("ssl_object").version()) if begun else ""
            finally:
                writer.transport.abort()


def judge_handshake(config: PeerConfig, host: str, done: Handshake) -> Finding:
    """The finding about a handshake; `host` is that for which the peer's certificate must be valid."""
    error, words = done.error, done.reason.lower().replace("_", " ")
    if config.tls_ca is None:
        if error is not None and "ALERT" not in done.reason:
            return ok("neither side uses TLS")
        remedy = f"give {spelled('tls_ca')}, {spelled('tls_cert')} and {spelled('tls_key')} of its run"
        return failure("the peer speaks TLS, and this one has no certificate", remedy)
    if done.version:
        return ok(f"{done.version}; both sides accept each other's certificates")
    if done.small_pass:
        text = f"packets of {SMALL_PACKET:,} bytes pass, and larger ones vanish without a word: TLS handshakes hang"
        return failure(text, smaller_packets())
    if error is None:
        text = "the peer closes the connection after the handshake, so it refuses the certificate of this one"
        why = "by its clock the certificate has expired, or its authority is unknown there"
        return failure(f"{text}: {why}", f"give both peers the same ca.pem, or {ISSUE}")
    if isinstance(error, ssl.SSLCertVerificationError):
        remedies = {
            _EXPIRED: f"there, {ISSUE}",
            _NOT_YET: "set the clocks of both machines",
            _HOST: f"there, {ISSUE} for {host}, or join it at a name that its certificate has",
        }
        remedies[_IP] = remedies[_HOST]
        authority = f"give the ca.pem of that run as {spelled('tls_ca')}"
        text = f"the certificate of the peer is refused here: {error.verify_message}"
        return failure(text, remedies.get(error.verify_code, authority))
    if "WRONG_VERSION_NUMBER" in done.reason or "RECORD_LAYER_FAILURE" in done.reason:
        return failure("the peer speaks no TLS", "start all peers of a run with TLS, or none")
    if "ALERT" in done.reason or "DECRYPT_ERROR" in done.reason:
        text = f"the peer refuses the certificate of this one: {words}"
        return failure(text, f"get one from the authority of its run, or {ISSUE}")
    text = "it does not answer" if isinstance(error, TimeoutError) else words or "it closed the connection"
    remedy = "check that a peer with TLS is up there, and that no firewall inspects the connection"
    return failure(f"{text} during the TLS handshake", remedy)


def smaller_packets() -> str:
    """The remedy where large packets vanish."""
    return (
        f"send smaller packets: `ip link set dev INTERFACE mtu {SMALL_PACKET}` here, or the same at the peer; or have "
        'the router let ICMP "fragmentation needed" and "packet too big" through, or clamp the MSS of TCP to '
        f"{SMALL_PACKET - HEADERS}"
    )


# The listener for a connection back.


@asynccontextmanager
async def listening(config: PeerConfig, nonce: bytes) -> AsyncIterator[int]:
    """Listens at `listen`, and writes `nonce` to each connection. Yields the port; 0 if it cannot listen there."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(greeting_of(nonce))
            async with asyncio.timeout(GREETING_SECONDS):
                await writer.drain()
                if writer.can_write_eof():
                    writer.write_eof()
        except OSError:
            pass  # the caller is gone
        finally:
            writer.close()

    try:
        context = server_context(config)
        own = await asyncio.to_thread(_bound, *parse_address(config.listen))
    except OSError:  # SSLError is one
        yield 0
        return
    server = await asyncio.start_server(greet, sock=own, ssl=context)
    try:
        yield int(own.getsockname()[1])
    finally:
        server.close()


def server_context(config: PeerConfig) -> ssl.SSLContext | None:
    """The settings of a listener with this peer's certificate, which asks for none; None without TLS."""
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_cert, config.tls_key)
    context.set_alpn_protocols(["h2"])
    return context


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens as gRPC would: on all addresses of both families for either wildcard."""
    name = host.strip("[]")
    if parse_ip(name) in (ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")):  # noqa: S104 - compared only
        if socket.has_dualstack_ipv6():
            with suppress(OSError):  # IPv6 may be off in this network namespace
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("0.0.0.0", port))  # noqa: S104 - as the user wants it
    family, *_, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where[:2] if len(where) == 2 else where, family=family)
