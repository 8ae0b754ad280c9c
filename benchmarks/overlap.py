"""Measures how much training slows down while averaging runs in the background.

Two processes train the same model, one thread each, in blocks: `alone` with the plain optimizer, and `averaged` with
`LocalSGD(overlap=True)` around it. Blocks alternate, so that other load on the machine affects both kinds equally. With
as many training threads as cores, training loses the CPU seconds of averaging; that much is explained:

    factor = seconds of a step while averaging / seconds of a step alone
    explained = 1 / (1 - CPU seconds of averaging / (cores · seconds))
    beyond = factor / explained

The exit code is 1 if a round failed. The results go to `overlap.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from averaging import DecentralizedAverager, LocalSGD, Receipt
from benchmarks.allreduce.report import machine
from benchmarks.output import make_folder, write
from benchmarks.workers import without_interrupts
from examples.children import ending_children

ROOT = Path(__file__).parent.parent

TAIL = 5
"""Steps at the end of a block, in which its last round ends."""


@dataclass(frozen=True, slots=True)
class Block:
    """Cost of some steps of one process."""

    seconds: float
    training_cpu: float
    other_cpu: float
    rounds: int
    failed: int
    round_seconds: float


def worker(pipe: Connection, join: str, width: int, sync_every: int, rounds: int) -> None:
    """Runs blocks as commanded: one kind of block per message."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    receipts: list[Receipt] = []
    averager = DecentralizedAverager(
        inner,
        run_id="overlap",
        strategy=LocalSGD(sync_every, overlap=True),
        join=[join] if join else [],
        group_size=2,
        on_round=receipts.append,
    )
    pipe.send(averager.endpoint)
    x, y = torch.randn(32, width), torch.randn(32, 1)

    def steps(optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    while kind := pipe.recv():
        receipts.clear()
        began, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        steps(averager if kind == "averaged" else inner, rounds * sync_every + TAIL)
        seconds, training = time.perf_counter() - began, time.thread_time() - thread
        averaged = [receipt for receipt in receipts if receipt.averaged]
        pipe.send(
            Block(
                seconds=seconds,
                training_cpu=training,
                other_cpu=time.process_time() - process - training,
                rounds=len(averaged),
                failed=len(receipts) - len(averaged),
                round_seconds=statistics.median(r.allreduce_seconds for r in averaged) if averaged else 0.0,
            )
        )
        if kind == "averaged":
            steps(averager, sync_every - TAIL)  # up to the step at which the next block's first round begins
    averager.close()


def measure(width: int, sync_every: int, rounds: int, blocks: int) -> list[dict[str, Any]]:
    """Runs blocks of both kinds alternately. The first pair is a warm-up and does not count."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    join = ""
    results = []
    try:
        for _ in range(2):
            pipe, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=worker, args=(theirs, join, width, sync_every, rounds), daemon=True))
            with without_interrupts():
                processes[-1].start()
            theirs.close()
            join = join or pipe.recv()
            pipes.append(pipe)
        pipes[1].recv()
        for number in range(blocks + 1):
            pair: dict[str, Any] = {"warm_up": number == 0}
            for kind in ("alone", "averaged"):
                for pipe in pipes:
                    pipe.send(kind)
                pair[kind] = [asdict(pipe.recv()) for pipe in pipes]
            results.append(pair)
            print(f"  block {number} of {blocks}: {summary(pair)}", file=sys.stderr, flush=True)
        for pipe in pipes:
            pipe.send("")
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    return results


def slowdown(pair: dict[str, Any]) -> tuple[float, float]:
    """Returns the factor by which steps are slower while averaging, and the factor that its CPU time explains."""
    alone = sum(one["seconds"] for one in pair["alone"])
    averaged = sum(one["seconds"] for one in pair["averaged"])
    taken = sum(one["other_cpu"] for one in pair["averaged"])
    cores = len(os.sched_getaffinity(0))
    return averaged / alone, 1 / (1 - taken / (cores * averaged / 2))


def summary(pair: dict[str, Any]) -> str:
    factor, explained = slowdown(pair)
    rounds = sum(one["rounds"] for one in pair["averaged"])
    return f"{factor:.3f} times as long, {explained:.3f} by its CPU, {factor / explained:.3f} beyond; {rounds} rounds"


@ending_children()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="of the model's layer: 4096 are 64 MiB (4096)")
    parser.add_argument("--sync-every", type=int, default=20, help="steps between two rounds (20)")
    parser.add_argument("--rounds", type=int, default=2, help="in a block (2)")
    parser.add_argument("--blocks", type=int, default=5, help="of each kind, after the warm-up (5)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/benchmarks"), help="folder of the results (runs/benchmarks)"
    )
    options = parser.parse_args()
    if min(options.width, options.rounds, options.blocks) < 1 or options.sync_every <= TAIL:
        parser.error(f"everything must be at least 1, and --sync-every more than {TAIL}")
    make_folder(parser, options.output)
    pairs = measure(options.width, options.sync_every, options.rounds, options.blocks)
    counted = [pair for pair in pairs if not pair["warm_up"]]
    beyond = [factor / explained for factor, explained in map(slowdown, counted)]
    path = options.output / "overlap.json"
    write(path, machine(ROOT) | {"pairs": pairs})
    print(
        f"A step takes {statistics.median(slowdown(pair)[0] for pair in counted):.3f} times as long while averaging "
        f"goes on; beyond what its CPU explains: {statistics.median(beyond):.3f} times ({min(beyond):.3f} to "
        f"{max(beyond):.3f}; wanted at most 1.10). {path}"
    )
    sys.exit(1 if any(one["failed"] for pair in pairs for one in pair["averaged"]) else 0)


if __name__ == "__main__":
    main()
