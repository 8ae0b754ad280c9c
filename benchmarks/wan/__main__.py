"""Compares averaging over slow links with long delays: this library, Gloo and plain TCP.

The links are emulated on this machine: each peer is in a network namespace, its upload and download are limited by
`tbf`, and every packet is delayed by half the round trip. This needs root, `ip` and `tc` (Debian: iproute2) and
/dev/net/tun:

    sudo .venv/bin/python -m benchmarks.wan                              # all, about 25 minutes
    sudo .venv/bin/python -m benchmarks.wan --settings 100x40 --mib 16   # the shortest, 1 minute

Settings, with four peers except for `pair`:
    100x40     100 Mbit/s and 40 ms of round trip, 16 and 64 MiB
    300x50     300 Mbit/s and 50 ms, 64 MiB
    1000x50    1 Gbit/s and 50 ms, 64 and 256 MiB; 4 Gbit/s in total keep two cores busy: see "machine s"
    pair       the same between two peers, for which two cores may be enough
    uneven     1 Gbit/s but one peer 100 Mbit/s, and 50 ms, 64 MiB; with and without `bandwidth=`

First, plain TCP streams measure the rate of one peer's link alone and of all links at once. The limit is computed from
the former: the bytes that a butterfly all-reduce must send, 2·S·(n-1)/n, at that rate, and two round trips; with uneven
links the optimum over all shares. Then all systems alternate round by round. `raw` is one of them: it sends the same
bytes over plain TCP connections that were idle as long as the others', which shows the cost of TCP's slow start. Every
round has new values and is compared with the true mean; the first one is not counted. The seconds of a round are those
of its slowest peer.

The results go to `wan.json`. The exit code is 1 if any round failed or was wrong, 2 if the links cannot be set up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.allreduce.__main__ import one_round
from benchmarks.allreduce.report import machine
from benchmarks.allreduce.worker import error_bound
from benchmarks.output import make_folder, write
from benchmarks.wan.limits import MIB, SETTINGS, WIRE, Setting, best_shares, equal_shares, limit
from benchmarks.wan.links import LinkError, Links, check_tools
from benchmarks.wan.report import show
from benchmarks.workers import ROOT, Worker, WorkerError, all_of, crew, say
from examples.children import ending_children

CALIBRATION_SECONDS = 6.0

CORES = os.cpu_count() or 1

BUSY_CORES = 0.2
"""CPU use by other processes, in cores, from which on a warning is printed."""


def idle_seconds() -> float:
    """Returns the idle seconds of all cores since boot."""
    idle, waiting = Path("/proc/stat").read_text().split(maxsplit=6)[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured system with its options.

    Attributes:
        system: averaging, gloo or raw.
        codec: compression of the values.
        states_bandwidth: whether the peers set `bandwidth`.
    """

    system: str
    codec: str
    states_bandwidth: bool = False

    def __str__(self) -> str:
        if self.system != "averaging":
            return self.system
        return f"averaging {self.codec}" + (", bandwidth stated" if self.states_bandwidth else "")


def entries(setting: Setting, codecs: Sequence[str]) -> list[Entry]:
    """Returns the systems to measure in a setting."""
    plain = [Entry("raw", "none", setting.uneven), Entry("gloo", "none")]
    ours = [Entry("averaging", codec, stated) for stated in (False, True)[: 1 + setting.uneven] for codec in codecs]
    return plain + ours


