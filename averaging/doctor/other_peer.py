"""The checks of one peer to join: each needs what those above it have found."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from averaging.common import (
    CLIENT_PREFIX,
    chosen_proxy,
    counted,
    duration,
    format_address,
    ignored_proxies,
    is_endpoint,
    is_loopback,
    is_own,
    is_placeholder,
    objection,
    parse_address,
    parse_ip,
    proxy_for,
    shown_proxy,
    size,
    spelled,
    without_wrappers,
)
from averaging.config import PeerConfig
from averaging.doctor.checks import Check, Finding, Severity, failure, ok, warning
from averaging.doctor.connections import (
    DialledAddress,
    Handshake,
    connect,
    judge_handshake,
    listening,
    shake_hands,
    smaller_packets,
)
from averaging.errors import AveragingError, ConfigError, PeerUnreachableError, RefusalCause, printable, refusal_cause
from averaging.probe import (
    CLOCK,
    DESCRIBE,
    DIAL_BACK,
    ECHO,
    MAX_ECHO_BYTES,
    NONCE_BYTES,
    SOFTWARE,
    DialOutcome,
    look_up,
    noise,
    options_alike,
)
from averaging.protocol import Mode
from averaging.receipts import PeerStatus
from averaging.security import Credentials
from averaging.tensors import Schema, TensorSpec, first_difference
from averaging.transport import RpcMethod
from averaging.transport.grpc import GET_SCHEMA, GET_STATUS, RpcChannel
from averaging.wire import probe_pb2

Request = TypeVar("Request")
Reply = TypeVar("Reply")

CALL_SECONDS, CALL_BACK_SECONDS, BATCH_SECONDS = 10.0, 15.0, 20.0
CLOCK_CALLS = 20  # that measure the round trip; the fastest tells the difference of the clocks
CLOCK_TOLERANCE = 3.0  # seconds by which the clocks of two peers may differ (docs/reference/protocol.md)
LONG_ROUND_TRIP = 1.0  # seconds that disturb a run: connections are lost after 10 s without an acknowledgement
FIRST_BATCH_BYTES, LAST_BATCH_BYTES = 64 << 10, 32 << 20  # of echoes. The first one fills the packets of any network
MAX_VALUE = 100  # characters of a value of another peer that are shown


@dataclass(slots=True)
class Visit:
    """One peer to join, and what is known of it so far."""

    seed: str  # HOST:PORT as the user gave it
    config: PeerConfig  # of the peer that will be started
    credentials: Credentials | None  # None if the files cannot be used
    certified_host: str  # the host for which the peer's certificate must be valid; empty for that of `seed`
    known: dict[str, tuple[str, Any]]  # what peers must have alike, with where it is so: "here", or "at HOST:PORT"
    run_known: bool = True  # whether `config.run_id` is that of the user
    addresses: list[str] = field(default_factory=list)  # first those of the name, then those that accept connections
    status: PeerStatus | None = None
    description: probe_pb2.Description | None = None  # None if the peer does not serve it
    round_trips: list[float] = field(default_factory=list)  # in seconds
    channel: RpcChannel | None = None

    @property
    def host(self) -> str:
        return parse_address(self.seed)[0]

    @property
    def port(self) -> int:
        return parse_address(self.seed)[1]

    @property
    def certified(self) -> str:
        return self.certified_host or self.host.strip("[]")

    async def call(self, method: RpcMethod[Request, Reply], request: Request, seconds: float = CALL_SECONDS) -> Reply:
        if self.channel is None:
            self.channel = self.open(self.seed)
        return await self.channel.call(method, request, seconds)

    def open(self, endpoint: str) -> RpcChannel:
        if self.credentials is None:
            raise ConfigError("no call is made, since this peer's certificate or token cannot be used, see above")
        host = self.certified_host or ("" if endpoint == self.seed else self.certified)
        return RpcChannel(endpoint, credentials=self.credentials, certified_host=host or None)

    def compare(self, what: str, theirs: Any) -> tuple[str, Any]:
        """What `theirs` is compared with, and where that is; the first peer sets it if nothing is known here."""
        return self.known.setdefault(what, (f"at {self.seed}", theirs))


async def visit(this: Visit, *, deep: bool) -> AsyncGenerator[Finding, None]:
    """Makes all checks of one peer, until a vital one fails."""
    try:
        for check in (*CHECKS, *(DEEP if deep else ())):
            found = await check.make(this, this.seed)
            if found is not None:
                yield found
                if check.vital and found.severity is Severity.FAILURE:
                    return
    finally:
        if this.channel is not None:
            await this.channel.close()


# Name, addresses, connections.


def proxy_of(this: Visit) -> str | None:
    return proxy_for(this.host, chosen_proxy())


async def ask_addresses(this: Visit) -> list[str] | None:
    """The addresses of the peer's name; None if a proxy looks it up."""
    if proxy_of(this) is not None:
        return None
    this.addresses = [str(address) for address in await look_up(this.host)]
    return this.addresses


