"""The checks of one peer to join, each of which needs what the one before has found."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from averaging.common import (
    CLIENT_PREFIX,
    chosen_proxy,
    duration,
    is_endpoint,
    is_loopback,
    is_own,
    objection,
    parse_address,
    parse_ip,
    proxy_for,
    shown_proxy,
    spelled,
)
from averaging.config import PeerConfig
from averaging.doctor import tls
from averaging.doctor.comparison import (
    MAX_VALUE,
    compare_clocks,
    compare_options,
    compare_runs,
    compare_schemas,
    compare_software,
    compare_strategies,
    judge_call_back,
    judge_nat,
)
from averaging.doctor.dial_back import NONCE_BYTES, DialListener, DialOutcome, look_up
from averaging.doctor.findings import Finding, failure, ok, told, warning
from averaging.doctor.probe import CLOCK, DESCRIBE, DIAL_BACK, SOFTWARE, options_alike
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    RefusalCause,
    printable,
    refusal_cause,
)
from averaging.protocol import Mode
from averaging.security import Credentials
from averaging.transport import RpcMethod
from averaging.transport.grpc import GET_SCHEMA, GET_STATUS, Channels, Dialling
from averaging.wire import probe_pb2

if TYPE_CHECKING:
    from averaging.receipts import PeerStatus
    from averaging.tensors import Schema

Request = TypeVar("Request")
Reply = TypeVar("Reply")

CONNECT_SECONDS, CALL_SECONDS, CALL_BACK_SECONDS = 5.0, 10.0, 15.0

RESOLVER_VARIABLE = "GRPC_DNS_RESOLVER"
"""With another value than `native` gRPC asks the DNS server itself, also for names in /etc/hosts."""

MAX_MESSAGE_BYTES = 32 << 20

CLOCK_CALLS = 5
"""Calls of which the fastest tells the difference of the clocks: its error is at most half its round trip."""

MAX_DIALLED = 8
"""Addresses of one name that are tried, so that another peer cannot make this one dial many."""

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
        certified_host: The host for which its certificate must be valid.
        channels: The connections for gRPC, while they are open.
        addresses: The IP addresses at which a connection came about.
        proxied: Whether it is called through a proxy, so that this machine opens no connections to it.
        endpoint: What gRPC dials: `seed`, or one of these addresses if gRPC does not find the name itself.
        description: What the peer says of itself; None if it was not asked or does not serve that.
        their_schema: What it averages, if it says so.
        strategy: The strategy of this peer; empty if it is not known.
        their_strategy: That of the other one; empty if it does not train, None if it is not known.
    """

    seed: str
    config: PeerConfig
    credentials: Credentials | None
    listener: DialListener | None
    run_known: bool
    schema: Schema | None
    certified_host: str = ""
    channels: Channels | None = None
    addresses: list[str] = field(default_factory=list)
    proxied: bool = False
    endpoint: str = ""
    description: probe_pb2.Description | None = None
    their_schema: Schema | None = None
    strategy: str = ""
    their_strategy: str | None = None

    def __post_init__(self) -> None:
        self.certified_host = self.certified_host or parse_address(self.seed)[0].strip("[]")
        self.endpoint = self.seed

    @property
    def address(self) -> str:
        """An IP address at which a connection came about; empty if there is none."""
        return self.addresses[0] if self.addresses else ""

    def endpoint_at(self, address: str) -> str:
        """The endpoint at which gRPC dials one of `addresses`."""
        host, port = parse_address(self.seed)
        literal = f"[{address}]" if ":" in address else address
        return self.seed if parse_ip(host) else f"{literal}:{port}"

    def open(self) -> None:
        """Makes calls possible; the connection is opened by the first call."""
        dialled = [self.seed, *map(self.endpoint_at, self.addresses)]
        names = {endpoint: self.certified_host for endpoint in dialled if endpoint != self._own_name}
        dialling = Dialling(dialled, names=names)
        self.channels = Channels(
            MAX_MESSAGE_BYTES, credentials=self.credentials, dialling=dialling, proxy=self.config.proxy
        )

    @property
    def _own_name(self) -> str:
        """The seed, if the certificate must be valid for its own host."""
        return self.seed if self.certified_host == parse_address(self.seed)[0].strip("[]") else ""

    async def call(
        self, method: RpcMethod[Request, Reply], request: Request, seconds: float | None = None, at: str = ""
    ) -> Reply:
        """Calls a method of the peer with one reply.

        Args:
            method: The method.
            request: Its request.
            seconds: Time limit; `CALL_SECONDS` if None.
            at: The endpoint; `endpoint` if it is empty.

        Raises:
            AveragingError: The call failed; PeerUnreachableError also if there is no answer in time.
        """
        if self.channels is None:
            raise PeerUnreachableError(self.seed, "no call is made without credentials")
        seconds = CALL_SECONDS if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                return await self.channels.call(at or self.endpoint, method, request)
        except TimeoutError:
            raise PeerUnreachableError(self.seed, f"no answer within {seconds:g} s") from None

    async def close(self) -> None:
        """Closes the connection for gRPC."""
        channels, self.channels = self.channels, None
        if channels is not None:
            await channels.close()


