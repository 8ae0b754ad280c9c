"""One cell of the benchmark, trained in a process of its own, which imports this module as it cannot `__main__`."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.cases import CASES, Cell
from benchmarks.convergence.plain import train_joined, train_replicas
from benchmarks.convergence.train import Recipe, start_model, use_text
from benchmarks.runner import machine
from benchmarks.workers import say

TEXT_FILE = "text.zip"
"""Name of the text beside the results, which is taken along to other machines as the trained starts are."""


def train(recipe: Recipe, cell: Cell, folder: Path) -> dict[str, Any]:
    """Trains one cell. The folder has the text and the trained starts."""
    torch.set_num_threads(1)
    use_text(folder / TEXT_FILE)
    case, steps = CASES[cell.case], recipe.steps_from(cell.start)
    told = partial(tell, cell)
    model = start_model(recipe, cell.start, cell.seed, folder, told)
    begun = time.perf_counter()
    arguments = (recipe, case, model, steps, cell.peers, cell.seed, told)
    if cell.by == "library":
        from benchmarks.convergence.library import train_with_library  # plain torch needs no gRPC

        trained = train_with_library(*arguments)
    else:
        trained = train_replicas(*arguments) if case.every else train_joined(*arguments)
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "lr": case.lr,
        "steps": steps,
        **asdict(trained),
        "seconds": seconds,
        "torch": torch.__version__,
    } | machine()


def tell(cell: Cell, what: str) -> None:
    say(f"{cell}: {what}")
