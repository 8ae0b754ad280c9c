"""The cases of the convergence benchmark by name, and its cells in the order in which they are worth running. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

DENSE_BITS = 32
INDEX_BITS = 12
DECAY = 0.95
NESTEROV = (0.7, 0.9)
"""Learning rate and momentum of the outer optimizer of DiLoCo."""

JOINED_LR, LOCAL_LR, SPARSE_LR, MUON_LR = 4e-3, 2e-3, 2e-3, 2e-3
"""Maximum inner learning rates. That of the joined batch is the one of the start; the others are chosen by the held-out
files for that. `--lr` tries others."""

BEST_LR = 12e-3
"""The best rate of the joined batch, with which it goes far from its start."""

MUON_FACTOR = 5.0
"""Learning rate of Muon for the matrices in proportion to that of AdamW for the rest."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train, without the number of peers, the start and the seed.

    Attributes:
        name: on the command line and in the results.
        title: in the page.
        lr: maximum learning rate of AdamW.
        every: local steps between two rounds of the same tensors; 0 is one process with the joined batch.
        codec: `none`, `int8` or `top_k`.
        keeps: of how many weights of a block one is sent, for top-k.
        bits: of a value that is sent.
        decay: factor of the residual in each round, for top-k.
        senders: whether the mean of an element is over those that sent it, not over all; for top-k.
        outer: learning rate and Nesterov momentum of the outer optimizer.
        fragments: number of pieces of the model, averaged at different steps.
        delay: local steps for which a round runs beside the training.
        alpha: weight of the local model when a result arrives.
        muon: learning rate of Muon in proportion to AdamW's; None is AdamW alone.
        last_speed: local steps of the last peer in one step of the others.
        in_step: whether gradients are averaged at every step.
    """

    name: str
    title: str
    lr: float = LOCAL_LR
    every: int = 0
    codec: str = "none"
    keeps: int = 1
    bits: int = DENSE_BITS
    decay: float = 1.0
    senders: bool = True
    outer: tuple[float, float] = NESTEROV
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    muon: float | None = None
    last_speed: float = 1.0
    in_step: bool = False

    @property
    def systems(self) -> tuple[str, ...]:
        """What can train this way."""
        if self.in_step:
            return ("library",)
        library = bool(self.every) and self.codec != "two_bit" and self.muon is None and self.last_speed == 1.0
        return SYSTEMS if library else SYSTEMS[:1]

    @property
    def bits_per_weight(self) -> float:
        """Bits of a peer's contribution to one round for each weight, without tables and scales."""
        if self.codec == "top_k":
            return (INDEX_BITS + self.bits) / self.keeps
        return float(self.bits)

    @property
    def ratio(self) -> float:
        """How many times fewer bits a peer contributes than float32 gradients at every step; 0 if it sends nothing."""
        return max(1, self.every) * DENSE_BITS / self.bits_per_weight if self.every or self.in_step else 0.0


def diloco(every: int, codec: str = "none") -> Case:
    """DiLoCo as in its paper, with float32 or int8 on the wire."""
    title = f"DiLoCo, H={every}" + (", int8" if codec == "int8" else "")
    name = f"{'int8' if codec == 'int8' else 'diloco'}-h{every}"
    return Case(name, title, every=every, codec=codec, bits=8 if codec == "int8" else DENSE_BITS)


def top_k(every: int, keeps: int, bits: int, decay: bool = True, senders: bool = True) -> Case:
    """DiLoCo whose peers send one of `keeps` weights, and whose residual takes the place of outer momentum."""
    name = f"top-k-{keeps}-{bits}bit-h{every}" + ("" if decay else "-no-decay") + ("" if senders else "-over-all")
    title = f"top-k 1/{keeps}, {bits} bit, H={every}"
    title += ("" if decay else ", residual without decay") + ("" if senders else ", mean over all")
    return Case(
        name,
        title,
        SPARSE_LR,
        every,
        "top_k",
        keeps,
        bits,
        decay=DECAY if decay else 1.0,
        senders=senders,
        outer=(1.0, 0.0),
    )


