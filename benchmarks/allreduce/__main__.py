"""Compares the all-reduce of this library with Gloo and hivemind, in separate processes on loopback.

All systems of a case run at the same time and alternate round by round, so that other load on the machine affects them
equally. Every round starts with new values, and its result is compared with the true mean. The seconds of a round are
those of its slowest peer, CPU seconds those of all peers, memory that of the largest peer. The first round is not
counted. `averaging` is this library with its default options, `sealed` the same with TLS, `grpc` sends its parts over
gRPC instead of connections of their own. The results go to `allreduce.json`. The exit code is 1 if any round failed or
was wrong.

hivemind needs an older numpy and therefore an environment of its own, with the extra `hivemind`. Without one its rows
are missing. `make bench-hivemind` creates one in .venv-hivemind and runs a part of this; or by hand:

    python3 -m venv /tmp/hivemind
    /tmp/hivemind/bin/pip install 'torch==2.13.0'
    /tmp/hivemind/bin/pip install --group hivemind -e .
    python -m benchmarks.allreduce --hivemind /tmp/hivemind/bin/python
"""

import asyncio
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from benchmarks.allreduce.rounds import MODULE, connected, one_round
from benchmarks.allreduce.worker import SYSTEMS, error_bound
from benchmarks.runner import (
    MIB,
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
from benchmarks.workers import Worker, say
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

    def start(self, system: str, python: str) -> AbstractAsyncContextManager[list[Worker]]:
        arguments = ["--peers", self.peers, "--kib", self.kib, "--tensors", self.tensors, "--codec", self.codec]
        return connected(system, self.peers, lambda _: [python, "-m", MODULE, system, *arguments])

    async def measure(self, pythons: Mapping[str, str], rounds: int) -> dict[str, Any]:
        """Runs all systems, each with its interpreter, alternately."""
        bound = error_bound(self.codec, self.peers)

        async def one(_: str, workers: Sequence[Worker]) -> dict[str, Any]:
            return await one_round(workers, bound) | {"versions": workers[0].started["versions"]}

        systems = {name: partial(self.start, name, python) for name, python in pythons.items()}
        return {
            "title": str(self),
            "peers": self.peers,
            "kib": self.kib,
            "tensors": self.tensors,
            "codec": self.codec,
            "error_bound": bound,
            "systems": await in_turns(systems, rounds, one),
        }


def size(kib: int) -> str:
    """`64 MiB`, or `1 KiB`."""
    return f"{kib} KiB" if kib % 1024 else f"{kib // 1024} MiB"


def row(case: Mapping[str, Any], name: str, rounds: int) -> Sequence[str]:
    system, gloo = case["systems"][name], case["systems"]["gloo"]
    good = counted(system)
    if not good:
        return (f"  {name}", "failed", *[""] * 6, f"0 of {rounds}")
    times = [
        "" if value is None else f"{value:.2f}"
        for value in (ratio(system, gloo, figure, "seconds") for figure in ("seconds", "allreduce_seconds"))
    ]
    return (
        f"  {name}",
        spread([one["seconds"] for one in good]),
        times[0],
        spread([one["allreduce_seconds"] for one in good]),
        times[1],
        f"{statistics.median(one['cpu_seconds'] for one in good):.3f}",
        f"{max(one['peak_bytes'] for one in good) / MIB:.0f}",
        f"{max(one['error'] for one in good):.1g}",
        f"{len(good)} of {rounds}",
    )


@ending_children()
def main() -> None:
    parser = make_parser(__doc__)
    codecs, divisions = ["none", "fp16", "bf16", "int8"], ["4", "1000", "4000", "20000", "gpt2"]
    own = [name for name in SYSTEMS if name not in ("gloo", "hivemind")]
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8], help="number of peers (2 4 8)")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="MiB of float32 at each peer (64 256)")
    parser.add_argument(
        "--kib", type=int, nargs="+", help="KiB of float32 at each peer instead; 1 shows the fixed cost of a round"
    )
    parser.add_argument(
        "--tensors", nargs="+", choices=divisions, default=["4", "gpt2"], help="division into tensors (4 gpt2)"
    )
    parser.add_argument(
        "--codecs",
        nargs="+",
        choices=codecs,
        default=codecs,
        help="of this library and, if supported, of hivemind; Gloo always sends float32 (all)",
    )
    parser.add_argument("--systems", nargs="+", choices=own, default=own, help=f"beside Gloo ({' '.join(own)})")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the warm-up (7)")
    parser.add_argument("--hivemind", metavar="PYTHON", help="interpreter of an environment with hivemind, see above")
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
    results: dict[str, Any] = machine() | {"rounds": options.rounds, "cases": []}
    rows: list[Sequence[str]] = []
    for case in map(Case, *zip(*product(options.peers, sizes, options.tensors, options.codecs), strict=True)):
        say(str(case))
        pythons = dict.fromkeys([*options.systems, "gloo"], sys.executable)
        if options.hivemind and case.codec in HIVEMIND_CODECS:
            pythons["hivemind"] = options.hivemind
        found = asyncio.run(case.measure(pythons, options.rounds))
        results["cases"].append(found)
        write(options.output / "allreduce.json", results)
        rows += [(f"[bold]{case}[/bold]",), *(row(found, name, options.rounds) for name in pythons)]
    header = ("system", "whole step, s", "x Gloo", "all-reduce, s", "x Gloo", "CPU s", "MiB", "error", "rounds")
    show(results, "Median (least to most); MiB: beyond the tensors, of the peer with most", header, rows)
    if not options.hivemind:
        print("hivemind was not measured: no --hivemind PYTHON was given; --help says how to get one.")
    wrong = failures(results["cases"])
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
