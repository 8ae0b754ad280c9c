"""Writes the page and the curves of the convergence benchmark from its recorded cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot, because there may be no display

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.convergence.cases import PEERS, SYSTEMS, Case, all_cases, all_cells, page_cells
from benchmarks.convergence.runner import landed

COLOURS = {"none": "#0072B2", "int8": "#009E73", "top_k": "#D55E00", "two_bit": "#CC79A7"}
"""By codec; distinguishable also by colour-blind readers (Okabe and Ito)."""

MBITS = (10, 100, 1000)
"""Rates of the emulated links in Mbit/s."""

STEP_SECONDS = 0.008
"""Seconds of a step of one peer with a core of its own, rounded."""

UNEQUAL = 0.02
"""Relative excess of the loss of unequal machines that is allowed."""

SAME = 5e-4
"""Relative difference below which two losses are equal to 4 digits."""


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


@dataclass(slots=True)
class Row:
    """The cells of one case at one start and with one number of peers.

    Attributes:
        cells: by `plain` or `library`, by seed.
    """

    case: Case
    start: str
    peers: int
    cells: dict[str, dict[int, Mapping[str, Any]]] = field(default_factory=lambda: {name: {} for name in SYSTEMS})

    @property
    def by(self) -> str:
        """The system whose losses the table has: plain torch, or the library if only that has them."""
        return next((name for name, cells in self.cells.items() if cells), SYSTEMS[0])

    @property
    def losses(self) -> dict[int, float]:
        """Held-out loss by seed."""
        return {seed: float(cell["loss"]) for seed, cell in sorted(self.cells[self.by].items())}

    @property
    def loss(self) -> float:
        """Mean of the seeds."""
        return statistics.mean(self.losses.values())

    def excess(self, base: Row | None) -> float | None:
        """Relative excess of the loss over that of `base`, in the mean of the seeds that both have."""
        both = self.losses.keys() & base.losses.keys() if base is not None else ()
        if base is None or not both:
            return None
        return statistics.mean(self.losses[seed] / base.losses[seed] - 1 for seed in both)


class Recorded:
    """The recorded cells, by row.

    Args:
        results: as `convergence.json` has them.
    """

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.recipe: Mapping[str, Any] = results["recipe"]
        self.cells: Mapping[str, Mapping[str, Any]] = results["cells"]
        self.rows: dict[tuple[str, int, str], Row] = {}
        self.tried: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
        known = all_cases()
        for key, cell in self.cells.items():
            start, peers, by, name, seed = key.split("/")
            if "@" in seed:
                self.tried.setdefault((f"{start}/{peers}/{by}/{name}", cell["lr"]), []).append(cell)
            elif name in known:
                row = self.rows.setdefault((start, int(peers), name), Row(known[name], start, int(peers)))
                row.cells[by][int(seed)] = cell

    def of(self, start: str, peers: int) -> dict[str, Row]:
        """The rows of a table by name, in the order of the cases."""
        return {name: self.rows[start, peers, name] for name in all_cases() if (start, peers, name) in self.rows}

    def steps(self, start: str) -> int:
        """Steps of each peer from this start."""
        return int(self.recipe["steps" if start == "trained" else "random_steps"])

    def sent(self, row: Row) -> float | None:
        """Bytes that a peer sends in a whole training, from receipts; None if there are none of such rounds.

        A round has the same bytes with another number of steps in between, so the receipts of one H serve for all.
        """
        for other in [row, *self.rows.values()]:
            if wire(other.case) == wire(row.case) and other.peers == row.peers:
                for cell in (*other.cells["library"].values(), *other.cells["receipts"].values()):
                    pause = row.case.every / other.case.every if row.case.every and other.case.every else 1.0
                    steps = self.steps(row.start) / cell.get("steps", self.steps(other.start))
                    sent: float = cell["sent"] * steps / pause
                    return sent
        return None


def wire(case: Case) -> tuple[object, ...]:
    """What the bytes of a round depend on."""
    return (
        case.codec,
        case.keeps,
        case.bits,
        case.fragments,
        case.in_step,
        bool(case.every),
        case.last_speed,
        case.quorum,
    )


LIMITS = (("int8", 120, 0.025), ("top_k", 1000, 0.03), ("top_k", 2000, 0.045), ("top_k", 4000, 0.07))
"""Codec, how many times fewer bits than float32 gradients at every step, and the most loss above the joined batch."""


def verdicts(recorded: Recorded) -> list[Verdict]:
    """The targets for which there are cells, from a trained start; only those of bytes also with 8 peers."""
    rows, found = recorded.of("trained", 4), []
    for peers in PEERS:
        for codec, at_least, most in LIMITS:
            if best := best_of(recorded.of("trained", peers), codec, at_least):
                over, row = best
                wanted = f"{peers} peers, {codec.replace('_', '-')}, 1/{at_least:,} of float32 gradients: "
                wanted += f"at most {most:.1%} above joined"
                found.append(Verdict(wanted, f"{over:+.2%} ({row.case.title}, 1/{row.case.ratio:,.0f})", over <= most))
    for name, row in rows.items():
        above = row.excess(rows.get(name.replace("quorum", "diloco"))) if row.case.quorum else None
        if above is not None:
            wanted = (
                f"one peer at a tenth of the speed, a quorum of the others, H={row.case.every}: the loss after as many "
            )
            wanted += f"samples is at most {UNEQUAL:.0%} above that of equal machines"
            found.append(Verdict(wanted, f"{above:+.2%}", above <= UNEQUAL))
    pairs = list(differences(recorded))
    wanted = f"the library ends at the loss of plain torch to 4 digits (within {SAME:.2%})"
    again = [abs(replayed) for _, _, _, replayed in pairs if replayed is not None]
    for kind, apart in (
        (", whose rounds have the same orders", again),
        (", in any order", [abs(each) for *_, each, _ in pairs]),
    ):
        if apart:
            measured = f"at most {max(apart):.3%} apart in {len(apart)} trainings"
            found.append(Verdict(wanted + kind, measured, max(apart) < SAME))
    return found


def best_of(rows: Mapping[str, Row], codec: str, at_least: float) -> tuple[float, Row] | None:
    """The row with the least loss above the joined batch of those that send at most that fraction."""
    joined = rows.get("joined")
    fit = [
        (over, row)
        for row in rows.values()
        if row.case.codec == codec and round(row.case.ratio) >= at_least and (over := row.excess(joined)) is not None
    ]
    return min(fit, key=lambda fitting: fitting[0], default=None)


def differences(recorded: Recorded) -> Iterator[tuple[Row, int, float, float | None]]:
    """Trainings that both plain torch and the library made.

    Yields the row, the seed, and the relative difference of the library's loss from that of plain torch, and from that
    of plain torch that has replayed the library's orders, if that was trained.
    """
    for row in recorded.rows.values():
        plain, library, replayed = (row.cells[name] for name in ("plain", "library", "replayed"))
        for seed in sorted(plain.keys() & library.keys()):
            loss = library[seed]["loss"]
            again = loss / replayed[seed]["loss"] - 1 if seed in replayed else None
            yield row, seed, loss / plain[seed]["loss"] - 1, again


def page(results: Mapping[str, Any], folder: Path) -> str:
    """Returns the page in Markdown. `folder` has the curves."""
    recorded = Recorded(results)
    recipe, size = recorded.recipe, recorded.recipe["size"]
    parts = [
        "# Convergence: loss and bytes by strategy",
        "This page compares the held-out loss and the bytes of rare and compressed rounds with those of one process "
        "that has the joined batch. It is generated by "
        f"`python -m benchmarks.convergence --report --output {folder.as_posix()}`. "
        f"The raw results are in [convergence.json]({folder.name}/convergence.json).",
        f"A byte-level transformer (120 thousand parameters: {size['layers']} layers of width {size['width']}, context "
        f"{size['context']}) learns the sources of the Python standard library. Each peer has another part of the text "
        "(neighbours in the alphabet, so the parts differ), and the loss is that of the mean of the peers' models on "
        "held-out files, in bits per byte.",
        f"- **Trained start**: {recipe['joint_steps']} steps with the joined batch of {recipe['joint_peers']} peers, "
        f"then {recipe['steps']} steps of {recipe['batch']} windows at each peer, with a fresh optimizer.\n"
        f"- **Random start**: {recipe['random_steps']} steps of {recipe['batch']} windows at each peer.\n"
        f"- Inner optimizer: AdamW (betas 0.9 and 0.95, gradients clipped to norm {recipe['max_norm']:g}); the "
        f"learning rate rises over {recipe['warm_up']:.0%} of the steps and falls along half a cosine to a twentieth.\n"
        "- Outer optimizer: SGD with lr 0.7 and Nesterov momentum 0.9; for top-k lr 1 without momentum, since the "
        "residual (decay 0.95) plays its part. top-k takes the mean of each element over the peers that sent it.\n"
        "- `plain` is the same algorithm in one process with plain PyTorch; `library` are the library's peers, which "
        "average over gRPC on loopback.",
        "## Targets",
        table(
            ("target", "measured", "result"),
            (
                (verdict.wanted, verdict.measured, "met" if verdict.met else "**missed**")
                for verdict in verdicts(recorded)
            ),
        ),
        "The fraction counts what a peer contributes: 14 bit for each weight that it sends with 2-bit top-k. Every "
        "member also gets the average back. With float32 and int8 that is as much as it contributes; with top-k the "
        "average has the elements of all members, so that direction is larger by up to the number of members. "
        "`sent a step` counts both, from receipts.",
    ]
    for start, peers in (("trained", 4), ("trained", 8), ("random", 4), ("random", 8)):
        rows = recorded.of(start, peers)
        if rows:
            parts += [f"## {start.capitalize()} start, {peers} peers", loss_table(recorded, rows, start)]
        if (start, peers) == ("trained", 4) and rows:
            parts += [
                f"![Held-out loss over training]({folder.name}/loss.png)",
                f"![Held-out loss over bytes]({folder.name}/bytes.png)",
                f"![Held-out loss over seconds]({folder.name}/seconds.png)",
                f"Seconds are those of the whole training: of the steps, {STEP_SECONDS * 1000:g} ms each, and of the "
                "bytes that a peer sends by its receipts, at that many Mbit/s in each direction, without latency.",
            ]
    if pairs := list(differences(recorded)):
        parts += [
            "## The library beside plain torch",
            table(
                ("training", "seed", "plain", "library", "difference", "replayed with the library's orders"),
                (
                    (
                        f"{row.case.title}, {row.start} start, {row.peers} peers",
                        f"{seed}",
                        f"{row.cells['plain'][seed]['loss']:.5f}",
                        f"{row.cells['library'][seed]['loss']:.5f}",
                        f"{difference:+.4%}",
                        "-" if again is None else f"{row.cells['replayed'][seed]['loss']:.5f} ({again:+.4%})",
                    )
                    for row, seed, difference, again in pairs
                ),
            ),
        ]
    parts += [*tried(recorded), "## What was run", coverage(recorded), origin(recorded)]
    return "\n\n".join(parts) + "\n"


def loss_table(recorded: Recorded, rows: Mapping[str, Row], start: str) -> str:
    """Returns the table of one start and number of peers."""
    joined, best = rows.get("joined"), rows.get("joined-best")
    head = ("case", "lr", "loss", "above joined", "above its best rate", "contributes", "sent a step", "seeds")
    lines = []
    for row in rows.values():
        sent = recorded.sent(row)
        lines.append(
            (
                row.case.title,
                f"{row.case.lr:g}",
                f"{row.loss:.4f}" + ("" if row.by == "plain" else " (library)"),
                percent(row.excess(joined)),
                percent(row.excess(best)),
                f"1/{row.case.ratio:,.0f}" if row.case.ratio else "-",
                f"{sent / recorded.steps(start):,.0f} B" if sent else "-",
                ", ".join(f"{loss:.4f}" for loss in row.losses.values()),
            )
        )
    return table(head, lines)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.2%}"


def tried(recorded: Recorded) -> list[str]:
    """The learning rates that were tried, if any."""
    if not recorded.tried:
        return []
    rows = (
        (name, f"{lr:g}", f"{statistics.mean(cell['tuning_loss'] for cell in cells):.4f}",
         f"{statistics.mean(cell['loss'] for cell in cells):.4f}")
        for (name, lr), cells in sorted(recorded.tried.items())
    )  # fmt: skip
    head = ("case", "lr", "loss on the files for choosing", "loss on the files of the results")
    return ["## Learning rates that were tried", table(head, rows)]


def coverage(recorded: Recorded) -> str:
    """Says how many of the page's cells were run."""
    done: dict[tuple[str, int, str], int] = {}
    whole: dict[tuple[str, int, str], int] = {}
    for cell in page_cells():
        place = (cell.start, cell.peers, cell.by)
        whole[place] = whole.get(place, 0) + 1
        done[place] = done.get(place, 0) + (str(cell) in recorded.cells)
    lines = (
        (start, f"{peers}", by, f"{done[start, peers, by]} of {count}")
        for (start, peers, by), count in sorted(whole.items(), key=lambda item: (item[0][0] != "trained", item[0][1:]))
    )
    text = table(("start", "peers", "by", "cells run"), lines)
    missing = len(page_cells()) - sum(done.values())
    listed = "`python -m benchmarks.convergence --rows page --list` names those that are missing; " if missing else ""
    return (
        f"{text}\n\n{listed}without `--rows page` there are {len(all_cells()):,} cells: each case with each number of "
        "peers, start and seed. `--list` names them."
    )


