"""The checks of one peer to join, each of which needs what the one before has found."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from averaging.common import counted, duration, parse_address, parse_ip, size, spelled
from averaging.config import PeerConfig
from averaging.doctor import tls
from averaging.doctor.dial_back import DialListener, DialOutcome, look_up
from averaging.doctor.findings import Finding, failure, ok, told, warning
from averaging.doctor.probe import CLOCK, DESCRIBE, DIAL_BACK, SOFTWARE, options_alike
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    PeerUnreachableError,
    RefusalCause,
    printable,
    refusal_cause,
)
from averaging.protocol import Mode
from averaging.security import Credentials
from averaging.tensors import first_difference
from averaging.transport import RpcMethod
from averaging.transport.grpc import GET_SCHEMA, GET_STATUS, Channels, Dialling
from averaging.wire import probe_pb2

if TYPE_CHECKING:
    from averaging.tensors import Schema

Request = TypeVar("Request")
Reply = TypeVar("Reply")

CONNECT_SECONDS, CALL_SECONDS = 5.0, 10.0

MAX_MESSAGE_BYTES = 32 << 20

CLOCK_CALLS = 5
"""Calls of which the fastest tells the difference of the clocks: its error is at most half its round trip."""

CLOCK_TOLERANCE = 3.0
"""Seconds by which the clocks of two peers may differ (docs/reference/protocol.md)."""

MAX_OPTIONS, MAX_VALUE = 64, 100
"""Options that a peer may announce, and the characters of each that are shown."""

NOT_ASKED = "this cannot be asked: the peer has a release without it, other software, or inspection switched off"


@dataclass(slots=True)
class Visit:
    """One peer to join, and what is known of it so far.

    Attributes:
        seed: HOST:PORT as the user gave it.
        config: The options of the peer that will be started.
        credentials: What calls are made with; None if its files cannot be used, so that no calls are made.
        listener: What listens at `listen` meanwhile; None if nothing or another process does.
        run_known: Whether `config.run_id` is that of the user.
        schema: What this peer will average; None if it is not known.
        channels: The connection for gRPC, while it is open.
        address: An IP address at which a connection came about; empty before.
        description: What the peer says of itself; None if it was not asked or does not serve that.
        their_schema: What it averages, if it says so.
    """

    seed: str
    config: PeerConfig
    credentials: Credentials | None
    listener: DialListener | None
    run_known: bool
    schema: Schema | None
    channels: Channels | None = None
    address: str = ""
    description: probe_pb2.Description | None = None
    their_schema: Schema | None = None

    async def call(self, method: RpcMethod[Request, Reply], request: Request, seconds: float = CALL_SECONDS) -> Reply:
        """Calls a method of the peer with one reply.

        Raises:
            AveragingError: The call failed; PeerUnreachableError also if there is no answer in time.
        """
        if self.channels is None:
            raise PeerUnreachableError(self.seed, "no call is made without credentials")
        try:
            async with asyncio.timeout(seconds):
                return await self.channels.call(self.seed, method, request)
        except TimeoutError:
            raise PeerUnreachableError(self.seed, f"no answer within {seconds:g} s") from None

    async def close(self) -> None:
        """Closes the connection for gRPC."""
        channels, self.channels = self.channels, None
        if channels is not None:
            await channels.close()


async def visit(this: Visit) -> list[Finding]:
    """Makes all checks of one peer; the later ones only if the earlier ones let them. Close `this` afterwards."""
    findings = await _check_connections(this)
    if not this.address:
        return findings
    findings.append(await tls.check_handshake(this.config, this.seed, this.address))
    if this.credentials is None:
        text = "no call was made, since this peer's certificate or token cannot be used"
        return [*findings, warning("call", text, "see certificate and token-file above", this.seed)]
    this.channels = Channels(MAX_MESSAGE_BYTES, credentials=this.credentials, dialling=Dialling((this.seed,)))
    return findings + [finding async for finding in _calls(this)]


# Name, addresses, connections.


async def _check_connections(this: Visit) -> list[Finding]:
    """Looks the name up, and connects to each of its addresses."""
    host, port = parse_address(this.seed)
    addresses = [str(address) for address in await look_up(host)]
    if not addresses:
        return [failure("addresses", f"{host} is an unknown host", "correct the name, or ask its owner", this.seed)]
    findings = [] if parse_ip(host) else [ok("addresses", f"{host} is {', '.join(addresses)}", this.seed)]
    results = await asyncio.gather(*(_connect(address, port) for address in addresses))
    this.address = next((address for address, (failed, _) in zip(addresses, results, strict=True) if not failed), "")
    for address, (failed, seconds) in zip(addresses, results, strict=True):
        where = f"{address} port {port}"
        if not failed:
            findings.append(ok("tcp", f"{where}: connected in {duration(seconds)}", this.seed))
            continue
        text, remedy = failed
        kind = warning if this.address else failure
        findings.append(kind("tcp", f"{where}: {text}", remedy, this.seed))
    return findings


async def _connect(address: str, port: int) -> tuple[tuple[str, str] | None, float]:
    """Connects; returns what failed and the remedy, or None, and the seconds."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        remedy = f"a firewall or router drops it, or no machine is there: let TCP port {port} in"
        return (f"no answer within {CONNECT_SECONDS:g} s", remedy), 0.0
    except ConnectionRefusedError:
        return ("connection refused: nothing listens there", "start the peer, or correct the port"), 0.0
    except OSError as error:
        return (error.strerror or str(error), "check the address, and the routes of this machine"), 0.0
    writer.transport.abort()
    return None, time.monotonic() - started


