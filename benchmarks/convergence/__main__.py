"""How well a language model learns with each way to average, at how many bytes.

`python -m benchmarks.convergence` trains a small byte-level transformer on the Python standard library's sources: with
the joined batch in one process, and with peers that average rarely and with few bits. Each way is trained in plain
PyTorch (`plain`) and some with the library (`library`), from a start that is trained already and from a random one.

The whole takes days, so it is made of cells that are run in pieces, the most telling first; `--rows page` are those
that the page needs. A cell is recorded as soon as it is done, and is not run again. After `--minutes` none is begun.
The text and the trained starts are kept in the folder of the results (3 MB). Copy it to another machine to go on there,
and take in what came of that with `--merge`.

examples:
  python -m benchmarks.convergence --rows page --minutes 10      what is missing, until the time is up
  python -m benchmarks.convergence --list                        which cells there are, and which are done
  python -m benchmarks.convergence --cells 'trained/4/plain/joined/0' '*/int8-h30/0'
  python -m benchmarks.convergence --merge FILE --report         the page, from what is recorded
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.convergence.cases import CASES, PEERS, STARTS, SYSTEMS, Case, Cell, all_cells, page_cells
from benchmarks.convergence.train import Recipe, start_model, use_text
from benchmarks.convergence.worker import TEXT_FILE, tell, train
from benchmarks.runner import Verdict, make_folder, make_parser, markdown, write
from benchmarks.workers import say, without_interrupts
from examples.children import ending_children

FILE = "convergence.json"
LIMITS = (("int8", 120, 0.025), ("top_k", 1000, 0.03), ("top_k", 2000, 0.045), ("top_k", 4000, 0.07))
"""Codec, how many times fewer bits than float32 gradients at every step, and the most loss above the joined batch."""

UNEQUAL = 0.02
"""Relative excess of the loss of unequal machines that is allowed."""


class Results:
    """The recorded cells.

    Args:
        file: JSON with the recipe, the digest of the text, and the cells.
        recipe: settings of all cases.
        text: digest of the text on which cells are trained; None if none is.

    Raises:
        ValueError: the file has results of other settings or of another text, or is none of this benchmark.
    """

    def __init__(self, file: Path, recipe: Recipe, text: str | None = None) -> None:
        self._file = file
        self._all: dict[str, Any] = {"recipe": json.loads(json.dumps(asdict(recipe))), "text": text, "cells": {}}
        if file.exists():
            self.merge(file)

    @property
    def cells(self) -> Mapping[str, Mapping[str, Any]]:
        return self._all["cells"]  # type: ignore[no-any-return]

    def add(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Records one cell."""
        self._all["cells"][str(cell)] = result
        write(self._file, self._all)

    def merge(self, file: Path) -> int:
        """Adds the cells of a file, of which the newer one is kept if both have it; returns how many are new."""
        try:
            theirs: dict[str, Any] = json.loads(file.read_text())
            settings, text, cells = theirs["recipe"], theirs["text"], theirs["cells"]
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file} has no results of this benchmark") from None
        if settings != self._all["recipe"]:
            raise ValueError(f"{file} has results of other settings")
        if None not in (text, self._all["text"]) and text != self._all["text"]:
            raise ValueError(f"{file} has results of another text; copy the {TEXT_FILE} of its folder to --output")
        self._all["text"] = self._all["text"] or text
        mine = self._all["cells"]
        newer = {key: cell for key, cell in cells.items() if key not in mine or cell["date"] > mine[key]["date"]}
        self._all["cells"] = dict(sorted((mine | newer).items()))
        return len(newer)


def run(recipe: Recipe, cells: Sequence[Cell], results: Results, folder: Path, processes: int, until: float) -> bool:
    """Trains the cells that are missing, as long as it is before `until`; returns whether none has failed."""
    left, good = [cell for cell in cells if str(cell) not in results.cells], True
    running: dict[Future[dict[str, Any]], Cell] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            while left or running:
                while left and len(running) < processes and time.monotonic() < until:
                    cell = left.pop(0)
                    if cell.start == "trained":  # here, so that no two processes train it
                        start_model(recipe, cell.start, cell.seed, folder, say)
                    with without_interrupts():
                        running[pool.submit(train, recipe, cell, folder)] = cell
                    tell(cell, "begins")
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED)[0]:
                    cell = running.pop(future)
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        raise
                    except Exception as error:  # the other cells have nothing to do with it
                        good = False
                        tell(cell, f"failed, and begins anew the next time: {type(error).__name__}: {error}")
                        continue
                    results.add(cell, result)
                    tell(cell, f"{result['loss']:.4f} bits per byte in {result['seconds']:.0f} s")
        except BaseException:  # such as Ctrl+C: the pool would wait for the end of the training
            for process in multiprocessing.active_children():
                process.kill()
            raise
    if left:
        say(f"the time is up; {len(left)} cells are left, run the same command again")
    return good


class Rows:
    """The losses of one start and number of peers, by case, system and seed."""

    def __init__(self, cells: Iterable[tuple[Cell, Mapping[str, Any]]]) -> None:
        self._losses: dict[str, dict[str, dict[int, float]]] = {}
        for cell, result in cells:
            systems = self._losses.setdefault(cell.case, {by: {} for by in SYSTEMS})
            systems[cell.by][cell.seed] = float(result["loss"])

    def __iter__(self) -> Iterator[Case]:
        return (case for name, case in CASES.items() if name in self._losses)

    def by(self, name: str, system: str) -> Mapping[int, float]:
        """Losses of a system by seed."""
        return self._losses.get(name, {}).get(system, {})

    def of(self, name: str) -> Mapping[int, float]:
        """Losses by seed of plain torch, or of the library if only that has them."""
        return self.by(name, "plain") or self.by(name, "library")

    def excess(self, name: str, base: str) -> float | None:
        """Relative excess of the loss over that of another case, in the mean of the seeds that both have."""
        mine, theirs = self.of(name), self.of(base)
        both = mine.keys() & theirs.keys()
        return statistics.mean(mine[seed] / theirs[seed] - 1 for seed in both) if both else None