def origin(recorded: Recorded) -> str:
    """Says when and with what the cells were trained."""
    cells = recorded.cells.values()
    runs = sorted({(cell["machine"], cell["python"], cell["torch"]) for cell in cells})
    dates = sorted(cell["date"] for cell in cells)
    commits = sorted({cell["commit"] for cell in cells if landed(cell["commit"].split()[0])})
    others = len({cell["commit"] for cell in cells}) - len(commits)
    where = "; ".join(f"{machine}, Python {python}, torch {torch}" for machine, python, torch in runs)
    named = [*commits, *([f"{others} of branches that were rebased before they landed"] if others else [])]
    return f"Trained from {dates[0]} to {dates[-1]} on a shared machine: {where}; commits {', '.join(named)}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


SHOWN = ("joined", "diloco-h30", "int8-h30", "top-k-32-2bit-h15", "top-k-64-2bit-h15", "top-k-64-2bit-h30",
         "streaming-h30", "muon-h30")  # fmt: skip
"""Cases of the curves over training."""


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """Draws the loss over training, over bytes and over seconds, from a trained start with 4 peers."""
    recorded = Recorded(results)
    rows = recorded.of("trained", 4)
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    decorate(axes, "steps of each peer")
    for row in (rows[name] for name in SHOWN if name in rows):
        curve = next(iter(row.cells[row.by].values()))["curve"]
        steps = [recorded.steps("trained") * (number + 1) / len(curve) for number in range(len(curve))]
        axes.plot(steps, curve, label=row.case.title, **line(row.case))
    axes.legend(fontsize=8)
    save(figure, folder / "loss.png")

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    decorate(axes, "contributed by a peer, of float32 gradients at every step")
    scatter(axes, rows, lambda row: 1 / row.case.ratio if row.case.ratio else None)
    axes.set_xscale("log")
    explain_points(figure, rows)
    save(figure, folder / "bytes.png")

    figure, parts = plt.subplots(1, len(MBITS), figsize=(15, 5), layout="constrained", sharey=True)
    for axes, mbit in zip(parts, MBITS, strict=True):
        decorate(axes, f"seconds of training at {mbit} Mbit/s")
        scatter(axes, rows, partial(seconds, recorded, mbit))
    explain_points(figure, rows)
    save(figure, folder / "seconds.png")


