"""Compares how well a language model learns with each strategy, with the same total number of tokens.

`python -m benchmarks.convergence` trains a small byte-level transformer on the Python standard library's sources: once
in one process with the joined batch, else in four processes that average over loopback gRPC. It writes the raw results
and the curves into a folder, and the page beside it. Existing cases are not trained again unless they are named:
`--cases diloco-50,diloco-100`. Update the recorded results with `--output docs/design/results`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD
from averaging.protocol.messages import CompressionType
from benchmarks.convergence.report import draw, page
from benchmarks.convergence.train import Case, PeerProcess, Recipe, Trained, held_out, new_model, train_alone
from benchmarks.output import make_folder, write
from benchmarks.workers import WorkerError, without_interrupts
from examples.children import ending_children
from examples.language_model import read, windows

CURVE, JUDGED = 256, 2048
"""Number of held-out windows for the curves, and for the final evaluation."""

LR, LOCAL_LR, DILOCO_LR = 4e-3, 4e-3, 3e-3
"""Maximum inner learning rates: for steps with the joined batch, for LocalSGD, and for DiLoCo."""

INT8: dict[str, Any] = {"compression": CompressionType.BLOCKWISE_INT8, "error_feedback": True}
STREAMING: dict[str, Any] = {"sync_every": 100, "fragments": 4, "delay": 3, "alpha": 0.5}


def cases(recipe: Recipe) -> dict[str, Case]:
    """The cases by name, in the page's order."""
    gradients, local, diloco = GradientAveraging, LocalSGD, DiLoCo
    joined = recipe.peers * recipe.batch
    return {
        "single": Case("one process, joined batch", LR),
        # A peer's own batch is enough for a step, so each step waits for one batch of every peer.
        "gradients": Case("GradientAveraging, in step", LR, partial(gradients, recipe.batch)),
        "gradients-free": Case("GradientAveraging, target of 4 batches", LR, partial(gradients, joined)),
        "local-10": Case("LocalSGD, H=10", LOCAL_LR, partial(local, 10)),
        "local-50": Case("LocalSGD, H=50", LOCAL_LR, partial(local, 50)),
        "diloco-50": Case("DiLoCo, H=50", DILOCO_LR, partial(diloco, 50)),
        "diloco-100": Case("DiLoCo, H=100", DILOCO_LR, partial(diloco, 100)),
        "streaming": Case("Streaming DiLoCo, H=100, 4 fragments", DILOCO_LR, partial(diloco, **STREAMING)),
        "diloco-50-int8": Case("DiLoCo, H=50, int8", DILOCO_LR, partial(diloco, 50, **INT8)),
        "streaming-int8": Case(
            "Streaming DiLoCo, H=100, 4 fragments, int8", DILOCO_LR, partial(diloco, **STREAMING, **INT8)
        ),
    }


def say(name: str, what: str) -> None:
    print(f"{name}: {what}", file=sys.stderr, flush=True)


def in_process(recipe: Recipe, name: str, case: Case, part: int, port: int) -> Trained:
    """Runs in each process of a case."""
    progress = partial(say, name) if part == 0 else lambda _: None
    return (
        train_alone(recipe, case, progress)
        if case.strategy is None
        else PeerProcess(recipe, case, part, port, progress).run()
    )


def train(recipe: Recipe, name: str, case: Case) -> list[Trained]:
    """Trains a case in new processes; returns the results of each.

    Raises:
        WorkerError: a process was killed.
    """
    count = 1 if case.strategy is None else recipe.peers
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            with without_interrupts():
                running = [pool.submit(in_process, recipe, name, case, part, port) for part in range(count)]
            return [process.result() for process in running]
        except BrokenProcessPool:  # the pool has ended the other processes
            raise WorkerError("a training process was killed, perhaps because memory ran out") from None
        except BaseException:  # such as Ctrl+C: the pool would wait for the end of the training
            for process in multiprocessing.active_children():
                process.kill()
            raise


