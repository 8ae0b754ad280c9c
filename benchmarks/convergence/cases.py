"""The cases of the convergence benchmark by name, and its cells in the order in which they are worth running. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

DENSE_BITS = 32
INDEX_BITS = 12
DECAY = 0.95
NESTEROV = (0.7, 0.9)
"""Learning rate and momentum of the outer optimizer of DiLoCo."""

JOINED_LR, LOCAL_LR, SPARSE_LR, MUON_LR = 4e-3, 2e-3, 2e-3, 2e-3
"""Maximum inner learning rates. That of the joined batch is the one of the start; the others were chosen by held-out
files for that."""

MUON_FACTOR = 5.0
"""Learning rate of Muon for the matrices in proportion to that of AdamW for the rest."""

STEPS = (15, 30, 50, 100)
"""Local steps between two rounds."""


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
        outer: learning rate and Nesterov momentum of the outer optimizer.
        fragments: number of pieces of the model, averaged at different steps.
        delay: local steps for which a round runs beside the training.
        alpha: weight of the local model when a result arrives.
        muon: learning rate of Muon in proportion to AdamW's; None is AdamW alone.
        last_speed: local steps of the last peer in one step of the others.
        quorum: whether a round waits for the fast peers only, and the last one comes after as many steps as they make;
            else it comes to each round with the steps that it has.
        moments: rounds between two averages of AdamW's first moments, and of its second moments; None if they are never
            averaged.
    """

    name: str
    title: str
    lr: float = LOCAL_LR
    every: int = 0
    codec: str = "none"
    keeps: int = 1
    bits: int = DENSE_BITS
    decay: float = 1.0
    outer: tuple[float, float] = NESTEROV
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    muon: float | None = None
    last_speed: float = 1.0
    quorum: bool = False
    moments: tuple[int, int] | None = None

    @property
    def systems(self) -> tuple[str, ...]:
        """What can train this way."""
        if self.quorum:  # plain torch knows no time, so nobody is late there
            return ("library",)
        if not self.every or (self.every * self.last_speed) % 1:
            return ("plain",)
        return SYSTEMS

    def speeds(self, peers: int) -> list[float]:
        """Local steps of each peer in one step of the others."""
        return [1.0] * (peers - 1) + [self.last_speed]

    def ticks(self, steps: int, peers: int) -> int:
        """Steps of a fast peer until all have trained on as many samples as equal peers have after `steps`."""
        return round(steps * peers / sum(self.speeds(peers)))

    @property
    def bits_per_weight(self) -> float:
        """Bits of a peer's contribution to one round for each weight, on average, without tables and scales."""
        if self.codec == "top_k":
            return (INDEX_BITS + self.bits) / self.keeps
        return self.bits * (1.0 + sum(1 / rounds for rounds in self.moments or ()))

    @property
    def ratio(self) -> float:
        """How many times fewer bits a peer contributes than float32 gradients at every step; 0 if it sends nothing."""
        return self.every * DENSE_BITS / self.bits_per_weight


def steps_in(tick: int, speed: float) -> bool:
    """Whether a peer of this speed makes a step in a tick, which is a step of the fast ones."""
    return math.floor((tick + 1) * speed + 1e-9) > math.floor(tick * speed + 1e-9)


def diloco(every: int, codec: str = "none") -> Case:
    """DiLoCo as in its paper, with float32 or int8 on the wire."""
    if codec == "int8":
        return Case(f"int8-h{every}", f"DiLoCo, H={every}, int8", every=every, codec=codec, bits=8)
    return Case(f"diloco-h{every}", f"DiLoCo, H={every}", every=every)


def top_k(every: int, keeps: int, bits: int, decay: bool = True) -> Case:
    """DiLoCo whose peers send one of `keeps` weights, and whose residual takes the place of outer momentum."""
    return Case(
        f"top-k-{keeps}-{bits}bit-h{every}" + ("" if decay else "-no-decay"),
        f"top-k 1/{keeps}, {bits} bit, H={every}" + ("" if decay else ", residual without decay"),
        SPARSE_LR,
        every,
        "top_k",
        keeps,
        bits,
        decay=DECAY if decay else 1.0,
        outer=(1.0, 0.0),
    )


def local_adam(every: int, moments: tuple[int, int] = (1, 1)) -> Case:
    """Local Adam, which averages parameters and moments; DES-LOC if the moments are averaged in some rounds only."""
    seldom = moments != (1, 1)
    title = f"Local Adam, H={every}" + (f", moments every {moments[0]} and {moments[1]} rounds" if seldom else "")
    name = f"des-loc-h{every}" if seldom else f"local-adam-h{every}"
    return Case(name, title, every=every, outer=(1.0, 0.0), moments=moments)