def seconds(recorded: Recorded, mbit: float, row: Row) -> float | None:
    """Seconds of a training: of its steps, and of a peer's bytes by its receipts; None without receipts."""
    sent = recorded.sent(row)
    return None if sent is None else recorded.steps(row.start) * STEP_SECONDS + sent * 8 / (mbit * 1e6)


FAMILIES: Mapping[str, str] = {
    "DiLoCo, float32": "#0072B2",
    "int8": "#009E73",
    "top-k 1/16": "#F4A582",
    "top-k 1/32": "#D55E00",
    "top-k 1/64": "#E69F00",
    "top-k 1/128": "#8C564B",
    "Streaming DiLoCo": "#56B4E9",
    "Muon inside": "#CC79A7",
    "Muon inside, compressed": "#7A3E8F",
    "one slow peer": "#7F7F7F",
}
"""Colours of the points."""

MARKERS = {15: "o", 30: "s", 50: "^", 100: "D"}
"""By the number of local steps between two rounds."""


def family(case: Case) -> str:
    """What a case has its colour from."""
    if case.last_speed != 1:
        return "one slow peer"
    if case.muon is not None:
        return "Muon inside" if case.codec == "none" else "Muon inside, compressed"
    if case.codec == "top_k":
        return f"top-k 1/{case.keeps}"
    return "int8" if case.codec == "int8" else "Streaming DiLoCo" if case.fragments > 1 else "DiLoCo, float32"


