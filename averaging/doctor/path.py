"""What the path to a peer lets through: packets of which sizes, and connections that were idle for how long.

gRPC does not show its sockets, so calls go through a `Tunnel`: a port of this process, from which their bytes travel
over a socket whose largest segment can be set, and of which the kernel tells what was acknowledged.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeVar

from averaging.common import format_address, parse_address, parse_ip
from averaging.doctor.transfer import MAX_ECHO_BYTES, echo
from averaging.errors import AveragingError, PeerUnreachableError
from averaging.security import Credentials
from averaging.transport.grpc import CONNECT_SECONDS, KEEPALIVE_SECONDS, UNUSED_SECONDS, Channels, Dialling

Result = TypeVar("Result")

COPY_BYTES = 256 << 10

MAX_MESSAGE_BYTES = 4 << 20

SILENCE_SECONDS, STEP_SECONDS = 4.0, 0.1
"""A packet is lost if nothing comes of it, and of its repetitions, for this time and ten round trips. It is counted in
steps, so that the pauses of a busy machine do not count."""

TRIAL_SECONDS = 30.0
"""The longest trial, so that a peer cannot prolong it by sending a byte now and then."""

ANSWER_SECONDS = 5.0
"""Time for the answer on a connection that was idle."""

KNOWN_SIZES = (576, 1000, 1200, 1280, 1320, 1360, 1400, 1420, 1440, 1450, 1460, 1472, 1480, 1492)
"""Packets that pass through usual networks: the least of IPv6 and of VPNs, WireGuard, VXLAN, GRE, PPPoE."""

TRIED_AT_ONCE = 14
"""Sizes that are tried at the same time."""


class Direction(StrEnum):
    """Where something stays on the way."""

    THERE = "to the peer"
    BACK = "from the peer"


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """What the kernel tells of a connection.

    Attributes:
        segment: Bytes of data in the packets that it sends.
        options: Bytes of TCP's options in each of them.
        unacknowledged: Packets that the other side has not acknowledged.
        round_trip: Seconds, as the kernel estimates it.
    """

    segment: int
    options: int
    unacknowledged: int
    round_trip: float


def tcp_info(sock: socket.socket) -> TcpInfo | None:
    """Asks the kernel; None on a system that does not tell, or if the connection is closed."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    fields = _TCP_INFO.unpack(raw)
    timestamps = 12 if fields[5] & 1 else 0
    return TcpInfo(segment=fields[10], options=timestamps, unacknowledged=fields[12], round_trip=fields[23] / 1e6)


_TCP_INFO = struct.Struct("@8B24I")
"""The beginning of `struct tcp_info` of Linux, which never changes."""


class Tunnel:
    """A port of this process whose connections are passed on to a peer. An async context manager.

    Args:
        address: IP address of the peer.
        port: Port of the peer.
        segment: Largest segment of TCP that is sent and accepted; None for what the system chooses.

    Attributes:
        endpoint: `host:port` of this end.
        received: Bytes that came from the peer.
    """

    def __init__(self, address: str, port: int, segment: int | None = None) -> None:
        self._where, self._segment = (address, port), segment
        self._outward: socket.socket | None = None  # the last connection
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""
        self.received = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def info(self) -> TcpInfo | None:
        """What the kernel tells of the connection to the peer; None without one."""
        return None if self._outward is None else tcp_info(self._outward)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._pass_on(reader, writer)
        finally:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            outward = await self._connect()
        there, back = await asyncio.open_connection(sock=outward)
        self._outward = outward
        try:
            copies = [asyncio.create_task(_copy(reader, back)), asyncio.create_task(_copy(there, writer, self._count))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.wait(copies)
        finally:
            self._outward = None
            back.transport.abort()

    def _count(self, nbytes: int) -> None:
        self.received += nbytes

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, where = (await loop.getaddrinfo(*self._where, type=socket.SOCK_STREAM))[0]
        outward = socket.socket(family, kind, protocol)
        try:
            outward.setblocking(False)
            outward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._segment is not None:
                outward.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, self._segment)
            await loop.sock_connect(outward, where)
        except BaseException:
            outward.close()
            raise
        return outward


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], object] = lambda _: None
) -> None:
    with suppress(OSError):
        while data := await reader.read(COPY_BYTES):
            count(len(data))
            writer.write(data)
            await writer.drain()