def judge_addresses(this: Visit, addresses: list[str]) -> Finding | None:
    if not addresses:
        return failure(f"{this.host} is an unknown host", "correct the name, or ask its owner")
    return None if parse_ip(this.host) else ok(f"{this.host} is {', '.join(addresses)}")


async def ask_connections(this: Visit) -> list[DialledAddress]:
    """What came of a connection to each address; none through a proxy."""
    made = await asyncio.gather(*(connect(address, this.port) for address in this.addresses))
    this.addresses = [each.address for each in made if not each.failed]
    return made


def judge_connections(this: Visit, made: list[DialledAddress]) -> Finding:
    if (proxy := proxy_of(this)) is not None:
        return ok(f"called through the proxy {shown_proxy(proxy)}, which also looks the name up")
    text = "; ".join(map(str, made))
    failed = [each for each in made if each.failed]
    if not failed:
        return ok(text)
    remedy = "; ".join(filter(None, (failed[0].remedy, ignored_proxies())))
    return (warning if this.addresses else failure)(text, remedy)


async def ask_handshake(this: Visit) -> Handshake | None:
    with suppress(OSError):  # this peer's own files cannot be used, as `certificate` says
        if this.addresses:
            return await shake_hands(this.config, this.addresses[0], this.port, this.certified)
    return None


# Calls: who the peer is.


async def ask_status(this: Visit) -> bool:
    """Makes the first call, which a run with a token refuses without it."""
    try:
        this.status = await this.call(GET_STATUS, (0, 0, False))
    except AveragingError as error:
        if refusal_cause(error) is not RefusalCause.NOT_SERVED:
            raise
    return bool(this.credentials and this.credentials.tokens)


def judge_status(_: Visit, tokens: bool) -> Finding:
    return ok(f"answered; {'the token is accepted' if tokens else 'no token is required'}")


async def ask_description(this: Visit) -> probe_pb2.Description:
    this.description = await this.call(DESCRIBE, probe_pb2.DescribeRequest())
    return this.description


def judge_run(this: Visit, described: probe_pb2.Description) -> Finding:
    theirs, ours = printable(described.run_id, MAX_VALUE), this.config.run_id
    if not this.run_known:
        remedy = f"give it as {spelled('run_id')} if it is the run that you mean"
        return warning(f"the peer belongs to run {theirs!r}", remedy)
    if theirs == ours:
        return ok(f"the peer belongs to run {theirs!r}, as this one")
    text = f"another run: the peer belongs to run {theirs!r}, not to {ours!r}"
    return failure(text, "give both peers the same run id, or join a peer of the other run")


def judge_software(_: Visit, described: probe_pb2.Description) -> Finding:
    theirs = printable(described.software, MAX_VALUE)
    if theirs == SOFTWARE:
        return ok(f"{theirs}, as here")
    return warning(f"{theirs or 'unknown'} there, {SOFTWARE} here", "use one release in a run")


async def ask_endpoint(this: Visit) -> list[DialledAddress] | None:
    """Connections to the endpoint that the peer tells all others; none if that is the address of `join`."""
    if this.status is None or not this.addresses:
        return None
    endpoint = this.status.endpoint
    if endpoint == this.seed:
        return []
    text = f"it tells others to dial {printable(endpoint, MAX_VALUE)}"
    if not is_endpoint(endpoint) or endpoint.startswith(CLIENT_PREFIX):
        raise ConfigError(f"{text}, which is no address; correct advertise there")
    host, port = parse_address(endpoint)
    addresses = [str(address) for address in await look_up(host)]
    loopback = is_loopback(this.addresses[0])  # otherwise a loopback address would be this machine
    reason = next(filter(None, (objection(each, loopback=loopback) for each in addresses)), None)
    if not addresses or reason:
        raise ConfigError(f"{text}, {reason or 'an unknown host here'}; correct advertise there")
    return await asyncio.gather(*(connect(each, port) for each in addresses))