# Calls.


async def _calls(this: Visit) -> AsyncGenerator[Finding, None]:
    """What the peer answers. A run with a token refuses the first call without it."""
    try:
        status = await this.call(GET_STATUS, (0, 0, False))
    except CallRefusedError as error:
        if error.cause is not RefusalCause.NOT_SERVED:
            yield _refused(error, this.seed)
            return
        status = None
    except AveragingError as error:
        yield told("call", error, this.seed)
        return
    tokens = this.credentials is not None and bool(this.credentials.tokens)
    yield ok("token", "the token is accepted" if tokens else "no token is required", this.seed)
    try:
        this.description = await this.call(DESCRIBE, probe_pb2.DescribeRequest())
    except AveragingError as error:
        if refusal_cause(error) is not RefusalCause.NOT_SERVED:
            yield told("call", error, this.seed)
            return
    told_by = this.description or status
    if told_by is None:
        yield warning("run", NOT_ASKED, "compare the run ids by hand", this.seed)
    else:
        yield _check_run(this, printable(told_by.run_id, MAX_VALUE))
        yield _check_software(this.seed, printable(told_by.software, MAX_VALUE))
    if this.description is None:
        yield warning("probe", f"clock, options and a call back: {NOT_ASKED}", "update that peer", this.seed)
    else:
        yield await _check_clocks(this)
        yield await _check_call_back(this)
        yield _check_options(this)
    yield await _check_schema(this)


def _refused(error: CallRefusedError, seed: str) -> Finding:
    return told("token" if error.cause is RefusalCause.UNAUTHENTICATED else "call", error, seed)


def _check_run(this: Visit, theirs: str) -> Finding:
    if not this.run_known:
        return warning("run", f"the peer belongs to run {theirs!r}", f"give {spelled('run_id', theirs)}", this.seed)
    if theirs == this.config.run_id:
        return ok("run", f"the peer belongs to run {theirs!r}, as this one", this.seed)
    text = f"another run: the peer belongs to run {theirs!r}, not to {this.config.run_id!r}"
    return failure("run", text, "give both peers the same run id", this.seed)


def _check_software(seed: str, theirs: str) -> Finding:
    if theirs == SOFTWARE:
        return ok("software", f"{theirs}, as here", seed)
    return warning("software", f"{theirs or 'unknown'} there, {SOFTWARE} here", "use one release in a run", seed)


async def _check_clocks(this: Visit) -> Finding:
    """The difference of the clocks, from the fastest of several calls."""
    best: tuple[float, float] | None = None  # half of the round trip, and how far the other clock is ahead
    try:
        for _ in range(CLOCK_CALLS):
            began, started = time.time(), time.monotonic()
            there = (await this.call(CLOCK, probe_pb2.ClockRequest())).time
            half = (time.monotonic() - started) / 2
            best = min(best or (math.inf, 0.0), (half, there - began - half))
    except AveragingError as error:
        return told("clock-difference", error, this.seed)
    return compare_clocks(*(best or (0.0, 0.0)), this.seed)


def compare_clocks(bound: float, ahead: float, seed: str) -> Finding:
    """The finding about the clock of another peer.

    Args:
        bound: How wrong `ahead` may be, in seconds.
        ahead: How far the other clock is ahead of this one, in seconds.
        seed: The other peer.
    """
    text = f"the clock there is {abs(1000 * ahead):.0f} ms {'ahead of' if ahead >= 0 else 'behind'} this one"
    text += f" (± {1000 * bound:.1f} ms)"
    remedy = "run NTP on both machines"
    if not abs(ahead) - bound <= CLOCK_TOLERANCE:
        text += f"; more than {CLOCK_TOLERANCE:g} s, so the peers may not find each other"
        return failure("clock-difference", text, remedy, seed)
    if abs(ahead) + bound > CLOCK_TOLERANCE / 2:
        return warning("clock-difference", f"{text}; at most {CLOCK_TOLERANCE:g} s are tolerated", remedy, seed)
    return ok("clock-difference", text, seed)


