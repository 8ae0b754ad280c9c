"""The training of the convergence benchmark: text, model, start, optimizers and held-out loss. All cases share it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_

from examples.language_model import LanguageModel, Size, windows
from examples.sources import partition, standard_library

CURVE, JUDGED = 256, 2048
"""Number of held-out windows for the curves, and for the final evaluation."""

START_LR = 4e-3
"""Maximum learning rate of the joint steps before a trained start."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings common to all cases.

    Attributes:
        steps: steps of one batch per peer from a trained start.
        random_steps: the same from a random start.
        joint_steps: steps of `joint_peers` joined batches before a trained start.
        joint_peers: number of peers whose batches and texts are joined before a trained start.
        batch: windows in a peer's batch; the joined batch has as many for each peer.
        size: size of the model.
        warm_up: fraction of the steps in which the learning rate rises.
        max_norm: gradients of the inner optimizer are clipped to this norm.
        snapshots: number of points of the curve of the held-out loss.
    """

    steps: int = 900
    random_steps: int = 3000
    joint_steps: int = 600
    joint_peers: int = 4
    batch: int = 8
    size: Size = field(default_factory=lambda: Size(layers=2, width=64, heads=4, context=64))
    warm_up: float = 0.05
    max_norm: float = 1.0
    snapshots: int = 18

    def steps_from(self, start: str) -> int:
        """Steps of a case from this start, `trained` or `random`."""
        return self.steps if start == "trained" else self.random_steps

    def lr_factor(self, done: float, steps: int) -> float:
        """Factor of the learning rate after `done` of `steps`: a linear rise, then half a cosine to a twentieth."""
        rise = min(1.0, (done + 1) / (self.warm_up * steps))
        return rise * (0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, done / steps))) / 2)


def use_text(file: Path) -> str:
    """Makes this process train on the text in a file, not on its own Python's standard library; returns its digest.

    Results are comparable only if they have the same text, which differs between versions of Python. So it is kept
    beside the results, written first if it is not there, and taken along to other machines.
    """
    if not file.exists():
        temporary = file.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as archive:
            for number, path in enumerate(standard_library()):
                archive.writestr(f"{number:04}-{path.name}", path.read_bytes())
        temporary.replace(file)
    with zipfile.ZipFile(file) as archive:
        _text[:] = [archive.read(name) for name in sorted(archive.namelist())]
    texts.cache_clear()
    held_out.cache_clear()
    return digest()


_text: list[bytes] = []
"""The files that are learned."""


def files() -> list[bytes]:
    if not _text:
        _text.extend(path.read_bytes() for path in standard_library())
    return _text


def digest() -> str:
    return hashlib.sha256(b"\0".join(files())).hexdigest()[:16]


def joined(contents: Sequence[bytes]) -> torch.Tensor:
    """All bytes of the files, concatenated, as uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)


@cache
def texts(parts: int) -> tuple[torch.Tensor, ...]:
    """The parts of the text, one for each peer: neighbours in the alphabet, so that the parts differ."""
    blocks, _ = partition([len(content) for content in files()], parts)
    return tuple(joined([files()[place] for place in block]) for block in blocks)


@cache
def held_out(context: int) -> torch.Tensor:
    """Held-out windows [JUDGED, context + 1]: of every other held-out file, since the rest chose the learning rates."""
    _, places = partition([len(content) for content in files()], 1)
    text = joined([files()[place] for place in places[1::2]])
    return windows(text, JUDGED, context, torch.Generator().manual_seed(0))


def batches(recipe: Recipe, peers: int, part: int, seed: int) -> Iterator[torch.Tensor]:
    """The batches of one peer, [batch, context + 1]: random windows of its part of the text, the same in every case."""
    random = torch.Generator().manual_seed(1_000_000 + 1000 * seed + part)
    text = texts(peers)[part]
    while True:
        yield windows(text, recipe.batch, recipe.size.context, random)


