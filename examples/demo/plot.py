"""The curves of the demo."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, because there may be no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from examples.demo.record import SMOOTHED, Member, Record

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A800")
"""Distinguishable also by colour-blind readers (Okabe and Ito)."""


def draw(record: Record, path: Path) -> None:
    """Draws the losses of all processes over their steps, and the kill and the newcomer, into a PNG."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 9), sharex=True, layout="constrained")
    figure.suptitle("Language model averaged between peers, and the same model trained alone on one part of the text")
    for axes, title in (
        (top, "Held-out text, after each average (a small sample: the printed results are of a larger one)"),
        (bottom, f"Own text, means of {SMOOTHED} steps"),
    ):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_ylabel("loss (bits per byte)")
        axes.grid(alpha=0.3)
    bottom.set_xlabel("training step")
    bottom.set_xlim(0, record.steps * 1.01)
    for place, peer in enumerate(record.peers):
        colour = COLOURS[place % len(COLOURS)]
        # The peers' curves coincide after an average, so later ones are thinner to keep all visible.
        width = max(1.0, 6.0 - 1.1 * place)
        top.plot(*points(peer.held_out.items()), color=colour, linewidth=width, label=label(peer))
        bottom.plot(*points(smooth(peer)), color=colour, linewidth=1.3)
        for axes, curve in ((top, list(peer.held_out.items())), (bottom, smooth(peer))):
            mark(axes, peer, curve, colour)
    alone = record.alone
    top.plot(*points(alone.held_out.items()), color="black", linewidth=1.8, linestyle="--", label=label(alone))
    bottom.plot(*points(smooth(alone)), color="black", linewidth=1.3, linestyle="--")
    top.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def label(member: Member) -> str:
    """Returns the legend entry of a process."""
    return f"{member.name}, part {member.part}"


def mark(axes: Axes, peer: Member, curve: list[tuple[int, float]], colour: str) -> None:
    """Marks where a peer was killed, and where one joined."""
    if peer.killed_at is not None and curve:
        axes.plot(*curve[-1], "X", color=colour, markeredgecolor="white", markersize=12, zorder=3)
    if peer.newcomer and curve:
        axes.plot(*curve[0], ">", color=colour, markeredgecolor="white", markersize=11, zorder=3)
    for step, word in ((peer.killed_at, "killed"), (peer.first_step if peer.newcomer else None, "joins")):
        if step is not None:
            axes.axvline(step, color=colour, linestyle=":", linewidth=1.5)
            axes.annotate(
                f"{peer.name} {word}",
                (step, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(4, -20) if word == "joins" else (-4, -6),  # they may be close to each other
                textcoords="offset points",
                horizontalalignment="left" if word == "joins" else "right",
                verticalalignment="top",
                fontsize=9,
            )


def smooth(member: Member) -> list[tuple[int, float]]:
    """Returns means of the training loss over `SMOOTHED` steps, at their last steps."""
    steps = list(member.training.items())
    pieces = [steps[start : start + SMOOTHED] for start in range(0, len(steps), SMOOTHED)]
    return [(piece[-1][0], sum(loss for _, loss in piece) / len(piece)) for piece in pieces]


def points(pairs: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Returns the x and y values of a curve."""
    listed = list(pairs)
    return [x for x, _ in listed], [y for _, y in listed]