async def visit(this: Visit) -> AsyncGenerator[Finding, None]:
    """Makes all checks of one peer; the later ones only if the earlier ones let them. Close `this` afterwards."""
    try:
        proxy = proxy_for(parse_address(this.seed)[0], chosen_proxy(this.config.proxy))
    except ConfigError as error:
        yield told("call", error, this.seed)
        return
    if proxy is not None:
        this.proxied = True
        text = f"called through the proxy {shown_proxy(proxy)}, which also looks the name up"
        yield ok("tcp", text, this.seed)
    else:
        for finding in await _check_connections(this):
            yield finding
        if not this.address:
            return
        yield await tls.check_handshake(this.config, this.seed, this.address, this.certified_host)
    if this.credentials is None:
        text = "no call was made, since this peer's certificate or token cannot be used"
        yield warning("call", text, "see certificate and token-file above", this.seed)
        return
    this.open()
    async for finding in _calls(this):
        yield finding


async def running_peer(config: PeerConfig, credentials: Credentials | None) -> Finding | None:
    """Says that a peer of the run is up at `listen` already, which is no fault; None if none answers."""
    endpoint = config.advertise or config.listen
    if config.mode is Mode.CLIENT or not parse_address(endpoint)[1] or credentials is None:
        return None
    this = Visit(endpoint, config, credentials, None, True, None)
    this.open()
    try:
        described = await this.call(DESCRIBE, probe_pb2.DescribeRequest(), CONNECT_SECONDS)
    except AveragingError:
        return None
    finally:
        await this.close()
    if described.run_id != config.run_id:
        return None
    text = f"a peer of run {config.run_id!r} is up at {endpoint} already"
    return warning("port", text, "nothing has to be done if it is the one that you examine")


# Name, addresses, connections.


async def _check_connections(this: Visit) -> list[Finding]:
    """Looks the name up, and connects to each of its addresses."""
    host, port = parse_address(this.seed)
    addresses = [str(address) for address in await look_up(host)]
    if not addresses:
        return [failure("addresses", f"{host} is an unknown host", "correct the name, or ask its owner", this.seed)]
    findings = [] if parse_ip(host) else [ok("addresses", f"{host} is {', '.join(addresses)}", this.seed)]
    results = await asyncio.gather(*(_connect(address, port) for address in addresses))
    this.addresses = [address for address, (failed, _) in zip(addresses, results, strict=True) if not failed]
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
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        return (reason, "check the address, and the routes of this machine"), 0.0
    writer.transport.abort()
    return None, time.monotonic() - started


# Calls.


