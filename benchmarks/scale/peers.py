"""Real peers in separate processes on loopback: how fast groups form, and the cost of a peer.

Part of `benchmarks.scale`.
"""

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.workers import Worker, all_of, crew, tell_all

MOST_PROCESSES = 8
"""Maximum number of processes. More peers share processes, because each takes some 200 MiB for torch and gRPC."""

LEAD, GAP = 0.15, 0.4
"""Seconds from a command to the first call of a round, and from the calls of all others to the last one."""

PATTERNS = ("last", "together")
"""Patterns of calls. `last`: the last peer calls when all others have waited for a while. `together`: at random within
10 ms.
"""


def divide(peers: int) -> list[int]:
    """Returns the number of peers in each process, as equal as possible."""
    used = min(peers, MOST_PROCESSES)
    return [peers * (number + 1) // used - peers * number // used for number in range(used)]


@asynccontextmanager
async def running(peers: int, group_size: int) -> AsyncIterator[list[Worker]]:
    """Yields connected processes with this number of peers in total."""
    async with crew() as started:

        async def start(count: int, first: int, join: str) -> Worker:
            arguments = ["--peers", count, "--first", first, "--group-size", group_size, "--join", join]
            return await started.start(sys.executable, "-m", "benchmarks.scale.worker", *arguments)

        counts = divide(peers)
        endpoint = (await start(counts[0], 0, "")).started["endpoint"]
        await all_of([start(counts[n], sum(counts[:n]), endpoint) for n in range(1, len(counts))])
        await tell_all(started.workers, "settle", peers=peers)
        yield started.workers


def moments(pattern: str, peers: int, rng: random.Random) -> list[float]:
    """Returns when each peer calls, in seconds from the earliest possible call."""
    calls = [rng.uniform(0.0, 0.01 if pattern == "together" else 0.1) for _ in range(peers)]
    if pattern == "last":
        calls[rng.randrange(peers)] = 0.1 + GAP
    return calls


async def one_round(workers: Sequence[Worker], counts: Sequence[int], pattern: str, rng: random.Random) -> Any:
    """Runs one round of all peers; returns its durations."""
    start = time.monotonic() + LEAD
    at = [start + moment for moment in moments(pattern, sum(counts), rng)]
    cuts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    steps = [worker.do("average", at=at[cuts[n] : cuts[n + 1]]) for n, worker in enumerate(workers)]
    return summary([one for answer in await all_of(steps) for one in answer["rounds"]])


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarizes one round of all peers. Seconds count from the last peer's call."""
    last = max(one["called"] for one in rounds)
    grouped = [one for one in rounds if one["members"]]
    return {
        "begun_seconds": max((one["begun"] for one in grouped), default=float("inf")) - last,
        "groups": sorted({one["group"]: one["members"] for one in grouped}.values()),
        "alone": len(rounds) - len(grouped),
    }


async def measure(peers: int, group_size: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Runs all measurements of real peers with one number of peers."""
    rng = random.Random(peers)
    async with running(peers, group_size) as workers:
        counts = divide(peers)
        await one_round(workers, counts, "last", rng)  # establishes the connections
        found: dict[str, Any] = {"peers": peers, "processes": len(counts), "group_size": group_size, "patterns": {}}
        for pattern in PATTERNS:
            await tell_all(workers, "count")
            done = [await one_round(workers, counts, pattern, rng) for _ in range(rounds)]
            calls = total(await tell_all(workers, "count"), peers * rounds)
            found["patterns"][pattern] = {"rounds": done, "calls_per_peer_and_round": calls}
        found["record_seconds"] = [await spread_seconds(workers, f"scale.fresh{n}", rng) for n in range(rounds)]
        rested = await tell_all(workers, "rest", seconds=seconds)
        found["idle_calls_per_peer_and_second"] = total(rested, peers * seconds)
        found["idle_cpu_per_peer"] = sum(one["cpu_seconds"] for one in rested) / seconds / peers
        found["bytes_per_peer"] = statistics.median(one["bytes_per_peer"] for one in rested)
        return found


async def spread_seconds(workers: Sequence[Worker], key: str, rng: random.Random) -> float:
    """Returns the seconds from storing a record at one peer until all peers of all processes read it."""
    stored = (await rng.choice(workers).do("store", key=key))["at"]
    return float(max(one["at"] for one in await tell_all(workers, "see", key=key)) - stored)


def total(answers: Sequence[Mapping[str, Any]], of: float) -> dict[str, float]:
    """Returns the calls of all peers by method, for each of so many."""
    calls: Counter[str] = Counter()
    for answer in answers:
        calls.update(answer["calls"])
    return {name: count / of for name, count in sorted(calls.items())}
