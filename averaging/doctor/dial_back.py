"""A connection back to the caller: what a peer does for a doctor elsewhere, and the listener that waits for it.

A peer that dials addresses on request could be used to reach what the caller cannot. So it dials only the IP address
from which the call came, once per call, a limited number of times a minute, and tells nothing of what it reads there.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

from averaging.common import Address, objection, parse_address, parse_ip
from averaging.errors import BusyError, ProtocolViolationError

if TYPE_CHECKING:
    from averaging.security import Tls

NONCE_BYTES = 16

DIAL_SECONDS, GREETING_SECONDS = 5.0, 2.0
"""Time limits of a connection back: until it is open, and until the listener has written its greeting."""

PERIOD_SECONDS, PER_HOST, IN_ALL = 60.0, 6, 30
"""Connections back in a period, for one calling host and for all."""

MAX_GREETED = 64
"""Connections that a doctor's listener greets, so that strangers cannot keep it busy."""


class DialOutcome(StrEnum):
    """What came of a connection back."""

    REACHED = "reached"
    """The caller's own listener answered."""
    OTHER = "other"
    """Something else listens there: a running peer, or another machine."""
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    CERTIFICATE = "certificate"
    """TLS failed: what listens there has no certificate for that host, or speaks no TLS."""
    NOT_YOURS = "not_yours"
    """It is not the address from which the call came, which was dialled instead."""


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The result of a connection back. The attributes are those of `DialBackReply` in probe.proto."""

    outcome: DialOutcome
    caller: str
    reason: str = ""
    seconds: float = 0.0
    at_caller: str = ""


class DialLimits:
    """Limits the connections back in a period. Its memory is bounded by `in_all`.

    Args:
        clock: A monotonic clock in seconds.
        per_host: Maximum for one host.
        in_all: Maximum for all hosts.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, per_host: int = PER_HOST, in_all: int = IN_ALL
    ) -> None:
        self._clock, self._per_host, self._in_all = clock, per_host, in_all
        self._dialled: deque[tuple[float, str]] = deque()  # earliest first

    def take(self, host: str) -> None:
        """Counts one connection.

        Raises:
            BusyError: The limit of the host, or that of all, is reached.
        """
        now = self._clock()
        while self._dialled and now - self._dialled[0][0] >= PERIOD_SECONDS:
            self._dialled.popleft()
        own = sum(each == host for _, each in self._dialled)
        if own >= self._per_host or len(self._dialled) >= self._in_all:
            whose = f"{own} connections back to your host" if own >= self._per_host else f"{self._in_all} connections"
            raise BusyError(f"{whose} in the last {PERIOD_SECONDS:.0f} s are the maximum; ask again in a minute")
        self._dialled.append((now, host))


def caller_address(host: str) -> Address | None:
    """The IP address of a caller, from gRPC's form of it, such as `ipv6:%5B::1%5D`; None if it has none."""
    name = unquote(host.removeprefix("ipv4:").removeprefix("ipv6:")).strip("[]")
    address = parse_ip(name)
    return address if address is None else plain_address(address)


