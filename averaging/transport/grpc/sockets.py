"""The sockets of gRPC's connections, which gRPC does not show: how many bytes arrived on one, and how it is closed.

It works on Linux, where a process sees its descriptors in /proc and TCP tells how much it has received. Elsewhere no
socket is found.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

_DESCRIPTORS = Path("/proc/self/fd")

_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` in Linux's `struct tcp_info`, from 4.1 on."""

_PAUSE = 50
"""The sockets are looked up again only after this many times as long as the last look-up took.

A look-up reads every descriptor of the process: with thousands of them it takes some 10 ms of the event loop."""


class Remote(NamedTuple):
    """The other end of a connection; an IPv6 address is without brackets and zone."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Found:
    """The sockets of accepted connections.

    Attributes:
        taken: when they were looked up, on the monotonic clock.
        by_port: their descriptors, by the port that was connected to and by the other end. One end may have several
            connections to one port, at different addresses of this machine.
    """

    taken: float = -1.0
    by_port: Mapping[int, Mapping[Remote, tuple[int, ...]]] = field(default_factory=dict)


def parse_peer(peer: str) -> Remote | None:
    """The other end of a call, from gRPC's text for it, such as `ipv4:192.0.2.7:1` or `ipv6:%5B2001:db8::7%5D:1`.

    Returns:
        None if it is no address; a call that was cancelled at once has an empty text.
    """
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _remote(host, int(port)) if host and port.isdecimal() else None


class Sockets:
    """Looks sockets up; one for the whole process, whose descriptors they are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found = Found()
        self._next = 0.0

    def find(self) -> Found:
        """The accepted connections, as they were at most a short time ago."""
        with self._lock:
            began = time.monotonic()
            if began >= self._next:
                self._found = Found(began, _look_up())
                ended = time.monotonic()
                self._next = ended + _PAUSE * (ended - began)
            return self._found


SOCKETS = Sockets()


def received(descriptors: tuple[int, ...], port: int, remote: Remote) -> int | None:
    """How many bytes have arrived from `remote` on its connections to `port`; None if they are closed."""
    total = None
    for one in _sockets(descriptors, port, remote):
        (nbytes,) = _RECEIVED.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size))
        total = (total or 0) + nbytes
    return total


def hang_up(descriptors: tuple[int, ...], port: int, remote: Remote) -> None:
    """Ends the connections of `remote` to `port`; gRPC sees that the other end has closed them."""
    for one in _sockets(descriptors, port, remote):
        one.shutdown(socket.SHUT_RDWR)


def _sockets(descriptors: tuple[int, ...], port: int, remote: Remote) -> Iterator[socket.socket]:
    """The sockets that are still those; gRPC may have closed one, and the system given its number to another."""
    for descriptor in descriptors:
        try:
            with _borrowed(descriptor) as one:
                if _ends(one) == (port, remote):
                    yield one
        except (OSError, struct.error):
            continue


def _look_up() -> dict[int, dict[Remote, tuple[int, ...]]]:
    by_port: dict[int, dict[Remote, tuple[int, ...]]] = {}
    try:
        numbers = [int(entry.name) for entry in _DESCRIPTORS.iterdir()]
    except OSError:
        return {}
    for number in numbers:
        try:
            with _borrowed(number) as one:
                ends = _ends(one)
        except OSError:
            continue
        if ends is not None:
            port, remote = ends
            same = by_port.setdefault(port, {})
            same[remote] = (*same.get(remote, ()), number)
    return by_port


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket under a descriptor of its own, so that gRPC's cannot be closed from here.

    Raises:
        OSError: it is closed, or no socket.
    """
    own = os.dup(descriptor)
    try:
        one = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with one:
        yield one


def _ends(one: socket.socket) -> tuple[int, Remote] | None:
    """The port of this end and the other end; None if it is no connection of TCP.

    Raises:
        OSError: it is not connected.
    """
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return None
    host, port = one.getpeername()[:2]
    return one.getsockname()[1], _remote(host, port)


def _remote(host: str, port: int) -> Remote:
    """One end, whose address may be in brackets, have a zone, or be an IPv4 address within IPv6."""
    address = host.strip("[]").partition("%")[0]
    return Remote(address.removeprefix("::ffff:") if "." in address else address, port)