def rows_of(cells: Mapping[str, Mapping[str, Any]], start: str, peers: int) -> Rows:
    known = ((Cell.parse(key), result) for key, result in cells.items())
    return Rows((cell, result) for cell, result in known if cell and (cell.start, cell.peers) == (start, peers))


def verdicts(rows: Rows, peers: int) -> Iterator[Verdict]:
    """The targets from a trained start for which there are cells."""
    for codec, at_least, most in LIMITS:
        fit = [case for case in rows if case.codec == codec and round(case.ratio) >= at_least]
        found = [(over, case) for case in fit if (over := rows.excess(case.name, "joined")) is not None]
        if found:
            over, best = min(found, key=lambda each: each[0])
            wanted = f"{peers} peers, {codec}, 1/{at_least:,} of float32 gradients: at most {most:.1%} above joined"
            yield Verdict(wanted, f"{over:+.2%} ({best.title}, 1/{best.ratio:,.0f})", over <= most)
    for case in rows:
        above = rows.excess(case.name, f"diloco-h{case.every}") if case.quorum else None
        if above is not None:
            wanted = f"{peers} peers, {case.title}: at most {UNEQUAL:.0%} above equal machines after as many samples"
            yield Verdict(wanted, f"{above:+.2%}", above <= UNEQUAL)


def page(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the tables in Markdown."""
    parts, found = ["# Convergence: loss and bytes by strategy"], list[Verdict]()
    for start in STARTS:
        for peers in PEERS:
            rows = rows_of(cells, start, peers)
            if lines := list(loss_rows(rows)):
                header = ("case", "lr", "loss", "above joined", "contributes", "the library's above plain", "seeds")
                parts += [f"## {start.capitalize()} start, {peers} peers", markdown(header, lines)]
            found += verdicts(rows, peers) if start == "trained" else []
    targets = [(verdict.wanted, verdict.measured, "met" if verdict.met else "**missed**") for verdict in found]
    parts += ["## Targets", markdown(("target", "measured", "result"), targets)]
    return "\n\n".join(parts) + "\n"


def loss_rows(rows: Rows) -> Iterator[Sequence[str]]:
    for case in rows:
        losses, plain, library = rows.of(case.name), rows.by(case.name, "plain"), rows.by(case.name, "library")
        apart = [library[seed] / plain[seed] - 1 for seed in library.keys() & plain.keys()]
        above = rows.excess(case.name, "joined")
        yield (
            case.title + ("" if plain else " (library)"),
            f"{case.lr:g}",
            f"{statistics.mean(losses.values()):.4f}",
            "-" if above is None else f"{above:+.2%}",
            f"1/{case.ratio:,.0f}" if case.ratio else "-",
            f"{max(apart, key=abs):+.3%}" if apart else "-",
            ", ".join(f"{loss:.4f}" for _, loss in sorted(losses.items())),
        )


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Cell]]:
    parser.add_argument("--rows", choices=["page", "all"], default="all", help="cells of the page, or all (all)")
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help="START/PEERS/BY/CASE/SEED (all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after that (no limit)")
    parser.add_argument("--processes", type=int, default=1, help="processes of one thread each (1)")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="add cells of other machines")
    parser.add_argument("--list", action="store_true", help="print the cells with their losses, and run none")
    parser.add_argument("--report", action="store_true", help="write the page from what is recorded, and run nothing")
    options = parser.parse_args()
    if not 1 <= options.processes <= 64:
        parser.error(f"--processes must be 1 to 64, not {options.processes}")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, not {options.minutes:g}")
    cells = page_cells() if options.rows == "page" else all_cells()
    chosen = [cell for cell in cells if any(fnmatch(str(cell), pattern) for pattern in options.cells)]
    if not chosen:
        parser.error("there are no such cells; see --list")
    return options, chosen


@ending_children()
def main() -> None:
    """Runs what is missing and writes the page. Exits with 2 if a process was killed, and with 1 if a cell failed."""
    parser = make_parser(__doc__, "runs/benchmarks/convergence")
    options, cells = parse(parser)
    recipe, until, good = Recipe(), time.monotonic() + options.minutes * 60, True
    make_folder(parser, options.output)
    text = None if options.report or options.list else use_text(options.output / TEXT_FILE)
    try:
        results = Results(options.output / FILE, recipe, text)
        for file in options.merge:
            say(f"{file}: {results.merge(file)} cells are new")
    except ValueError as error:
        parser.error(f"{error}; give another --output or --merge")
    if options.list:
        known = [(cell, results.cells.get(str(cell))) for cell in cells]
        print(*(f"{cell}  {result['loss']:.4f}" if result else f"{cell}  -" for cell, result in known), sep="\n")
        return
    if text is not None:
        try:
            good = run(recipe, cells, results, options.output, options.processes, until)
        except BrokenProcessPool:
            say("a training process was killed, perhaps because memory ran out; run the same command again to continue")
            sys.exit(2)
    path = options.output.with_suffix(".md")
    path.write_text(page(results.cells))
    print(path)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