async def _check_call_back(this: Visit) -> Finding:
    """Lets the peer dial this one at the address that it would have."""
    config, check = this.config, "call-back"
    if config.mode is Mode.CLIENT:
        return ok(check, "not needed: a client accepts no connections", this.seed)
    host, port = parse_address(config.advertise or config.listen)
    if not port:
        port = parse_address(config.listen)[1] or (this.listener.port if this.listener else 0)
    endpoint, nonce = f"{host}:{port}", this.listener.nonce if this.listener else bytes(16)
    if not port:
        return warning(check, "not tried: nothing listens here", "see port above", this.seed)
    try:
        reply = await this.call(
            DIAL_BACK, probe_pb2.DialBackRequest(run_id=config.run_id, endpoint=endpoint, nonce=nonce)
        )
    except AveragingError as error:
        return _not_called_back(error, this)
    return called_back(reply, endpoint, this.seed, listening=this.listener is not None)


def _not_called_back(error: AveragingError, this: Visit) -> Finding:
    reason = printable(error.reason, MAX_VALUE * 3)
    remedy = "ask again in a minute" if "in a minute" in reason else "see what is said above"
    return warning("call-back", f"not tried: {reason}", remedy, this.seed)


def called_back(reply: probe_pb2.DialBackReply, endpoint: str, seed: str, *, listening: bool) -> Finding:
    """The finding about a connection back.

    Args:
        reply: What the peer answers.
        endpoint: HOST:PORT that it was to dial.
        seed: The peer.
        listening: Whether this process listens there.
    """
    check, port = "call-back", endpoint.rpartition(":")[2]
    caller, reason = printable(reply.caller, 64), printable(reply.reason, 2 * MAX_VALUE)
    forward = f"let TCP port {port} in, or forward it to this machine; or use {spelled('mode', 'client')}"
    match reply.outcome:
        case DialOutcome.REACHED:
            return ok(check, f"the peer reaches {endpoint} in {duration(max(0.0, reply.seconds))}", seed)
        case DialOutcome.OTHER if not listening:
            return ok(check, f"the peer reaches {endpoint}, where something listens already", seed)
        case DialOutcome.OTHER:
            text = f"at {endpoint} the peer reaches something else than this machine"
            return failure(check, text, f"correct the forwarding, or {spelled('advertise')}", seed)
        case DialOutcome.REFUSED:
            what = "the connection was refused" if listening else "nothing listens there"
            return failure(check, f"the peer cannot reach {endpoint}: {what}", forward, seed)
        case DialOutcome.SILENT | DialOutcome.UNREACHABLE:
            return failure(check, f"the peer cannot reach {endpoint}: {reason or reply.outcome}", forward, seed)
        case DialOutcome.CERTIFICATE:
            text = f"the peer reaches {endpoint}, but TLS fails there: {reason}"
            remedy = f"issue a certificate for {parse_address(endpoint)[0]} (averaging ca issue)"
            return failure(check, text, remedy, seed)
        case DialOutcome.NOT_YOURS:
            text = f"not tried, since a peer calls back only the address from which it is called: {reason}"
            remedy = (
                f"if calls to {endpoint} come in another way than {caller}'s leave, try it from that peer's machine"
            )
            return warning(check, text, remedy, seed)
    return warning(check, f"the peer answers {printable(reply.outcome, 40)!r}, unknown here", "update it", seed)


def _check_options(this: Visit) -> Finding:
    theirs = this.description.options if this.description is not None else {}
    return compare_options(options_alike(this.config), theirs, this.seed)


def compare_options(ours: Mapping[str, str], theirs: Mapping[str, str], seed: str) -> Finding:
    """The finding about the options that must be the same at all peers of a run; it names those that differ."""
    differing = [name for name, value in ours.items() if name in theirs and theirs[name] != value]
    if not differing:
        return ok("options", f"{counted(len(ours), 'option')} that must be the same at all peers are", seed)
    text = "; ".join(
        f"{name} is {ours[name]} here and {printable(theirs[name], MAX_VALUE)} there" for name in differing
    )
    first = differing[0]
    remedy = f"set {spelled(first)} alike at all peers"
    return failure("options", text, remedy, seed)


async def _check_schema(this: Visit) -> Finding:
    """Compares what is averaged, if this peer knows."""
    try:
        this.their_schema = theirs = await this.call(GET_SCHEMA, None)
    except AveragingError as error:
        if refusal_cause(error) is RefusalCause.NOT_SERVED:
            return warning("schema", NOT_ASKED, "", this.seed)
        return told("schema", error, this.seed)
    text = f"{counted(len(theirs.tensors), 'tensor')}, {size(theirs.nbytes)}"
    if this.schema is None:
        return ok("schema", f"the peer averages {text}; give a FILE to compare", this.seed)
    if difference := first_difference(this.schema, theirs):
        return failure("schema", difference, "all peers of a run average the same tensors", this.seed)
    return ok("schema", f"{text}, as here", this.seed)
