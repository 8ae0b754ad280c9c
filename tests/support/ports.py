"""Ports for servers that are started at a known port, or again at the port they had."""

import os
import random
from itertools import cycle

from examples.ports import fixed_ports, is_free

_SLICES = 16


def _mine() -> list[int]:
    """The ports of this worker: tests that run at the same time choose from different ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = fixed_ports()[worker % _SLICES :: _SLICES]
    start = random.randrange(len(ports))  # so that two runs of the tests on one machine rarely choose the same
    return ports[start:] + ports[:start]


_ports = cycle(_mine())


def free_port() -> int:
    """A port on which nothing listens, which the system gives to nobody, and which no other test gets soon."""
    return next(port for port in _ports if is_free(port))


def free_address() -> str:
    """`host:port` with such a port of this machine."""
    return f"127.0.0.1:{free_port()}"