def judge_endpoint(this: Visit, made: list[DialledAddress]) -> Finding:
    text = f"it tells others to dial {printable(this.status.endpoint if this.status else '', MAX_VALUE)}"
    if not made:
        return ok(text)
    if any(not each.failed for each in made):
        return ok(f"{text}, where it is reached from here too")
    return failure(f"{text}, where it is not reached from here: {made[0].failed}", "correct advertise there")


# Clocks.


async def ask_clock(this: Visit) -> tuple[float, float] | None:
    """How far the other clock is ahead in seconds, and how wrong that may be: half of the shortest round trip."""
    if this.description is None:
        return None
    ahead, bound = 0.0, math.inf
    for _ in range(CLOCK_CALLS):
        started, began = time.monotonic(), time.time()
        there = (await this.call(CLOCK, probe_pb2.ClockRequest())).time
        this.round_trips.append(time.monotonic() - started)
        half = this.round_trips[-1] / 2
        if half < bound:
            ahead, bound = there - began - half, half
    return ahead, bound


def judge_clock(_: Visit, answer: tuple[float, float]) -> Finding:
    ahead, bound = answer
    direction = "ahead of" if ahead >= 0 else "behind"
    text = f"the clock there is {1000 * abs(ahead):.0f} ms {direction} this one (± {1000 * bound:.1f} ms)"
    remedy = "set both clocks, for example with NTP"
    if not abs(ahead) - bound <= CLOCK_TOLERANCE:  # also if it is no number
        return failure(f"{text}; with more than {CLOCK_TOLERANCE:g} s peers may not find each other", remedy)
    if abs(ahead) + bound > CLOCK_TOLERANCE / 2:
        return warning(f"{text}; at most {CLOCK_TOLERANCE:g} s are tolerated", remedy)
    return ok(text)


# The way back.


async def ask_call_back(this: Visit) -> tuple[str, bool, probe_pb2.DialBackReply] | None:
    """Lets the peer dial this one's address, which is returned with whether this process listened there."""
    config = this.config
    if this.description is None or config.mode is Mode.CLIENT or not this.addresses:
        return None
    host, port = parse_address(config.advertise or config.listen)
    run_id = config.run_id if this.run_known else this.description.run_id
    nonce = os.urandom(NONCE_BYTES)
    async with listening(config, nonce) as listened:
        port = port or parse_address(config.listen)[1] or listened
        if not port:  # the check of this machine's port says why
            return None
        request = probe_pb2.DialBackRequest(run_id=run_id, endpoint=f"{host}:{port}", nonce=nonce)
        # The peer dials only the address that calls it, so the call leaves over a family that `endpoint` has.
        versions = {address.version for address in await look_up(host)}
        fitting = [format_address(each, this.port) for each in this.addresses if (6 if ":" in each else 4) in versions]
        async with this.open(fitting[0] if fitting else this.seed) as channel:
            return request.endpoint, bool(listened), await channel.call(DIAL_BACK, request, CALL_BACK_SECONDS)


def judge_call_back(_: Visit, answer: tuple[str, bool, probe_pb2.DialBackReply]) -> Finding:
    endpoint, listened, reply = answer
    host, port = parse_address(endpoint)
    client, reason = f"use {spelled('mode', 'client')}", printable(reply.reason or reply.outcome, 2 * MAX_VALUE)
    caller = parse_ip(reply.caller)
    if reply.outcome == DialOutcome.NOT_YOURS and caller is not None and not is_own(str(caller)):
        text, outside = f"calls from here arrive from {caller}, so a NAT is between", format_address(str(caller), port)
        if reply.at_caller == DialOutcome.REACHED:
            text += f"; its port {port} leads here, and {endpoint} is another address"
            return failure(text, f"advertise {outside}, or let the name of {endpoint} lead to it")
        text += f", which does not let port {port} in to this machine ({printable(reply.at_caller, 40)})"
        forward = f"forward TCP port {port} of {caller} to this machine and advertise {outside}"
        return failure(text, f"{forward}, or {client}")
    match reply.outcome:
        case DialOutcome.REACHED:
            return ok(f"the peer reaches {endpoint} in {duration(max(0.0, reply.seconds))}")
        case DialOutcome.OTHER if not listened:
            return ok(f"the peer reaches {endpoint}, where something listens already")
        case DialOutcome.OTHER:
            text = f"at {endpoint} the peer reaches something else than this machine"
            return failure(text, f"correct the forwarding, or {spelled('advertise')}")
        case DialOutcome.CERTIFICATE:
            text = f"the peer reaches {endpoint}, but TLS fails there: {reason}"
            return failure(text, f"issue a certificate for {host} (averaging ca issue), and give it here")
        case DialOutcome.NOT_YOURS:
            text = f"not tried, because a peer calls back only the address that calls it: {reason}"
            return warning(text, f"try {endpoint} from that machine, for example with `nc -vz`")
    forward = f"let TCP port {port} in, or forward it to this machine; or {client}"
    return failure(f"the peer cannot reach {endpoint}: {reason}", forward)


