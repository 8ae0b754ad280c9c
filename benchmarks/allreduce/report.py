"""The table and the plot of the all-reduce benchmark, and the description of the machine."""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, because there may be no display

import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from benchmarks.allreduce.shapes import size

COLOURS = {
    "averaging": "#0072B2",
    "direct": "#56B4E9",
    "direct_sealed": "#CC79A7",
    "grpc": "#D55E00",
    "grpc_tls": "#F0E442",
    "bare": "#009E73",
    "gloo": "#7F7F7F",
    "hivemind": "#E69F00",
}

MIB = 2**20


def machine(root: Path) -> dict[str, Any]:
    """Describes date, sources and machine of a measurement."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
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


def counted(system: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rounds after the warm-up with a correct average."""
    return [one for one in system["rounds"] if not one["warm_up"] and not one["failure"]]


def ratio(case: Mapping[str, Any], system: Mapping[str, Any], figure: str) -> float | None:
    """Median over the rounds of a system's seconds divided by Gloo's in the same round."""
    gloo = case["systems"]["gloo"]
    ratios = [
        one[figure] / other["seconds"]
        for one, other in zip(system["rounds"], gloo["rounds"], strict=False)
        if not (one["warm_up"] or one["failure"] or other["failure"])
    ]
    return statistics.median(ratios) if ratios else None


def show(results: Mapping[str, Any]) -> bool:
    """Prints the table. Returns whether all rounds, including the warm-up, had correct averages."""
    where, sound = results["machine"], True
    table = Table(
        "system",
        title="Seconds per round: median (least to most)",
        caption=f"{where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}; "
        f"commit {results['commit'][:10]}{results['commit'][40:]}; "
        "x Gloo: median of the ratios round by round; memory: beyond the tensors, of the peer with most",
    )
    for header in ("whole step", "x Gloo", "all-reduce", "x Gloo", "CPU s", "MiB", "error", "rounds"):
        table.add_column(header, justify="right")
    failures = []
    for case in results["cases"]:
        table.add_section()
        table.add_row(f"[bold]{case['title']}[/bold]", *[""] * 6, f"< {case['error_bound']:.1g}")
        for name, system in case["systems"].items():
            good = counted(system)
            sound &= not system["broken"] and all(not one["failure"] for one in system["rounds"])
            failures += [f"{case['title']}, {name}: {one['failure']}" for one in system["rounds"] if one["failure"]]
            failures += [f"{case['title']}, {name}: broke: {system['broken']}"] if system["broken"] else []
            table.add_row("  " + name, *_row(case, name, system, good, results["rounds"]))
    console = Console()
    console = console if console.is_terminal else Console(width=160)  # the width of a pipe is unknown
    console.print(table)
    for failure in failures:
        print(failure)
    return sound


def _row(
    case: Mapping[str, Any], name: str, system: Mapping[str, Any], good: Sequence[Mapping[str, Any]], rounds: int
) -> Sequence[str]:
    if not good:
        return ("failed", *[""] * 6, f"0 of {rounds}")
    return (
        _spread(good, "seconds"),
        _times(ratio(case, system, "seconds")),
        "" if name == "gloo" else _spread(good, "allreduce_seconds"),
        "" if name == "gloo" else _times(ratio(case, system, "allreduce_seconds")),
        f"{statistics.median(one['cpu_seconds'] for one in good):.3f}",
        f"{max(one['peak_bytes'] for one in good) / MIB:.0f}",
        f"{max(one['error'] for one in good):.1g}",
        f"{len(good)} of {rounds}",
    )


def _spread(rounds: Sequence[Mapping[str, Any]], figure: str) -> str:
    values = [one[figure] for one in rounds]
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draws the seconds per round as bars: one panel per load, one group per case, the all-reduce within the step."""
    panels: dict[str, list[Mapping[str, Any]]] = {}
    for case in results["cases"]:
        tensors = "4 tensors" if case["tensors"] == "4" else "the tensors of a GPT-2"
        load = f"{size(case['kib'])} of float32 in {tensors}"
        panels.setdefault(load, []).append(case)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(2 + 5 * columns, 1 + 3.5 * rows), squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (load, cases) in zip(grid.flat, panels.items(), strict=False):
        for place, case in enumerate(cases):
            width = 0.8 / len(COLOURS)
            for number, name in enumerate(COLOURS):
                good = counted(case["systems"][name]) if name in case["systems"] else []
                if not good:
                    continue
                x = place + (number - (len(COLOURS) - 1) / 2) * width
                values = [one["seconds"] for one in good]
                middle = statistics.median(values)
                error = [[middle - min(values)], [max(values) - middle]]
                axes.bar(x, middle, width, color=COLOURS[name], alpha=0.45, yerr=error, capsize=2)
                inner = statistics.median(one["allreduce_seconds"] for one in good)
                axes.bar(x, inner, width, color=COLOURS[name])
        axes.set_xticks(range(len(cases)), [f"{case['peers']}\n{case['codec']}" for case in cases], fontsize=8)
        axes.set_xlabel("peers and code", fontsize=8)
        axes.set_ylabel("seconds per round")
        axes.set_title(load, loc="left", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    used = [name for name in COLOURS if any(name in case["systems"] for case in results["cases"])]
    handles = [Patch(color=COLOURS[name], label=name) for name in used]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(used))
    figure.suptitle(
        "Median, and least to most; full: the all-reduce, pale: the rest of the step", x=0.01, ha="left", fontsize=10
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
