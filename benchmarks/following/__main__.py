"""Measures how fast versions of weights reach followers, each target beside what it is compared with, in turns.

    one         64 MiB to one follower at 1 Gbit/s and 50 ms, beside TCP over connections that are warm
    large       the same with 1 GiB
    tree        64 MiB to 1, 8 and 32 followers at 100 Mbit/s and 50 ms, and the copies that the publisher sends
    loopback    64 MiB and 1 GiB to one follower, beside HTTP, and the first byte of weights that leaves
    folder      64 MiB through a folder behind a web server at 1 Gbit/s and 50 ms, beside a file, and a difference
    many        16 MiB to one follower on loopback, in 4, 1,000 and 4,000 tensors
    slow        10 followers at 2 MB/s, with a commit every 0.2 s

    python -m benchmarks.following --target loopback many
    sudo .venv/bin/python -m benchmarks.following --target one large tree slow folder   # on emulated links

The publisher has random bfloat16 weights, and steps of Adam with a learning rate of 1e-6 on a float32 copy. All times
are from the call of `publish`, so they include the copy and the digests; a follower holds a version that it has
verified. The first round of each is not counted; of the others the best counts, since the machine may be shared. The
links need what `benchmarks.wan` needs. The results go to `following_TARGET.json`.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.runner import MIB, Verdict, machine, make_folder, make_parser, write
from benchmarks.wan.limits import Setting
from benchmarks.wan.links import LinkError, Links, check_tools
from benchmarks.workers import Crew, Worker, WorkerError, all_of, crew, say, tell_all
from examples.children import ending_children

IDLE_SECONDS = 2.0
"""Between the connection and the version."""

TCP_CONNECTIONS = (1, 4)
"""The better one is compared with."""

MANY = {4: 1.0, 1000: 1.5, 4000: 2.5}
"""How much longer than the first so many tensors may take."""

WARM_BYTES = 32 * MIB

SLOW_SECONDS, SLOW_INTERVAL, SLOW_MIB, SLOW_BYTES_PER_SECOND = 40.0, 0.2, 8, 2e6

Found = tuple[list[Verdict], dict[str, Any]]
"""The targets, and all measured values."""


@dataclass(frozen=True, slots=True)
class Place:
    """Starts processes on loopback or, with links, at their ends."""

    processes: Crew
    links: Links | None

    def host(self, rank: int) -> str:
        return "127.0.0.1" if self.links is None else self.links.host(rank)

    async def start(self, role: str, rank: int = 0) -> Worker:
        inside = [] if self.links is None else self.links.command(rank)
        command = (sys.executable, "-m", "benchmarks.following.worker", role, "--host", self.host(rank))
        return await self.processes.start(*inside, *command)


@asynccontextmanager
async def place(options: argparse.Namespace, mbits: Sequence[float] = ()) -> AsyncIterator[Place]:
    """Emulates a link of each rate, or none for loopback."""
    if not mbits:
        async with crew() as processes:
            yield Place(processes, None)
        return
    check_tools()
    with Links(Setting("following", tuple(mbits), options.rtt / 1000, ())) as links:
        async with crew() as processes:
            yield Place(processes, links)


async def one_version(mib: int, publisher: Worker, followers: list[Worker], **tensors: int) -> dict[str, float]:
    """New weights to followers that have none, after a pause. Returns seconds to the last and to the first byte."""
    await tell_all(followers, "leave")
    endpoint = (await publisher.do("new", mib=mib, **tensors))["endpoint"]
    await tell_all(followers, "follow", endpoint=endpoint)
    await asyncio.sleep(IDLE_SECONDS)
    published = await publisher.do("publish")
    ends = await tell_all(followers, "has", version=published["version"])
    sent = (await publisher.do("sent"))["sent"] - published["sent"]
    return {
        "seconds": max(end["time"] for end in ends) - published["began"],
        "first_byte": published["first"] - published["began"],
        "copies": sent / statistics.mean(end["received"] for end in ends),
    }


def best(rounds: Sequence[dict[str, float]], figure: str = "seconds") -> float:
    return min(each[figure] for each in rounds[1:])


async def tcp_over(at: Place, count: int) -> Callable[[int], Awaitable[float]]:
    """Opens and warms connections. Returns a function that sends so many MiB after a pause, for the seconds."""
    server, client = await at.start("tcp-server", 0), await at.start("tcp-client", 1)
    port = (await server.do("open", count=count))["port"]
    await client.do("open", host=at.host(0), port=port, count=count)

    async def send(nbytes: int) -> float:
        sent, received = await all_of([server.do("send", nbytes=nbytes), client.do("receive", nbytes=nbytes)])
        return float(received["time"] - sent["began"])

    await send(WARM_BYTES)

    async def timed(mib: int) -> float:
        await asyncio.sleep(IDLE_SECONDS)
        return await send(mib * MIB)

    return timed


async def rate(options: argparse.Namespace, mib: int, wanted: float) -> Found:
    """The share of TCP's rate that one follower gets."""
    ours: list[dict[str, float]] = []
    tcp: dict[int, list[float]] = {count: [] for count in TCP_CONNECTIONS}
    async with place(options, (1000.0, 1000.0)) as at:
        publisher, follower = await at.start("publisher", 0), await at.start("follower", 1)
        plain = {count: await tcp_over(at, count) for count in TCP_CONNECTIONS}
        for _ in range(options.repeats + 1):
            ours.append(await one_version(mib, publisher, [follower]))
            for count, timed in plain.items():
                tcp[count].append(await timed(mib))
            say(f"ours {ours[-1]}, TCP { {count: times[-1] for count, times in tcp.items()} }")
    best_tcp = min(min(times[1:]) for times in tcp.values())
    share = best_tcp / best(ours)
    figure = (
        f"{share:.0%} ({best(ours):.2f} s, TCP {best_tcp:.2f} s; the first byte leaves after "
        f"{1000 * best(ours, 'first_byte'):.0f} ms)"
    )
    wanted_text = f"{mib} MiB to one at 1 Gbit/s: at least {wanted:.0%} of TCP"
    return [Verdict(wanted_text, figure, share >= wanted)], {"ours": ours, "tcp": tcp}