def new_model(recipe: Recipe, seed: int) -> LanguageModel:
    """The same random model each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(recipe.size)


def train_step(recipe: Recipe, model: LanguageModel, inner: Inner, batch: torch.Tensor, factor: float) -> None:
    """One step of the inner optimizer with clipped gradients, at this fraction of its maximum learning rate."""
    inner.zero_grad()
    model.loss(batch).backward()  # type: ignore[no-untyped-call]
    clip_grad_norm_(model.parameters(), recipe.max_norm)
    inner.step(factor)


class Inner:
    """The inner optimizer: AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

    Args:
        model: the model to train.
        lr: maximum learning rate of AdamW.
        muon: learning rate of Muon in proportion to that of AdamW; None is AdamW alone.
    """

    def __init__(self, model: LanguageModel, lr: float, muon: float | None = None) -> None:
        matrices = [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
        inside = {id(matrix) for matrix in matrices} if muon is not None else set()
        others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        self._pairs: list[tuple[torch.optim.Optimizer, float]] = [(adamw(others), lr)]
        if muon is not None:
            self._pairs.insert(0, (torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0), lr * muon))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """All parameters in the order in which the library averages them: that of an optimizer's groups."""
        return [one for optimizer, _ in self._pairs for group in optimizer.param_groups for one in group["params"]]

    def statistics(self, kind: str) -> list[torch.Tensor]:
        """The optimizers' statistics of that name, such as `exp_avg`, for each parameter."""
        return [state[kind] for optimizer, _ in self._pairs for state in optimizer.state.values()]

    def zero_grad(self) -> None:
        for optimizer, _ in self._pairs:
            optimizer.zero_grad()

    def step(self, factor: float) -> None:
        """One step at this fraction of the maximum learning rates, rounded as a scheduler of torch rounds it."""
        for optimizer, lr in self._pairs:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()


def adamw(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW with the settings of all cases; its learning rate is set before each step."""
    return torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.95))


def start_model(recipe: Recipe, start: str, seed: int, cache_folder: Path, say: Say) -> LanguageModel:
    """The model that all cases of a seed begin with; a trained one is trained once and read from the cache then."""
    model = new_model(recipe, seed)
    if start == "random":
        return model
    settings = json.dumps([asdict(recipe), START_LR, seed, digest()], sort_keys=True)
    file = cache_folder / f"start-{seed}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}.safetensors"
    if not file.exists():
        say(f"trains the start of seed {seed}: {recipe.joint_steps} joint steps")
        train_start(recipe, model, seed)
        temporary = file.with_suffix(f".{os.getpid()}")
        save_file(model.state_dict(), temporary, {"torch": torch.__version__})
        temporary.replace(file)
    model.load_state_dict(load_file(file))
    return model


def train_start(recipe: Recipe, model: LanguageModel, seed: int) -> None:
    """Trains a random model with joined batches."""
    inner = Inner(model, START_LR)
    parts = [batches(recipe, recipe.joint_peers, part, seed + 500) for part in range(recipe.joint_peers)]
    for step in range(recipe.joint_steps):
        rise = min(1.0, (step + 1) / (recipe.warm_up * recipe.joint_steps))
        train_step(recipe, model, inner, torch.cat([next(part) for part in parts]), rise)


@torch.no_grad()
def loss_of(recipe: Recipe, models: Sequence[LanguageModel], held: torch.Tensor) -> float:
    """Held-out loss in bits per byte of the mean of the peers' models."""
    with torch.random.fork_rng(devices=[]):
        mean = LanguageModel(recipe.size)
    for target, *sources in zip(mean.parameters(), *(model.parameters() for model in models), strict=True):
        target.copy_(sources[0] if len(sources) == 1 else torch.stack(sources).mean(0))
    return mean.evaluate(held)


@dataclass(slots=True)
class Trained:
    """The result of one case.

    Attributes:
        loss: of the mean of the peers' models on the held-out windows, in bits per byte.
        curve: loss on some of the windows, at equal distances.
        samples: windows on which all peers together have trained.
        rounds: number of rounds.
        incomplete: rounds without all peers; such a round runs beside the training.
        sent: bytes that a peer has sent, in the mean, by its receipts; 0 from plain torch.
        orders: order of the peers in the group of each round; from the library.
    """

    loss: float = 0.0
    curve: list[float] = field(default_factory=list)
    samples: int = 0
    rounds: int = 0
    incomplete: int = 0
    sent: float = 0.0
    orders: list[list[int]] = field(default_factory=list)


class Curve:
    """The held-out loss at equal distances.

    Args:
        steps: steps in which the peers train on all samples.
    """

    def __init__(self, recipe: Recipe, steps: int) -> None:
        self._recipe, self._steps = recipe, steps
        self.trained = Trained()

    def note(self, models: Sequence[LanguageModel], before: float, now: float) -> None:
        """Evaluates the models if a mark lies between these numbers of steps; the end has an evaluation of its own."""
        every = self._steps / self._recipe.snapshots
        if now < self._steps and int(now / every) > int(before / every):
            self._point(models)

    def end(self, models: Sequence[LanguageModel]) -> Trained:
        """Evaluates the last models."""
        self.trained.loss = loss_of(self._recipe, models, held_out(self._recipe.size.context))
        self._point(models)
        return self.trained

    def _point(self, models: Sequence[LanguageModel]) -> None:
        some = held_out(self._recipe.size.context)[:CURVE]
        self.trained.curve.append(round(loss_of(self._recipe, models, some), 5))
