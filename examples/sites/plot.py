"""Draws the accuracy of both sites, and what happened to the node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from examples.sites.__main__ import Run


def draw(run: Run, alone: Sequence[float], file: Path) -> None:
    """Writes a PNG."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    began = min(events[0]["at"] for events in run.events if events)
    for number, events in enumerate(run.events):
        steps = [one for one in events if "accuracy" in one]
        axes.plot(
            [one["at"] - began for one in steps],
            [one["accuracy"] for one in steps],
            color=f"C{number}",
            label=f"site {number + 1}",
        )
        axes.axhline(alone[number], color=f"C{number}", linestyle=":", label=f"site {number + 1} alone, at the end")
    for name, colour in (("killed", "red"), ("without", "orange"), ("started", "gray"), ("back", "green")):
        if name in run.moments:
            axes.axvline(run.moments[name] - began, color=colour, linewidth=1)
            axes.annotate(
                name, (run.moments[name] - began, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8
            )
    axes.set_xlabel("seconds")
    axes.set_ylabel("accuracy on all ten digits")
    axes.legend(loc="center right", fontsize=8)
    figure.savefig(file, dpi=110)