# What all peers of a run must have alike.


def judge_options(this: Visit, described: probe_pb2.Description) -> Finding:
    """Names the options that differ. One that the peer does not name is of another release."""
    theirs: Mapping[str, str] = described.options
    common = {name: ours for name, ours in options_alike(this.config).items() if name in theirs}
    differing = [name for name, ours in common.items() if theirs[name] != ours]
    if not differing:
        return ok(f"{counted(len(common), 'option')} of a run are the same here and there")
    text = "; ".join(f"{name} is {common[name]} here and {printable(theirs[name], 40)} there" for name in differing)
    if differing == ["compression"]:
        return warning(text, "it must be the same, unless a strategy with the option wins at both")
    return failure(text, f"set {', '.join(map(spelled, differing))} alike at all peers")


def ask_strategy(this: Visit) -> str | None:
    if this.status is None:
        return None
    return this.status.training.strategy if this.status.training else ""


def judge_strategy(this: Visit, theirs: str) -> Finding | None:
    """Compares the names of strategies, such as `local_sgd` or `LocalSGD`; empty if the peer does not train."""
    theirs = printable(theirs, MAX_VALUE)
    if not theirs:
        where, ours = this.known.get("strategy", ("", ""))
        if not ours:
            return None
        return warning(f"the peer does not train, and {ours} is used {where}", "join a trainer as well")
    where, ours = this.compare("strategy", theirs)
    if ours.replace("_", "").lower() != theirs.replace("_", "").lower():
        return failure(f"{ours} {where} and {theirs} there", "use one strategy in a run")
    return ok(f"the peer trains with {theirs}{'' if where == f'at {this.seed}' else f', as {where}'}")


def judge_schema(this: Visit, theirs: Schema) -> Finding:
    where, ours = this.compare("schema", theirs)
    text = f"{counted(len(theirs.tensors), 'tensor')}, {size(theirs.nbytes)}"
    if where == f"at {this.seed}":
        return ok(f"the peer averages {text}; with a FILE they are compared")
    between = "" if where == "here" else f"between {where.removeprefix('at ')} (here) and {this.seed} (there): "
    if ours.topic != theirs.topic:
        topics = f"{ours.topic or 'its own tensors'!r} here and {theirs.topic or 'its own tensors'!r} there"
        return warning(f"{between}not compared: a round averages {topics} at this moment", "ask again")
    if difference := difference_of(ours, theirs):
        remedy = "all peers of a run average the same in the same way: compare the models, the options of the strategy"
        return failure(f"{between}{difference}", f"{remedy}, and the versions of their code")
    if first_difference(ours, theirs):
        text = f"{between}the same {text}, in another order: a file has them by name, a model as its code does"
        return warning(text, "this fits a training script with that model, and not `averaging peer`")
    return ok(f"{between}{text}, the same here and there")


def difference_of(ours: Schema, theirs: Schema) -> str | None:
    """The first difference between two schemas, in the order of the names if all tensors have some."""
    here, there = by_name(ours), by_name(theirs)
    for where, missing in (("here", here.keys() - there.keys()), ("there", there.keys() - here.keys())):
        if missing and here and there:
            return f"{counted(len(missing), 'tensor')} only {where}, such as {min(missing)!r}"
    if here and there:
        theirs = replace(theirs, tensors=tuple(there[name] for name in here))
    return first_difference(ours, theirs)


