"""Compares the all-reduce of this library with Gloo and hivemind, in separate processes on loopback.

All systems of a case run at the same time and alternate round by round, so that other load on the machine affects them
equally. Every round starts with new values, and its result is compared with the true mean. The seconds of a round are
those of its slowest peer, CPU seconds those of all peers, memory that of the largest peer. The first round is not
counted. `averaging` is this library with its default options. `direct` is the same with `in_place`, which writes
averages as they arrive; `direct_sealed` also has TLS. `grpc` and `grpc_tls` send their parts over gRPC instead. `bare`
only sends the same bytes over gRPC in the same pattern and sums them, which shows the cost of gRPC itself.
The results go to `allreduce.json` and `allreduce.png`. The exit code is 1 if any round failed or was wrong.

hivemind needs an older numpy and therefore an environment of its own, with the extra `hivemind`. Without one its rows
are missing. `make bench-hivemind` creates one in .venv-hivemind and runs a part of this; or by hand:

    python3 -m venv /tmp/hivemind
    /tmp/hivemind/bin/pip install 'torch==2.13.0'
    /tmp/hivemind/bin/pip install --group hivemind -e .
    python -m benchmarks.allreduce --hivemind /tmp/hivemind/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.allreduce.report import draw, machine, show
from benchmarks.allreduce.shapes import size
from benchmarks.allreduce.systems import SYSTEMS, write_certificates
from benchmarks.allreduce.worker import error_bound
from benchmarks.output import make_folder, write
from benchmarks.workers import ROOT, Worker, WorkerError, all_of, crew, say
from examples.children import ending_children

HIVEMIND_CODECS = ("none", "fp16")


@dataclass(frozen=True, slots=True)
class Case:
    """Number of peers, size, tensors and compression of one case."""

    peers: int
    kib: int
    tensors: str
    codec: str

    def __str__(self) -> str:
        tensors = "GPT-2's tensors" if self.tensors == "gpt2" else f"{self.tensors} tensors"
        return f"{self.peers} peers, {size(self.kib)} in {tensors}, {self.codec}"


@asynccontextmanager
async def system(name: str, case: Case, python: str) -> AsyncIterator[list[Worker]]:
    """Starts the peers of one system, one process each, and connects them."""
    with tempfile.TemporaryDirectory() as scratch:
        async with crew() as started:

            async def start(rank: int, join: str) -> Worker:
                arguments = ["--rank", rank, "--peers", case.peers, "--kib", case.kib]
                arguments += ["--tensors", case.tensors, "--codec", case.codec, "--join", join, "--files", scratch]
                return await started.start(python, "-m", "benchmarks.allreduce.worker", name, *arguments)

            if name in ("direct_sealed", "grpc_tls"):
                write_certificates(Path(scratch))
            if name in ("bare", "gloo"):  # their peers meet through a file
                await all_of([start(rank, f"file://{scratch}/store") for rank in range(case.peers)])
            else:
                address = (await start(0, "")).started["address"]
                await all_of([start(rank, address) for rank in range(1, case.peers)])
            yield started.workers


async def one_round(workers: Sequence[Worker], bound: float) -> dict[str, Any]:
    """Runs one round with new values; returns its cost and its error."""
    await all_of([worker.do("fill", "filled") for worker in workers])
    averaged = await all_of([worker.do("average", "averaged") for worker in workers])
    checked = await all_of([worker.do("check", "checked") for worker in workers])
    failure = next((one["failure"] for one in averaged if one["failure"]), "")
    error = max(one["error"] for one in checked)
    if not failure and not error <= bound:
        failure = f"wrong: {error:g} from the true mean, more than {bound:g}"
    return {
        "seconds": max(one["seconds"] for one in averaged),
        "allreduce_seconds": max(one["allreduce_seconds"] for one in averaged),
        "cpu_seconds": sum(one["cpu_seconds"] for one in checked),
        "peak_bytes": max(one["peak_bytes"] for one in checked),
        "peak_bytes_over_former": max(one["peak_bytes_over_former"] for one in checked),
        "error": error if math.isfinite(error) else None,
        "failure": failure,
    }


async def measure(case: Case, pythons: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Runs all systems of a case alternately. A system that breaks, or fails twice in a row, is removed."""
    systems: dict[str, dict[str, Any]] = {name: {"versions": {}, "rounds": [], "broken": ""} for name in pythons}
    bound = error_bound(case.codec, case.peers)
    async with AsyncExitStack() as stack:
        running: dict[str, list[Worker]] = {}

        def broke(name: str, error: WorkerError) -> None:
            systems[name]["broken"] = str(error)
            say(f"  {name} broke: {error}")

        for name, python in pythons.items():
            try:
                running[name] = await stack.enter_async_context(system(name, case, python))
                systems[name]["versions"] = running[name][0].started["versions"]
            except WorkerError as error:
                broke(name, error)
        for number in range(rounds + 1):
            # In random order, because a system may go on working after its round and slow down the next system.
            for name in random.Random(number).sample(list(running), len(running)):
                try:
                    done = await one_round(running[name], bound)
                except WorkerError as error:
                    broke(name, error)
                    del running[name]
                    continue
                before = systems[name]["rounds"][-1:]
                systems[name]["rounds"].append({"warm_up": number == 0} | done)
                say(
                    f"  {f'round {number}' if number else 'warm-up'}, {name}: {done['seconds']:.3f} s, "
                    f"{done['cpu_seconds']:.3f} CPU s {done['failure']}"
                )
                if done["failure"] and before and before[0]["failure"]:
                    broke(name, WorkerError(f"two rounds failed, the last one with {done['failure']}"))
                    del running[name]
    return {
        "peers": case.peers,
        "kib": case.kib,
        "tensors": case.tensors,
        "codec": case.codec,
        "error_bound": bound,
        "systems": systems,
    }


