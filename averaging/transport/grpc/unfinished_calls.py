"""Bounds the memory that unfinished requests take in gRPC, and closes the connections that exceed the bounds.

gRPC keeps the bytes of a message until the message is complete. Its flow control counts only bytes of messages. But a
few of them keep the whole block of memory in which they arrived, whatever else is in it: 6 MiB of a message, sent in
small pieces between frames of an unknown type, keep 1.6 GiB. This module therefore counts what the system says has
arrived on a connection since its oldest unfinished call began, less the messages that were read from the connection.

gRPC does not expose its sockets. On Linux a process sees its descriptors in /proc, and TCP counts the bytes that it
received. On other systems no socket is found and nothing is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote

from averaging.errors import BusyError
from averaging.timing import expire

logger = logging.getLogger("averaging.transport")

LOOK_SECONDS = 0.05
"""Interval at which the bytes on connections with unfinished calls are counted."""

_PAUSE = 10
"""Minimum pause between two counts, and between two searches for sockets, as a multiple of the last one's duration."""

_DESCRIPTORS = "/proc/self/fd"

_TCP_INFO = struct.Struct("=B127xQ")
"""`tcpi_state` and `tcpi_bytes_received` in Linux's `struct tcp_info`, since Linux 4.1."""

_ESTABLISHED = 1


class Remote(NamedTuple):
    """The other end of a connection; an IPv6 address has no brackets and no zone."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def parse_peer(peer: str) -> Remote:
    """Parses gRPC's text for the caller, such as `ipv4:192.0.2.7:1` or `ipv6:%5B2001:db8::7%5D:1`.

    Any other text becomes a `Remote` that no socket has. The text is empty for a call that was cancelled at once.
    """
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _remote(host, int(port)) if host and port.isdecimal() else Remote(peer, 0)


def _remote(host: str, port: int) -> Remote:
    """Normalizes an address, which may have brackets or a zone, or be IPv4 mapped to IPv6."""
    address = host.strip("[]").partition("%")[0]
    return Remote(address.removeprefix("::ffff:") if "." in address else address, port)


@dataclass(frozen=True, slots=True)
class SocketHandle:
    """A descriptor that gRPC owns and may close at any time.

    Attributes:
        identity: device and inode, which differ from those of a later socket or file with the same descriptor.
        ends: local port and other end; None if it is no connected TCP socket.
    """

    descriptor: int
    identity: tuple[int, int]
    ends: tuple[int, Remote] | None = None

    def received(self) -> int | None:
        """Returns how many bytes have arrived since the connection began; None if either end has closed it."""
        with suppress(OSError, struct.error):
            if _identity(self.descriptor) == self.identity:
                with _borrowed(self.descriptor) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                    state, nbytes = _TCP_INFO.unpack(info)
                    return int(nbytes) if state == _ESTABLISHED else None
        return None

    def hang_up(self) -> None:
        """Shuts the socket down in both directions. gRPC sees a connection that the other end has closed."""
        with suppress(OSError):
            if _identity(self.descriptor) == self.identity:
                # A duplicate cannot become another socket between the check and the end of the connection.
                with socket.socket(fileno=os.dup(self.descriptor)) as own:
                    if _identity(own.fileno()) == self.identity:
                        own.shutdown(socket.SHUT_RDWR)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Opens a socket without taking its descriptor over.

    Raises:
        OSError: it is closed, or not a socket.
    """
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _handle(descriptor: int, identity: tuple[int, int]) -> SocketHandle:
    with suppress(OSError), _borrowed(descriptor) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
            ends = connection.getsockname()[1], _remote(*connection.getpeername()[:2])
            return SocketHandle(descriptor, identity, ends)
    return SocketHandle(descriptor, identity)


