"""Free ports of this machine, for examples that start processes which must know each other's addresses."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def fixed_ports() -> list[int]:
    """Ports that the system assigns to no process by itself, in order.

    A port that it assigns (to a connection, or to a server that asks for port 0) may be taken between the moment it was
    found free and the moment a process listens on it.
    """
    low, high = 32768, 65535  # Linux assigns the ports up to 60999, others those from 49152
    with suppress(OSError, ValueError):
        low, high = map(int, _RANGE.read_text().split())
    below, above = range(min(10000, low), low), range(high + 1, 65535)
    found = below if len(below) >= len(above) else above
    return list(found if len(found) >= 1000 else range(10000, 65535))


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and whose successors are: shard 1 of an averager listens on the port after shard 0's."""
    candidates = fixed_ports()[:-1:2]
    random.shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            break
        if is_free(port) and is_free(port + 1):
            found.append(port)
    return found


def is_free(port: int) -> bool:
    """Whether a process can listen on the port now."""
    with ExitStack() as stack, suppress(OSError):
        one = stack.enter_context(socket.socket())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
        return True
    return False