@ending_children()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8], help="number of peers (2 4 8)")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="MiB of float32 at each peer (64 256)")
    parser.add_argument(
        "--kib", type=int, nargs="+", help="KiB of float32 at each peer instead; 1 shows the fixed cost of a round"
    )
    parser.add_argument(
        "--tensors",
        nargs="+",
        choices=["4", "1000", "4000", "20000", "gpt2"],
        default=["4", "gpt2"],
        help="division into tensors (4 gpt2)",
    )
    parser.add_argument(
        "--codecs",
        nargs="+",
        choices=["none", "fp16", "bf16", "int8"],
        default=["none", "fp16", "bf16", "int8"],
        help="of this library and, if supported, of hivemind; Gloo always sends float32 (none fp16 bf16 int8)",
    )
    own = [name for name in SYSTEMS if name not in ("gloo", "hivemind")]
    parser.add_argument("--systems", nargs="+", choices=own, default=own, help=f"beside Gloo ({' '.join(own)})")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the warm-up (7)")
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of an environment with hivemind, see above")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of the results (runs/benchmarks)"
    )
    options = parser.parse_args()
    sizes = options.kib or [mib * 1024 for mib in options.mib]
    if min(options.peers) < 2 or min(sizes) < 1 or options.rounds < 1:
        parser.error("there must be at least 2 peers, 1 MiB or 1 KiB, and 1 round")
    for tensors in options.tensors:
        if min(sizes) * 256 < (int(tensors) if tensors != "gpt2" else 256 * 1024):
            parser.error(f"{size(min(sizes))} is too little for --tensors {tensors}: choose another division")
    if options.hivemind and not shutil.which(options.hivemind):
        parser.error(f"--hivemind {options.hivemind}: there is no such program")
    make_folder(parser, options.output)
    results: dict[str, Any] = machine(ROOT) | {"rounds": options.rounds, "cases": []}
    for peers, kib, tensors, codec in product(options.peers, sizes, options.tensors, options.codecs):
        case = Case(peers, kib, tensors, codec)
        say(str(case))
        ours = [name for name in options.systems if codec == "none" or name != "bare"]
        ours = [*ours, "gloo"]
        pythons = dict.fromkeys(ours, sys.executable)
        if options.hivemind and codec in HIVEMIND_CODECS:
            pythons["hivemind"] = options.hivemind
        results["cases"].append(asyncio.run(measure(case, pythons, options.rounds)) | {"title": str(case)})
        write(options.output / "allreduce.json", results)
    draw(results, options.output / "allreduce.png")
    sound = show(results)
    if not options.hivemind:
        print("hivemind was not measured: no --hivemind PYTHON was given; --help says how to get one.")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