async def tree(options: argparse.Namespace) -> Found:
    """How much longer 8 and 32 followers take than one."""
    counts = (1, 8, 32)
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for count in counts:
        async with place(options, (100.0,) * (count + 1)) as at:
            publisher = await at.start("publisher", 0)
            followers = [await at.start("follower", rank) for rank in range(1, count + 1)]
            for _ in range(options.repeats + 1):
                found[count].append(await one_version(64, publisher, followers))
                say(f"{count} followers: {found[count][-1]}")
    one = best(found[1])
    verdicts = [
        Verdict(
            f"the last of {count} within {most} times the time of one",
            f"{best(found[count]) / one:.2f} times ({best(found[count]):.1f} and {one:.1f} s)",
            best(found[count]) <= most * one,
        )
        for count, most in ((8, 2), (32, 3))
    ]
    copies = statistics.median(each["copies"] for each in found[32])
    verdicts.append(Verdict("32 followers cost the publisher at most 3 copies", f"{copies:.2f}", copies <= 3))
    return verdicts, {"ours": found}


async def loopback(options: argparse.Namespace) -> Found:
    """How much longer than HTTP, of which the seconds to write the file count only in the second figure."""
    verdicts, found = [], {}
    for mib in options.mib:
        ours, plain = [], []
        async with place(options) as at:
            publisher, follower = await at.start("publisher"), await at.start("follower")
            server, client = await at.start("http-server"), await at.start("http-client")
            for _ in range(options.repeats + 1):
                ours.append(await one_version(mib, publisher, [follower]))
                written = await server.do("write", mib=mib)
                end = await client.do("get", url=written["url"])
                plain.append({"seconds": end["time"] - written["ended"], "whole": end["time"] - written["began"]})
                say(f"{mib} MiB: ours {ours[-1]}, HTTP {plain[-1]}")
        mine, theirs, whole = best(ours), best(plain), best(plain, "whole")
        figure = f"{mine / theirs:.2f} times ({mine:.2f} s); with writing the file {mine / whole:.2f} times"
        verdicts.append(Verdict(f"{mib} MiB: at most 1.5 times HTTP", figure, mine <= 1.5 * theirs))
        first = best(ours, "first_byte")
        verdicts.append(Verdict(f"{mib} MiB: the first byte leaves in 50 ms", f"{1000 * first:.1f} ms", first <= 0.05))
        found[mib] = {"ours": ours, "http": plain}
    return verdicts, found


async def folder(options: argparse.Namespace) -> Found:
    """The share of the rate at which a file is saved and downloaded, and that of a step of fine-tuning in the bytes."""
    ours, plain = [], []
    async with place(options, (1000.0, 1000.0)) as at:
        server = await at.start("http-server", 0)
        client, follower = await at.start("http-client", 1), await at.start("follower", 1)
        for number in range(options.repeats + 1):
            written = await server.do("write", mib=64)
            plain.append({"seconds": (await client.do("get", url=written["url"]))["time"] - written["began"]})
            published = await server.do("publish", mib=64, name=f"run{number}")
            await follower.do("follow", endpoint=published["url"])
            ours.append({"seconds": (await follower.do("has", version=1))["time"] - published["began"]})
            say(f"ours {ours[-1]}, of which writing {published['ended'] - published['began']:.2f} s; file {plain[-1]}")
        share = (await server.do("difference"))["share"]
    rate = best(plain) / best(ours)
    figure = f"{rate:.0%} ({best(ours):.2f} s, the file {best(plain):.2f} s)"
    verdicts = [
        Verdict("64 MiB through a web server: at least 60% of the rate of a file", figure, rate >= 0.6),
        Verdict("a step with a learning rate of 1e-6 has at most 1% of the bytes", f"{share:.2%}", share <= 0.01),
    ]
    return verdicts, {"ours": ours, "file": plain, "difference": share}


