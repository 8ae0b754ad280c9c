"""Measures how fast versions of weights reach followers, and what that costs the publisher.

    python -m benchmarks.following                                         # loopback, 64 MiB: a few minutes
    sudo .venv/bin/python -m benchmarks.following --link 1000 --rtt 50     # on emulated links of 1 Gbit/s and 50 ms

For each number of followers, a process each, new followers connect and the publisher publishes random bfloat16 weights:
the whole state travels. Then steps of Adam with a learning rate of 1e-6 on a float32 copy are published: differences
travel. Seconds are from the call of `publish` to the moment when the last follower holds the verified version; `copies`
is what the publisher sent, in bytes that one follower received. Beside it, Python's HTTP server sends one safetensors
file to as many clients at once; seconds are without the time to write the file.

The links need what `benchmarks.wan` needs. Results go to `following.json`. Targets, each printed beside its figure:

    sudo .venv/bin/python -m benchmarks.following --target one        # or several, see `benchmarks.following.targets`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.allreduce.report import machine
from benchmarks.following.targets import TARGETS, measure_targets
from benchmarks.output import make_folder, write
from benchmarks.wan.limits import MIB, Setting
from benchmarks.wan.links import LinkError, Links, check_tools
from benchmarks.workers import ROOT, Crew, Worker, WorkerError, all_of, crew, say
from examples.children import ending_children


@dataclass(frozen=True, slots=True)
class Measured:
    """One version.

    Attributes:
        kind: whole, difference or http.
        seconds: until the last follower has it.
        first: until the first one has it.
        committing: of these, for the copy and the digests, or for writing the file.
        received: bytes that a follower received, of weights.
        copies: what the publisher sent, in such bytes.
    """

    link: str
    kind: str
    mib: int
    followers: int
    seconds: float
    first: float
    committing: float
    received: float
    copies: float


class Bench:
    """Processes at their places in the links."""

    def __init__(self, processes: Crew, links: Links | None, name: str) -> None:
        self._processes, self._links, self._name = processes, links, name

    async def start(self, role: str, rank: int) -> Worker:
        inside = [] if self._links is None else self._links.command(rank)
        host = "127.0.0.1" if self._links is None else self._links.host(rank)
        module = "benchmarks.following.worker"
        return await self._processes.start(*inside, sys.executable, "-m", module, role, "--host", host)

    async def versions(self, mib: int, followers: Sequence[Worker], publisher: Worker, steps: int) -> list[Measured]:
        """One whole version and the differences of some steps."""
        await all_of([follower.do("leave", "leave") for follower in followers])
        endpoint = (await publisher.do(f"new {mib}", "new"))["endpoint"]
        for follower in followers:
            await follower.do(f"follow {endpoint}", "follow")
        found = []
        for number in range(1 + steps):
            if number:
                await publisher.do("step", "step")
            before = [(await follower.do("bytes", "bytes"))["received"] for follower in followers]
            published = await publisher.do("publish", "publish")
            version = published["version"]
            ends = await all_of([follower.do(f"has {version}", "has") for follower in followers])
            sent = (await publisher.do("sent", "sent"))["sent"] - published["sent"]
            received = statistics.mean(end["received"] - base for end, base in zip(ends, before, strict=True))
            times = [end["time"] - published["began"] for end in ends]
            kind, spent = "difference" if number else "whole", published["ended"] - published["began"]
            case = (self._name, kind, mib, len(followers))
            found.append(Measured(*case, max(times), min(times), spent, received, sent / received))
        return found

    async def http(self, mib: int, clients: Sequence[Worker], server: Worker) -> Measured:
        written = await server.do(f"write {mib}", "write")
        ends = await all_of([client.do(f"get {written['url']}", "get") for client in clients])
        times = [end["time"] - written["ended"] for end in ends]
        spent, received = written["ended"] - written["began"], ends[0]["received"]
        return Measured(self._name, "http", mib, len(clients), max(times), min(times), spent, received, len(clients))


async def measure(options: argparse.Namespace, links: Links | None, name: str) -> list[Measured]:
    results: list[Measured] = []
    for count in options.followers:
        async with crew() as processes:
            bench = Bench(processes, links, name)
            publisher = await bench.start("publisher", 0)
            followers = [await bench.start("follower", rank) for rank in range(1, count + 1)]
            for mib in options.mib:
                for _ in range(options.repeats):
                    results += await bench.versions(mib, followers, publisher, options.steps)
                    say(json.dumps([asdict(each) for each in results[-1 - options.steps :]]))
        if options.http:
            async with crew() as processes:
                bench = Bench(processes, links, name)
                server = await bench.start("http-server", 0)
                clients = [await bench.start("http-client", rank) for rank in range(1, count + 1)]
                for mib in options.mib:
                    results += [await bench.http(mib, clients, server) for _ in range(options.repeats)]
                    say(json.dumps(asdict(results[-1])))
    return results


def table(results: Sequence[Measured]) -> str:
    """Medians as Markdown."""
    lines = [
        "| link | MiB | followers | what | s to the last (least to most) | to the first | of commit | MiB received "
        "| copies |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    cases = dict.fromkeys((each.link, each.mib, each.followers, each.kind) for each in results)
    for case in cases:
        same = [each for each in results if (each.link, each.mib, each.followers, each.kind) == case]
        seconds = [each.seconds for each in same]
        first, spent, received, copies = (
            statistics.median(getattr(each, name) for each in same)
            for name in ("first", "committing", "received", "copies")
        )
        link, mib, followers, kind = case
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        lines.append(
            f"| {link} | {mib} | {followers} | {kind} | {spread} | {first:.2f} | {spent:.2f} | {received / MIB:.2f} "
            f"| {copies:.2f} |"
        )
    return "\n".join(lines)


def show_targets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        outcomes = asyncio.run(measure_targets(options))
    except LinkError as error:
        parser.error(str(error))
    except WorkerError as error:
        sys.exit(f"following: {error}")
    for name in options.target:
        found = [asdict(each) for each in outcomes if each.name.startswith(name)]
        write(options.output / f"following_{name}.json", {"machine": machine(ROOT), "results": found})
    print(*outcomes, sep="\n")


@ending_children()
def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--followers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--mib", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=3, help="differences after each whole version (3)")
    parser.add_argument("--repeats", type=int, default=3, help="of each case (3)")
    parser.add_argument("--link", type=float, metavar="MBIT", help="emulate links of this rate; loopback by default")
    parser.add_argument("--rtt", type=float, default=50.0, metavar="MS", help="round trip of the links (50)")
    parser.add_argument("--congestion", help="TCP's congestion control on the links; the machine's by default")
    parser.add_argument("--no-http", dest="http", action="store_false", help="leave the HTTP server out")
    parser.add_argument("--target", nargs="+", choices=TARGETS, help="measure only these; following_NAME.json")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    if min(*options.followers, *options.mib, options.repeats) < 1 or options.steps < 0:
        parser.error("needs at least 1 follower, 1 MiB and 1 repeat")
    make_folder(parser, options.output)
    if options.target:
        show_targets(parser, options)
        return
    with ExitStack() as stack:
        links, name = None, "loopback"
        try:
            if options.link is not None:
                check_tools()
                ends = 1 + max(options.followers)
                setting = Setting("following", (options.link,) * ends, options.rtt / 1000, ())
                links = stack.enter_context(Links(setting, options.congestion))
                name = f"{options.link:g} Mbit/s, {options.rtt:g} ms"
            results = asyncio.run(measure(options, links, name))
        except LinkError as error:
            parser.error(str(error))
        except WorkerError as error:
            sys.exit(f"following: {error}")
    write(options.output / "following.json", {"machine": machine(ROOT), "results": [asdict(each) for each in results]})
    print(table(results))


if __name__ == "__main__":
    main()
