"""The tables and the plot of the scale benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, because there may be no display

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#7F7F7F")

Row = Mapping[str, Any]


def growth(sizes: Sequence[int], values: Sequence[float | None]) -> list[float | None]:
    """Returns the factor per doubling of the size between consecutive sizes; None where it is undefined.

    1 means constant, 2 linear, 4 quadratic.
    """
    factors: list[float | None] = []
    for (size, value), (larger, after) in pairwise(zip(sizes, values, strict=True)):
        known = value is not None and after is not None and value > 0 and after > 0 and larger > size
        factors.append((after / value) ** (1 / math.log2(larger / size)) if known else None)  # type: ignore[operator]
    return factors


def caption(results: Row) -> str:
    """Describes the machine and the sources of the measurement."""
    where = results["machine"]
    return (
        f"{where['processor']}, {where['cores']} cores, {where['memory_gib']} GiB, {where['system']}; "
        f"commit {results['commit'][:10]}{results['commit'][40:]}; in parentheses: factor per doubling of the peers"
    )


def show(results: Row) -> None:
    """Prints the tables."""
    console = Console()
    console = console if console.is_terminal else Console(width=180)  # the width of a pipe is unknown
    for title, rows, columns in tables(results):
        table = Table(title=title, caption=caption(results))
        for name in ("peers", *columns):
            table.add_column(name, justify="right")
        for cells in cells_of(rows, columns):
            table.add_row(*cells)
        console.print(table)


def tables(results: Row) -> list[tuple[str, list[Row], dict[str, Any]]]:
    """Yields title, rows, and a function per column that returns its number."""
    found: list[tuple[str, list[Row], dict[str, Any]]] = []
    if results["real"]:
        found.append(("Real peers on loopback, groups of 4", results["real"], REAL))
    for kind in dict.fromkeys(map(kind_of, results["simulated"])):
        rows = [one for one in results["simulated"] if kind_of(one) == kind]
        found.append((f"Simulated, a message takes 20 to 80 ms, groups of 8: {kind}", rows, SIMULATED))
    if results["rumours"]:
        found.append(("Simulated: a fresh record to all members, nothing else held", results["rumours"], RUMOURS))
    return found


def kind_of(row: Row) -> str:
    """Describes a simulation as text."""
    return f"{row['discovery']}, {'one key for all' if row['keys'] == 1 else 'a key for each group'}"


def cells_of(rows: Sequence[Row], columns: Mapping[str, Any]) -> list[list[str]]:
    """Returns the texts of the table: each number with its factor per doubling."""
    sizes = [row["peers"] for row in rows]
    cells = [[f"{size:,}"] for size in sizes]
    for read in columns.values():
        values = [read(row) for row in rows]
        factors: list[float | None] = [None, *growth(sizes, values)] if values else []
        for line, value, factor in zip(cells, values, factors, strict=True):
            line.append(number(value) + ("" if factor is None else f" ({factor:.2f})"))
    return cells


def number(value: float | None) -> str:
    """Formats three digits, or as many as there are before the point."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _begun(pattern: str, pick: Any) -> Any:
    return lambda row: pick(1e3 * one["begun_seconds"] for one in row["patterns"][pattern]["rounds"])


def _sum(row: Row, *names: str) -> float:
    return float(sum(row.get(name, 0.0) for name in names))


REAL: dict[str, Any] = {
    "ms to BEGIN, the last called, median": _begun("last", statistics.median),
    "max": _begun("last", max),
    "all within 10 ms, median": _begun("together", statistics.median),
    "max ": _begun("together", max),
    "join calls /peer": lambda row: _sum(row["patterns"]["together"]["calls_per_peer_and_round"], "join_group"),
    "pushes /peer": lambda row: _sum(row["patterns"]["together"]["calls_per_peer_and_round"], "push"),
    "ms, record at all": lambda row: 1e3 * statistics.median(row["record_seconds"]),
    "idle calls/s /peer": lambda row: _sum(row["idle_calls_per_peer_and_second"], "push", "exchange"),
    "idle % of a core /peer": lambda row: 100 * row["idle_cpu_per_peer"],
    "MiB /peer": lambda row: row["bytes_per_peer"] / 2**20,
}

SIMULATED: dict[str, Any] = {
    "s to groups, median": lambda row: statistics.median(one["seconds_median"] for one in row["rounds"]),
    "s to the last group": lambda row: max(one["seconds_max"] for one in row["rounds"]),
    "peers in full groups, %": lambda row: 100 * statistics.mean(one["full"] for one in row["rounds"]) / row["peers"],
    "join calls /peer": lambda row: statistics.mean(one["calls_per_peer"]["join_group"] for one in row["rounds"]),
    "pushes /peer": lambda row: statistics.mean(one["calls_per_peer"].get("push", 0.0) for one in row["rounds"]),
    "idle calls/s /peer": lambda row: _sum(row["idle_calls_per_peer_and_second"], "push", "exchange"),
    "KiB held /peer": lambda row: row["bytes_per_peer"] / 1024,
    "s real": lambda row: row["real_seconds"],
}

RUMOURS: dict[str, Any] = {
    "s, median": lambda row: statistics.median(row["seconds"]),
    "max": lambda row: max(row["seconds"]),
    "pushes /record": lambda row: statistics.median(row["pushes"]),
    "s real": lambda row: row["real_seconds"],
}


def draw(results: Row, path: Path) -> None:
    """Plots time to groups, calls per peer and memory per peer over the number of peers, on logarithmic scales."""
    panels: list[tuple[str, dict[str, list[tuple[int, float]]]]] = [
        ("seconds until all are in a group", {}),
        ("requests to join, per peer and round", {}),
        ("KiB per peer", {}),
    ]
    for title, rows, columns in tables(results):
        if columns is RUMOURS:
            continue
        real = columns is REAL
        label = "real" if real else title.rpartition(": ")[2]
        names = (
            ("all within 10 ms, median", "join calls /peer", "MiB /peer")
            if real
            else ("s to the last group", "join calls /peer", "KiB held /peer")
        )
        factors = (1e-3, 1.0, 1024.0) if real else (1.0, 1.0, 1.0)
        for (_, lines), name, factor in zip(panels, names, factors, strict=True):
            if "shared" in label and "KiB" in name:
                continue  # a shared table belongs to no peer
            lines[label] = [(row["peers"], factor * columns[name](row)) for row in rows]
    figure, grid = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
    labels = list(dict.fromkeys(label for _, lines in panels for label in lines))
    colours = dict(zip(labels, COLOURS, strict=False))
    for axes, (title, lines) in zip(grid, panels, strict=True):
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", color=colours[label], label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("peers")
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    handles, names_ = grid[0].get_legend_handles_labels()
    figure.legend(handles, names_, loc="outside lower center", ncols=max(1, len(labels)), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