def by_name(schema: Schema) -> dict[str, TensorSpec]:
    """The tensors of a schema by name; none if they have no names of their own."""
    names = without_wrappers(spec.name for spec in schema.tensors)
    return {} if any(map(is_placeholder, names)) else dict(zip(names, schema.tensors, strict=True))


# The path, with `--deep`.


def judge_round_trips(_: Visit, seconds: list[float]) -> Finding:
    """The median, and how much one round trip differs from the next (RFC 3550)."""
    median, jitter = statistics.median(seconds), statistics.mean(abs(after - last) for last, after in pairwise(seconds))
    text = f"{1000 * median:.3g} ms (median of {len(seconds)}), jitter {1000 * jitter:.3g} ms"
    if median > LONG_ROUND_TRIP:
        found = warning(text, "look for a link that queues too much, or choose a peer that is nearer")
    else:
        found = ok(text)
    return replace(found, figures={"median_seconds": median, "jitter_seconds": jitter})


async def ask_bandwidth(this: Visit) -> tuple[float, float] | None:
    """Bytes/s to the peer and from it; 0 if not even an echo arrives that fills packets, where small calls do."""
    if this.description is None:
        return None
    try:
        return await measure_rate(this, upward=True), await measure_rate(this, upward=False)
    except PeerUnreachableError:
        return 0.0, 0.0


async def measure_rate(this: Visit, *, upward: bool) -> float:
    """Moves batches of echoes over one connection, each twice as large as the last, until one takes a second."""
    nbytes, rate = FIRST_BATCH_BYTES, 0.0
    while nbytes <= LAST_BATCH_BYTES:
        each, started = min(nbytes, MAX_ECHO_BYTES), time.perf_counter()
        out, back = (each, 0) if upward else (0, each)
        request = probe_pb2.EchoRequest(padding=noise()[:out], reply_bytes=back)
        await asyncio.gather(*(this.call(ECHO, request, BATCH_SECONDS) for _ in range(nbytes // each)))
        seconds = time.perf_counter() - started
        rate = nbytes / seconds
        if seconds > 1:
            break
        nbytes *= 2
    return rate


def judge_bandwidth(this: Visit, rates: tuple[float, float]) -> Finding:
    config, (there, back) = this.config, rates
    if not there:
        text = f"calls are answered, and {size(FIRST_BATCH_BYTES)} do not pass within {BATCH_SECONDS:g} s"
        return failure(f"{text}: large packets vanish, or the path is too slow", smaller_packets())
    text = f"{_bits(there)} to the peer, {_bits(back)} from it, over one connection{' with TLS' * bool(config.tls_ca)}"
    slowest, others = min(rates), max(1, (config.group_size or 2) - 1)
    seconds = others * config.part_size_bytes / slowest
    if seconds > config.stall_timeout:
        text += (
            f"; a part for each of {others} other members takes {duration(seconds)}, and a member without progress is "
            f"dropped after {config.stall_timeout:g} s"
        )
        found = failure(text, f"raise {spelled('stall_timeout')}, or lower {spelled('group_size')}")
    else:
        found = ok(text)
    return replace(found, figures={"to_peer_bytes_per_second": there, "from_peer_bytes_per_second": back})


def _bits(rate: float) -> str:
    mbit = 8 * rate / 1e6
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


CHECKS: tuple[Check[Visit], ...] = (
    Check("addresses", ask_addresses, judge_addresses, vital=True),
    Check("tcp", ask_connections, judge_connections, vital=True),
    Check("tls", ask_handshake, lambda this, done: judge_handshake(this.config, this.certified, done), vital=True),
    Check("call", ask_status, judge_status, vital=True),
    Check("run", ask_description, judge_run),
    Check("software", lambda this: this.description, judge_software),
    Check("endpoint", ask_endpoint, judge_endpoint),
    Check("clock-difference", ask_clock, judge_clock),
    Check("call-back", ask_call_back, judge_call_back),
    Check("options", lambda this: this.description, judge_options),
    Check("strategy", ask_strategy, judge_strategy),
    Check("schema", lambda this: this.call(GET_SCHEMA, None), judge_schema),
)
DEEP: tuple[Check[Visit], ...] = (
    Check("round-trip", lambda this: this.round_trips or None, judge_round_trips),
    Check("bandwidth", ask_bandwidth, judge_bandwidth),
)
