"""What a peer answers to `averaging doctor` elsewhere: its run and options, its clock, echoes, a connection back.

A peer that dials addresses on request could be used to reach what the caller cannot. So it dials only the IP address
from which the call came, and tells nothing of what it reads there.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from functools import cache
from importlib import metadata
from typing import Any
from urllib.parse import unquote

from averaging.common import Address, HostQuota, covers, is_loopback, objection, parse_address, parse_ip
from averaging.config import OPTIONS, PeerConfig
from averaging.errors import BusyError, CallRefusedError, ProtocolViolationError, RefusalCause
from averaging.security import Tls
from averaging.transport import RpcHandler, RpcMethod, rpc_caller
from averaging.wire import probe_pb2

SOFTWARE = f"averaging {metadata.version('averaging')}"
"""Name and version of this software, as peers announce them."""

MAX_ECHO_BYTES = 1 << 20
"""Bytes of an echo in each direction."""

NONCE_BYTES = 16

DIAL_SECONDS, GREETING_SECONDS = 5.0, 2.0
"""Time limits of a connection back: until it is open, and until the listener has written its greeting."""

DIALS_IN_ALL, DIALS_PER_HOST = 8, 2
"""Connections back at the same time, of all callers and of one host."""

_PROBE, _SMALL, _ECHO = "/averaging.probe.v1.Probe", 64 << 10, MAX_ECHO_BYTES + 1024

DESCRIBE = RpcMethod(f"{_PROBE}/Describe", probe_pb2.DescribeRequest, probe_pb2.Description, max_reply_bytes=_SMALL)
CLOCK = RpcMethod(f"{_PROBE}/Clock", probe_pb2.ClockRequest, probe_pb2.ClockReply, max_reply_bytes=_SMALL)
DIAL_BACK = RpcMethod(
    f"{_PROBE}/DialBack",
    probe_pb2.DialBackRequest,
    probe_pb2.DialBackReply,
    max_reply_bytes=_SMALL,
    sender=lambda request: request.endpoint,
)
ECHO = RpcMethod(
    f"{_PROBE}/Echo", probe_pb2.EchoRequest, probe_pb2.EchoReply, max_request_bytes=_ECHO, max_reply_bytes=_ECHO
)


class DialOutcome(StrEnum):
    """What came of a connection back."""

    REACHED = "reached"  # the caller's own listener answered
    OTHER = "other"  # something else listens there: a running peer, or another machine
    REFUSED = "refused"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    CERTIFICATE = "certificate"  # what listens there has no certificate for that host, or speaks no TLS
    NOT_YOURS = "not_yours"  # not the address from which the call came, which was dialled instead


class ProbeService:
    """Serves `averaging.probe.v1.Probe` at a peer."""

    def __init__(self, config: PeerConfig, tls: Tls | None, *, clock: Callable[[], float] = time.time) -> None:
        self._config, self._tls, self._clock = config, tls, clock
        self._dials = HostQuota(DIALS_IN_ALL, DIALS_PER_HOST)
        hosts = {parse_address(each)[0] for each in (config.listen, config.advertise) if each}
        self._loopback = any(map(is_loopback, hosts))

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [
            DESCRIBE.answers(self._describe),
            CLOCK.answers(self._tell_time),
            DIAL_BACK.answers(self._dial_back),
            ECHO.answers(self._echo),
        ]

    async def _describe(self, _: probe_pb2.DescribeRequest) -> probe_pb2.Description:
        config = self._config
        return probe_pb2.Description(
            run_id=config.run_id, software=SOFTWARE, mode=config.mode.name.lower(), options=options_alike(config)
        )

    async def _tell_time(self, _: probe_pb2.ClockRequest) -> probe_pb2.ClockReply:
        return probe_pb2.ClockReply(time=self._clock())

    async def _echo(self, request: probe_pb2.EchoRequest) -> probe_pb2.EchoReply:
        if request.reply_bytes > MAX_ECHO_BYTES:
            raise ProtocolViolationError(f"an echo of {request.reply_bytes} bytes; at most {MAX_ECHO_BYTES} are sent")
        return probe_pb2.EchoReply(padding=noise()[: request.reply_bytes])

    async def _dial_back(self, request: probe_pb2.DialBackRequest) -> probe_pb2.DialBackReply:
        if request.run_id != self._config.run_id:
            raise CallRefusedError("", "another run; only peers of this run are called back", RefusalCause.WRONG_RUN)
        host = rpc_caller().host
        if not self._dials.take(host):
            raise BusyError("it calls others back at this moment; ask again")
        try:
            return await dial_back(host, request.endpoint, request.nonce, self._tls, loopback=self._loopback)
        finally:
            self._dials.leave(host)


def options_alike(config: PeerConfig) -> dict[str, str]:
    """The options that must be the same at all peers of a run, as text, in the order of the documentation."""
    return {name: _text(getattr(config, name)) for name, declared in OPTIONS.items() if declared.alike}


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name.lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def noise() -> bytes:
    """Random bytes for echoes: a link that compresses would carry zeros too fast."""
    return os.urandom(MAX_ECHO_BYTES)


async def dial_back(
    caller_host: str, endpoint: str, nonce: bytes, tls: Tls | None, *, loopback: bool
) -> probe_pb2.DialBackReply:
    """Opens one connection to the port of `endpoint` at the address of the caller, and closes it again."""
    caller = parse_ip(unquote(caller_host.removeprefix("ipv4:").removeprefix("ipv6:")))
    if caller is None:
        raise ProtocolViolationError("the address of the caller is not known, so that it cannot be dialled")
    if len(nonce) != NONCE_BYTES:
        raise ProtocolViolationError(f"a nonce of {len(nonce)} bytes; it must have {NONCE_BYTES}")
    caller = _plain(caller)
    # A link-local caller of IPv6 is on this link itself, so it is no metadata service of a cloud.
    on_this_link = caller.version == 6 and caller.is_link_local
    if not on_this_link and (reason := objection(str(caller), loopback=loopback)):
        raise ProtocolViolationError(f"{caller} is not dialled: it is {reason}")
    name, port = parse_address(endpoint)
    if port == 0:
        raise ProtocolViolationError(f"{endpoint} has no port that could be dialled")
    addresses = await look_up(name)
    if caller.is_loopback:  # both are this machine, where a call to 127.0.0.1 may come from ::1
        caller = next((address for address in addresses if address.is_loopback), caller)
    outcome, reason, seconds = await _dial(str(caller), port, name.strip("[]"), nonce, tls)
    reply = probe_pb2.DialBackReply(outcome=outcome, caller=str(caller), reason=reason, seconds=seconds)
    if not covers(map(str, addresses), str(caller)):
        known = ", ".join(map(str, addresses)) or "an unknown host"
        reply.outcome, reply.at_caller = DialOutcome.NOT_YOURS, outcome
        reply.reason = f"{name} is {known} here, and you call from {caller}"
    return reply


async def _dial(address: str, port: int, name: str, nonce: bytes, tls: Tls | None) -> tuple[DialOutcome, str, float]:
    """Returns what came of it, why, and the seconds until the connection was open."""
    started = time.monotonic()
    context = None if tls is None else trusting(tls.ca_pem)
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            reader, writer = await asyncio.open_connection(
                address, port, ssl=context, server_hostname=None if context is None else name
            )
    except ssl.SSLError as error:
        words = (error.reason or "TLS failed").lower().replace("_", " ")
        return DialOutcome.CERTIFICATE, getattr(error, "verify_message", "") or words, 0.0
    except TimeoutError:
        return DialOutcome.SILENT, f"no answer within {DIAL_SECONDS:g} s", 0.0
    except ConnectionRefusedError:
        return DialOutcome.REFUSED, "connection refused", 0.0
    except OSError as error:
        return DialOutcome.UNREACHABLE, os.strerror(error.errno or 0), 0.0
    seconds = time.monotonic() - started
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            greeting = await reader.readexactly(len(greeting_of(nonce)))
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError and SSLError are OSErrors
        greeting = b""
    finally:
        writer.transport.abort()
    reached = hmac.compare_digest(greeting, greeting_of(nonce))
    return DialOutcome.REACHED if reached else DialOutcome.OTHER, "", seconds


def greeting_of(nonce: bytes) -> bytes:
    """What a doctor's listener writes to each connection."""
    return f"averaging doctor {nonce.hex()}\n".encode()


def trusting(ca_pem: bytes) -> ssl.SSLContext:
    """The settings of a TLS client that trusts these authorities and has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=ca_pem.decode("ascii", "replace"))
    context.set_alpn_protocols(["h2"])
    return context


async def look_up(host: str) -> tuple[Address, ...]:
    """The addresses of a host, those of IPv4 in IPv6 as IPv4; none if its name is unknown."""
    literal = parse_ip(host)
    if literal is not None:
        return (_plain(literal),)
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # TimeoutError is an OSError
        return ()
    return tuple(dict.fromkeys(_plain(ipaddress.ip_address(where[0])) for *_, where in found))


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6 as itself, so that both are equal."""
    return getattr(address, "ipv4_mapped", None) or address
