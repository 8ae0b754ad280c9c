"""What a process holds, as the system tells it: file descriptors and threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from tests.integration.processes import JsonProcess

WAIT = 20.0
"""Seconds in which connections that are lost must have been closed."""

SPARE = 2
"""More of each are no leak: gRPC's pool may start a thread, and a channel lives on while a call on it has not ended."""


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
    """Each has at most `SPARE` file descriptors and threads more than before, within `WAIT`."""
    deadline = time.monotonic() + WAIT
    for process, was in zip(processes, before, strict=True):
        while (now := Held.by(process)).fds > was.fds + SPARE or now.threads > was.threads + SPARE:
            assert time.monotonic() < deadline, f"it held {was} before the fault and holds {now} after it"
            time.sleep(0.05)