def with_muon(case: Case) -> Case:
    return replace(case, name=f"muon-{case.name}", title=f"Muon inside, {case.title}", lr=MUON_LR, muon=MUON_FACTOR)


def of_each(every: int) -> list[Case]:
    """The cases with so many local steps between two rounds."""
    delay = max(1, every // 18)
    streaming = replace(diloco(every), fragments=5, delay=delay, alpha=0.5)
    unequal = replace(diloco(every), last_speed=0.1)
    title = f"{unequal.title}, the last peer at a tenth of the speed"
    sparse = itertools.product((16, 32, 64, 128), (2, 4, 8), (True, False))
    return [
        diloco(every),
        diloco(every, "int8"),
        local_adam(every),
        local_adam(every, (3, 6)),
        *(top_k(every, keeps, bits, decay) for keeps, bits, decay in sparse),
        replace(streaming, name=f"streaming-h{every}", title=f"Streaming DiLoCo, H={every}, 5 fragments"),
        replace(with_muon(diloco(every)), name=f"muon-h{every}"),
        with_muon(top_k(every, 32, 2)),
        replace(unequal, name=f"unequal-h{every}", title=title),
        replace(unequal, name=f"quorum-h{every}", title=f"{title}, quorum of the others", quorum=True),
    ]


CASES = {
    case.name: case
    for case in (
        Case("joined", "one process, joined batch", JOINED_LR),
        Case("muon-joined", "one process, joined batch, Muon", MUON_LR, muon=MUON_FACTOR),
        *itertools.chain.from_iterable(map(of_each, STEPS)),
    )
}
"""The cases by name, in the page's order."""


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

    def __str__(self) -> str:
        return f"{self.start}/{self.peers}/{self.by}/{self.case}/{self.seed}"

    @classmethod
    def parse(cls, key: str) -> Cell | None:
        """The cell of a recorded result; None for one that this benchmark no longer has."""
        start, peers, by, case, seed = key.split("/")
        return (
            cls(start, int(peers), by, case, int(seed)) if by in SYSTEMS and case in CASES and "@" not in seed else None
        )


STARTS, PEERS, SEEDS = ("trained", "random"), (4, 8), (0, 1)
SYSTEMS = ("plain", "library")

MAIN = (
    "diloco-h{}", "int8-h{}", "top-k-32-2bit-h{}", "top-k-64-2bit-h{}", "streaming-h{}", "muon-h{}", "unequal-h{}",
    "top-k-128-2bit-h{}", "top-k-32-8bit-h{}", "top-k-32-2bit-h{}-no-decay", "local-adam-h{}", "des-loc-h{}",
)  # fmt: skip
"""Cases of the page for each number of local steps; the first 7 of them also for 8 peers and a random start."""

IN_LIBRARY = (
    "top-k-32-2bit-h15", "int8-h30", "quorum-h30", "muon-h30", "streaming-h30", "top-k-64-2bit-h30", "diloco-h30",
    "unequal-h30", "quorum-h100", "local-adam-h30", "des-loc-h30",
)  # fmt: skip
"""Cases of the page that the library trains, too."""


def page_cells() -> list[Cell]:
    """The cells that the page needs, the most telling first."""
    joined = ("joined", "muon-joined")
    often, seldom = ([name.format(every) for every in hs for name in MAIN] for hs in ((30, 15), (100, 50)))
    few = [name.format(every) for every in (30, 100) for name in MAIN[:7]]
    return [
        *_cells("trained", 4, "plain", (*joined, *often, *seldom), 0),
        *_cells("random", 4, "plain", ("joined", *few), 0),
        *_cells("trained", 8, "plain", ("joined", *few, "top-k-32-2bit-h15", "top-k-64-2bit-h15"), 0),
        *_cells("trained", 4, "library", IN_LIBRARY, 0),
        *_cells("trained", 4, "plain", (*joined, *often, *seldom), 1),
        *_cells("trained", 4, "library", IN_LIBRARY, 1),
    ]


def all_cells() -> list[Cell]:
    """All cells: those of the page, then the rest of the grid."""
    grid = itertools.product(STARTS, PEERS, SYSTEMS, SEEDS)
    rest = (cell for start, peers, by, seed in grid for cell in _cells(start, peers, by, CASES, seed))
    return list(dict.fromkeys([*page_cells(), *rest]))


def _cells(start: str, peers: int, by: str, names: Iterable[str], seed: int) -> list[Cell]:
    """Leaves out what a system does not have."""
    return [Cell(start, peers, by, name, seed) for name in names if by in CASES[name].systems]
