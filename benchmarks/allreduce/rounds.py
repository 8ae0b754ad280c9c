"""The processes of a system, and its rounds: for `benchmarks.allreduce`, `benchmarks.wan` and `benchmarks.recovery`."""

import math
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.allreduce.worker import write_certificates
from benchmarks.workers import Worker, all_of, crew, tell_all

MODULE = "benchmarks.allreduce.worker"


@asynccontextmanager
async def connected(
    system: str, peers: int, command: Callable[[int], Sequence[object]], **environment: str
) -> AsyncIterator[list[Worker]]:
    """Starts the peers of a system, one process each, and connects them.

    Args:
        command: of each rank, without what tells it where the others are.
        environment: of the processes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        async with crew(**environment) as started:

            async def start(rank: int, join: str) -> Worker:
                return await started.start(*command(rank), "--rank", rank, "--join", join, "--files", scratch)

            if system == "sealed":
                write_certificates(Path(scratch))
            if system == "gloo":  # its peers meet through a file
                await all_of([start(rank, f"file://{scratch}/store") for rank in range(peers)])
            else:
                address = (await start(0, "")).started["address"]
                await all_of([start(rank, address) for rank in range(1, peers)])
            yield started.workers


async def one_round(workers: Sequence[Worker], bound: float) -> dict[str, Any]:
    """Runs one round with new values; returns its cost and its error.

    The seconds are those of the slowest peer, CPU seconds those of all peers, memory that of the largest peer.
    """
    await tell_all(workers, "fill")
    averaged = await tell_all(workers, "average")
    checked = await tell_all(workers, "check")
    failure = next((one["failure"] for one in averaged if one["failure"]), "")
    error = max(one["error"] for one in checked)
    if not failure and not error <= bound:
        failure = f"wrong: {error:g} from the true mean, more than {bound:g}"
    return {
        "seconds": max(one["seconds"] for one in averaged),
        "allreduce_seconds": max(one["allreduce_seconds"] for one in averaged),
        "cpu_seconds": sum(one["cpu_seconds"] for one in checked),
        "peak_bytes": max(one["peak_bytes"] for one in checked),
        "error": error if math.isfinite(error) else None,
        "failure": failure,
    }
