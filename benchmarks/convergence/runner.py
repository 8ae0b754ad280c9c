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
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.cases import Case, Cell, all_cases
from benchmarks.convergence.plain import train_joined, train_replicas
from benchmarks.convergence.train import Recipe, Text, start_model, use_text
from benchmarks.output import write
from benchmarks.workers import WorkerError, without_interrupts

TEXT_FILE = "text.zip"
"""Name of the text beside the results, which is taken along to other machines as the trained starts are."""


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
        return self.cell.steps(recipe.steps_from(self.cell.start)) * self.cell.peers


def run(
    recipe: Recipe, job: Job, folder: Path, orders: Sequence[Sequence[int]] = (), commit: str | None = None
) -> dict[str, Any]:
    """Trains one cell; runs in a process of its own.

    Args:
        folder: of the text and the trained starts.
        orders: of the groups of the library's rounds, to replay them.
        commit: of the code; by default git is asked.
    """
    torch.set_num_threads(1)
    if not _prepared:
        use_text(Text.kept_in(folder / TEXT_FILE))
        _prepared.append(folder)
    cell, case = job.cell, job.case
    tell = partial(say, job.key)
    steps = cell.steps(recipe.steps_from(cell.start))
    model = start_model(recipe, cell.start, cell.seed, folder, tell)
    begun = time.perf_counter()
    arguments = (recipe, case, model, steps, cell.peers, cell.seed, tell)
    if cell.by in ("library", "receipts"):
        from benchmarks.convergence.library import train_with_library  # plain torch needs no gRPC

        trained = train_with_library(*arguments)
    else:
        trained = train_replicas(*arguments, orders) if case.every else train_joined(*arguments)
    seconds = time.perf_counter() - begun
    return {"lr": case.lr, "steps": steps, **asdict(trained), "seconds": round(seconds, 1)} | provenance(commit)


_prepared: list[Path] = []
"""The folder whose text this process has read."""


def say(name: str, what: str) -> None:
    print(f"{name}: {what}", file=sys.stderr, flush=True)


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Describes where and with what a case was trained."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or present_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": this_machine(),
    }


def this_machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def present_commit() -> str:
    """The commit of this checkout; `unknown` outside of one."""
    root = Path(__file__).parents[2]
    git = ["git", "-C", str(root)]
    log = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    status = [*git, "status", "-s", "-uno", "averaging", "benchmarks/convergence"]
    changed = subprocess.run(status, capture_output=True, text=True, check=False).stdout
    return (log.stdout.strip() or "unknown") + (" with changes" if changed else "")


