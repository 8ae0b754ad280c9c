"""The targets of handing weights on, each measured beside what it is compared with, in turns.

    first-byte  1 GiB on loopback: from `publish` to the first byte of weights that leaves
    one         64 MiB to one follower at 1 Gbit/s and 50 ms, beside TCP over connections that are warm
    large       the same with 1 GiB
    tree        64 MiB to 1, 8 and 32 followers at 100 Mbit/s and 50 ms
    loopback    64 MiB and 1 GiB to one follower, beside HTTP
    many        16 MiB to one follower on loopback, in 4, 1,000 and 4,000 tensors
    slow        10 followers at 2 MB/s, with a commit every 0.2 s
    rounding    bytes of steps of reinforcement learning, by learning rate and rounding, beside PULSE's figure

All times are from the call of `publish`, so they include the copy and the digests. The first round of each is not
counted; of the others the best counts, since the machine may be shared, and all are in the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.following.rounding import measure_rounding, rounding_table
from benchmarks.wan.limits import MIB, Setting
from benchmarks.wan.links import Links, check_tools
from benchmarks.workers import Worker, all_of, crew, say

IDLE_SECONDS = 2.0
"""Between the connection and the version."""

TCP_CONNECTIONS = (1, 4)
"""The better one is compared with."""

MANY = {4: 1.0, 1000: 1.5, 4000: 2.5}
"""How much longer than the first so many tensors may take."""

WARM_BYTES = 32 * MIB

SLOW_SECONDS, SLOW_INTERVAL, SLOW_MIB, SLOW_BYTES_PER_SECOND = 40.0, 0.2, 8, 2e6


@dataclass(frozen=True, slots=True)
class Outcome:
    """One target.

    Attributes:
        target: in words.
        figure: what was measured, in words.
        met: whether it is met.
        details: all measured values.
    """

    name: str
    target: str
    figure: str
    met: bool
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}: target {self.target}; measured {self.figure}: {'met' if self.met else 'MISSED'}"


class Place:
    """Processes on loopback or on emulated links.

    Args:
        processes: starts them.
        links: the links; None for loopback.
    """

    def __init__(self, processes: Any, links: Links | None) -> None:
        self._processes, self._links = processes, links

    def host(self, rank: int) -> str:
        return "127.0.0.1" if self._links is None else self._links.host(rank)

    async def start(self, role: str, rank: int) -> Worker:
        inside = [] if self._links is None else self._links.command(rank)
        command = (sys.executable, "-m", "benchmarks.following.worker", role, "--host", self.host(rank))
        worker: Worker = await self._processes.start(*inside, *command)
        return worker


async def one_version(
    mib: int, publisher: Worker, followers: list[Worker], tensors: int | None = None
) -> dict[str, float]:
    """New weights to followers that have none, after a pause. Returns seconds to the last and to the first byte."""
    await all_of([follower.do("leave", "leave") for follower in followers])
    endpoint = (await publisher.do(f"new {mib} {tensors or ''}".strip(), "new"))["endpoint"]
    await all_of([follower.do(f"follow {endpoint}", "follow") for follower in followers])
    await asyncio.sleep(IDLE_SECONDS)
    published = await publisher.do("publish", "publish")
    ends = await all_of([follower.do(f"has {published['version']}", "has") for follower in followers])
    return {
        "seconds": max(end["time"] for end in ends) - published["began"],
        "first_byte": published["first"] - published["began"],
        "publish": published["ended"] - published["began"],
    }


async def tcp_over(place: Place, count: int) -> Callable[[int], Awaitable[float]]:
    """Opens and warms connections. Returns a function that sends so many MiB after a pause, for the seconds."""
    server, client = await place.start("tcp-server", 0), await place.start("tcp-client", 1)
    port = (await server.do(f"open {count}", "open"))["port"]
    await client.do(f"open {place.host(0)} {port} {count}", "open")

    async def send(nbytes: int) -> float:
        sent, received = await all_of([server.do(f"send {nbytes}", "send"), client.do(f"receive {nbytes}", "receive")])
        return float(received["time"] - sent["began"])

    await send(WARM_BYTES)

    async def timed(mib: int) -> float:
        await asyncio.sleep(IDLE_SECONDS)
        return await send(mib * MIB)

    return timed


def links_of(stack: ExitStack, mbits: tuple[float, ...], options: argparse.Namespace) -> Links:
    check_tools()
    return stack.enter_context(Links(Setting("following", mbits, options.rtt / 1000, ()), options.congestion))


async def rate(options: argparse.Namespace, mib: int, wanted: float, name: str) -> Outcome:
    """The share of TCP's rate that one follower gets."""
    ours: list[dict[str, float]] = []
    tcp: dict[int, list[float]] = {count: [] for count in TCP_CONNECTIONS}
    with ExitStack() as stack:
        links = links_of(stack, (1000.0, 1000.0), options)
        async with crew() as processes:
            place = Place(processes, links)
            publisher, follower = await place.start("publisher", 0), await place.start("follower", 1)
            plain = {count: await tcp_over(place, count) for count in TCP_CONNECTIONS}
            for number in range(options.repeats + 1):
                ours.append(await one_version(mib, publisher, [follower]))
                for count, timed in plain.items():
                    tcp[count].append(await timed(mib))
                say(f"{name} {number}: ours {ours[-1]}, TCP { {count: times[-1] for count, times in tcp.items()} }")
    best = min(each["seconds"] for each in ours[1:])
    first = min(each["first_byte"] for each in ours[1:])
    best_tcp = min(min(times[1:]) for times in tcp.values())
    figure = (
        f"{best_tcp / best:.0%} ({mib} MiB in {best:.2f} s, TCP {best_tcp:.2f} s; the first byte leaves after "
        f"{1000 * first:.0f} ms)"
    )
    return Outcome(name, f"at least {wanted:.0%} of TCP", figure, best_tcp / best >= wanted, {"ours": ours, "tcp": tcp})


