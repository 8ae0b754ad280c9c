"""Runs cells of the convergence benchmark in a few processes, and records each as soon as it is done."""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.cases import SYSTEMS, Case, Cell, all_cases
from benchmarks.convergence.library import train_with_library
from benchmarks.convergence.plain import train_joined, train_replicas
from benchmarks.convergence.train import Recipe, start_model
from benchmarks.output import write
from benchmarks.workers import WorkerError, without_interrupts

STARTS_FOLDER = Path("runs/benchmarks/convergence")
"""Folder of trained starts, which all results share."""


@dataclass(frozen=True, slots=True)
class Job:
    """One cell to run, with a learning rate of its own if that is being chosen."""

    cell: Cell
    lr: float | None = None

    @property
    def case(self) -> Case:
        known = all_cases()[self.cell.case]
        return known if self.lr is None else replace(known, lr=self.lr)

    @property
    def key(self) -> str:
        """Key of the result."""
        return f"{self.cell}" + (f"@{self.lr:g}" if self.lr is not None else "")

    def work(self, recipe: Recipe) -> float:
        """Steps of all peers together, to which the seconds are in proportion."""
        return recipe.steps_from(self.cell.start) * self.cell.peers


def run(recipe: Recipe, job: Job) -> dict[str, Any]:
    """Trains one cell; runs in a process of its own."""
    torch.set_num_threads(1)
    cell, case = job.cell, job.case
    tell = partial(say, job.key)
    steps = recipe.steps_from(cell.start)
    model = start_model(recipe, cell.start, cell.seed, STARTS_FOLDER, tell)
    alone = train_replicas if case.every else train_joined
    train = train_with_library if cell.by == "library" else alone
    begun = time.perf_counter()
    trained = train(recipe, case, model, steps, cell.peers, cell.seed, tell)
    seconds = time.perf_counter() - begun
    return {"lr": case.lr, **asdict(trained), "seconds": round(seconds, 1)} | provenance()


def say(name: str, what: str) -> None:
    print(f"{name}: {what}", file=sys.stderr, flush=True)


def provenance() -> dict[str, Any]:
    """Describes where and with what a case was trained."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    log = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    status = [*git, "status", "-s", "-uno", "averaging", "benchmarks/convergence"]
    changed = subprocess.run(status, capture_output=True, text=True, check=False).stdout
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": (log.stdout.strip() or "unknown") + (" with changes" if changed else ""),
        "python": platform.python_version(),
        "torch": version("torch"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def landed(commit: str) -> bool:
    """Whether a commit is in the history of this one, so that others can find it."""
    git = ["git", "-C", str(Path(__file__).parents[2]), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(git, capture_output=True, check=False).returncode == 0


class Results:
    """The recorded cells, in a file that several processes may add to.

    Args:
        file: JSON with the recipe and the cells.
        recipe: settings of all cases.

    Raises:
        ValueError: the file has results of other settings, or is none of this benchmark.
    """

    def __init__(self, file: Path, recipe: Recipe) -> None:
        self._file = file
        self._settings = json.loads(json.dumps(asdict(recipe)))
        self.read()

    def read(self) -> dict[str, Any]:
        """All results so far."""
        if not self._file.exists():
            return {"recipe": self._settings, "cells": {}}
        try:
            results: dict[str, Any] = json.loads(self._file.read_text())
            settings, _ = results["recipe"], results["cells"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self._file} has no results of this benchmark") from None
        if settings != self._settings:
            raise ValueError(f"{self._file} has results of other settings")
        return results

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Records one cell."""
        with locked(self._file.parent):
            results = self.read()
            results["cells"][key] = result
            results["cells"] = dict(sorted(results["cells"].items()))
            write(self._file, results)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes that call this out."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def rates(recipe: Recipe, cells: Mapping[str, Mapping[str, Any]], by: str) -> list[float]:
    """Seconds per step of a peer in the recorded cells of `plain` or `library`."""
    found = []
    for key, cell in cells.items():
        start, peers, system, _, _ = key.split("/")
        if system == by:
            found.append(cell["seconds"] / (recipe.steps_from(start) * int(peers)))
    return found


def estimate(recipe: Recipe, cells: Mapping[str, Mapping[str, Any]], job: Job) -> float:
    """Seconds that a cell probably takes, by the median of the recorded ones; 0 if there are none."""
    known = rates(recipe, cells, job.cell.by) or rates(recipe, cells, SYSTEMS[0])
    return statistics.median(known) * job.work(recipe) if known else 0.0


def minutes(seconds: float) -> str:
    """Such as `3:05`, in hours, minutes and seconds if it is longer."""
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    return (f"{hours}:{rest // 60:02}" if hours else f"{rest // 60}") + f":{rest % 60:02}"


class Runner:
    """Runs jobs in a few processes, and records each result as it comes.

    Args:
        recipe: settings of all cases.
        results: where they are recorded.
        processes: number of processes, of one thread each.
        until: moment of `time.monotonic` after which none is begun that would not be done; infinity for no limit.
    """

    def __init__(self, recipe: Recipe, results: Results, processes: int, until: float) -> None:
        self._recipe, self._results, self._processes, self._until = recipe, results, processes, until
        self._running: dict[Future[dict[str, Any]], Job] = {}

    def run(self, jobs: Sequence[Job]) -> int:
        """Runs all jobs, or those for which there is time; returns the number of those that are left.

        Raises:
            WorkerError: a process was killed.
        """
        left = list(jobs)
        with ProcessPoolExecutor(self._processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                while left or self._running:
                    while left and len(self._running) < self._processes and self._begin(pool, left):
                        continue
                    if not self._running:
                        break
                    self._record(left)
            except BrokenProcessPool:
                raise WorkerError("a training process was killed, perhaps because memory ran out") from None
            except BaseException:  # such as Ctrl+C: the pool would wait for the end of the training
                for process in multiprocessing.active_children():
                    process.kill()
                raise
        return len(left)

    def _begin(self, pool: ProcessPoolExecutor, left: list[Job]) -> bool:
        """Begins the first job that is not done and for which there is time; returns whether there was one."""
        cells = self._results.read()["cells"]
        left[:] = [job for job in left if job.key not in cells]
        for job in left:
            if time.monotonic() + estimate(self._recipe, cells, job) <= self._until:
                left.remove(job)
                with without_interrupts():
                    self._running[pool.submit(run, self._recipe, job)] = job
                rest = sum(estimate(self._recipe, cells, each) for each in [job, *left]) / self._processes
                ends = f"; all {len(left) + 1} left take {minutes(rest)}" if rest else ""
                say(job.key, f"begins{ends}")
                return True
        return False

    def _record(self, left: Sequence[Job]) -> None:
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            job = self._running.pop(future)
            result = future.result()
            self._results.add(job.key, result)
            say(job.key, f"{result['loss']:.4f} bits per byte in {minutes(result['seconds'])}; {len(left)} to begin")