class Bench:
    """The links of one setting, and the program that runs on them."""

    def __init__(self, setting: Setting, links: Links) -> None:
        self.setting, self._links = setting, links
        self.hosts = [links.host(rank) for rank in range(len(setting.mbits))]

    def _command(self, rank: int, module: str, *arguments: object) -> list[str]:
        command = [*self._links.command(rank), sys.executable, "-m", module, "--rank", rank, *arguments]
        return [str(word) for word in (*command, "--hosts", *self.hosts)]

    async def calibrate(self, senders: int) -> list[float]:
        """Returns the bytes/s that each peer receives over plain TCP if the first `senders` peers send to all."""
        arguments = ("--senders", senders, "--seconds", CALIBRATION_SECONDS)
        processes = [
            await asyncio.create_subprocess_exec(
                *self._command(rank, "benchmarks.wan.raw", *arguments),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            for rank in range(len(self.hosts))
        ]
        try:
            answers = await all_of([process.communicate() for process in processes])
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.shield(asyncio.gather(*(process.wait() for process in processes)))
        if any(process.returncode for process in processes):
            raise WorkerError("plain TCP streams did not run through; see above")
        return [json.loads(out)["received"] for out, _ in answers]

    @asynccontextmanager
    async def running(self, entry: Entry, mib: int, parts: Sequence[float]) -> AsyncIterator[list[Worker]]:
        """Starts the peers of one system, each in its namespace, and connects them."""
        with tempfile.TemporaryDirectory() as scratch:
            async with crew(GLOO_SOCKET_IFNAME="eth0") as started:

                async def start(rank: int, join: str) -> Worker:
                    arguments = ["--peers", len(self.hosts), "--mib", mib, "--codec", entry.codec, "--join", join]
                    arguments += ["--parts", *parts]
                    if entry.states_bandwidth:
                        arguments += ["--bandwidth", self.setting.mbits[rank] * 1e6 / 8]
                    return await started.start(*self._command(rank, "benchmarks.wan.worker", entry.system, *arguments))

                if entry.system == "averaging":
                    address = (await start(0, "")).started["address"]
                    await all_of([start(rank, address) for rank in range(1, len(self.hosts))])
                else:  # Gloo's peers meet through a file
                    await all_of([start(rank, f"file://{scratch}/store") for rank in range(len(self.hosts))])
                yield started.workers

    async def measure(self, listed: Sequence[Entry], mib: int, rounds: int, rates: Sequence[float]) -> dict[str, Any]:
        """Runs all systems at one size alternately. A system that breaks is removed and reports why."""
        best = best_shares(self.setting.mbits)
        found: dict[str, dict[str, Any]] = {}
        async with AsyncExitStack() as stack:
            running: dict[Entry, list[Worker]] = {}

            def broke(entry: Entry, error: WorkerError) -> None:
                found[str(entry)]["broken"] = str(error)
                say(f"  {entry} broke: {error}")

            for entry in listed:
                parts = best if entry.states_bandwidth else equal_shares(len(self.hosts))
                nbytes = mib * MIB * WIRE[entry.codec]
                found[str(entry)] = {
                    "system": entry.system,
                    "codec": entry.codec,
                    "told": entry.states_bandwidth,
                    "limit_seconds": limit(nbytes, rates, parts, self.setting.rtt),
                    "optimum_seconds": limit(nbytes, rates, best, self.setting.rtt),
                    "versions": {},
                    "rounds": [],
                    "broken": "",
                }
                try:
                    running[entry] = await stack.enter_async_context(self.running(entry, mib, parts))
                    found[str(entry)]["versions"] = running[entry][0].started["versions"]
                except WorkerError as error:
                    broke(entry, error)
            for number in range(rounds + 1):
                turn = number % max(1, len(running))
                for entry in [*running][turn:] + [*running][:turn]:  # rotated
                    try:
                        done = await self._one_round(entry, running[entry])
                    except WorkerError as error:
                        broke(entry, error)
                        del running[entry]
                        continue
                    found[str(entry)]["rounds"].append({"warm_up": number == 0} | done)
                    say(
                        f"  {f'round {number} of {rounds}' if number else 'warm-up'}, {entry}: "
                        f"{done['allreduce_seconds']:.3f} s {done['failure']}"
                    )
        return {"mib": mib, "systems": found}

    async def _one_round(self, entry: Entry, workers: Sequence[Worker]) -> dict[str, Any]:
        before, idle, begun = self._links.relay(), idle_seconds(), time.monotonic()
        if entry.system == "raw":  # it has no average to check
            averaged = await all_of([worker.do("average", "averaged") for worker in workers])
            failure = next((one["failure"] for one in averaged if one["failure"]), "")
            seconds = max(one["allreduce_seconds"] for one in averaged)
            done = {"seconds": seconds, "allreduce_seconds": seconds, "failure": failure}
        else:
            done = await one_round(workers, error_bound(entry.codec, len(workers)))
        after = self._links.relay()
        return done | {
            "relay_late_ms": after["late_ms"],
            "relay_cpu_seconds": after["cpu_seconds"] - before["cpu_seconds"],
            # includes filling and checking the tensors, which a round's seconds do not
            "machine_busy_seconds": (time.monotonic() - begun) * CORES - (idle_seconds() - idle),
        }


async def run(options: argparse.Namespace, name: str, links: Links, results: dict[str, Any]) -> None:
    """Runs one setting: calibration, then each size."""
    setting = SETTINGS[name]
    bench = Bench(setting, links)
    idle = idle_seconds()
    await asyncio.sleep(1)
    others = CORES - (idle_seconds() - idle)
    if others > BUSY_CORES:
        say(f"Other processes use {others:.1f} of {CORES} cores, which will affect the figures")
    say(f"{setting}: calibrating with plain TCP")
    one, everybody = await bench.calibrate(1), await bench.calibrate(len(bench.hosts))
    # All of it came from peer 0. A link is at least as fast alone as with all others; a lower value means that the
    # machine was busy.
    link = max(sum(one), *everybody)
    efficiency = link / (setting.mbits[0] * 1e6 / 8)
    rates = [mbit * 1e6 / 8 * efficiency for mbit in setting.mbits]
    calibration = {
        "link_mbit": link * 8 / 1e6,
        "all_links_mbit": [rate * 8 / 1e6 for rate in everybody],
        "relay": links.relay(),
        "cores_busy_before": others,
        "tcp": links.tcp(),
    }
    say(f"  one link {link * 8 / 1e6:.0f} Mbit/s, all at once {statistics.mean(everybody) * 8 / 1e6:.0f} each")
    for mib in options.mib or setting.mib:
        say(f"{setting}, {mib} MiB")
        done = await bench.measure(entries(setting, options.codecs), mib, options.rounds, rates)
        case = {"setting": name, "title": f"{setting}, {mib} MiB", "uneven": setting.uneven}
        results["cases"].append(case | {"calibration": calibration} | done)
        write(options.output / "wan.json", results)


@ending_children()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="see above (all)")
    parser.add_argument("--mib", type=int, nargs="+", help="MiB of float32 at each peer (as the setting has it)")
    parser.add_argument(
        "--codecs", nargs="+", choices=WIRE, default=list(WIRE), help="of this library (none fp16 int8)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up (5)")
    parser.add_argument(
        "--congestion", metavar="NAME", help="TCP's congestion control at the peers, as cubic or bbr (the machine's)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of wan.json (runs/benchmarks)"
    )
    options = parser.parse_args()
    if options.rounds < 1 or min(options.mib or [1]) < 1:
        parser.error("there must be at least 1 MiB and 1 round")
    try:
        check_tools()
        make_folder(parser, options.output)
        results: dict[str, Any] = machine(ROOT) | {"rounds": options.rounds, "cases": []}
        for name in options.settings:
            with Links(SETTINGS[name], options.congestion) as links:
                asyncio.run(run(options, name, links, results))
    except (LinkError, WorkerError) as error:
        print(f"The links cannot be measured: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0 if show(results) else 1)


if __name__ == "__main__":
    main()
