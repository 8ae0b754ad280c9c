"""Compares averaging over slow links with long delays: this library and Gloo, beside the limit of plain TCP.

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
links the optimum over all shares. Then all systems alternate round by round. Every round has new values and is compared
with the true mean; the first one is not counted. The seconds of a round are those of its slowest peer.

The results go to `wan.json`. The exit code is 1 if any round failed or was wrong, 2 if the links cannot be set up.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.allreduce.rounds import MODULE, connected, one_round
from benchmarks.allreduce.worker import error_bound
from benchmarks.runner import (
    MIB,
    Verdict,
    counted,
    failures,
    in_turns,
    machine,
    make_folder,
    make_parser,
    ratio,
    show,
    spread,
    write,
)
from benchmarks.wan.limits import SETTINGS, WIRE, Setting, best_shares, equal_shares, limit
from benchmarks.wan.links import LinkError, Links, check_tools
from benchmarks.workers import ROOT, Worker, WorkerError, all_of, say
from examples.children import ending_children

CALIBRATION_SECONDS = 6.0

CORES = os.cpu_count() or 1

LARGE_MIB = 64
"""Minimum size in MiB to which the targets apply."""

OF_LIMIT, UNEVEN_OVER = 0.90, 1.15
SPEEDUPS = {"fp16": 1.8, "int8": 3.3}


def idle_seconds() -> float:
    """Returns the idle seconds of all cores since boot."""
    idle, waiting = Path("/proc/stat").read_text().split(maxsplit=6)[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Entry:
    """A measured system with the compression of its values, and whether its peers set `bandwidth`."""

    system: str
    codec: str
    states_bandwidth: bool = False

    def __str__(self) -> str:
        if self.system != "averaging":
            return self.system
        return f"averaging {self.codec}" + (", bandwidth stated" if self.states_bandwidth else "")


def entries(setting: Setting, codecs: Sequence[str]) -> dict[str, Entry]:
    """Returns the systems to measure in a setting."""
    ours = [Entry("averaging", codec, stated) for stated in (False, True)[: 1 + setting.uneven] for codec in codecs]
    return {str(entry): entry for entry in (Entry("gloo", "none"), *ours)}


class Bench:
    """The links of one setting, and the program that runs on them."""

    def __init__(self, setting: Setting, links: Links) -> None:
        self.setting, self._links = setting, links
        self.hosts = [links.host(rank) for rank in range(len(setting.mbits))]

    async def calibrate(self, senders: int) -> list[float]:
        """Returns the bytes/s that each peer receives over plain TCP if the first `senders` peers send to all."""
        arguments = ["--senders", senders, "--seconds", CALIBRATION_SECONDS, "--hosts", *self.hosts]
        module = [sys.executable, "-m", "benchmarks.wan.calibrate"]
        processes = [
            await asyncio.create_subprocess_exec(
                *map(str, [*self._links.command(rank), *module, "--rank", rank, *arguments]),
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

    def start(self, entry: Entry, mib: int) -> AbstractAsyncContextManager[list[Worker]]:
        """Starts the peers of one system, each in its namespace, and connects them."""

        def command(rank: int) -> list[object]:
            words: list[object] = [*self._links.command(rank), sys.executable, "-m", MODULE, entry.system]
            words += ["--peers", len(self.hosts), "--kib", 1024 * mib, "--codec", entry.codec]
            words += ["--listen", f"{self.hosts[rank]}:0"]
            if entry.states_bandwidth:
                words += ["--bandwidth", self.setting.mbits[rank] * 1e6 / 8]
            return words

        return connected(entry.system, len(self.hosts), command, GLOO_SOCKET_IFNAME="eth0")

    async def one_round(self, entry: Entry, workers: Sequence[Worker]) -> dict[str, Any]:
        before, idle, begun = self._links.relay(), idle_seconds(), time.monotonic()
        done = await one_round(workers, error_bound(entry.codec, len(workers)))
        after = self._links.relay()
        return done | {
            "relay_late_ms": after["late_ms"],
            "relay_cpu_seconds": after["cpu_seconds"] - before["cpu_seconds"],
            # includes filling and checking the tensors, which a round's seconds do not
            "machine_busy_seconds": (time.monotonic() - begun) * CORES - (idle_seconds() - idle),
        }

    async def measure(
        self, listed: Mapping[str, Entry], mib: int, rounds: int, rates: Sequence[float]
    ) -> dict[str, Any]:
        """Runs all systems at one size alternately; `rates` of the links are in bytes/s."""
        starts = {name: partial(self.start, entry, mib) for name, entry in listed.items()}
        found = await in_turns(starts, rounds, lambda name, workers: self.one_round(listed[name], workers))
        best = best_shares(self.setting.mbits)
        for name, entry in listed.items():
            parts = best if entry.states_bandwidth else equal_shares(len(self.hosts))
            nbytes = mib * MIB * WIRE[entry.codec]
            found[name] |= {
                "codec": entry.codec,
                "limit_seconds": limit(nbytes, rates, parts, self.setting.rtt),
                "optimum_seconds": limit(nbytes, rates, best, self.setting.rtt),
            }
        return found


async def run(options: argparse.Namespace, name: str, links: Links, results: dict[str, Any]) -> None:
    """Runs one setting: calibration, then each size."""
    setting = SETTINGS[name]
    bench = Bench(setting, links)
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
        "tcp": links.tcp(),
    }
    for mib in options.mib or setting.mib:
        say(f"{setting}, {mib} MiB")
        systems = await bench.measure(entries(setting, options.codecs), mib, options.rounds, rates)
        case = {"setting": name, "title": f"{setting}, {mib} MiB", "uneven": setting.uneven, "mib": mib}
        results["cases"].append(case | {"calibration": calibration, "systems": systems})
        write(options.output / "wan.json", results)


def seconds(system: Mapping[str, Any]) -> list[float]:
    """Seconds of the all-reduce, by round."""
    return [one["allreduce_seconds"] for one in counted(system)]


def verdicts(cases: Sequence[Mapping[str, Any]]) -> Iterator[Verdict]:
    """Returns the targets for the measurements."""
    for case in cases:
        systems = case["systems"]
        plain, stated = systems.get("averaging none", {}), systems.get("averaging none, bandwidth stated", {})
        if case["mib"] < LARGE_MIB or not plain or not seconds(plain):
            continue
        if case["uneven"]:
            if stated and seconds(stated):
                over = statistics.median(seconds(stated)) / stated["optimum_seconds"]
                wanted = f"{case['title']}: with bandwidth stated, within {UNEVEN_OVER - 1:.0%} of the optimum"
                yield Verdict(wanted, f"{over - 1:+.0%}", over <= UNEVEN_OVER)
            continue
        part = plain["limit_seconds"] / statistics.median(seconds(plain))
        yield Verdict(f"{case['title']}: at least {OF_LIMIT:.0%} of the limit", f"{part:.0%}", part >= OF_LIMIT)
        for codec, wanted_times in SPEEDUPS.items():
            coded = systems.get(f"averaging {codec}")
            faster = ratio(plain, coded, "allreduce_seconds") if coded else None
            if faster is not None:
                wanted = f"{case['title']}: {codec} {wanted_times:g} times as fast as uncompressed"
                yield Verdict(wanted, f"{faster:.2f}", faster >= wanted_times)


def rows_of(case: Mapping[str, Any], rounds: int) -> Iterator[Sequence[str]]:
    calibration = case["calibration"]
    all_links = statistics.mean(calibration["all_links_mbit"])
    yield (f"[bold]{case['title']}[/bold]; plain TCP {calibration['link_mbit']:.1f} Mbit/s, all {all_links:.1f} each",)
    for name, system in case["systems"].items():
        good, took = counted(system), seconds(system)
        if not good:
            yield (f"  {name}", "failed", *[""] * 6, f"0 of {rounds}")
            continue
        others = [case["systems"].get(other) for other in ("averaging none", "gloo")]
        times = [ratio(other, system, "allreduce_seconds") if other else None for other in others]
        yield (
            f"  {name}",
            spread(took),
            f"{system['limit_seconds']:.3f}",
            f"{system['limit_seconds'] / statistics.median(took):.0%}",
            *("" if value is None else f"{value:.2f}" for value in times),
            *(f"{statistics.median(one[key] for one in good):.2f}" for key in ("cpu_seconds", "machine_busy_seconds")),
            f"{len(good)} of {rounds}",
        )


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="see above (all)")
    parser.add_argument("--mib", type=int, nargs="+", help="MiB of float32 at each peer (as the setting has it)")
    parser.add_argument("--codecs", nargs="+", choices=WIRE, default=list(WIRE), help="of this library (all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up (5)")
    options = parser.parse_args()
    if options.rounds < 1 or min(options.mib or [1]) < 1:
        parser.error("there must be at least 1 MiB and 1 round")
    try:
        check_tools()
        make_folder(parser, options.output)
        results: dict[str, Any] = machine() | {"rounds": options.rounds, "cases": []}
        for name in options.settings:
            with Links(SETTINGS[name]) as links:
                asyncio.run(run(options, name, links, results))
    except (LinkError, WorkerError) as error:
        print(f"The links cannot be measured: {error}", file=sys.stderr)
        sys.exit(2)
    header = ("system", "all-reduce, s", "limit", "of it", "x plain", "x Gloo", "CPU s", "machine s", "rounds")
    rows = [row for case in results["cases"] for row in rows_of(case, options.rounds)]
    show(results, "Median (least to most); x plain: times as fast as uncompressed; CPU s: of all peers", header, rows)
    print(*verdicts(results["cases"]), sep="\n")
    wrong = failures(results["cases"])
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
