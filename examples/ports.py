"""Free ports of this machine, for examples that start processes which must know each other's addresses."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and whose successors are: shard 1 of an averager listens on the port after shard 0's."""
    with ExitStack() as stack:

        def bound(port: int) -> int:
            one = stack.enter_context(socket.socket())
            one.bind(("127.0.0.1", port))
            return int(one.getsockname()[1])

        found: list[int] = []
        while len(found) < count:
            port = bound(0)
            try:
                bound(port + 1)
            except OSError:
                continue
            found.append(port)
        return found