async def _calls(this: Visit) -> AsyncGenerator[Finding, None]:
    """What the peer answers. A run with a token refuses the first call without it."""
    try:
        status, note = await _first_call(this)
    except CallRefusedError as error:
        if error.cause is not RefusalCause.NOT_SERVED:
            yield _refused(error, this.seed)
            return
        status, note = None, None
    except AveragingError as error:
        yield _unanswered(error, this.seed)
        return
    if note is not None:
        yield note
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
        yield compare_runs(this.config.run_id if this.run_known else None, told_by.run_id, this.seed)
        yield compare_software(SOFTWARE, told_by.software, this.seed)
    if status is not None and not this.proxied:
        yield await _check_endpoint(this, status.endpoint)
    if this.description is None:
        yield warning("probe", f"clock, options and a call back: {NOT_ASKED}", "update that peer", this.seed)
    else:
        yield await _check_clocks(this)
        yield await _check_call_back(this)
        yield compare_options(options_alike(this.config), this.description.options, this.seed)
    if status is not None:
        this.their_strategy = "" if status.training is None else status.training.strategy
        if this.strategy or this.their_strategy:
            yield compare_strategies(this.strategy, this.their_strategy, this.seed)
    yield await _check_schema(this)


async def _first_call(this: Visit) -> tuple[PeerStatus, Finding | None]:
    """Asks for the status by the name as gRPC finds it, and if it does not, at an address that the system has found."""
    try:
        return await this.call(GET_STATUS, (0, 0, False)), None
    except PeerUnreachableError as error:
        not_found = error.unknown_host or error.reason.startswith("no answer")
        if this.proxied or this.endpoint_at(this.address) == this.seed or not not_found:
            raise
        this.endpoint = this.endpoint_at(this.address)
        status = await this.call(GET_STATUS, (0, 0, False))
        text = f"gRPC does not find the name ({error.reason}), which this machine knows"
        remedy = "join it at its IP address"
        if os.environ.get(RESOLVER_VARIABLE, "native") != "native":
            remedy = f"unset {RESOLVER_VARIABLE}, so that gRPC asks the system for names, or {remedy}"
        return status, failure("call", text, remedy, this.seed)


def _unanswered(error: AveragingError, seed: str) -> Finding:
    """A call without an answer, although the port accepts connections."""
    if not getattr(error, "reason", "").startswith("no answer"):
        return told("call", error, seed)
    remedy = "look whether that peer hangs, or its path loses large packets (--deep)"
    return failure("call", f"the port accepts connections, and a call gets {error.reason}", remedy, seed)


def _refused(error: CallRefusedError, seed: str) -> Finding:
    return told("token" if error.cause is RefusalCause.UNAUTHENTICATED else "call", error, seed)


async def _check_endpoint(this: Visit, endpoint: str) -> Finding:
    """Checks that this peer reaches the other one at the endpoint that it tells all others."""
    shown = printable(endpoint, MAX_VALUE)
    if endpoint == this.seed:
        return ok("endpoint", f"it tells others to dial {shown}", this.seed)
    text, remedy = f"it tells others to dial {shown}", "correct advertise there"
    if not is_endpoint(endpoint) or endpoint.startswith(CLIENT_PREFIX):
        return failure("endpoint", f"{text}, which is no address", remedy, this.seed)
    host, port = parse_address(endpoint)
    addresses = [str(address) for address in await look_up(host)]
    if not addresses:
        return failure("endpoint", f"{text}, an unknown host here", f"{remedy}, or make the name known here", this.seed)
    loopback = is_loopback(this.address)
    if reason := next(filter(None, (objection(address, loopback=loopback) for address in addresses)), None):
        return failure("endpoint", f"{text}, {reason}: parts do not reach it there", remedy, this.seed)
    results = [
        failed for failed, _ in await asyncio.gather(*(_connect(each, port) for each in addresses[:MAX_DIALLED]))
    ]
    if None in results:
        return ok("endpoint", f"{text}, where it is reached from here too", this.seed)
    reason = next(failed[0] for failed in results if failed)
    return failure("endpoint", f"{text}, where it is not reached from here: {reason}", remedy, this.seed)


