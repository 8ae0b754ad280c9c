"""What benchmarks share: the folder of the results, turns of several systems, tables, and targets."""

import argparse
import datetime
import json
import os
import platform
import random
import re
import statistics
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

import benchmarks
from averaging.cli.files import replaced_atomically
from benchmarks.workers import ROOT, WorkerError, say

T = TypeVar("T")

MIB = 2**20


def make_parser(doc: str | None, folder: str = "runs/benchmarks") -> argparse.ArgumentParser:
    """Returns a parser with `--output`; recorded results are overwritten only on purpose."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(folder), help=f"folder of the results ({folder})")
    return parser


def make_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Creates a folder for results and checks that files can be written to it; else it is wrong usage."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        parser.error(f"--output {folder}: {error.strerror}; give another folder")


def write(path: Path, results: Any) -> None:
    """Writes a JSON file atomically."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    benchmarks.kept[path] = None


def machine() -> dict[str, Any]:
    """Describes date, sources and machine of a measurement."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--short", "averaging", "benchmarks")
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else ""),
        "machine": {
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": model[1] if model else platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory / 2**30, 1),
        },
    }


async def in_turns(
    systems: Mapping[str, Callable[[], AbstractAsyncContextManager[T]]],
    rounds: int,
    one_round: Callable[[str, T], Awaitable[dict[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Runs all systems alternately, so that other load on the machine affects them equally.

    The first round of each is a warm-up. A system that breaks, or fails twice in a row, is removed and says why.

    Args:
        systems: what starts each, and ends it.
        rounds: number of rounds after the warm-up.
        one_round: runs a round of a system; returns at least `seconds` and `failure`, which is empty if it is right.

    Returns:
        For each system its `rounds`, each with `warm_up`, and why it `broke`.
    """
    found: dict[str, dict[str, Any]] = {name: {"rounds": [], "broken": ""} for name in systems}
    async with AsyncExitStack() as stack:
        running: dict[str, T] = {}

        def broke(name: str, why: str) -> None:
            found[name]["broken"] = why
            running.pop(name, None)
            say(f"  {name} broke: {why}")

        for name, start in systems.items():
            try:
                running[name] = await stack.enter_async_context(start())
            except WorkerError as error:
                broke(name, str(error))
        for number in range(rounds + 1):
            # In random order, because a system may go on working after its round and slow down the next system.
            for name in random.Random(number).sample(list(running), len(running)):
                try:
                    done = await one_round(name, running[name])
                except WorkerError as error:
                    broke(name, str(error))
                    continue
                before = found[name]["rounds"][-1:]
                found[name]["rounds"].append({"warm_up": number == 0} | done)
                turn = f"round {number} of {rounds}" if number else "warm-up"
                say(f"  {turn}, {name}: {done['seconds']:.3f} s {done['failure']}")
                if done["failure"] and before and before[0]["failure"]:
                    broke(name, f"two rounds failed, the last one with {done['failure']}")
    return found


def counted(system: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rounds after the warm-up that were right."""
    return [one for one in system["rounds"] if not one["warm_up"] and not one["failure"]]


def ratio(ours: Mapping[str, Any], others: Mapping[str, Any], figure: str, of: str | None = None) -> float | None:
    """Median of a system's figure divided by another system's, of `of` if given, in the same round."""
    ratios = [
        one[figure] / other[of or figure]
        for one, other in zip(ours["rounds"], others["rounds"], strict=False)
        if not (one["warm_up"] or one["failure"] or other["failure"])
    ]
    return statistics.median(ratios) if ratios else None


def failures(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong in the cases, warm-ups included."""
    found = []
    for case in cases:
        for name, system in case["systems"].items():
            found += [f"{case['title']}, {name}: {one['failure']}" for one in system["rounds"] if one["failure"]]
            found += [f"{case['title']}, {name}: broke: {system['broken']}"] if system["broken"] else []
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median, the least and the most."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def show(results: Mapping[str, Any], title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose caption describes the machine; `title` may have a second sentence about the columns."""
    where = results["machine"]
    table = Table(
        title=title,
        caption=f"{where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}; "
        f"commit {results['commit'][:10]}{results['commit'][40:]}",
    )
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console = console if console.is_terminal else Console(width=180)  # the width of a pipe is unknown
    console.print(table)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *rows))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target, what was measured, and whether that meets it."""

    wanted: str
    measured: str
    met: bool

    def __str__(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'} {self.wanted}: {self.measured}"