def measure(recipe: Recipe, trained: list[Trained], text: torch.Tensor) -> dict[str, Any]:
    """Returns the figures of a case: loss of the mean of all peers' models, bytes, times."""
    model = new_model(recipe)
    random = torch.Generator().manual_seed(0)
    judged = windows(text, JUDGED, recipe.size.context, random)

    def loss(vectors: list[torch.Tensor], count: int) -> float:
        torch.nn.utils.vector_to_parameters(torch.stack(vectors).mean(0), model.parameters())
        return model.evaluate(judged[:count])

    marks = list(trained[0].snapshots)
    if any(list(peer.snapshots) != marks for peer in trained):
        raise RuntimeError("the peers saved their models after different samples: they were not synchronous")
    at = [[peer.snapshots[mark] for peer in trained] for mark in marks]
    rounds = [peer.rounds for peer in trained]
    return {
        "loss": loss(at[-1], JUDGED),
        "peers_equal": all(torch.equal(at[-1][0], other) for other in at[-1]),
        "curve": [[mark, loss(vectors, CURVE)] for mark, vectors in zip(marks, at, strict=True)],
        "samples": marks[-1],
        "local_steps": [peer.local_steps for peer in trained],
        "global_steps": trained[0].global_steps,
        "counts_samples": trained[0].counts_samples,
        "parameters": len(at[-1][0]),
        "bytes_sent": [sum(one.bytes_sent for one in peer) for peer in rounds],
        "rounds": len(rounds[0]),
        "rounds_with_all": sum(one.complete and one.members == recipe.peers for one in rounds[0]),
        "failures": sorted({one.reason for peer in rounds for one in peer if one.reason}),
        "seconds": max(peer.seconds for peer in trained),
        "seconds_in_rounds": statistics.mean(sum(one.seconds for one in peer) for peer in rounds),
        "seconds_per_round": statistics.median(one.seconds for one in rounds[0]) if rounds[0] else 0.0,
    }


def provenance() -> dict[str, Any]:
    """Describes where and with what a case was trained."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    log = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    status = [*git, "status", "-s", "-uno", "averaging"]
    changed = subprocess.run(status, capture_output=True, text=True, check=False).stdout
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": (log.stdout.strip() or "unknown") + (" with changes" if changed else ""),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "grpcio", "averaging")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


@ending_children()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps of one batch per peer, in every case (1000)")
    parser.add_argument(
        "--cases", help="comma-separated names, trained again if they exist; by default all missing ones"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/benchmarks/convergence"),
        help="folder; the page is beside it (runs/benchmarks/convergence)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of the order of its text (0)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("there must be at least 1 step")
    recipe = Recipe(steps=options.steps, seed=options.seed)
    known = cases(recipe)
    output: Path = options.output
    make_folder(parser, output)
    raw = output / "convergence.json"
    settings = json.loads(json.dumps(asdict(recipe)))
    results: dict[str, Any] = {"recipe": settings, "cases": {}}
    if raw.exists():
        results = json.loads(raw.read_text())
        if results["recipe"] != settings:
            parser.error(f"{raw} has results of other settings; give another --output, or delete it")
    chosen = options.cases.split(",") if options.cases else [name for name in known if name not in results["cases"]]
    if unknown := set(chosen) - set(known):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    text = read(held_out()[1])
    for name in chosen:
        case = known[name]
        say(name, case.title)
        try:
            trained = train(recipe, name, case)
        except WorkerError as error:
            say(name, f"{error}; run the same command again to continue")
            sys.exit(2)
        measured = measure(recipe, trained, text)
        results["cases"][name] = {"title": case.title, "lr": case.lr} | measured | provenance()
        results["cases"] = {name: results["cases"][name] for name in known if name in results["cases"]}
        write(raw, results)
        say(name, f"{measured['loss']:.4f} bits per byte, {measured['seconds']:.0f} s")
    draw(results, output)
    output.with_suffix(".md").write_text(page(results, output))


if __name__ == "__main__":
    main()