def is_variant(case: Case) -> bool:
    """Whether a case differs from its neighbour in the values or the residual alone; its point is hollow."""
    return case.codec == "top_k" and (case.bits != 2 or case.decay == 1)


def scatter(axes: Axes, rows: Mapping[str, Row], x: Callable[[Row], float | None]) -> None:
    """Draws a point for each row that has this x, and the joined batch as a line."""
    for name, row in rows.items():
        place, case = x(row), row.case
        if name == "joined":
            axes.axhline(row.loss, color="black", linestyle="--")
        elif place is not None and case.every:
            colour = FAMILIES[family(case)]
            axes.plot(
                place, row.loss, MARKERS[case.every], color=colour, mfc="none" if is_variant(case) else colour, ms=6
            )


def explain_points(figure: Any, rows: Mapping[str, Row]) -> None:
    """Adds the legend of the points of these rows."""
    there = {family(row.case) for row in rows.values() if row.case.every}
    marks = [Line2D([], [], color="black", linestyle="--", label="one process, joined batch")]
    marks += [
        Line2D([], [], linestyle="", marker="o", color=colour, label=name)
        for name, colour in FAMILIES.items()
        if name in there
    ]
    marks += [
        Line2D([], [], linestyle="", marker=marker, color="black", label=f"H={every}")
        for every, marker in MARKERS.items()
    ]
    marks.append(
        Line2D([], [], linestyle="", marker="o", color="black", mfc="none", label="4 or 8 bit, or without decay")
    )
    figure.legend(handles=marks, loc="outside right center", fontsize=8)


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=110)
    plt.close(figure)


def line(case: Case) -> dict[str, Any]:
    """Returns the style of a case's curve."""
    if not case.every:
        return {"color": "black", "linestyle": "--", "linewidth": 2.0, "zorder": 3}
    style = {15: "-", 30: "--", 50: "-.", 100: ":"}[case.every]
    if case.codec == "none" and (case.fragments > 1 or case.muon):
        return {"color": "#E69F00" if case.muon else "#7F7F7F", "linestyle": style}
    colour = "#56B4E9" if case.codec == "top_k" and case.keeps == 64 else COLOURS[case.codec]
    return {"color": colour, "linestyle": style}


def decorate(axes: Axes, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel("loss (bits per byte)")
    axes.grid(alpha=0.3)
