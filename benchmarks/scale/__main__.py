"""Measures matchmaking and discovery with a growing number of peers: seconds, messages and memory.

Two things are measured, in this order:

  real       whole peers over gRPC on loopback, in at most 8 processes, so beyond 8 several peers share a process. They
             average a tiny tensor in groups of 4 repeatedly. "ms to BEGIN" is the time from the moment at which the
             last of all peers calls average() to the moment at which the last of all has its group.
  simulated  whole peers in one process, in virtual time, in groups of 8, all calling at once, with gossip in full:
             every record is at every peer.

The results go to `scale.json`. Ctrl+C ends all processes, and the results so far are kept.

    python -m benchmarks.scale                          # everything: a quarter of an hour and 4 GiB
    python -m benchmarks.scale --real 2 4 8 --simulate  # a minute; an option without numbers omits that part
"""

import argparse
import asyncio
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from benchmarks.runner import Verdict, machine, make_folder, make_parser, show, write
from benchmarks.scale.peers import measure
from benchmarks.scale.simulation import in_child
from benchmarks.workers import WorkerError, say
from examples.children import ending_children

REAL_GROUP, SIMULATED_GROUP = 4, 8

MOST_REAL_MS = 50.0
"""Limit in milliseconds from the last call until a group of all 4 peers has begun."""

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], float | None]]


def begun(row: Row, pattern: str) -> list[float]:
    """Milliseconds from the last call until all have their group, of each round."""
    return [1e3 * float(one["begun_seconds"]) for one in row["patterns"][pattern]["rounds"]]


def asked(row: Row, name: str) -> float:
    return float(row["patterns"]["together"]["calls_per_peer_and_round"].get(name, 0.0))


def idle_calls(row: Row) -> float:
    return float(sum(row["idle_calls_per_peer_and_second"].get(name, 0.0) for name in ("push", "exchange")))


def mean_calls(row: Row, name: str) -> float:
    return statistics.mean(float(one["calls_per_peer"].get(name, 0.0)) for one in row["rounds"])


REAL: Columns = {
    "ms to BEGIN, the last called, median": lambda row: statistics.median(begun(row, "last")),
    "max": lambda row: max(begun(row, "last")),
    "all within 10 ms, median": lambda row: statistics.median(begun(row, "together")),
    "max ": lambda row: max(begun(row, "together")),
    "join calls /peer": lambda row: asked(row, "join_group"),
    "pushes /peer": lambda row: asked(row, "push"),
    "ms, record at all": lambda row: 1e3 * statistics.median(row["record_seconds"]),
    "idle calls/s /peer": idle_calls,
    "idle % of a core /peer": lambda row: 100 * row["idle_cpu_per_peer"],
    "MiB /peer": lambda row: row["bytes_per_peer"] / 2**20,
}

SIMULATED: Columns = {
    "keys": lambda row: row["keys"],
    "s to groups, median": lambda row: statistics.median(one["seconds_median"] for one in row["rounds"]),
    "s to the last group": lambda row: max(one["seconds_max"] for one in row["rounds"]),
    "peers in full groups, %": lambda row: 100 * statistics.mean(one["full"] for one in row["rounds"]) / row["peers"],
    "join calls /peer": lambda row: mean_calls(row, "join_group"),
    "pushes /peer": lambda row: mean_calls(row, "push"),
    "idle calls/s /peer": idle_calls,
    "KiB held /peer": lambda row: row["bytes_per_peer"] / 1024,
    "s real": lambda row: row["real_seconds"],
}


def number(value: float | None) -> str:
    """Formats three digits, or as many as there are before the point."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def run(options: argparse.Namespace, results: dict[str, Any]) -> Iterator[None]:
    """Measures one thing after the other; yields after each."""
    for peers in options.real:
        say(f"{peers} real peers")
        results["real"].append(asyncio.run(measure(peers, min(REAL_GROUP, peers), options.rounds, options.seconds)))
        yield
    for one_key, sizes in ((False, options.simulate), (True, options.one_key)):
        for peers in sizes:
            say(f"{peers} simulated peers, {'one key' if one_key else 'a key for each group'}")
            wanted = {"peers": peers, "group_size": SIMULATED_GROUP, "rounds": options.turns, "one_key": one_key}
            results["simulated"].append(in_child(**wanted))
            yield


def print_tables(results: Row) -> None:
    titles: Sequence[tuple[str, str, Columns]] = (
        ("real", "Real peers on loopback, groups of 4", REAL),
        ("simulated", "Simulated peers with gossip, a message takes 20 to 80 ms, groups of 8", SIMULATED),
    )
    for name, title, columns in titles:
        if results[name]:
            rows = [[f"{row['peers']:,}", *(number(read(row)) for read in columns.values())] for row in results[name]]
            show(results, title, ["peers", *columns], rows)


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)

    def sizes(name: str, default: list[int], what: str) -> None:
        default_text = " ".join(map(str, default))
        parser.add_argument(name, type=int, nargs="*", metavar="N", default=default, help=f"{what} ({default_text})")

    sizes("--real", [2, 4, 8, 16, 32, 64], "how many real peers")
    sizes("--simulate", [64, 128, 256, 512, 1024], "how many simulated ones, with a key for each group")
    sizes("--one-key", [16, 32, 64, 128], "the same under one key")
    parser.add_argument("--rounds", type=int, default=20, help="of real peers in each pattern (20)")
    parser.add_argument("--turns", type=int, default=2, help="rounds of simulated peers (2)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which real peers are left idle (5)")
    options = parser.parse_args()
    every = chain(options.real, options.simulate, options.one_key)
    if options.rounds < 1 or options.turns < 1 or min((2, *every)) < 2 or not 0 < options.seconds < math.inf:
        parser.error("there must be at least 2 peers and 1 round, and --seconds above 0")
    if wrong := [peers for peers in options.simulate if peers < SIMULATED_GROUP or peers & (peers - 1)]:
        parser.error(f"{wrong[0]}: with a key for each group of 8 there must be a power of 2 of peers, at least 8")
    make_folder(parser, options.output)
    results: dict[str, Any] = machine() | {"real": [], "simulated": []}
    try:
        for _ in run(options, results):
            write(options.output / "scale.json", results)
    except (WorkerError, subprocess.CalledProcessError) as error:
        sys.exit(f"a process of peers failed: {error}")
    print_tables(results)
    slowest = [statistics.median(begun(one, "last")) for one in results["real"] if one["peers"] == REAL_GROUP]
    wanted = f"a group of {REAL_GROUP} begins within {MOST_REAL_MS:g} ms of the last call"
    found = [Verdict(wanted, f"{ms:.1f} ms", ms <= MOST_REAL_MS) for ms in slowest]
    print(*found, sep="\n")
    sys.exit(0 if all(verdict.met for verdict in found) else 1)


if __name__ == "__main__":
    main()