async def first_byte(options: argparse.Namespace) -> Outcome:
    found: list[dict[str, float]] = []
    async with crew() as processes:
        place = Place(processes, None)
        publisher, follower = await place.start("publisher", 0), await place.start("follower", 1)
        for number in range(options.repeats + 1):
            found.append(await one_version(1024, publisher, [follower]))
            say(f"first-byte {number}: {found[-1]}")
    best = min(each["first_byte"] for each in found[1:])
    return Outcome("first-byte", "at most 50 ms for 1 GiB", f"{1000 * best:.1f} ms", best <= 0.05, {"ours": found})


async def tree(options: argparse.Namespace) -> list[Outcome]:
    """How much longer 8 and 32 followers take than one."""
    counts = (1, 8, 32)
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with ExitStack() as stack:
        links = links_of(stack, (100.0,) * 33, options)
        for count in counts:
            async with crew() as processes:
                place = Place(processes, links)
                publisher = await place.start("publisher", 0)
                followers = [await place.start("follower", rank) for rank in range(1, count + 1)]
                for number in range(options.repeats):
                    found[count].append(await one_version(64, publisher, followers))
                    say(f"tree {count} followers, {number}: {found[count][-1]}")
    best = {count: min(each["seconds"] for each in found[count]) for count in counts}
    return [
        Outcome(
            f"tree-{count}",
            f"at most {most} times the time of one",
            f"{best[count] / best[1]:.2f} times ({best[count]:.1f} and {best[1]:.1f} s)",
            best[count] <= most * best[1],
            {"ours": found[count]},
        )
        for count, most in ((8, 2), (32, 3))
    ]


async def loopback(options: argparse.Namespace) -> list[Outcome]:
    """How much longer than HTTP, of which the seconds to write the file count only in the second figure."""
    outcomes = []
    for mib in (64, 1024):
        ours, plain = [], []
        async with crew() as processes:
            place = Place(processes, None)
            publisher, follower = await place.start("publisher", 0), await place.start("follower", 1)
            server, client = await place.start("http-server", 0), await place.start("http-client", 1)
            for number in range(options.repeats + 1):
                ours.append(await one_version(mib, publisher, [follower]))
                written = await server.do(f"write {mib}", "write")
                end = await client.do(f"get {written['url']}", "get")
                plain.append((end["time"] - written["ended"], end["time"] - written["began"]))
                say(f"loopback {mib} MiB, {number}: ours {ours[-1]}, HTTP {plain[-1]}")
        best, http = min(each["seconds"] for each in ours[1:]), min(each[0] for each in plain[1:])
        whole = min(each[1] for each in plain[1:])
        figure = (
            f"{best / http:.2f} times ({best:.2f} and {http:.2f} s); with writing the file {best / whole:.2f} times"
        )
        details = {"ours": ours, "http": plain}
        outcomes.append(Outcome(f"loopback-{mib}", "at most 1.5 times HTTP", figure, best <= 1.5 * http, details))
    return outcomes


