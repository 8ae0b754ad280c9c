"""The plot of the explorers' example."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, because there may be no display

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from examples.cart_pole import EPISODE_STEPS
from examples.demo.plot import COLOURS

if TYPE_CHECKING:
    from examples.explorers.__main__ import Record


def draw(record: Record, path: Path) -> None:
    """Draws the reward, and the staleness of each explorer, over the steps of the trainer into a PNG."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 8), sharex=True, layout="constrained")
    top.set_title("Reward: steps for which the pole stays up", loc="left", fontsize=11)
    top.set_ylabel(f"mean of the batch (at most {EPISODE_STEPS})")
    top.plot(*zip(*record.rewards, strict=True), color="black", linewidth=1.8)
    bottom.set_title("Staleness: how many versions older than the newest one the episodes are", loc="left", fontsize=11)
    bottom.set_ylabel("versions")
    bottom.set_xlabel("step of the trainer")
    for number, seen in sorted(record.staleness.items()):
        colour, shift = COLOURS[number - 1], 0.06 * number  # shifted, so that all are visible
        versions, behind = zip(*seen, strict=True)
        shifted = [one + shift for one in behind]
        bottom.plot(versions, shifted, ".", markersize=5, color=colour, label=f"explorer {number}")
    for step, number, text in record.events:
        for axes in (top, bottom):
            axes.axvline(step, color=COLOURS[number - 1], linestyle="--", linewidth=1)
        top.annotate(f" explorer {number} {text}", (step, 0), color=COLOURS[number - 1], va="bottom")
    top.set_ylim(bottom=0)
    bottom.set_ylim(bottom=0)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
