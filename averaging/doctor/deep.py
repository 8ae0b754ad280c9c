"""`averaging doctor --deep`: measures the path to one peer, and says what that means for a run."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import statistics
import struct
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from averaging.common import Address, duration, parse_ip, size, spelled
from averaging.config import PeerConfig
from averaging.doctor.findings import Finding, Severity, failure, ok, warning
from averaging.doctor.path import MAX_MESSAGE_BYTES, Idle, Packets, PathTo, headers_of, measure_idle, measure_packets
from averaging.doctor.transfer import MeasuredTransfer, download, echo, upload
from averaging.errors import AveragingError, PeerUnreachableError, RefusalCause, refusal_cause
from averaging.security import Credentials
from averaging.transport.direct import DirectTransport, sealing_rate
from averaging.transport.grpc import KEEPALIVE_SECONDS, UNUSED_SECONDS, Channels

ROUND_TRIPS, ROUND_TRIP_SECONDS = 20, 5.0
"""Round trips that are measured, and the time for all of them."""

LONG_ROUND_TRIP = 1.0
"""Seconds from which on a round trip disturbs a run: connections are lost after 10 s without an acknowledgement."""

SEALING_SECONDS = 0.3
"""Time for which a core seals parts."""

LANE_SECONDS = 20.0
"""Time limit for a direct connection, which is asked for by a call and then opened."""

BANDWIDTH_FACTOR = 1.5
"""A stated bandwidth above the measured one by this factor is reported."""


@dataclass(frozen=True, slots=True)
class DeepCheck:
    """What is measured of which path.

    Attributes:
        peer: HOST:PORT of the peer, as the user gave it.
        address: IP address at which it accepts connections.
        endpoint: What gRPC dials: `peer`, or HOST:PORT at the address if gRPC does not find the name.
        certified_host: The host for which its certificate must be valid.
        credentials: What calls are made with.
        config: The options of the peer that will be started here.
        tell: Called with what is being measured, for people who wait.
    """

    peer: str
    address: str
    endpoint: str
    certified_host: str
    credentials: Credentials
    config: PeerConfig
    tell: Callable[[str], None]


async def measure_paths(checks: Sequence[DeepCheck], idle: float, report: Callable[[Finding], None]) -> None:
    """Measures one path after the other, so that they do not disturb each other, and reports what is found.

    Args:
        checks: The paths.
        idle: For how many seconds connections are left idle at most, of all paths at the same time; 0 for not at all.
        report: Called with each finding.
    """
    async with asyncio.TaskGroup() as tasks:
        waiting: list[asyncio.Task[Finding]] = []
        for check in checks:
            path, finding = await _measure_packets(check)
            report(finding)
            if path is None:
                continue
            if idle:
                waiting.append(tasks.create_task(_measure_idle(path, idle)))
            async for finding in _measure_rates(check, path):
                report(finding)
            if path.packet is None:
                report(await _check_lane(check))
        if waiting:
            checks[0].tell(f"connections that are idle for up to {idle:g} s")
        for task in waiting:
            report(await task)


def _not_measured(name: str, error: AveragingError, peer: str) -> Finding:
    if refusal_cause(error) is RefusalCause.NOT_SERVED:
        text = "not measured: the peer has a release without it, or other software"
        return warning(name, text, "update that peer", peer)
    return warning(name, f"not measured: {error.reason}", "", peer)


# Packets.


async def _measure_packets(check: DeepCheck) -> tuple[PathTo | None, Finding]:
    """Returns the path with a packet that passes, or None if there is no use in measuring more, and the finding."""
    check.tell(f"{check.peer}: which packets pass")
    path = PathTo(check.peer, check.address, check.certified_host, check.credentials)
    try:
        packets = await measure_packets(path)
    except AveragingError as error:
        return None, _not_measured("packets", error, check.peer)
    finding = replace(
        judge_packets(packets, check.address, check.peer),
        figures={"passed_bytes": packets.passed, "usual_bytes": packets.usual.packet},
    )
    if not packets.passed:
        return None, finding
    return replace(path, packet=packets.passed if packets.black_hole else None), finding


def judge_packets(packets: Packets, address: str, peer: str) -> Finding:
    """The finding about the sizes of packets."""
    check, usual = "packets", packets.usual
    if usual.stuck is None:
        return ok(check, f"packets of {usual.packet:,} bytes pass in both directions", peer)
    if not packets.passed:
        text = f"connections are accepted, but nothing that is sent {usual.stuck} arrives, in packets of any size"
        return failure(check, text, "see what is said above, and look for a firewall between the peers", peer)
    text = (
        f"packets of {packets.passed:,} bytes pass, and larger ones vanish without a word: those of {usual.packet:,} "
        f"bytes are lost on the way {usual.stuck}. Small calls work; handshakes, parts and states hang"
    )
    own, mtu = interface_of(address), packets.passed
    remedy = (
        f"send smaller packets: `ip link set dev {own} mtu {mtu}` here, or the same at the peer; or have the router "
        f'let ICMP "fragmentation needed" and "packet too big" through, or clamp the MSS of TCP to '
        f"{mtu - headers_of(address)}"
    )
    return failure(check, text, remedy, peer)


def interface_of(address: str) -> str:
    """The name of the interface over which this machine sends to an address; `INTERFACE` if it is not known."""
    ip = parse_ip(address.partition("%")[0])
    with suppress(OSError), socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        return next((name for name, each in _own_addresses(probe) if each == own), "INTERFACE")
    return "INTERFACE"


def _family(ip: Address | None) -> int:
    return socket.AF_INET6 if ip is not None and ip.version == 6 else socket.AF_INET


def _own_addresses(probe: socket.socket) -> Iterator[tuple[str, Address]]:
    """The interfaces of this machine with their addresses, as far as Linux tells them without further tools."""
    if sys.platform != "linux":
        return
    import fcntl

    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(int(digits, 16))
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # it has none of IPv4
            raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            yield name, ipaddress.IPv4Address(raw[20:24])


_SIOCGIFADDR = 0x8915
"""Linux: the first IPv4 address of an interface."""


# Round trips, bandwidth, sealing.


@asynccontextmanager
async def _channels(path: PathTo) -> AsyncIterator[tuple[Channels, str]]:
    """Provides calls to a peer: over a tunnel if its packets must be small, else without a detour."""
    if path.packet is not None:
        async with path.open() as (tunnel, channels):
            yield channels, tunnel.endpoint
        return
    async with path.channels(path.endpoint) as channels:
        yield channels, path.endpoint


async def _measure_rates(check: DeepCheck, path: PathTo) -> AsyncGenerator[Finding, None]:
    async with _channels(path) as (channels, endpoint):
        check.tell(f"{check.peer}: round trips")
        try:
            yield judge_round_trips(await measure_round_trips(channels, endpoint), check.peer)
        except AveragingError as error:
            yield _not_measured("round-trip", error, check.peer)
        check.tell(f"{check.peer}: bandwidth, at most 64 MiB and 10 s each way")
        there = back = None
        try:
            there, back = await upload(channels, endpoint), await download(channels, endpoint)
            finding = judge_bandwidth(there, back, check.config, check.peer, tls=path.credentials.tls is not None)
            rates = {"to_peer_bytes_per_second": _rate(there), "from_peer_bytes_per_second": _rate(back)}
            yield replace(finding, figures=rates)
        except AveragingError as error:
            yield _not_measured("bandwidth", error, check.peer)
    sealed = await asyncio.to_thread(sealing_rate, check.config.part_size_bytes, SEALING_SECONDS, time.perf_counter)
    fastest = max((transfer.rate for transfer in (there, back) if transfer is not None), default=0.0)
    finding = judge_sealing(sealed, fastest, check.peer, tls=path.credentials.tls is not None)
    yield replace(finding, figures={"sealed_bytes_per_second": sealed})


async def measure_round_trips(channels: Channels, endpoint: str) -> list[float]:
    """Returns the seconds of some round trips over one connection.

    Raises:
        AveragingError: A call failed; PeerUnreachableError also if there is no answer in time.
    """
    measured: list[float] = []
    try:
        async with asyncio.timeout(ROUND_TRIP_SECONDS):
            await echo(channels, endpoint)  # opens the connection
            while len(measured) < ROUND_TRIPS:
                measured.append(await echo(channels, endpoint))
    except TimeoutError:
        if not measured:
            raise PeerUnreachableError(endpoint, f"no answer within {ROUND_TRIP_SECONDS:g} s") from None
    return measured


def judge_round_trips(seconds: list[float], peer: str) -> Finding:
    """The finding about round trips: their median, and how much one differs from the next (RFC 3550)."""
    median = statistics.median(seconds)
    steps = [abs(after - before) for before, after in pairwise(seconds)]
    jitter = statistics.mean(steps) if steps else 0.0
    text = f"{_milliseconds(median)} (median of {len(seconds)}), jitter {_milliseconds(jitter)}"
    long = median > LONG_ROUND_TRIP
    remedy = "look for a link that queues too much, or choose a peer that is nearer" if long else ""
    figures = {"median_seconds": median, "jitter_seconds": jitter}
    return Finding("round-trip", Severity.WARNING if long else Severity.OK, text, remedy, peer, figures)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def judge_bandwidth(
    there: MeasuredTransfer, back: MeasuredTransfer, config: PeerConfig, peer: str, *, tls: bool
) -> Finding:
    """The finding about the bandwidth, compared with what the options need and state."""
    check, rates = "bandwidth", [rate for rate in map(_rate, (there, back)) if rate]
    text = f"{_told(there)} to the peer, {_told(back)} from it, over one connection{' with TLS' if tls else ''}"
    if not rates:
        return warning(check, f"{text}: too little for a result", "measure again", peer)
    slowest = min(rates)
    others = max(1, (config.group_size or 2) - 1)
    seconds = others * config.part_size_bytes / slowest
    if seconds > config.stall_timeout:
        text += (
            f"; a part for each of {others} other members takes {duration(seconds)}, and a member without progress is "
            f"dropped after {config.stall_timeout:g} s"
        )
        return failure(check, text, f"lower {spelled('part_size_bytes')}, or raise {spelled('stall_timeout')}", peer)
    if config.bandwidth is not None and config.bandwidth > BANDWIDTH_FACTOR * slowest:
        text += f"; {spelled('bandwidth', f'{config.bandwidth:g}')} is more"
        return warning(check, text, f"give {spelled('bandwidth', f'{slowest:.2g}')}", peer)
    return ok(check, text, peer)


def _rate(transfer: MeasuredTransfer) -> float:
    """Bytes/s at the end of a transfer, or of all of it."""
    return transfer.rate or (transfer.nbytes / transfer.seconds if transfer.seconds else 0.0)


def _told(transfer: MeasuredTransfer) -> str:
    ended = ", ended by a round" if transfer.interrupted else ""
    return f"{_bits(_rate(transfer))} ({size(transfer.nbytes)} in {duration(transfer.seconds)}{ended})"


def _bits(rate: float) -> str:
    mbit = 8 * rate / 1e6
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def judge_sealing(sealed: float, fastest: float, peer: str, *, tls: bool) -> Finding:
    """The finding about encryption: whether a core seals as fast as the path carries.

    Args:
        sealed: Bytes/s that one core seals.
        fastest: Bytes/s of the faster direction; 0 if it is not known.
        peer: The peer.
        tls: Whether the run has TLS.
    """
    text = f"one core here seals {_bits(sealed)}"
    if not tls:
        return ok("sealing", f"{text}; nothing is sealed, since there is no TLS", peer)
    if sealed < fastest:
        return warning("sealing", f"{text}, less than the path carries", "use a processor with AES instructions", peer)
    share = f", {sealed / fastest:.0f} times what the path carries" if fastest else ""
    return ok("sealing", f"{text}{share}", peer)


# The lane.


async def _check_lane(check: DeepCheck) -> Finding:
    name, config = "lane", check.config
    if config.direct_listen is None:
        return ok(name, f"gRPC, since {spelled('direct_listen', 'off')} is set here", check.peer)
    transport = DirectTransport(
        None,
        max_part_bytes=MAX_MESSAGE_BYTES,
        max_message_bytes=MAX_MESSAGE_BYTES,
        credentials=check.credentials,
        given=[check.endpoint],
        names={check.endpoint: check.certified_host},
    )
    await transport.bind()
    try:
        async with asyncio.timeout(LANE_SECONDS):
            lane = await transport.try_lane(check.endpoint)
    except TimeoutError:
        silent = PeerUnreachableError(check.peer, f"no answer within {LANE_SECONDS:g} s")
        return _not_measured(name, silent, check.peer)
    except AveragingError as error:
        return _not_measured(name, error, check.peer)
    finally:
        await transport.close()
    if lane.name == "grpc":
        remedy = f"let the port in; {spelled('direct_listen')} of the peer chooses it"
        return warning(name, f"gRPC, which costs more CPU: {lane.reason}", remedy, check.peer)
    how = "sealed: a connection beside gRPC, encrypted" if lane.name == "sealed" else "direct: a connection beside gRPC"
    return ok(name, how, check.peer)


# Idle connections.


async def _measure_idle(path: PathTo, longest: float) -> Finding:
    try:
        idle = await measure_idle(path, longest)
    except AveragingError as error:
        return _not_measured("idle", error, path.peer)
    figures = {"lived_seconds": idle.lived} | ({} if idle.lost is None else {"lost_seconds": idle.lost})
    return replace(judge_idle(idle, path.peer), figures=figures)


def judge_idle(idle: Idle, peer: str) -> Finding:
    """The finding about idle connections, which peers ping and replace so that most of the losses do not matter."""
    check = "idle"
    if idle.lost is None:
        return ok(check, f"connections live when they were idle for {idle.lived:g} s", peer)
    text = f"something on the way forgets idle connections after {idle.lived:g} to {idle.lost:g} s"
    remedy = (
        "raise the timeout of the firewall or NAT for idle TCP connections to 60 s or more; on a Linux router "
        "`sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=600`"
    )
    if idle.lived > UNUSED_SECONDS:
        care = f"peers ping every {KEEPALIVE_SECONDS:g} s, and replace what was unused for {UNUSED_SECONDS:g} s"
        return ok(check, f"{text}; it does not matter, since {care}", peer)
    if idle.lived > KEEPALIVE_SECONDS:
        late = f"peers reuse connections that were unused for up to {UNUSED_SECONDS:g} s, so some calls will hang"
        return warning(check, f"{text}; {late}", remedy, peer)
    return failure(check, f"{text}; the pings of peers every {KEEPALIVE_SECONDS:g} s come too late", remedy, peer)