async def many(options: argparse.Namespace) -> list[Outcome]:
    """How much longer than a few large tensors many small ones take."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in MANY}
    async with crew() as processes:
        place = Place(processes, None)
        publisher, follower = await place.start("publisher", 0), await place.start("follower", 1)
        for number in range(options.repeats + 1):
            for count, ours in found.items():
                first = await one_version(16, publisher, [follower], count)
                await publisher.do("step", "step")
                published = await publisher.do("publish", "publish")
                end = await follower.do(f"has {published['version']}", "has")
                ours.append({"seconds": end["time"] - published["began"], "first": first["seconds"]})
                say(f"many {count}, {number}: {ours[-1]}")
    best, at_start = (
        {count: min(each[key] for each in ours[1:]) for count, ours in found.items()} for key in ("seconds", "first")
    )
    few, *others = MANY
    return [
        Outcome(
            f"many-{count}",
            f"at most {MANY[count]} times the time of {few} tensors",
            f"{best[count] / best[few]:.2f} times ({best[count]:.3f} and {best[few]:.3f} s); the first version of a "
            f"publisher, with the names of all tensors, {at_start[count] / at_start[few]:.2f} times",
            best[count] <= MANY[count] * best[few],
            {"ours": found[count], "few": found[few]},
        )
        for count in others
    ]


async def slow(options: argparse.Namespace) -> list[Outcome]:
    """Followers whose transfer takes many commits: how old is what they have, and what it costs the publisher."""
    followers, mbit = 10, SLOW_BYTES_PER_SECOND * 8 / 1e6
    with ExitStack() as stack:
        links = links_of(stack, (1000.0, *(mbit,) * followers), options)
        async with crew() as processes:
            place = Place(processes, links)
            publisher = await place.start("publisher", 0)
            crowd = [await place.start("follower", rank) for rank in range(1, followers + 1)]
            endpoint = (await publisher.do(f"new {SLOW_MIB}", "new"))["endpoint"]
            await publisher.do(f"commits 3 {SLOW_INTERVAL}", "commits")
            before = (await publisher.do("resident", "resident"))["resident_mib"]
            await all_of([follower.do(f"follow {endpoint}", "follow") for follower in crowd])
            commits, *seen = await all_of(
                [
                    publisher.do(f"commits {SLOW_SECONDS} {SLOW_INTERVAL}", "commits"),
                    *(follower.do(f"watch {SLOW_SECONDS - 2}", "watch") for follower in crowd),
                ]
            )
    # What the link alone takes for a whole version; most differences, to those who have a recent version, take less.
    transfer = SLOW_MIB * MIB / SLOW_BYTES_PER_SECOND
    ages = [oldest(commits["times"], each["held"]) for each in seen]
    copies = (commits["resident_mib"] - before) / SLOW_MIB
    held = commits["held_mib"] / SLOW_MIB
    versions = [len(each["held"]) for each in seen]
    return [
        Outcome(
            "slow-age",
            "each finishes some version and is at most 3 transfers old",
            f"{min(versions)} to {max(versions)} versions each, at most {max(ages) / transfer:.2f} transfers old "
            f"({max(ages):.1f} s; the link takes {transfer:.1f} s for a version)",
            min(versions) > 0 and max(ages) <= 3 * transfer,
            {
                "ages": ages,
                "versions": versions,
                "retries": [each["retries"] for each in seen],
            },
        ),
        Outcome(
            "slow-memory",
            "the publisher keeps at most 2 versions more for 10 slow followers, however long they take",
            f"{held:.1f} versions, of which 2 are kept in any case, the newest besides; the process has grown by "
            f"{copies:.1f} of them, with what is under way on the connections",
            held <= 4.5,
            {"held_mib": commits["held_mib"], "before_mib": before, "most_mib": commits["resident_mib"]},
        ),
    ]


def oldest(published: dict[str, float], held: dict[str, float]) -> float:
    """The largest age of what a follower has, once it has its first version: just before it gets the next one."""
    order = sorted((moment, published[version]) for version, moment in held.items() if version in published)
    return max((later - committed for (_, committed), (later, _) in pairwise(order)), default=0.0)


async def rounding() -> Outcome:
    """Bytes of differences. PULSE (arXiv 2602.03839) sends 108 MB of 14 GB, 0.8 %, at a learning rate of 1e-6."""
    found = await asyncio.to_thread(measure_rounding)
    say(rounding_table(found))
    plain = next(each for each in found if each["learning_rate"] == 1e-6 and each["rounding"] == "bfloat16")
    share = plain["share_of_bfloat16"]
    return Outcome("rounding", "PULSE's 0.8 % or less", f"{share:.2%} at 1e-6", share <= 0.008, {"found": found})


async def measure_targets(options: argparse.Namespace) -> list[Outcome]:
    measures: dict[str, Callable[[], Awaitable[Outcome | list[Outcome]]]] = {
        "first-byte": lambda: first_byte(options),
        "one": lambda: rate(options, 64, 0.7, "one"),
        "large": lambda: rate(options, 1024, 0.9, "large"),
        "tree": lambda: tree(options),
        "loopback": lambda: loopback(options),
        "many": lambda: many(options),
        "slow": lambda: slow(options),
        "rounding": rounding,
    }
    outcomes: list[Outcome] = []
    for name in options.target:
        found = await measures[name]()
        outcomes += found if isinstance(found, list) else [found]
    return outcomes


TARGETS = ("first-byte", "one", "large", "tree", "loopback", "many", "slow", "rounding")
