"""The cases of the convergence benchmark by name, and its cells in the order in which they are worth running. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
        quorum: whether a round waits for the fast peers only, and the last one comes after as many steps as they make;
            else it comes to each round with the steps that it has.
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
    quorum: bool = False
    in_step: bool = False

    @property
    def systems(self) -> tuple[str, ...]:
        """What can train this way."""
        if self.in_step or self.quorum:  # plain torch knows no time, so nobody is late there
            return ("library",)
        if not self.every or self.codec == "two_bit" or (self.every * self.last_speed) % 1:
            return ("plain",)
        # Rounds beside the training end when they end, so there is no order to replay.
        return ("plain", "library", "replayed") if self.last_speed == 1 and not self.delay else ("plain", "library")

    def speeds(self, peers: int) -> list[float]:
        """Local steps of each peer in one step of the others."""
        return [1.0] * (peers - 1) + [self.last_speed]

    def ticks(self, steps: int, peers: int) -> int:
        """Steps of a fast peer until all have trained on as many samples as equal peers have after `steps`."""
        return round(steps * peers / sum(self.speeds(peers)))

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


def steps_in(tick: int, speed: float) -> bool:
    """Whether a peer of this speed makes a step in a tick, which is a step of the fast ones."""
    return math.floor((tick + 1) * speed + 1e-9) > math.floor(tick * speed + 1e-9)


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
        for every, delay in ((15, 1), (30, 2), (50, 3), (100, 5))
    ]  # fmt: skip
    muon = [
        Case(f"muon-h{every}", f"DiLoCo with Muon inside, H={every}", MUON_LR, every, muon=MUON_FACTOR)
        for every in steps
    ]
    muon_top_k = [
        replace(
            top_k(every, 32, 2), name=f"muon-top-k-32-2bit-h{every}", lr=MUON_LR, muon=MUON_FACTOR,
            title=f"Muon inside, top-k 1/32, 2 bit, H={every}",
        )
        for every in steps
    ]  # fmt: skip
    muon_2bit = Case(
        "muon-2bit-h30", "Muon inside, all weights in 2 bit, H=30", MUON_LR, 30, "two_bit", 1, 2, 1.0, muon=MUON_FACTOR
    )
    unequal = [
        Case(f"unequal-h{every}", f"DiLoCo, H={every}, the last peer at a tenth of the speed", every=every,
             last_speed=0.1)
        for every in steps
    ]  # fmt: skip
    quorum = [
        replace(case, name=f"quorum-h{case.every}", title=f"{case.title}, quorum of the others", quorum=True)
        for case in unequal
    ]
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
        *muon_top_k,
        *unequal,
        *quorum,
    ]
    return {case.name: case for case in found}


@dataclass(frozen=True, slots=True)
class Cell:
    """One training of the benchmark.

    Attributes:
        start: `trained` or `random`.
        peers: number of peers; the joined batch has the batches of as many.
        by: `plain` torch in one process, the `library`, plain torch that has `replayed` the library's orders, or
            `receipts`, the library for two rounds.
        case: name of the case.
        seed: of the model and of the order of its text.
    """

    start: str
    peers: int
    by: str
    case: str
    seed: int

    def steps(self, whole: int) -> int:
        """Steps of each peer, of `whole` in a whole training."""
        return RECEIPT_ROUNDS * all_cases()[self.case].every if self.by == "receipts" else whole

    @property
    def row(self) -> str:
        """Key of the cells that differ in the seed alone."""
        return f"{self.start}/{self.peers}/{self.by}/{self.case}"

    def __str__(self) -> str:
        return f"{self.row}/{self.seed}"


STARTS, PEERS, SEEDS = ("trained", "random"), (4, 8), (0, 1)
SYSTEMS = ("plain", "library", "replayed", "receipts")

RECEIPTS = {
    4: ("top-k-128-2bit-h15", "top-k-32-4bit-h15", "top-k-32-8bit-h15"),
    8: ("diloco-h30", "int8-h30", "top-k-32-2bit-h30", "top-k-64-2bit-h30"),
}
"""Cases whose bytes two rounds of the library tell, by the number of peers; it trains none of them to the end."""

RECEIPT_ROUNDS = 2

MAIN = (
    "diloco-h{}", "int8-h{}", "top-k-32-2bit-h{}", "top-k-64-2bit-h{}", "top-k-128-2bit-h{}", "top-k-32-4bit-h{}",
    "top-k-32-8bit-h{}", "top-k-32-2bit-h{}-no-decay", "streaming-h{}", "muon-h{}", "unequal-h{}",
)  # fmt: skip
"""Cases of the page for each number of local steps, see `page_cells`."""

JOINED = ("joined", "joined-best", "muon-joined")
MUON_COMPRESSED = ("muon-top-k-32-2bit-h15", "muon-top-k-32-2bit-h30", "muon-2bit-h30")

SHORT = ("diloco-h{}", "int8-h{}", "top-k-32-2bit-h{}", "top-k-64-2bit-h{}", "streaming-h{}", "muon-h{}", "unequal-h{}")
"""Those of them for 8 peers and a random start."""

IN_LIBRARY = (
    "top-k-32-2bit-h15", "int8-h30", "quorum-h30", "muon-h30", "streaming-h30", "top-k-64-2bit-h15",
    "top-k-64-2bit-h30", "diloco-h30", "unequal-h30", "muon-top-k-32-2bit-h15", "quorum-h100", "muon-h100",
)  # fmt: skip
"""Cases of the page that the library trains, too."""


def page_cells() -> list[Cell]:
    """The cells that the page needs, the most telling first: whole rows of one seed, then those that take long."""
    trained = partial(_cells, "trained")
    first, second = ([seed] for seed in SEEDS)
    often, seldom = ([name.format(every) for every in hs for name in MAIN] for hs in ((30, 15), (100, 50)))
    few = [name.format(every) for every in (30, 100) for name in SHORT]
    tiers: Iterable[Iterable[Cell]] = (
        trained(4, "plain", (*JOINED, *often, *seldom), first),
        trained(4, "plain", (*JOINED, *often), second),
        _cells("random", 4, "plain", ("joined", *few), first),
        trained(8, "plain", ("joined", *few, "top-k-32-2bit-h15", "top-k-64-2bit-h15"), first),
        trained(4, "library", IN_LIBRARY, first),
        trained(4, "replayed", IN_LIBRARY, first),
        trained(4, "plain", seldom, second),
        trained(4, "plain", MUON_COMPRESSED, SEEDS),
        trained(4, "library", IN_LIBRARY, second),
        trained(4, "replayed", IN_LIBRARY, second),
        (Cell("trained", peers, "receipts", name, 0) for peers, names in RECEIPTS.items() for name in names),
    )
    return list(itertools.chain.from_iterable(tiers))


def all_cells() -> list[Cell]:
    """All cells: those of the page, then the rest of the grid."""
    rest = (
        cell
        for start, peers, by in itertools.product(STARTS, PEERS, SYSTEMS)
        for cell in _cells(start, peers, by, all_cases(), SEEDS)
    )
    return list(dict.fromkeys([*page_cells(), *rest]))


def _cells(start: str, peers: int, by: str, names: Iterable[str], seeds: Sequence[int]) -> Iterator[Cell]:
    """Cells in the order of the seeds; leaves out what a system does not have."""
    known = all_cases()
    names = [name for name in names if by in known[name].systems]
    return (Cell(start, peers, by, name, seed) for seed in seeds for name in names)
