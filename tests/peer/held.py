"""What a process holds, as the system tells it: file descriptors and threads."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from averaging.transport.grpc.channel_options import KEEPALIVE_SECONDS, SILENCE_SECONDS
from tests.support.processes import JsonProcess

WAIT = KEEPALIVE_SECONDS + SILENCE_SECONDS
"""Seconds in which connections that are lost must have been closed. Mostly that is at once; but of a reset that arrives
together with data gRPC (1.85) reads the data alone, and learns of the reset when it next writes, or by its ping."""

TIMER_THREADS = 1
"""More threads than before are no leak: gRPC runs its timers in one, and keeps a second from the moment the first timer
comes due, about five seconds after the first connection. Of file descriptors none may be left."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds at a moment."""

    fds: int
    threads: int

    @classmethod
    def by(cls, process: JsonProcess) -> Self:
        """Now."""
        found = psutil.Process(process.pid)
        return cls(found.num_fds(), found.num_threads())


def wait_until_given_back(processes: Sequence[JsonProcess], before: Sequence[Held]) -> None:
    """Each has no more file descriptors than before, and threads but for gRPC's own, within `WAIT`."""
    deadline = time.monotonic() + WAIT
    for process, was in zip(processes, before, strict=True):
        while (now := Held.by(process)).fds > was.fds or now.threads > was.threads + TIMER_THREADS:
            assert time.monotonic() < deadline, f"it held {was} before the fault and holds {now} after it"
            time.sleep(0.05)
