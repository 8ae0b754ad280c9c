"""Trains one case of the convergence benchmark: the model in one process, or in one process per peer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from averaging import DecentralizedAverager, GradientAveraging, Receipt, Strategy
from examples.language_model import LanguageModel, Size, read, windows
from examples.sources import divide, standard_library

PATIENCE = 60.0
"""Seconds for which peers wait for each other before the first step."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings common to all cases.

    Attributes:
        steps: number of steps of one batch per peer.
        peers: number of peers.
        batch: windows in a peer's batch; the single process's batch has `peers` times as many.
        size: size of the model.
        warm_up: fraction of the steps in which the learning rate rises.
        max_norm: gradients of the inner optimizer are clipped to this norm.
        snapshots: number of times that the model is saved for evaluation.
        seed: seed of the model and of the order of the text.
    """

    steps: int = 1000
    peers: int = 4
    batch: int = 8
    size: Size = field(default_factory=lambda: Size(layers=2, width=128, heads=4, context=64))
    warm_up: float = 0.05
    max_norm: float = 1.0
    snapshots: int = 20
    seed: int = 0

    @property
    def samples(self) -> int:
        """Number of windows on which all peers together train."""
        return self.steps * self.peers * self.batch

    def lr_factor(self, samples: float) -> float:
        """Factor of the learning rate after some samples: a linear rise, then half a cosine down to a twentieth."""
        done = min(1.0, samples / self.samples)
        rise = min(1.0, (samples + self.peers * self.batch) / (self.warm_up * self.samples))
        return rise * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train.

    Attributes:
        title: name in the page.
        lr: maximum learning rate of the inner optimizer.
        strategy: creates the peers' strategy; None is one process with the joined batch.
        pieces: number of pieces into which a peer's batch is cut, each an `opt.step()`; for GradientAveraging.
    """

    title: str
    lr: float
    strategy: Callable[[], Strategy] | None = None
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Round:
    """A summary of one receipt."""

    samples: float
    complete: bool
    members: int
    seconds: float
    bytes_sent: int
    reason: str


@dataclass(slots=True)
class Trained:
    """The results of one process.

    Attributes:
        seconds: from the first step to the end, including the strategy's last result.
        snapshots: all parameters as one vector, by the number of samples of all peers together.
        rounds: the receipts.
        local_steps: calls of `opt.step()`.
        global_steps: global steps, if the strategy has them.
        counts_samples: whether a global step is a step of the inner optimizer, as with GradientAveraging.
    """

    seconds: float = 0.0
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    local_steps: int = 0
    global_steps: int | None = None
    counts_samples: bool = False


class Text:
    """The batches of one peer: random windows of its own part of the text, the same in every case."""

    def __init__(self, recipe: Recipe, part: int) -> None:
        self.recipe = recipe
        self.bytes = read(divide(standard_library(), recipe.peers).parts[part])
        self.random = torch.Generator().manual_seed(1000 * recipe.seed + part)

    def draw(self) -> torch.Tensor:
        """Returns the next batch, [batch, context + 1]."""
        return windows(self.bytes, self.recipe.batch, self.recipe.size.context, self.random)