async def many(options: argparse.Namespace) -> Found:
    """How much longer than a few large tensors many small ones take, once the names of all are known."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in MANY}
    async with place(options) as at:
        publisher, follower = await at.start("publisher"), await at.start("follower")
        for _ in range(options.repeats + 1):
            for count, ours in found.items():
                first = await one_version(16, publisher, [follower], tensors=count)
                await publisher.do("step")
                published = await publisher.do("publish")
                end = await follower.do("has", version=published["version"])
                ours.append({"seconds": end["time"] - published["began"], "first": first["seconds"]})
                say(f"{count} tensors: {ours[-1]}")
    few, *others = MANY
    verdicts = [
        Verdict(
            f"16 MiB in {count} tensors at most {MANY[count]} times the time of {few}",
            f"{best(found[count]) / best(found[few]):.2f} times ({best(found[count]):.3f} s); the first version "
            f"{best(found[count], 'first') / best(found[few], 'first'):.2f} times",
            best(found[count]) <= MANY[count] * best(found[few]),
        )
        for count in others
    ]
    return verdicts, {"ours": found}


async def slow(options: argparse.Namespace) -> Found:
    """Followers whose transfer takes many commits: how old is what they have."""
    followers, mbit = 10, SLOW_BYTES_PER_SECOND * 8 / 1e6
    async with place(options, (1000.0, *(mbit,) * followers)) as at:
        publisher = await at.start("publisher", 0)
        crowd = [await at.start("follower", rank) for rank in range(1, followers + 1)]
        endpoint = (await publisher.do("new", mib=SLOW_MIB))["endpoint"]
        await publisher.do("commits", seconds=3.0, interval=SLOW_INTERVAL)
        await tell_all(crowd, "follow", endpoint=endpoint)
        commits, *seen = await all_of(
            [
                publisher.do("commits", seconds=SLOW_SECONDS, interval=SLOW_INTERVAL),
                *(follower.do("watch", seconds=SLOW_SECONDS - 2) for follower in crowd),
            ]
        )
    # What the link alone takes for a whole version; most differences, to those who have a recent version, take less.
    transfer = SLOW_MIB * MIB / SLOW_BYTES_PER_SECOND
    ages = [oldest(commits["times"], each["held"]) for each in seen]
    versions = [len(each["held"]) for each in seen]
    figure = f"{min(versions)} to {max(versions)} versions each, at most {max(ages) / transfer:.2f} transfers old"
    wanted = "each slow follower finishes some version and is at most 3 transfers old"
    met = min(versions) > 0 and max(ages) <= 3 * transfer
    return [Verdict(wanted, figure, met)], {"ages": ages, "versions": versions}


def oldest(published: dict[str, float], held: dict[str, float]) -> float:
    """The largest age of what a follower has, once it has its first version: just before it gets the next one."""
    order = sorted((moment, published[version]) for version, moment in held.items() if version in published)
    return max((later - committed for (_, committed), (later, _) in pairwise(order)), default=0.0)


TARGETS: dict[str, Callable[[argparse.Namespace], Coroutine[Any, Any, Found]]] = {
    "one": lambda options: rate(options, 64, 0.7),
    "large": lambda options: rate(options, 1024, 0.9),
    "tree": tree,
    "loopback": loopback,
    "folder": folder,
    "many": many,
    "slow": slow,
}


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=["loopback", "many"])
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024], help="of `loopback` (64 1024)")
    parser.add_argument("--repeats", type=int, default=3, help="of each case, after the first (3)")
    parser.add_argument("--rtt", type=float, default=50.0, metavar="MS", help="round trip of the links (50)")
    options = parser.parse_args()
    if min(*options.mib, options.repeats) < 1:
        parser.error("needs at least 1 MiB and 1 repeat")
    make_folder(parser, options.output)
    for name in options.target:
        say(name)
        try:
            verdicts, found = asyncio.run(TARGETS[name](options))
        except LinkError as error:
            parser.error(str(error))
        except WorkerError as error:
            sys.exit(f"{name}: {error}")
        results = machine() | {"targets": [asdict(verdict) for verdict in verdicts], "found": found}
        write(options.output / f"following_{name}.json", results)
        print(*verdicts, sep="\n", flush=True)


if __name__ == "__main__":
    main()
