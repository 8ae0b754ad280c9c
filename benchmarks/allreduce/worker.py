"""One peer in the all-reduce benchmark: a process with one system, controlled by `benchmarks.allreduce`.

It reads `fill`, `average` and `check` from stdin, one command per line, and answers each with a line of JSON. It leaves
at the end of stdin. It also runs in hivemind's environment, so it must not import this library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.allreduce.systems import LIMIT, SYSTEMS, System

PERIOD = 262_147
"""Period of the values; a prime, so that a part in the wrong place is noticed."""

LARGEST = 4.0
"""Magnitude of the values. They are multiples of 1/1024, so that float32 adds those of all peers exactly."""


def error_bound(codec: str, peers: int) -> float:
    """Returns the largest error that float32 sums and the compression, in both directions, may cause."""
    largest = LARGEST + peers - 1
    steps = {"none": 0.0, "fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}
    return largest * (2 * steps[codec] * 1.01 + peers * 2**-23)


class Truth:
    """Values that every peer can compute: the same random ones everywhere, plus the peer's rank."""

    def __init__(self, peers: int) -> None:
        random = torch.Generator().manual_seed(0)
        steps = int(LARGEST * 1024)
        self._pattern = torch.randint(-steps, steps + 1, (PERIOD,), generator=random) / 1024
        self._mean = self._pattern + (peers - 1) / 2

    def fill(self, tensors: Sequence[torch.Tensor], rank: int) -> None:
        for piece, place in _pieces(tensors):
            torch.add(self._pattern[place], rank, out=piece)

    def error(self, tensors: Sequence[torch.Tensor]) -> float:
        """Returns the largest distance to the true mean; infinite if a value is NaN."""
        errors = [(piece - self._mean[place]).abs_().max() for piece, place in _pieces(tensors) if piece.numel()]
        return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, slice]]:
    """Returns views of the tensors' elements, in order, and the position of each in the period."""
    position = 0
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        end = position + flat.numel()
        cuts = [position, *range((position // PERIOD + 1) * PERIOD, end, PERIOD), end]
        for start, stop in pairwise(cuts):
            first = start % PERIOD
            yield flat[start - position : stop - position], slice(first, first + stop - start)
        position = end


def process_tree() -> list[int]:
    """Returns this process and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    tree = [os.getpid()]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the process and its descendants, without files and shared memory."""

    held: int
    peak: int

    @classmethod
    def now(cls) -> Memory:
        held, peak = 0, 0
        for pid in process_tree():
            status = Path(f"/proc/{pid}/status").read_text()
            kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
            if kib:  # a process that has just ended has none
                held += kib["RssAnon"] * 1024
                peak += (kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]) * 1024
        return cls(held, peak)

    @staticmethod
    def forget_peak() -> None:
        for pid in process_tree():
            Path(f"/proc/{pid}/clear_refs").write_text("5")


class CpuTime:
    """CPU time of the process and its descendants since now; to look for them costs more than a small round."""

    def __init__(self) -> None:
        self._processes = process_tree()
        self._before = self._total()

    @property
    def seconds(self) -> float:
        return self._total() - self._before

    def _total(self) -> float:
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._processes)  # see clock_getcpuclockid(3)


async def work(system: System, options: argparse.Namespace, out: TextIO) -> None:
    def say(**fields: Any) -> None:
        print(json.dumps(fields), file=out, flush=True)

    truth = Truth(options.peers)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with system:
        versions = {name: version(name) for name in ("torch", *system.packages)}
        say(event="started", address=system.address, versions={"python": platform.python_version(), **versions})
        idle: Memory | None = None
        async for command in commands:
            match command.decode().strip():
                case "fill":
                    with system.writing():
                        truth.fill(system.tensors, options.rank)
                    Memory.forget_peak()
                    before = Memory.now()
                    idle = idle or before
                    cpu = CpuTime()
                    say(event="filled")
                case "average":
                    failure, allreduce_seconds, begun = "", 0.0, time.perf_counter()
                    try:
                        async with asyncio.timeout(LIMIT):
                            allreduce_seconds = await system.average()
                    except Exception as error:
                        failure = f"{type(error).__name__}: {error}"
                    seconds = time.perf_counter() - begun
                    say(event="averaged", seconds=seconds, allreduce_seconds=allreduce_seconds, failure=failure)
                case "check" if idle is not None:  # all peers have finished, so this includes the whole round
                    cpu_seconds, after = cpu.seconds, Memory.now()
                    say(
                        event="checked",
                        cpu_seconds=cpu_seconds,
                        peak_bytes=after.peak - idle.held,
                        peak_bytes_over_former=after.peak - before.held,
                        error=truth.error(system.tensors),
                    )
                case other:
                    raise ValueError(f"{other!r} is no command")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    for name in ("rank", "peers", "kib"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("tensors", "codec"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--files", type=Path, help="folder of the certificates")
    parser.add_argument("--join", default="", help="address of rank 0; for Gloo the URL of a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Only answers may be on stdout; libraries may print there, too.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    make: Any = SYSTEMS[options.system]
    asyncio.run(work(make(options), options, out))


if __name__ == "__main__":
    main()
