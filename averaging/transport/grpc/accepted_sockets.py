"""Finds the sockets of the connections that gRPC accepted, counts the bytes that arrived, and closes connections.

gRPC does not expose them. On Linux a process sees its descriptors in /proc, and TCP counts the bytes that it received.
On other systems no socket is found.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

_DESCRIPTORS = Path("/proc/self/fd")

_TCP_INFO = struct.Struct("=B127xQ")
"""`tcpi_state` and `tcpi_bytes_received` in Linux's `struct tcp_info`, since Linux 4.1."""

_ESTABLISHED = 1

_PAUSE = 50
"""Minimum pause between two searches, as a multiple of the duration of the last one.

A search reads every descriptor of the process. With thousands of them it blocks the event loop for about 50 ms."""


class Remote(NamedTuple):
    """The other end of a connection; an IPv6 address has no brackets and no zone."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


class SocketHandle(NamedTuple):
    """One socket. Its inode differs from that of a later socket or file with the same descriptor."""

    descriptor: int
    inode: int


@dataclass(frozen=True, slots=True)
class Found:
    """The sockets of all connections of this process.

    Attributes:
        taken: when the search began, on the monotonic clock.
        sockets: the sockets by local port and other end. One end may have several connections to one port, at different
            addresses of this machine.
    """

    taken: float = -1.0
    sockets: Mapping[tuple[int, Remote], tuple[SocketHandle, ...]] = field(default_factory=dict)


def parse_peer(peer: str) -> Remote:
    """Parses gRPC's text for the caller, such as `ipv4:192.0.2.7:1` or `ipv6:%5B2001:db8::7%5D:1`.

    Any other text becomes a `Remote` that no socket has. The text is empty for a call that was cancelled at once.
    """
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _remote(host, int(port)) if host and port.isdecimal() else Remote(peer, 0)


class SocketSearch:
    """Searches for sockets, for all servers of this process.

    Args:
        clock: the monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._found = Found()
        self._next = 0.0

    def find(self) -> Found:
        """Returns the connections of this process; the result of the last search, if that is recent."""
        with self._lock:
            began = self._clock()
            if began >= self._next:
                with suppress(OSError):  # without a free descriptor the last result remains
                    self._found = Found(began, search())
                ended = self._clock()
                self._next = ended + _PAUSE * (ended - began)
            return self._found


SEARCH = SocketSearch()


def search() -> Mapping[tuple[int, Remote], tuple[SocketHandle, ...]]:
    """Reads all descriptors of this process; see `Found.sockets`.

    Raises:
        OSError: this process has no free descriptor.
    """
    found: defaultdict[tuple[int, Remote], tuple[SocketHandle, ...]] = defaultdict(tuple)
    descriptors: list[int] = []
    with _skipped():
        descriptors += [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    for descriptor in descriptors:
        with _skipped(), _borrowed(descriptor) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            if _received(one) is not None:
                ends = one.getsockname()[1], _remote(*one.getpeername()[:2])
                found[ends] += (SocketHandle(descriptor, _inode(one)),)
    return found


def received(handles: tuple[SocketHandle, ...]) -> int | None:
    """Returns how many bytes have arrived on these sockets since they were connected; None if one of them is closed.

    Raises:
        OSError: this process has no free descriptor.
    """
    total = 0
    for descriptor, inode in handles:
        nbytes = None
        with _skipped(), _borrowed(descriptor) as one:
            if _inode(one) == inode:
                nbytes = _received(one)
        if nbytes is None:
            return None
        total += nbytes
    return total


def hang_up(handles: tuple[SocketHandle, ...]) -> None:
    """Shuts these sockets down in both directions. gRPC sees connections that the other end has closed."""
    for descriptor, inode in handles:
        with suppress(OSError), _borrowed(descriptor) as one:
            if _inode(one) == inode:
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def _skipped() -> Iterator[None]:
    """Suppresses errors of descriptors that are closed or not sockets. An error for lack of descriptors is raised."""
    try:
        yield
    except struct.error:
        pass
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Opens a socket through a duplicate of its descriptor, which gRPC may close at any time.

    Raises:
        OSError: it is closed, or not a socket, or this process has no free descriptor.
    """
    # Never duplicate the descriptor of a file: closing the duplicate releases the POSIX locks on that file.
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    own = os.dup(descriptor)
    try:
        one = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with one:
        yield one


def _received(one: socket.socket) -> int | None:
    """Returns the bytes that arrived; None if either end has closed the connection, or it is a listening socket."""
    state, nbytes = _TCP_INFO.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return int(nbytes) if state == _ESTABLISHED else None


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def _remote(host: str, port: int) -> Remote:
    """Normalizes an address, which may have brackets or a zone, or be IPv4 mapped to IPv6."""
    address = host.strip("[]").partition("%")[0]
    return Remote(address.removeprefix("::ffff:") if "." in address else address, port)