def held_out() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns the held-out files: those for choosing learning rates, and those for the final evaluation."""
    files = divide(standard_library(), 1).held_out
    return files[0::2], files[1::2]


def new_model(recipe: Recipe) -> LanguageModel:
    """Returns the same model each time."""
    torch.manual_seed(recipe.seed)
    return LanguageModel(recipe.size)


def new_optimizer(recipe: Recipe, case: Case, model: LanguageModel) -> torch.optim.Optimizer:
    """AdamW that clips its gradients: with GradientAveraging, the averaged ones."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=case.lr, betas=(0.9, 0.95))

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def backward(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    model.loss(batch).backward()  # type: ignore[no-untyped-call]


class Snapshots:
    """Saves the model at regular distances.

    Args:
        recipe: settings of all cases.
        model: the model whose parameters are saved.
    """

    def __init__(self, recipe: Recipe, model: LanguageModel) -> None:
        self._every = recipe.samples / recipe.snapshots
        self._last = recipe.samples
        self._model = model
        self.taken: dict[int, torch.Tensor] = {}

    def at(self, before: float, now: float) -> None:
        """Saves the model if a mark lies between `before` and `now` samples. `end` saves the last one."""
        if now < self._last and int(now / self._every) > int(before / self._every):
            self._take(round(now))

    def end(self, samples: float) -> None:
        self._take(round(samples))

    def _take(self, samples: int) -> None:
        self.taken[samples] = torch.nn.utils.parameters_to_vector(self._model.parameters()).detach().clone()


def train_alone(recipe: Recipe, case: Case, say: Callable[[str], None]) -> Trained:
    """Trains in one process with the batches of all peers."""
    torch.set_num_threads(1)
    model = new_model(recipe)
    optimizer = new_optimizer(recipe, case, model)
    joined = recipe.peers * recipe.batch
    schedule = LambdaLR(optimizer, lambda step: recipe.lr_factor(step * joined))
    texts = [Text(recipe, part) for part in range(recipe.peers)]
    snapshots = Snapshots(recipe, model)
    begun = time.perf_counter()
    for step in range(recipe.steps):
        backward(model, optimizer, torch.cat([text.draw() for text in texts]))
        optimizer.step()
        schedule.step()
        snapshots.at(step * joined, (step + 1) * joined)
        if (step + 1) % 100 == 0:
            say(f"step {step + 1}, {time.perf_counter() - begun:.0f} s")
    seconds = time.perf_counter() - begun
    snapshots.end(recipe.samples)
    return Trained(seconds, snapshots.taken, [], recipe.steps, recipe.steps)


class PeerProcess:
    """One peer of a case.

    Args:
        recipe: settings of all cases.
        case: how it trains.
        part: number of the peer and of its part of the text, from 0.
        port: port of peer 0.
        say: reports progress.
    """

    def __init__(self, recipe: Recipe, case: Case, part: int, port: int, say: Callable[[str], None]) -> None:
        torch.set_num_threads(1)
        self.recipe, self.case, self.say = recipe, case, say
        self.samples = 0.0  # of all peers, as far as this one knows
        self.trained = Trained()
        self.model = new_model(recipe)
        self.snapshots = Snapshots(recipe, self.model)
        self.text = Text(recipe, part)
        if case.strategy is None:
            raise ValueError("a case of one process has no peers")
        strategy = case.strategy()
        # With GradientAveraging only receipts show how many samples the other peers had.
        self.trained.counts_samples = isinstance(strategy, GradientAveraging)
        first = f"127.0.0.1:{port}"
        self.opt = DecentralizedAverager(
            new_optimizer(recipe, case, self.model),
            run_id="convergence",
            strategy=strategy,
            listen=first if part == 0 else "127.0.0.1:0",
            join=[] if part == 0 else [first],
            join_timeout=PATIENCE,
            group_size=recipe.peers,
            group_wait=10.0,
            round_timeout=30.0,
            stall_timeout=10.0,
            scheduler=lambda optimizer: LambdaLR(optimizer, lambda _: recipe.lr_factor(self.samples)),
            on_round=self.note,
        )

    def note(self, receipt: Receipt) -> None:
        """Keeps a receipt. With GradientAveraging it has the number of samples of the step."""
        if self.trained.counts_samples and receipt.averaged:
            self.samples += sum(receipt.gathered[member]["samples"] for member in receipt.members)
        complete = receipt.averaged and not receipt.dropped
        members, reason = len(receipt.members), receipt.reason
        self.trained.rounds.append(Round(self.samples, complete, members, receipt.seconds, receipt.bytes_sent, reason))

    def run(self) -> Trained:
        """Trains to the end."""
        recipe, trained = self.recipe, self.trained
        joined = recipe.peers * recipe.batch
        with self.opt as opt:
            # no peer makes a step alone
            if not opt.wait_for_peers(recipe.peers, PATIENCE):
                raise TimeoutError(f"only {len(opt.peers)} of {recipe.peers} peers have come")
            begun = time.perf_counter()
            for piece in self.pieces():
                backward(self.model, opt, piece)
                before = self.samples
                if not trained.counts_samples:
                    self.samples += joined
                opt.step(batch_size=len(piece))
                trained.local_steps += 1
                self.snapshots.at(before, self.samples)
                if trained.local_steps % (100 * self.case.pieces) == 0:
                    seconds = time.perf_counter() - begun
                    self.say(f"step {trained.local_steps}, {self.samples / recipe.samples:.0%}, {seconds:.0f} s")
        trained.seconds = time.perf_counter() - begun
        trained.global_steps = opt.global_step
        self.snapshots.end(self.samples)
        trained.snapshots = self.snapshots.taken
        return trained

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yields the batches in the pieces of the case, until all peers together have trained on enough samples."""
        while True:
            for piece in self.text.draw().chunk(self.case.pieces):
                if self.samples >= self.recipe.samples:
                    return
                yield piece