async def _check_clocks(this: Visit) -> Finding:
    """The difference of the clocks, from the fastest of several calls."""
    best = (math.inf, 0.0)  # half of the round trip, and how far the other clock is ahead
    try:
        for _ in range(CLOCK_CALLS):
            started, began = time.monotonic(), time.time()
            there = (await this.call(CLOCK, probe_pb2.ClockRequest())).time
            half = (time.monotonic() - started) / 2
            best = min(best, (half, there - began - half))
    except AveragingError as error:
        return told("clock-difference", error, this.seed)
    return compare_clocks(*best, this.seed)


async def _check_call_back(this: Visit) -> Finding:
    """Lets the peer dial this one at the address that it would have."""
    config, check = this.config, "call-back"
    if config.mode is Mode.CLIENT:
        return ok(check, "not needed: a client accepts no connections", this.seed)
    if this.proxied:
        text = "not tried, because calls arrive from the proxy"
        return warning(check, text, f"use {spelled('mode', 'client')} behind a proxy", this.seed)
    host, port = parse_address(config.advertise or config.listen)
    port = port or parse_address(config.listen)[1] or (this.listener.port if this.listener else 0)
    if not port:
        return warning(check, "not tried, because this command could not listen", "see port above", this.seed)
    endpoint, listening = f"{host}:{port}", this.listener is not None
    # The peer dials only the address that calls it, so the call leaves over a family that `endpoint` has.
    versions = {address.version for address in await look_up(host)}
    at = next((this.endpoint_at(each) for each in this.addresses if (6 if ":" in each else 4) in versions), "")
    nonce = this.listener.nonce if this.listener else bytes(NONCE_BYTES)
    request = probe_pb2.DialBackRequest(run_id=config.run_id, endpoint=endpoint, nonce=nonce)
    try:
        reply = await this.call(DIAL_BACK, request, CALL_BACK_SECONDS, at)
    except AveragingError as error:
        busy = "in a minute" in error.reason
        remedy = "ask again in a minute" if busy else "correct what is said above, and ask again"
        return warning(check, f"not tried: {error.reason}", remedy, this.seed)
    caller = parse_ip(reply.caller)
    if reply.outcome == DialOutcome.NOT_YOURS and caller is not None and not is_own(str(caller)):
        outside = f"[{caller}]:{port}" if caller.version == 6 else f"{caller}:{port}"
        return judge_nat(reply.at_caller, endpoint, outside, this.seed)
    return judge_call_back(reply.outcome, reply.reason, reply.seconds, endpoint, this.seed, listening=listening)


async def _check_schema(this: Visit) -> Finding:
    """Compares what is averaged, if this peer knows."""
    try:
        this.their_schema = await this.call(GET_SCHEMA, None)
    except AveragingError as error:
        if refusal_cause(error) is RefusalCause.NOT_SERVED:
            return warning("schema", NOT_ASKED, "", this.seed)
        return told("schema", error, this.seed)
    return compare_schemas(this.schema, this.their_schema, this.seed)


def compare_peers(visits: Sequence[Visit]) -> Iterator[Finding]:
    """Compares the peers to join with the first one that answers: what they average, and their options."""
    averaging = [(visit.seed, visit.their_schema) for visit in visits if visit.their_schema is not None]
    for seed, schema in averaging[1:]:
        where = f"between {averaging[0][0]} (here) and {seed} (there): "
        yield compare_schemas(averaging[0][1], schema, seed, where)
    training = [(visit.seed, visit.their_strategy) for visit in visits if visit.their_strategy]
    for seed, strategy in training[1:]:
        yield compare_strategies(training[0][1], strategy, seed, f"at {training[0][0]}")
    described = [(visit.seed, visit.description.options) for visit in visits if visit.description is not None]
    for seed, options in described[1:]:
        yield compare_options(described[0][1], options, seed, f"at {described[0][0]}")