@dataclass(frozen=True, slots=True)
class PathTo:
    """The way to one peer.

    Attributes:
        peer: HOST:PORT of the peer, as the user gave it.
        address: IP address of the peer that was found to accept connections.
        certified_host: The host for which its certificate must be valid.
        credentials: What calls are made with.
        packet: Largest packet to use; None for what the system chooses.
    """

    peer: str
    address: str
    certified_host: str
    credentials: Credentials
    packet: int | None = None

    @property
    def endpoint(self) -> str:
        """What gRPC dials without a tunnel. A name is not looked up again."""
        return format_address(self.address, parse_address(self.peer)[1])

    @property
    def headers(self) -> int:
        """See `headers_of`."""
        return headers_of(self.address)

    @asynccontextmanager
    async def open(self, packet: int | None = None) -> AsyncIterator[tuple[Tunnel, Channels]]:
        """Provides a tunnel to the peer, and what calls over it.

        Args:
            packet: Largest packet to use; None for that of this path.
        """
        limit = packet or self.packet
        segment = None if limit is None else limit - self.headers
        async with (
            Tunnel(self.address, parse_address(self.peer)[1], segment) as tunnel,
            self.channels(tunnel.endpoint) as channels,
        ):
            yield tunnel, channels

    @asynccontextmanager
    async def channels(self, endpoint: str) -> AsyncIterator[Channels]:
        """Provides calls to an endpoint at which the peer is reached."""
        dialling = Dialling((endpoint,), names={endpoint: self.certified_host})
        channels = Channels(MAX_MESSAGE_BYTES, credentials=self.credentials, dialling=dialling)
        try:
            yield channels
        finally:
            await channels.close()


def headers_of(address: str) -> int:
    """Returns the bytes of the headers of IP and TCP in each packet to an address."""
    ip = parse_ip(address.partition("%")[0])
    return 60 if ip is not None and ip.version == 6 else 40