def landed(commit: str) -> bool:
    """Whether a commit is in the history of this one, so that others can find it."""
    git = ["git", "-C", str(Path(__file__).parents[2]), "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(git, capture_output=True, check=False).returncode == 0


class Results:
    """The recorded cells, in a file that several processes may add to.

    Args:
        file: JSON with the recipe, the digest of the text, and the cells.
        recipe: settings of all cases.
        text: digest of the text on which cells are trained; None if none is.

    Raises:
        ValueError: the file has results of other settings or of another text, or is none of this benchmark.
    """

    def __init__(self, file: Path, recipe: Recipe, text: str | None = None) -> None:
        self._file, self._text = file, text
        self._settings = json.loads(json.dumps(asdict(recipe)))
        self.read()

    def read(self) -> dict[str, Any]:
        """All results so far."""
        if not self._file.exists():
            return {"recipe": self._settings, "text": self._text, "cells": {}}
        return self._checked(self._file)

    def _checked(self, file: Path) -> dict[str, Any]:
        try:
            results: dict[str, Any] = json.loads(file.read_text())
            settings, text, _ = results["recipe"], results["text"], results["cells"]
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} has no results of this benchmark") from None
        if settings != self._settings:
            raise ValueError(f"{file} has results of other settings")
        if None not in (text, self._text) and text != self._text:
            raise ValueError(
                f"{file} has results of another text; copy the {TEXT_FILE} that it was trained on beside it"
            )
        return results

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Records one cell."""
        with locked(self._file.parent):
            self._write(self.read(), {key: result})

    def merge(self, file: Path) -> int:
        """Adds the cells of another file, of which the newer one is kept if both have it; returns how many are new.

        Raises:
            ValueError: the file has no results of this text and these settings.
        """
        with locked(self._file.parent):
            mine, theirs = self.read(), self._checked(file)
            if mine["text"] is not None and theirs["text"] not in (None, mine["text"]):
                raise ValueError(f"{file} has results of another text than {self._file}")
            mine["text"] = mine["text"] or theirs["text"]
            newer = {
                key: cell
                for key, cell in theirs["cells"].items()
                if key not in mine["cells"] or cell["date"] > mine["cells"][key]["date"]
            }
            if newer:
                self._write(mine, newer)
            return len(newer)

    def _write(self, results: dict[str, Any], more: Mapping[str, Any]) -> None:
        results["text"] = results["text"] or self._text
        results["cells"] = dict(sorted((results["cells"] | dict(more)).items()))
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


def rates(recipe: Recipe, cells: Mapping[str, Mapping[str, Any]], library: bool) -> list[float]:
    """Seconds per step of a peer in the cells recorded on this machine, in plain torch or with the library."""
    found, here = [], this_machine()
    for key, cell in cells.items():
        start, peers, system, _, _ = key.split("/")
        if system != "receipts" and (system == "library") == library and cell.get("machine", here) == here:
            found.append(cell["seconds"] / (recipe.steps_from(start) * int(peers)))
    return found


def estimate(recipe: Recipe, cells: Mapping[str, Mapping[str, Any]], job: Job) -> float:
    """Seconds that a cell probably takes, by the median of those recorded on this machine; 0 if there are none."""
    known = rates(recipe, cells, job.cell.by in ("library", "receipts")) or rates(recipe, cells, library=False)
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
        folder: of the text and the trained starts.
        processes: number of processes, of one thread each.
        until: moment of `time.monotonic` at which a cell that is not done is cut off, so none is begun that would not
            be done; infinity for no limit.
        commit: of the code; by default git is asked.

    Attributes:
        failed: cells that have raised an error.
    """

    def __init__(
        self,
        recipe: Recipe,
        results: Results,
        folder: Path,
        processes: int,
        until: float = math.inf,
        commit: str | None = None,
    ) -> None:
        self._recipe, self._results, self._folder = recipe, results, folder
        self._processes, self._until, self._commit = processes, until, commit
        self._running: dict[Future[dict[str, Any]], Job] = {}
        self.failed: list[Job] = []

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
                    if not self._record(left):
                        return self._cut_off(pool) + len(left)
            except BrokenProcessPool:
                raise WorkerError("a training process was killed, perhaps because memory ran out") from None
            except BaseException:  # such as Ctrl+C: the pool would wait for the end of the training
                kill_children()
                raise
        return len(left)

    def _begin(self, pool: ProcessPoolExecutor, left: list[Job]) -> bool:
        """Begins the first job that is not done and for which there is time; returns whether there was one."""
        cells = self._results.read()["cells"]
        left[:] = [job for job in left if job.key not in cells]
        for job in left:
            orders = orders_for(job, cells)
            if orders is not None and time.monotonic() + estimate(self._recipe, cells, job) <= self._until:
                left.remove(job)
                with without_interrupts():
                    future = pool.submit(run, self._recipe, job, self._folder, orders, self._commit)
                self._running[future] = job
                rest = sum(estimate(self._recipe, cells, each) for each in [job, *left]) / self._processes
                ends = f"; all {len(left) + 1} left take {minutes(rest)}" if rest else ""
                say(job.key, f"begins{ends}")
                return True
        return False

    def _record(self, left: Sequence[Job]) -> bool:
        """Records what is done next; returns whether that was before the time was up."""
        limit = None if self._until == math.inf else max(0.0, self._until - time.monotonic())
        done, _ = wait(self._running, limit, return_when=FIRST_COMPLETED)
        for future in done:
            job = self._running.pop(future)
            try:
                result = future.result()
            except BrokenProcessPool:
                raise
            except Exception as error:  # the other cells have nothing to do with it
                self.failed.append(job)
                say(job.key, f"failed, and begins anew the next time: {type(error).__name__}: {error}")
                continue
            self._results.add(job.key, result)
            say(job.key, f"{result['loss']:.4f} bits per byte in {minutes(result['seconds'])}; {len(left)} to begin")
        return bool(done)

    def _cut_off(self, pool: ProcessPoolExecutor) -> int:
        """Ends what is not done; returns how many cells that are."""
        for job in self._running.values():
            say(job.key, "is cut off and begins anew the next time")
        kill_children()
        pool.shutdown(wait=False, cancel_futures=True)
        return len(self._running)


def orders_for(job: Job, cells: Mapping[str, Mapping[str, Any]]) -> list[list[int]] | None:
    """The orders that a cell replays, none for most; None as long as the library has not trained its cell."""
    if job.cell.by != "replayed":
        return []
    library = cells.get(str(replace(job.cell, by="library")))
    return library["orders"] if library is not None and library.get("orders") else None


def kill_children() -> None:
    for process in multiprocessing.active_children():
        process.kill()
