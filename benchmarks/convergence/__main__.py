"""How well a language model learns with each way to average, at how many bytes.

`python -m benchmarks.convergence` trains a small byte-level transformer on the Python standard library's sources: with
the joined batch in one process, and with peers that average rarely and with few bits. Each way is trained in plain
PyTorch (`plain`) and with the library (`library`), from a start that is trained already and from a random one. Plain
PyTorch trains again with the orders of the library's groups (`replayed`), and the bytes of what the library does not
train to the end are those of two rounds (`receipts`).

The whole takes days, so it is made of cells that are run in pieces, the most telling first; `--rows page` are those
that the page needs. A cell is recorded as soon as it is done, and is not run again. One that is cut off by `--minutes`
loses only itself. The text and the trained starts are kept in the folder of the results (3 MB). Copy it to another
machine to go on there, and take in what came of that with `--merge`.

examples:
  python -m benchmarks.convergence --rows page --minutes 10      what is missing, until the time is up
  python -m benchmarks.convergence --list                        which cells there are, and which are done
  python -m benchmarks.convergence --cases joined,int8-h30 --seeds 0
  python -m benchmarks.convergence --merge FILE --report         the page and its curves, from what is recorded
  python -m benchmarks.convergence --cases diloco-h30 --lr 2e-3 3e-3 --by plain --seeds 0
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.cases import PEERS, SEEDS, STARTS, SYSTEMS, Cell, all_cases, all_cells, page_cells
from benchmarks.convergence.report import draw, page
from benchmarks.convergence.runner import TEXT_FILE, Job, Results, Runner
from benchmarks.convergence.train import Recipe, Text
from benchmarks.output import make_folder
from benchmarks.workers import WorkerError
from examples.children import ending_children


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells of the command line, the most important first."""
    return [
        cell
        for cell in (page_cells() if options.rows == "page" else all_cells())
        if cell.start in options.starts
        and cell.peers in options.peers
        and cell.by in options.by
        and cell.seed in options.seeds
        and (options.cases is None or cell.case in options.cases)
    ]


def show(cells: Sequence[Cell], results: Mapping[str, Any]) -> None:
    """Prints the cells and their losses."""
    for cell in cells:
        result = results["cells"].get(str(cell))
        print(f"{cell}  " + (f"{result['loss']:.4f}" if result else "-"))
    done = sum(str(cell) in results["cells"] for cell in cells)
    print(f"{done} of {len(cells)} cells are done")


def names(text: str) -> list[str]:
    """Parses names separated by commas."""
    found = text.split(",")
    if unknown := sorted(set(found) - set(all_cases())):
        raise argparse.ArgumentTypeError(f"no such case: {', '.join(unknown)}; there are {', '.join(all_cases())}")
    return found


def listed(allowed: Sequence[Any]) -> Callable[[str], list[Any]]:
    """Returns a parser of some of these values, separated by commas."""
    by_text = {str(value): value for value in allowed}

    def parse(text: str) -> list[Any]:
        try:
            return [by_text[part] for part in text.split(",")]
        except KeyError as error:
            raise argparse.ArgumentTypeError(f"{error.args[0]!r} is none of {', '.join(by_text)}") from None

    return parse


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return number


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--cases", type=names, metavar="NAME,…", help="some cases, see --list (all)")
    made.add_argument("--rows", choices=["page", "all"], default="all", help="cells of the page, or all (all)")
    made.add_argument("--starts", type=listed(STARTS), default=STARTS, metavar="NAME,…", help="trained,random (both)")
    made.add_argument("--peers", type=listed(PEERS), default=PEERS, metavar="N,…", help="4,8 (both)")
    made.add_argument("--seeds", type=listed(SEEDS), default=SEEDS, metavar="N,…", help="0,1 (both)")
    made.add_argument(
        "--by", type=listed(SYSTEMS), default=SYSTEMS, metavar="NAME,…", help="plain,library,replayed,receipts (all)"
    )
    made.add_argument("--lr", type=positive, nargs="+", help="try these inner learning rates instead of the cases' own")
    made.add_argument("--minutes", type=positive, help="end then, without the cells that are not done (no limit)")
    made.add_argument("--processes", type=int, default=1, help="processes of one thread each (1)")
    made.add_argument("--merge", type=Path, nargs="+", default=[], metavar="FILE", help="add cells of other machines")
    made.add_argument("--commit", help="commit of the code, for the record (by default git is asked)")
    made.add_argument("--list", action="store_true", help="print the cells with their losses, and run none")
    made.add_argument("--report", action="store_true", help="write the page from what is recorded, and run nothing")
    made.add_argument(
        "--output",
        type=Path,
        default=Path("runs/benchmarks/convergence"),
        help="folder of convergence.json; the page is beside it (runs/benchmarks/convergence)",
    )
    return made


@ending_children()
def main() -> None:
    """Runs what is missing and writes the page. Exits with 2 if a process was killed, and with 1 if a cell failed."""
    made = parser()
    options = made.parse_args()
    if not 1 <= options.processes <= 64:
        made.error(f"--processes must be 1 to 64, not {options.processes}")
    cells = chosen_cells(options)
    if not cells:
        made.error("there are no such cells: what you chose exists with other options only; see --list")
    if unread := [str(file) for file in options.merge if not file.is_file()]:
        made.error(f"--merge {', '.join(unread)}: there is no such file")
    begun = time.monotonic()
    recipe = Recipe()
    make_folder(made, options.output)
    trains = not (options.report or options.list)
    text = Text.kept_in(options.output / TEXT_FILE).digest if trains else None
    try:
        results = Results(options.output / "convergence.json", recipe, text)
        for file in options.merge:
            print(f"{file}: {results.merge(file)} cells are new", file=sys.stderr)
    except ValueError as error:
        made.error(f"{error}; give another --output or --merge")
    if options.list:
        show(cells, results.read())
        return
    if trains:
        jobs = [Job(cell, lr) for cell in cells for lr in options.lr or [None]]
        until = begun + options.minutes * 60 if options.minutes else math.inf
        try:
            runner = Runner(recipe, results, options.output, options.processes, until, options.commit)
            left = runner.run(jobs)
        except WorkerError as error:
            print(f"{error}; run the same command again to continue", file=sys.stderr)
            sys.exit(2)
        if left:
            print(f"the time is up; {left} cells are left, run the same command again", file=sys.stderr)
    recorded = results.read()
    if recorded["cells"]:
        draw(recorded, options.output)
        options.output.with_suffix(".md").write_text(page(recorded, options.output))
    if trains and runner.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
