"""Writes the page and the curves of the convergence benchmark from its raw results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, because there may be no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#B8A800", "#D55E00", "#E69F00", "#CC79A7", "#7F7F7F", "#8C510A")
"""Distinguishable also by colour-blind readers (Okabe and Ito, and some more)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target, and whether it is met.

    Attributes:
        wanted: the target as text.
        measured: the measurement as text.
        met: whether the measurement meets the target.
    """

    wanted: str
    measured: str
    met: bool


def bytes_per_step(case: Mapping[str, Any]) -> float:
    """Bytes that a peer sends per step of its optimizer: a global step with GradientAveraging, else a local one."""
    steps = case["global_steps"] if case["counts_samples"] else statistics.mean(case["local_steps"])
    return float(statistics.mean(case["bytes_sent"]) / steps)


def excess(case: Mapping[str, Any], single: Mapping[str, Any]) -> float:
    """Relative excess of this case's held-out loss over the single process's."""
    loss, base = float(case["loss"]), float(single["loss"])
    return loss / base - 1


def verdicts(cases: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Returns the targets for the available cases."""
    found = []
    single, gradients = cases.get("single"), cases.get("gradients")
    for name, most in (("gradients", 0.005), ("gradients-free", 0.005), ("diloco-50", 0.03)):
        if single is not None and name in cases:
            over = excess(cases[name], single)
            wanted = f"{cases[name]['title']}: held-out loss at most {most:.1%} above the single process"
            found.append(Verdict(wanted, f"{over:+.2%}", over <= most))
    for name, share in (("diloco-50", 50), ("diloco-50-int8", 190)):
        if gradients is not None and name in cases:
            ratio = bytes_per_step(gradients) / bytes_per_step(cases[name])
            wanted = f"{cases[name]['title']}: bytes per step at most 1/{share} of GradientAveraging's"
            found.append(Verdict(wanted, f"1/{ratio:.1f}", ratio >= share * (1 - 1e-9)))
    return found


def page(results: Mapping[str, Any], folder: Path) -> str:
    """Returns the page in Markdown. `folder` has the curves."""
    recipe, cases = results["recipe"], results["cases"]
    size = recipe["size"]
    windows = recipe["steps"] * recipe["peers"] * recipe["batch"]
    any_case = next(iter(cases.values()))
    parts = [
        "# What averaging costs in loss, and saves in bytes",
        f"This page is written by `python -m benchmarks.convergence --output {folder.as_posix()}`; do not edit it. "
        "The raw results are in "
        f"[convergence.json]({folder.name}/convergence.json).",
        f"A byte-level transformer ({any_case['parameters']:,} parameters: {size['layers']} layers of width "
        f"{size['width']}, context {size['context']}) learns the sources of the Python standard library. "
        f"{recipe['peers']} peers, each a process with its own part of the text (neighbours in the alphabet, so the "
        f"parts differ), average over gRPC on loopback. Every case trains on the same {windows:,} windows of "
        f"{size['context']} bytes, {windows * size['context'] / 1e6:.1f} MB in all: {recipe['steps']} steps of "
        f"{recipe['batch']} windows per peer, and the single process takes the union of what the peers draw, "
        f"{recipe['peers'] * recipe['batch']} windows a step. All start from the same parameters.",
        f"The inner optimizer is AdamW (betas 0.9 and 0.95, gradients clipped to norm {recipe['max_norm']:g}), its "
        f"learning rate rises over {recipe['warm_up']:.0%} of the samples and falls along half a cosine to a "
        "twentieth. The highest rate is chosen for each family, on other held-out files than those on which is judged; "
        "it is in the table. The outer optimizer of DiLoCo is SGD with lr 0.7 and Nesterov momentum 0.9; the streaming "
        "cases have 4 fragments, delay 3 and alpha 0.5; int8 is `BLOCKWISE_INT8` with error feedback. "
        "Loss is that of the mean of the peers' models, on held-out files, in bits per byte; with all strategies but "
        "Streaming DiLoCo the peers' models are the same at the end. "
        "Bytes are those of the tensors as packed for the wire, from the receipts.",
        "## Wanted and measured",
        table(
            ("wanted", "measured", ""),
            ((one.wanted, one.measured, "met" if one.met else "**falls short**") for one in verdicts(cases)),
        ),
        "## All cases",
        table(
            ("case", "lr", "loss", "above single", "sent per peer", "per step", "rounds", "time", "of it in rounds"),
            (row(case, cases.get("single")) for case in cases.values()),
        ),
        "A step is a global one with GradientAveraging, else a local one. Times are rough: four processes of one "
        "thread each share two cores with other work, and the single process has a core to itself. A round of "
        "Streaming DiLoCo runs beside training, so that its time in rounds is no waiting.",
        f"![Held-out loss over training]({folder.name}/loss.png)",
        f"![Held-out loss over bytes sent]({folder.name}/bytes.png)",
    ]
    findings, tuning = folder / "findings.md", folder / "tuning.json"
    if findings.exists():
        parts.append(findings.read_text().strip())
    if tuning.exists():
        parts += [
            "## The same in one process, without the library",
            "`python -m benchmarks.convergence_tuning` trains the peers' replicas in turn, with plain PyTorch. The "
            "rates were chosen by the first loss, on the files set aside for that.",
            table(
                ("H", "steps", "inner lr", "outer lr", "momentum", "besides", "loss for choosing", "loss as above"),
                (tuning_row(run) for run in json.loads(tuning.read_text())),
            ),
        ]
    runs = sorted({(case["commit"], case["machine"], case["python"], case["torch"]) for case in cases.values()})
    dates = sorted(case["date"] for case in cases.values())
    parts.append(
        f"Trained from {dates[0]} to {dates[-1]} on a shared machine: "
        + "; ".join(
            f"commit {commit}, {machine}, Python {python}, torch {torch}" for commit, machine, python, torch in runs
        )
        + "."
    )
    return "\n\n".join(parts) + "\n"


