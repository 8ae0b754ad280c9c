"""Measures matchmaking and discovery with a growing number of peers: seconds, messages and memory.

Three things are measured, in this order:

  real       whole peers over gRPC on loopback, in at most 8 processes, so beyond 8 several peers share a process. They
             average a tiny tensor in groups of 4 repeatedly. "ms to BEGIN" is the time from the moment at which the
             last of all peers calls average() to the moment at which the last of all has its group.
  simulated  whole peers in one process, in virtual time, in groups of 8, all calling at once. Discovery is complete
             gossip, with every record at every peer, or, for more peers than memory allows, one shared table (a record
             reaches the others after 0.5 s); then only matchmaking and rounds are simulated.
  rumours    how a fresh record spreads among members that have no other records.

Every figure is followed by its factor per doubling of the peers: 1 means constant, 2 means linear. The results go to
`scale.json` and `scale.png`. Ctrl+C ends all processes, and the results so far are kept.

    python -m benchmarks.scale                          # everything: a quarter of an hour and 4 GiB
    python -m benchmarks.scale --real 2 4 8 --simulate  # a minute; an option without numbers omits that part
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.allreduce.report import machine
from benchmarks.output import make_folder, write
from benchmarks.scale.peers import measure
from benchmarks.scale.report import draw, show
from benchmarks.scale.simulation import in_child
from benchmarks.workers import ROOT, WorkerError, say
from examples.children import ending_children

REAL_GROUP, SIMULATED_GROUP = 4, 8

MOST_REAL_MS = 50.0
"""Limit in milliseconds from the last call until a group of all 4 peers has begun."""


def simulations(options: argparse.Namespace) -> Iterator[tuple[int, bool, bool]]:
    """Yields the number of peers, whether discovery is gossip, whether all have one key."""
    for one_key, sizes in ((False, options.simulate), (True, options.one_key)):
        yield from ((peers, True, one_key) for peers in sizes)
    for one_key, sizes in ((False, options.shared), (True, options.shared_one_key)):
        yield from ((peers, False, one_key) for peers in sizes)


def run(options: argparse.Namespace, results: dict[str, Any]) -> Iterator[None]:
    """Measures one thing after the other; yields after each."""
    for peers in options.real:
        say(f"{peers} real peers")
        group = min(REAL_GROUP, peers)
        found = asyncio.run(measure(peers, group, options.rounds, options.seconds))
        results["real"].append(found)
        say(f"  the last one's call to all begun: {median_ms(found):.1f} ms")
        yield
    for peers, gossip, one_key in simulations(options):
        found_by = "gossip" if gossip else "one shared table"
        say(f"{peers} simulated peers, {found_by}, {'one key' if one_key else 'a key for each group'}")
        wanted = {"peers": peers, "group_size": SIMULATED_GROUP, "rounds": options.turns}
        results["simulated"].append(in_child("matchmaking", **wanted, gossip=gossip, one_key=one_key))
        yield
    for peers in options.rumours:
        say(f"rumours among {peers} peers")
        results["rumours"].append(in_child("rumours", peers=peers, records=5))
        yield


@ending_children()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def sizes(name: str, default: list[int], what: str) -> None:
        default_text = " ".join(map(str, default))
        parser.add_argument(name, type=int, nargs="*", metavar="N", default=default, help=f"{what} ({default_text})")

    sizes("--real", [2, 4, 8, 16, 32, 64], "how many real peers")
    sizes("--simulate", [64, 128, 256, 512, 1024], "how many simulated ones with gossip in full, a key for each group")
    sizes("--one-key", [16, 32, 64, 128], "the same under one key")
    sizes("--shared", [64, 256, 1024, 4096], "the same with a shared table, a key for each group")
    sizes("--shared-one-key", [16, 64, 128, 256], "the same under one key")
    sizes("--rumours", [64, 256, 1024, 4096], "the same, to follow a fresh record")
    parser.add_argument("--rounds", type=int, default=20, help="of real peers in each pattern (20)")
    parser.add_argument("--turns", type=int, default=2, help="rounds of simulated peers (2)")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which real peers are left idle (5)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of the results (runs/benchmarks)"
    )
    options = parser.parse_args()
    every = (options.real, options.simulate, options.one_key, options.shared, options.shared_one_key, options.rumours)
    if options.rounds < 1 or options.turns < 1 or min((2, *chain(*every))) < 2 or not 0 < options.seconds < math.inf:
        parser.error("there must be at least 2 peers and 1 round, and --seconds above 0")
    for peers in (*options.simulate, *options.shared):
        if peers < SIMULATED_GROUP or peers & (peers - 1):
            parser.error(
                f"{peers}: with a key for each group of 8 the number of peers must be a power of 2, at least 8"
            )
    make_folder(parser, options.output)
    results: dict[str, Any] = machine(ROOT) | {"real": [], "simulated": [], "rumours": []}
    try:
        for _ in run(options, results):
            write(options.output / "scale.json", results)
    except (WorkerError, subprocess.CalledProcessError) as error:
        sys.exit(f"a process of peers failed: {error}")
    draw(results, options.output / "scale.png")
    show(results)
    late = [one for one in results["real"] if one["peers"] == REAL_GROUP and median_ms(one) > MOST_REAL_MS]
    sys.exit(f"a group of {REAL_GROUP} takes more than {MOST_REAL_MS:g} ms to begin" if late else 0)


def median_ms(found: dict[str, Any]) -> float:
    """Median milliseconds from the last call until all have their group."""
    return 1e3 * statistics.median(float(one["begun_seconds"]) for one in found["patterns"]["last"]["rounds"])


if __name__ == "__main__":
    main()