def plain_address(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6 as itself, so that both are equal."""
    return getattr(address, "ipv4_mapped", None) or address


def without_zone(address: Address) -> Address:
    """A link-local address without the interface, whose name differs from machine to machine."""
    return address if address.version == 4 else ipaddress.IPv6Address(int(address))


async def dial_back(
    host: str, endpoint: str, nonce: bytes, tls: Tls | None, limits: DialLimits, *, loopback: bool
) -> DialledBack:
    """Opens one connection to the port of `endpoint` at the address of the caller, and closes it again.

    Args:
        host: The caller, as in `RpcCaller`.
        endpoint: HOST:PORT, as the caller names it.
        nonce: What its listener writes to each connection.
        tls: The authorities that the certificate there must have; None for a run without TLS.
        limits: Counts the connections.
        loopback: Whether the caller may be on this machine's loopback.

    Raises:
        BusyError: There were too many connections back.
        ProtocolViolationError: The request is malformed, or the caller's address is not dialled.
    """
    caller = caller_address(host)
    if caller is None:
        raise ProtocolViolationError("the address of the caller is not known, so that it cannot be dialled")
    if len(nonce) != NONCE_BYTES:
        raise ProtocolViolationError(f"a nonce of {len(nonce)} bytes; it must have {NONCE_BYTES}")
    on_this_link = caller.version == 6 and caller.is_link_local  # the caller is there, so no service of a cloud
    if not on_this_link and (reason := objection(str(caller), loopback=loopback)):
        raise ProtocolViolationError(f"{caller} is not dialled: it is {reason}")
    name, port = parse_address(endpoint)
    if port == 0:
        raise ProtocolViolationError(f"{endpoint} has no port that could be dialled")
    limits.take(str(caller))  # before the name is looked up, which costs time too
    addresses = await look_up(name)
    if caller.is_loopback:  # both are this machine, where a call to 127.0.0.1 may come from ::1
        caller = next((address for address in addresses if address.is_loopback), caller)
    dialled = await _dial(caller, port, name, nonce, tls)
    if without_zone(caller) in map(without_zone, addresses):
        return dialled
    known = ", ".join(map(str, addresses)) or "an unknown host"
    reason = f"{name} is {known} here, and you call from {caller}"
    return DialledBack(DialOutcome.NOT_YOURS, str(caller), reason, dialled.seconds, at_caller=dialled.outcome)


async def look_up(host: str) -> tuple[Address, ...]:
    """The addresses of a host; none if its name is unknown."""
    literal = parse_ip(host)
    if literal is not None:
        return (plain_address(literal),)
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return ()
    return tuple(dict.fromkeys(plain_address(ipaddress.ip_address(where[0])) for *_, where in found))


async def _dial(address: Address, port: int, name: str, nonce: bytes, tls: Tls | None) -> DialledBack:
    started, caller = time.monotonic(), str(address)
    context = None if tls is None else trusting(tls.ca_pem)
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            reader, writer = await asyncio.open_connection(
                caller, port, ssl=context, server_hostname=None if context is None else name.strip("[]")
            )
    except ssl.SSLError as error:
        return DialledBack(DialOutcome.CERTIFICATE, caller, getattr(error, "verify_message", "") or _words(error))
    except TimeoutError:
        return DialledBack(DialOutcome.SILENT, caller, f"no answer within {DIAL_SECONDS:g} s")
    except ConnectionRefusedError:
        return DialledBack(DialOutcome.REFUSED, caller, "connection refused")
    except OSError as error:
        return DialledBack(DialOutcome.UNREACHABLE, caller, os.strerror(error.errno or 0))
    seconds = time.monotonic() - started
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            greeting = await reader.readexactly(len(greeting_of(nonce)))
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError and SSLError are OSErrors
        greeting = b""
    finally:
        writer.transport.abort()
    reached = hmac.compare_digest(greeting, greeting_of(nonce))
    return DialledBack(DialOutcome.REACHED if reached else DialOutcome.OTHER, caller, "", seconds)


def _words(error: ssl.SSLError) -> str:
    return (error.reason or "TLS failed").lower().replace("_", " ")


def trusting(ca_pem: bytes) -> ssl.SSLContext:
    """The settings of a TLS client that trusts these authorities and has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca_pem.decode("ascii", "replace"))
    context.set_alpn_protocols(["h2"])
    return context


def greeting_of(nonce: bytes) -> bytes:
    """What a doctor's listener writes to each connection."""
    return f"averaging doctor {nonce.hex()}\n".encode()


class DialListener:
    """Listens like the peer that will be started, while another peer dials back. Use it in `async with`.

    Args:
        listen: `host:port`; port 0 takes a free one.
        context: The settings of TLS; None for none.

    Attributes:
        nonce: What it writes to each connection.
        port: The port, once it listens.
    """

    def __init__(self, listen: str, context: ssl.SSLContext | None) -> None:
        self._listen, self._context = listen, context
        self.nonce = os.urandom(NONCE_BYTES)
        self.port = 0
        self._greeted = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listens.

        Raises:
            OSError: The address is not available.
        """
        host, port = parse_address(self._listen)
        own = await asyncio.to_thread(_bound, host, port)
        self._server = await asyncio.start_server(self._greet, sock=own, ssl=self._context)
        self.port = int(own.getsockname()[1])
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._greeted += 1
        try:
            if self._greeted <= MAX_GREETED:
                writer.write(greeting_of(self.nonce))
                async with asyncio.timeout(GREETING_SECONDS):
                    await writer.drain()
                    writer.write_eof() if writer.can_write_eof() else None
        except OSError:
            pass  # the caller is gone
        finally:
            writer.close()


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