def all_cases() -> dict[str, Case]:
    """The cases by name, in the page's order."""
    steps = (15, 30, 50, 100)
    streaming = [
        Case(f"streaming-h{every}", f"Streaming DiLoCo, H={every}, 5 fragments", every=every, fragments=5, delay=delay,
             alpha=0.5)
        for every, delay in ((30, 2), (50, 3), (100, 5))
    ]  # fmt: skip
    muon = [
        Case(f"muon-h{every}", f"DiLoCo with Muon inside, H={every}", MUON_LR, every, muon=MUON_FACTOR)
        for every in (15, 30)
    ]
    muon_2bit = Case(
        "muon-2bit-h30", "Muon inside, all weights in 2 bit, H=30", MUON_LR, 30, "two_bit", 1, 2, 1.0, muon=MUON_FACTOR
    )
    unequal = [
        Case(f"unequal-h{every}", f"DiLoCo, H={every}, the last peer at a tenth of the speed", every=every,
             last_speed=0.1)
        for every in (30, 50)
    ]  # fmt: skip
    found = [
        Case("joined", "one process, joined batch", JOINED_LR),
        Case("joined-best", "one process, joined batch, best rate", BEST_LR),
        Case("gradients", "GradientAveraging, in step", JOINED_LR, in_step=True),
        *(diloco(every) for every in steps),
        *(diloco(every, "int8") for every in steps),
        *(
            top_k(every, keeps, bits, decay)
            for every, keeps, bits, decay in itertools.product(steps, (16, 32, 64, 128), (2, 4, 8), (True, False))
        ),
        *(top_k(every, 32, 2, senders=False) for every in (15, 30)),
        *streaming,
        Case("muon-joined", "one process, joined batch, Muon", MUON_LR, muon=MUON_FACTOR),
        *muon,
        muon_2bit,
        *unequal,
    ]
    return {case.name: case for case in found}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training of the benchmark.

    Attributes:
        start: `trained` or `random`.
        peers: number of peers; the joined batch has the batches of as many.
        by: `plain` torch in one process, or the `library`.
        case: name of the case.
        seed: of the model and of the order of its text.
    """

    start: str
    peers: int
    by: str
    case: str
    seed: int

    @property
    def row(self) -> str:
        """Key of the cells that differ in the seed alone."""
        return f"{self.start}/{self.peers}/{self.by}/{self.case}"

    def __str__(self) -> str:
        return f"{self.row}/{self.seed}"


STARTS, PEERS, SEEDS, SYSTEMS = ("trained", "random"), (4, 8), (0, 1), ("plain", "library")

REFERENCES = ("joined", "joined-best", "diloco-h30")
TARGETS = ("int8-h30", "top-k-32-2bit-h15", "top-k-64-2bit-h15", "top-k-64-2bit-h30")
OTHERS = (
    "int8-h15", "diloco-h15", "top-k-16-2bit-h30", "top-k-32-2bit-h30", "top-k-128-2bit-h15",
    "top-k-32-2bit-h15-no-decay", "top-k-64-2bit-h30-no-decay", "top-k-32-2bit-h30-over-all", "top-k-32-4bit-h15",
    "top-k-32-8bit-h15", "top-k-64-4bit-h15", "top-k-64-8bit-h15", "unequal-h30", "streaming-h30", "muon-joined",
    "muon-h30", "muon-2bit-h30", "diloco-h50", "int8-h50", "top-k-64-2bit-h50", "diloco-h100", "int8-h100",
    "top-k-64-2bit-h100", "streaming-h100",
)  # fmt: skip
FROM_RANDOM = ("joined", "diloco-h15", "int8-h15", "top-k-32-2bit-h15", "top-k-64-2bit-h15", "diloco-h50")


def all_cells() -> list[Cell]:
    """All cells, the most important first: those of the targets, then the variants, then the rest of the grid."""
    trained, seeds = partial(_cells, "trained"), SEEDS
    tiers: Iterable[Iterable[Cell]] = (
        trained(4, "plain", (*REFERENCES, *TARGETS), seeds),
        trained(4, "library", TARGETS, seeds[:1]),
        trained(4, "plain", OTHERS, seeds[:1]),
        trained(8, "plain", (*REFERENCES, *TARGETS), seeds[:1]),
        trained(4, "library", TARGETS, seeds),
        trained(4, "library", ("gradients", *OTHERS), seeds[:1]),
        trained(4, "plain", OTHERS, seeds),
        _cells("random", 4, "plain", FROM_RANDOM, seeds[:1]),
        trained(8, "plain", (*REFERENCES, *TARGETS, *OTHERS), seeds),
        (
            cell
            for start, peers, by in itertools.product(STARTS, PEERS, SYSTEMS)
            for cell in _cells(start, peers, by, all_cases(), seeds)
        ),
    )
    return list(dict.fromkeys(itertools.chain.from_iterable(tiers)))


def _cells(start: str, peers: int, by: str, names: Iterable[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """Cells in the order of the seeds; leaves out what a system does not have."""
    known = all_cases()
    names = [name for name in names if by in known[name].systems]
    return (Cell(start, peers, by, name, seed) for seed in seeds for name in names)