def row(case: Mapping[str, Any], single: Mapping[str, Any] | None) -> Sequence[str]:
    """Returns a row of the large table."""
    sent = statistics.mean(case["bytes_sent"])
    return (
        case["title"],
        f"{case['lr']:g}",
        f"{case['loss']:.4f}",
        f"{excess(case, single):+.2%}" if single else "",
        f"{sent / 1e6:.1f} MB" if sent else "-",
        f"{bytes_per_step(case) / 1e3:.1f} kB" if sent else "-",
        f"{case['rounds_with_all']}" + (f" of {case['rounds']}" if case["rounds"] > case["rounds_with_all"] else ""),
        f"{case['seconds']:.0f} s",
        f"{case['seconds_in_rounds']:.0f} s",
    )


def tuning_row(run: Mapping[str, Any]) -> Sequence[str]:
    """Returns a row about one run of the tuning. H = 0 is one process with the joined batch."""
    outer = (f"{run['every']}", f"{run['outer_lr']:g}", f"{run['momentum']:g}") if run["every"] else ("-", "-", "-")
    judged = f"{run['judged']:.4f}" if run["judged"] is not None else "-"
    chosen = f"{run['chosen']:.4f}"
    besides = [f"batch {run['batch']}"] if run["batch"] != 8 else []
    besides += [f"averaged at each of the first {run['begin']} steps"] if run["begin"] else []
    besides += ["all peers draw from the whole text"] if run["alike"] else []
    return (outer[0], f"{run['steps']}", f"{run['lr']:g}", *outer[1:], ", ".join(besides), chosen, judged)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Draws the curves into `loss.png`, and the final loss over the bytes sent into `bytes.png`."""
    recipe, cases = results["recipe"], results["cases"]
    figure, (axes, late) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for part in (axes, late):
        decorate(part, "bytes of text that all peers have trained on (MB)")
        for place, (name, case) in enumerate(cases.items()):
            x = [samples * recipe["size"]["context"] / 1e6 for samples, _ in case["curve"]]
            y = [loss for _, loss in case["curve"]]
            part.plot(x, y, label=case["title"], **line(name, place))
    axes.legend(fontsize=8)
    axes.set_title("Held-out text", loc="left", fontsize=11)
    late.set_title("The last half", loc="left", fontsize=11)
    last = [case["curve"] for case in cases.values()]
    late.set_xlim(left=late.get_xlim()[1] / 2)
    tails = [loss for curve in last for _, loss in curve[len(curve) // 2 - 1 :]]
    late.set_ylim(min(tails) - 0.02, max(tails) + 0.02)
    figure.savefig(folder / "loss.png", dpi=110)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    decorate(axes, "bytes sent per peer and step")
    for place, (name, case) in enumerate(cases.items()):
        if sum(case["bytes_sent"]):
            style = line(name, place)
            axes.plot(bytes_per_step(case), case["loss"], "s" if "int8" in name else "o", color=style["color"])
            axes.annotate(
                case["title"],
                (bytes_per_step(case), case["loss"]),
                xytext=(6, 4),
                textcoords="offset points",
                fontsize=8,
            )
        else:
            axes.axhline(case["loss"], color="black", linestyle="--", label=case["title"])
            axes.legend()
    axes.set_xscale("log")
    axes.margins(x=0.25)
    figure.savefig(folder / "bytes.png", dpi=110)
    plt.close(figure)


def line(name: str, place: int) -> dict[str, Any]:
    """Returns the style of a case's curve."""
    if name == "single":
        return {"color": "black", "linestyle": "--", "linewidth": 2.0, "zorder": 3}
    return {"color": COLOURS[(place - 1) % len(COLOURS)], "linestyle": ":" if "int8" in name else "-"}


def decorate(axes: Axes, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel("loss (bits per byte)")
    axes.grid(alpha=0.3)