class SocketTable:
    """The sockets of this process. A search inspects only descriptors that it has not seen before."""

    def __init__(self) -> None:
        self._handles: dict[int, SocketHandle] = {}
        self._connected: Mapping[tuple[int, Remote], tuple[SocketHandle, ...]] = {}

    def search(self) -> None:
        """Reads the descriptors of this process.

        Raises:
            OSError: this process has no free descriptor, or the system has no /proc.
        """
        handles: dict[int, SocketHandle] = {}
        connected: defaultdict[tuple[int, Remote], tuple[SocketHandle, ...]] = defaultdict(tuple)
        with os.scandir(_DESCRIPTORS) as entries:
            descriptors = [int(entry.name) for entry in entries]
        for descriptor in descriptors:
            with suppress(OSError):
                identity = _identity(descriptor)
                handle = self._handles.get(descriptor)
                if handle is None or handle.identity != identity:
                    handle = _handle(descriptor, identity)
                handles[descriptor] = handle
                if handle.ends is not None:
                    connected[handle.ends] += (handle,)
        self._handles, self._connected = handles, connected

    def of(self, port: int, remote: Remote) -> tuple[SocketHandle, ...]:
        """Returns the sockets of connections from `remote`; several if they lead to several addresses of this host."""
        return self._connected.get((port, remote), ())


@dataclass(frozen=True, slots=True)
class ByteLimits:
    """Bytes that unfinished calls may hold.

    Attributes:
        per_connection: limit of one connection.
        per_host: limit of all connections from one address.
        in_all: limit of all connections.
    """

    per_connection: int
    per_host: int
    in_all: int


def excess(nbytes: Mapping[Remote, int], limits: ByteLimits) -> list[Remote]:
    """Selects the connections to close, so that the others keep within the limits.

    A host over its limit loses its largest connections. If all hosts together are over the limit, the host that holds
    the most loses its largest connections.

    Args:
        nbytes: the bytes of each connection.
        limits: the bytes that are allowed.
    """
    gone: list[Remote] = []
    left: dict[str, list[Remote]] = {}
    totals: Counter[str] = Counter()
    for remote in sorted(nbytes, key=lambda remote: nbytes[remote], reverse=True):
        if nbytes[remote] > limits.per_connection:
            gone.append(remote)
        else:
            left.setdefault(remote.address, []).append(remote)
            totals[remote.address] += nbytes[remote]
    while totals:
        host, total = totals.most_common(1)[0]
        if total <= limits.per_host and totals.total() <= limits.in_all:
            break
        largest = left[host].pop(0)
        gone.append(largest)
        totals[host] -= nbytes[largest]
    return gone


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection on which there has been a call.

    Attributes:
        remote: its other end.
        handles: its socket; empty until it is found.
        calls: the unfinished calls, each with the `level` when it began: earlier bytes belong to other calls.
        taken: bytes of messages that were read.
        level: bytes that have arrived, less `taken`, at the last count. The first call is charged for all of them.
    """

    remote: Remote
    handles: tuple[SocketHandle, ...] = ()
    calls: dict[UnfinishedCall, int] = field(default_factory=dict)
    taken: int = 0
    level: int = 0

    def count(self) -> bool:
        """Counts the bytes that have arrived; False if the connection is closed."""
        if not self.handles:
            return True
        arrived = [handle.received() for handle in self.handles]
        self.level = sum(filter(None, arrived)) - self.taken
        return None not in arrived

    @property
    def charged(self) -> int:
        return self.level - min(self.calls.values(), default=self.level)


class UnfinishedCall:
    """One call for which gRPC may hold bytes."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._read = 0
        self._limit: asyncio.Timeout | None = None
        connection.calls[self] = connection.level

    def took(self, nbytes: int) -> None:
        """Records that a message was read. In an unfinished call its bytes count as held until `release`."""
        self._read += nbytes
        if self not in self._connection.calls:
            self.release()

    def release(self) -> None:
        """Records that the messages that were read are no longer in memory."""
        self._connection.taken += self._read
        self._read = 0

    def finish(self) -> None:
        """Ends the count of this call. The service that reads it bounds what the caller sends from now on."""
        self.release()
        self._connection.calls.pop(self, None)

    @asynccontextmanager
    async def until_hung_up(self) -> AsyncIterator[None]:
        """A context for everything that serves the call, except for the reply with an error.

        Raises:
            BusyError: the connection was closed because it holds too much. An error must be sent to the caller: gRPC
                may notice the closed connection only when it writes, and keeps the memory until then, up to 20 s.
        """
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise BusyError("the unfinished requests on this connection hold too much memory") from None
        finally:
            self._limit = None

    def hang_up(self) -> None:
        if self._limit is not None:
            expire(self._limit)


