"""Draws the rewards, the versions at the explorers, and the kills."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from examples.posttrain.record import Record

SMOOTHED = 8
"""Posts over which the share of right answers is averaged."""


def draw(record: Record, file: Path) -> None:
    """Writes a PNG."""
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    began = min(event["at"] for site in record.sites for event in site.ready)
    for number, site in enumerate(record.sites, start=1):
        colour = f"C{number - 1}"
        times = [event["at"] - began for event in site.posted]
        right = [event["right"] for event in site.posted]
        means = [
            sum(right[max(0, i - SMOOTHED) : i + 1]) / len(right[max(0, i - SMOOTHED) : i + 1])
            for i in range(len(right))
        ]
        above.plot(times, means, color=colour, label=f"site {number}, explorers")
        below.plot(
            [event["at"] - began for event in site.steps],
            [event["local_step"] for event in site.steps],
            color=colour,
            label=f"site {number}, trainers",
        )
        for place, (process, events) in enumerate(sorted(site.versions.items())):
            below.plot(
                [event["at"] - began for event in events],
                [event["version"] for event in events],
                ".",
                markersize=2 + 2 * place,
                color=colour,
                alpha=0.5,
                label=process,
            )
    for kill in record.kills:
        for axes in (above, below):
            axes.axvspan(kill.at - began, (kill.works_again or kill.at) - began, color="red", alpha=0.15, lw=0)
        above.annotate(kill.what, (kill.at - began, 1.0), xycoords=("data", "axes fraction"), fontsize=8, rotation=20)
    above.set_ylabel("sampled answers without a mistake")
    below.set_ylabel("version of the weights")
    below.set_xlabel("seconds")
    above.legend(loc="lower right", fontsize=8)
    below.legend(loc="lower right", fontsize=8)
    figure.savefig(file, dpi=110)