# Packets.


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of packets of one size.

    Attributes:
        packet: Their size with all headers.
        stuck: The direction in which they did not arrive; None if they passed in both.
    """

    packet: int
    stuck: Direction | None = None


@dataclass(frozen=True, slots=True)
class Packets:
    """Which packets pass.

    Attributes:
        usual: What became of those that the system chooses.
        passed: Largest size that passed in both directions; 0 if none did.
        failed: What became of the smallest that did not pass; None if all did.
    """

    usual: Trial
    passed: int
    failed: Trial | None = None

    @property
    def black_hole(self) -> bool:
        """Whether usual packets vanish although smaller ones pass."""
        return self.usual.stuck is not None and self.passed > 0


async def measure_packets(path: PathTo) -> Packets:
    """Finds the largest packet that passes in both directions.

    Raises:
        CallRefusedError: The peer refuses the calls, or serves none of them.
        PeerUnreachableError: Nothing passes, not even the connection.
    """
    usual = await try_packet(path, None)
    if usual.stuck is None:
        return Packets(usual, usual.packet)
    trials = [usual]
    while sizes := next_sizes([trial.packet for trial in trials if trial.stuck is None], _failed(trials)):
        trials += await _all(try_packet(path, size) for size in sizes)
        if not any(trial.stuck is None for trial in trials):
            break
    passed = max((trial.packet for trial in trials if trial.stuck is None), default=0)
    above = [trial for trial in trials if trial.stuck is not None and trial.packet > passed]
    return Packets(usual, passed, min(above, key=lambda trial: trial.packet, default=None))


def _failed(trials: Sequence[Trial]) -> int:
    return min(trial.packet for trial in trials if trial.stuck is not None)


def next_sizes(passed: Collection[int], failed: int) -> list[int]:
    """Returns the sizes to try next, all at once: usual ones first, then those between what passed and what did not.

    Args:
        passed: Sizes that passed.
        failed: The smallest size that did not.

    Returns:
        Sizes in ascending order; none if the largest that passes is known.
    """
    if not passed:
        return [size for size in KNOWN_SIZES if size < failed]
    best = max(size for size in passed if size < failed) if any(size < failed for size in passed) else failed - 1
    between = range(best + 1, failed)
    step = max(1, -(-len(between) // TRIED_AT_ONCE))
    return list(between[step - 1 :: step]) if step > 1 else list(between)


async def try_packet(path: PathTo, packet: int | None) -> Trial:
    """Sends several full packets of one size in each direction.

    Args:
        path: The way to the peer.
        packet: The size; None for what the system chooses.

    Raises:
        CallRefusedError: The peer refuses the call, or does not serve it.
        PeerUnreachableError: There is no connection.
    """
    async with path.open(packet) as (tunnel, channels):
        call = asyncio.create_task(_fill(channels, tunnel, path.headers))
        try:
            seen = await _wait(call, tunnel)
            if call.done() and (passed := _size_of(call, packet)) is not None:
                return Trial(passed)
        finally:
            call.cancel()
            await asyncio.wait({call})
    if seen is None and packet is None:
        raise PeerUnreachableError(path.peer, "no answer to the connection", unconnected=True)
    if seen is None:
        return Trial(packet or 0, Direction.THERE)
    stuck = Direction.THERE if seen.unacknowledged else Direction.BACK
    return Trial(packet or seen.segment + seen.options + path.headers, stuck)


async def _wait(call: asyncio.Task[int], tunnel: Tunnel) -> TcpInfo | None:
    """Waits until a call has ended, or nothing has come of it for too long; returns what the kernel told last."""
    seen: TcpInfo | None = None
    before, silence, waited = -1, 0.0, 0.0
    while not call.done() and silence < SILENCE_SECONDS + 10 * (seen.round_trip if seen else 0.0):
        if waited >= TRIAL_SECONDS:
            break
        await asyncio.wait({call}, timeout=STEP_SECONDS)
        seen = tunnel.info() or seen
        silence = silence + STEP_SECONDS if tunnel.received == before else 0.0
        before, waited = tunnel.received, waited + STEP_SECONDS
    return seen


def _size_of(call: asyncio.Task[int], packet: int | None) -> int | None:
    """The size of packets that have passed; None if the connection was lost, as one is that nothing comes of.

    An error that the peer has sent shows that packets pass, even if it is about the certificate.

    Raises:
        AveragingError: It has sent an error although packets have the usual size.
    """
    try:
        usual = call.result()
    except PeerUnreachableError as error:
        if not error.definite:
            return None
        failed: AveragingError = error
    except AveragingError as error:
        failed = error
    else:
        return packet or usual
    if packet is None:
        raise failed
    return packet


async def _fill(channels: Channels, tunnel: Tunnel, headers: int) -> int:
    """Makes round trips with full packets in each direction; returns the size of those that were sent."""
    await echo(channels, tunnel.endpoint)
    info = tunnel.info()
    count = MAX_ECHO_BYTES if info is None else min(MAX_ECHO_BYTES, 4 * info.segment)
    await echo(channels, tunnel.endpoint, out=count)
    await echo(channels, tunnel.endpoint, back=count)
    info = tunnel.info()  # the kernel may have learned of smaller packets meanwhile
    return 0 if info is None else info.segment + info.options + headers


# Idle connections.


def idle_steps(longest: float) -> list[float]:
    """Returns for how many seconds connections are left idle.

    They are the longest, its half, quarter and eighth, and a second more than the two times on which peers rely.
    """
    halves = {longest / parts for parts in (1, 2, 4, 8)}
    own = {KEEPALIVE_SECONDS + 1, UNUSED_SECONDS + 1}
    return sorted(halves | {step for step in own if step < longest})


@dataclass(frozen=True, slots=True)
class Idle:
    """How long idle connections live.

    Attributes:
        lived: Longest time in seconds after which a connection still worked; 0 if none did.
        lost: Shortest time after which one did not; None if all worked.
    """

    lived: float
    lost: float | None


async def measure_idle(path: PathTo, longest: float) -> Idle:
    """Leaves several connections idle, each for another time, and uses each again.

    Raises:
        AveragingError: A connection did not even work before, or a new one does not work afterwards.
    """
    steps = idle_steps(longest)
    lives = await _all(_lives(path, step) for step in steps)
    if not all(lives):
        await _check_up(path)
    lost = min((step for step, alive in zip(steps, lives, strict=True) if not alive), default=None)
    lived = max(
        (step for step, alive in zip(steps, lives, strict=True) if alive and (lost is None or step < lost)), default=0.0
    )
    return Idle(lived, lost)


async def _check_up(path: PathTo) -> None:
    """Checks that a new connection works: otherwise it is not the path that has lost the others.

    Raises:
        PeerUnreachableError: It does not.
    """
    async with path.open() as (tunnel, channels):
        if not await _answers(channels, tunnel):
            raise PeerUnreachableError(path.peer, "it does not answer any more, on new connections either")


async def _lives(path: PathTo, seconds: float) -> bool:
    """Whether a connection works after it was idle."""
    async with path.open() as (tunnel, channels):
        if not await _answers(channels, tunnel):
            raise PeerUnreachableError(path.peer, f"no answer within {ANSWER_SECONDS:g} s")
        async with channels.connection(tunnel.endpoint):  # otherwise an unused one is replaced
            await asyncio.sleep(seconds)
            return await _answers(channels, tunnel)


async def _answers(channels: Channels, tunnel: Tunnel) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await echo(channels, tunnel.endpoint)
    except (PeerUnreachableError, TimeoutError):
        return False
    return True


async def _all(calls: Iterable[Coroutine[None, None, Result]]) -> list[Result]:
    """Awaits all at once; if one raises, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except* AveragingError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