class UnfinishedCalls:
    """Counts what the unfinished calls of one server hold, and closes the connections that hold too much.

    Args:
        limits: the bytes that are allowed.
        clock: the monotonic clock.
    """

    def __init__(self, limits: ByteLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._port = 0
        self._connections: dict[Remote, _Connection] = {}
        self._sockets, self._next_search = SocketTable(), 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, port: int) -> None:
        self._port = port

    def stop(self) -> None:
        """Stops counting."""
        self._port = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @contextmanager
    def call(self, peer: str) -> Iterator[UnfinishedCall]:
        """A context for a call of `peer`, as gRPC writes it. Enter it before the request is read."""
        call = UnfinishedCall(self._connection(parse_peer(peer)))
        self._look_in(LOOK_SECONDS)
        try:
            yield call
        finally:
            call.finish()

    def hang_up(self, peer: str) -> None:
        """Closes the connection of `peer`, as gRPC writes it."""
        self._search()
        connection = self._connections.get(parse_peer(peer))
        if connection is not None:
            self._end(connection)

    def look(self) -> None:
        """Counts what has arrived, and closes the connections that hold too much."""
        self._search()
        for connection in list(self._connections.values()):
            # Another one may come from the same address and port, and gRPC does not tell their calls apart.
            others = self._sockets.of(self._port, connection.remote) != connection.handles
            if (connection.handles and others) or (connection.calls and not connection.count()):
                self._end(connection)
        nbytes = {remote: connection.charged for remote, connection in self._connections.items() if connection.calls}
        for remote in excess(nbytes, self._limits):
            text = "closed the connection of %s: its unfinished requests hold %.0f MiB"
            logger.warning(text, remote, nbytes[remote] / (1 << 20))
            self._end(self._connections[remote])

    def _connection(self, remote: Remote) -> _Connection:
        """Returns the connection of a new call, with a count of what has arrived."""
        connection = self._connections.get(remote)
        if connection is not None and not connection.count():
            self._end(connection)
            connection = None
        if connection is None:
            self._search()
            handles = self._sockets.of(self._port, remote)
            connection = _Connection(remote, tuple(handle for handle in handles if handle.received() is not None))
            self._connections[remote] = connection
        return connection

    def _search(self) -> None:
        """Finds the sockets of new connections, unless the last search is too recent for its duration."""
        began = self._clock()
        if began < self._next_search:
            return
        with suppress(OSError):  # then the last result remains
            self._sockets.search()
        ended = self._clock()
        self._next_search = ended + _PAUSE * (ended - began)
        for connection in [new for new in self._connections.values() if not new.handles]:
            connection.handles = self._sockets.of(self._port, connection.remote)
            if not connection.handles and not connection.calls:
                del self._connections[connection.remote]

    def _look_in(self, seconds: float) -> None:
        if self._timer is None and self._port:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look_and_go_on)

    def _look_and_go_on(self) -> None:
        self._timer = None
        began = self._clock()
        self.look()
        if any(connection.calls or not connection.handles for connection in self._connections.values()):
            self._look_in(max(LOOK_SECONDS, _PAUSE * (self._clock() - began)))

    def _end(self, connection: _Connection) -> None:
        """Closes a connection, in case it is not closed yet, and ends its unfinished calls."""
        del self._connections[connection.remote]
        for handle in connection.handles:
            handle.hang_up()
        for call in connection.calls:
            call.hang_up()
