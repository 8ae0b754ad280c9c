"""Whether a connection comes from this user's processes on this machine, as the system's table of sockets says.

An address alone does not show that: a proxy or a forwarded port on this machine makes every caller local.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

Address: TypeAlias = "tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]"

TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
ESTABLISHED = "01"


@dataclass(frozen=True, slots=True)
class SocketEntry:
    """One TCP socket of this machine.

    Attributes:
        local: its own address.
        remote: the address of the other end.
        user: the user id of its owner; None if no process holds it any more.
    """

    local: Address
    remote: Address
    user: int | None


def is_owned_by(users: Collection[int], caller: Address, sockets: Iterable[SocketEntry]) -> bool:
    """Whether the other end of a connection is a socket of this machine that one of `users` holds. Pure.

    Each socket that is connected to `caller` must have its other end among the sockets of this machine: the connection
    of a caller behind a proxy or a translation of addresses has none.

    Args:
        users: user ids.
        caller: the address from which the caller's connection comes.
        sockets: all established TCP sockets of this machine.
    """
    known = list(sockets)
    owners = {(entry.local, entry.remote): entry.user for entry in known}
    served = [entry.local for entry in known if entry.remote == caller]
    return bool(served) and all(owners.get((caller, local)) in users for local in served)


def parse_table(lines: Iterable[str]) -> list[SocketEntry]:
    """The established sockets in the lines of a table of Linux, such as /proc/net/tcp. Pure."""
    entries = []
    for line in lines:
        # sl, local, remote, state, queues, timer, retransmissions, user, timeouts, inode
        columns = line.split()
        if len(columns) > 9 and columns[3] == ESTABLISHED:
            user = int(columns[7]) if columns[9] != "0" else None  # without an inode, the user id says nothing
            entries.append(SocketEntry(_from_hex(columns[1]), _from_hex(columns[2]), user))
    return entries


def parse_connection(connection: str) -> Address | None:
    """The address in gRPC's name of a connection, such as `ipv6:%5B::1%5D:4222`; None if it is none of TCP. Pure."""
    host, _, port = unquote(connection).partition(":")[2].rpartition(":")
    try:
        return _plain(ipaddress.ip_address(host.strip("[]"))), int(port)
    except ValueError:
        return None


def _from_hex(text: str) -> Address:
    host, port = text.split(":")
    words = [bytes.fromhex(host[at : at + 8]) for at in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return getattr(address, "ipv4_mapped", None) or address


def _is_local(address: Address) -> bool:
    """Whether this machine has the address: callers from elsewhere do not cost a look at the table."""
    host = address[0]
    try:
        with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((str(host), 0))
    except OSError:
        return False
    return True


def _established() -> list[SocketEntry]:
    """All established sockets; none on a system that has no such table."""
    entries: list[SocketEntry] = []
    for table in TABLES:
        try:
            with table.open() as lines:
                entries += parse_table(lines)
        except (OSError, ValueError):
            continue
    return entries


async def is_own_user(connection: str, established: Callable[[], list[SocketEntry]] = _established) -> bool:
    """Whether the caller over a connection is a process of this user, or of root, on this machine.

    Args:
        connection: gRPC's name of the connection, see `RpcCaller`.
        established: reads the sockets of this machine.
    """
    caller = parse_connection(connection)
    if caller is None or not _is_local(caller):
        return False
    return is_owned_by({os.geteuid(), 0}, caller, await asyncio.to_thread(established))
