"""DiLoCo, int8 and top-k in one process with plain PyTorch: the reference for the library, without its averaging.

Every replica trains in turn on its own part of the text. A round is what `docs/reference/protocol.md` says that the
members compute: contributions as their receivers decode them, their mean, and the mean as the members decode it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import torch

from benchmarks.convergence.cases import Case, steps_in
from benchmarks.convergence.train import Inner, Recipe, Say, batches, held_out, loss_of, train_step
from examples.language_model import LanguageModel

TILE = 64
"""Blocks of a matrix are TILE × TILE; those of a vector have as many elements."""

INT8_BLOCK = 1024


@dataclass(slots=True)
class Trained:
    """The result of one case.

    Attributes:
        loss: of the mean of the peers' models on the held-out windows of the results, in bits per byte.
        tuning_loss: the same on the held-out windows for choosing learning rates.
        curve: loss on some of the windows of the results, at equal distances.
        samples: windows on which all peers together have trained.
        rounds: number of rounds.
        incomplete: rounds without all peers; such a round runs beside the training.
        bits: that one peer has contributed to all rounds, by the bits of an element; 0 from the library.
        sent: bytes that a peer has sent, in the mean, by its receipts; 0 from plain torch.
        received: the same of bytes that it has received.
        orders: order of the peers in the group of each round; from the library.
    """

    loss: float = 0.0
    tuning_loss: float = 0.0
    curve: list[float] = field(default_factory=list)
    samples: int = 0
    rounds: int = 0
    incomplete: int = 0
    bits: float = 0.0
    sent: float = 0.0
    received: float = 0.0
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
            judged = held_out(self._recipe.size.context)[1]
            self.trained.curve.append(round(loss_of(self._recipe, models, judged[:256]), 5))

    def end(self, models: Sequence[LanguageModel]) -> Trained:
        """Evaluates the last models."""
        chosen, judged = held_out(self._recipe.size.context)
        self.trained.loss = loss_of(self._recipe, models, judged)
        self.trained.tuning_loss = loss_of(self._recipe, models, chosen)
        self.trained.curve.append(round(loss_of(self._recipe, models, judged[:256]), 5))
        return self.trained


def train_joined(
    recipe: Recipe, case: Case, model: LanguageModel, steps: int, peers: int, seed: int, say: Say
) -> Trained:
    """Trains one model with the batches of all peers."""
    inner, curve = Inner(model, case.lr, case.muon), Curve(recipe, steps)
    parts = [batches(recipe, peers, part, seed) for part in range(peers)]
    for step in range(steps):
        joined = torch.cat([next(part) for part in parts])
        train_step(recipe, model, inner, joined, recipe.lr_factor(step, steps))
        curve.trained.samples += len(joined)
        curve.note([model], step, step + 1)
        if (step + 1) % 100 == 0:
            say(f"step {step + 1} of {steps}")
    return curve.end([model])


def train_replicas(
    recipe: Recipe,
    case: Case,
    model: LanguageModel,
    steps: int,
    peers: int,
    seed: int,
    say: Say,
    orders: Sequence[Sequence[int]] = (),
) -> Trained:
    """Trains one replica for each peer, and averages them as the case says.

    If the last peer is slow, the others make more steps, until all have trained on as many samples as equal peers have.

    Args:
        orders: order of the peers in the group of each round, which decides who reduces what; after the last, and by
            default, it is that of their numbers.
    """
    replicas = [LanguageModel(recipe.size) for _ in range(peers)]
    for replica in replicas:
        replica.load_state_dict(model.state_dict())
    inners = [Inner(replica, case.lr, case.muon) for replica in replicas]
    outer = Outer(case, [inner.parameters for inner in inners], orders)
    curve = Curve(recipe, steps)
    parts = [batches(recipe, peers, part, seed) for part in range(peers)]
    speeds, ticks = case.speeds(peers), case.ticks(steps, peers)
    for tick in range(ticks):
        factor = recipe.lr_factor(tick, ticks)
        for peer, speed in enumerate(speeds):
            if steps_in(tick, speed):
                train_step(recipe, replicas[peer], inners[peer], next(parts[peer]), factor)
                outer.steps[peer] += 1
                curve.trained.samples += recipe.batch
        outer.after(tick + 1, last=tick + 1 == ticks)
        curve.note(replicas, tick * steps / ticks, (tick + 1) * steps / ticks)
        if (tick + 1) % 100 == 0:
            say(f"step {tick + 1} of {ticks}")
    trained = curve.end(replicas)
    trained.rounds, trained.bits = outer.rounds, outer.bits
    return trained


class Outer:
    """The outer side of all peers: which tensors are averaged after which step, and what becomes of the average.

    Args:
        replicas: the parameters of each peer.
        orders: see `train_replicas`.

    Attributes:
        steps: local steps of each peer since the last round, the weights of a round.
        rounds: number of rounds so far.
        bits: contributed by each peer so far.
    """

    def __init__(
        self, case: Case, replicas: Sequence[Sequence[torch.nn.Parameter]], orders: Sequence[Sequence[int]] = ()
    ) -> None:
        self._case, self._orders, self._replicas = case, orders, replicas
        anchors = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self._replicas[0]]
        sizes = [anchor.numel() for anchor in anchors]
        self._anchors = anchors
        self._fragments = cut(sizes, case.fragments)
        lr, momentum = case.outer
        self._optimizers = [
            torch.optim.SGD([anchors[place] for place in fragment], lr=lr, momentum=momentum, nesterov=momentum > 0)
            for fragment in self._fragments
        ]
        self._residuals = [[torch.zeros(size) for size in sizes] for _ in replicas]
        self._lost: dict[tuple[int, int], torch.Tensor] = {}  # residual of a reducer's replies for a tensor
        self._owners = owners(sizes, self._fragments, len(replicas))
        self._pending: tuple[int, list[torch.Tensor]] | None = None
        self._since = 0
        self.steps = [0] * len(replicas)
        self.rounds, self.bits = 0, 0.0

    @torch.no_grad()
    def after(self, step: int, last: bool) -> None:
        """Ends and begins the rounds that are due after a step of all peers."""
        self._since += 1
        if self._pending is not None and (self._since >= self._case.delay or last):
            self._end()
        if self._since == self._case.every // self._case.fragments or last:
            for number in range(len(self._fragments)) if last else [self.rounds % len(self._fragments)]:
                self._begin(number)
                if not self._case.delay or last:
                    self._end()

    def _begin(self, number: int) -> None:
        fragment = self._fragments[number]
        weights = self.steps if self._case.last_speed != 1.0 else [1] * len(self.steps)
        self._pending = number, [self._average(place, weights) for place in fragment]
        self.rounds += 1
        self._since = 0
        self.steps = [0] * len(self.steps)

    def _average(self, place: int, weights: Sequence[int]) -> torch.Tensor:
        """The average of the peers' changes of one tensor."""
        anchor = self._anchors[place]
        changes = [(anchor - parameters[place]).reshape(-1) for parameters in self._replicas]
        residuals = [residuals[place] for residuals in self._residuals]
        order = self._orders[self.rounds] if self.rounds < len(self._orders) else range(len(changes))
        owner = order[self._owners[place]]
        self.bits += anchor.numel() * self._case.bits_per_weight
        match self._case.codec:
            case "none":
                return weighted_mean(changes, weights).view(anchor.shape)
            case "int8":
                losses = [
                    self._lost.setdefault((peer, place), torch.zeros(anchor.numel())) for peer in range(len(changes))
                ]
                return int8_round(changes, residuals, losses, weights, owner).view(anchor.shape)
            case "two_bit":
                return all_in_two_bit(changes, residuals, weights).view(anchor.shape)
            case _:
                lost = self._lost.setdefault((owner, place), torch.zeros(anchor.numel()))
                average = top_k_round(self._case, tuple(anchor.shape), changes, residuals, weights, lost)
                return average.view(anchor.shape)

    def _end(self) -> None:
        """Makes the outer step with the average, and merges its result with the local models."""
        assert self._pending is not None
        number, averages = self._pending
        self._pending = None
        for place, average in zip(self._fragments[number], averages, strict=True):
            self._anchors[place].grad = average
        self._optimizers[number].step()
        for place in self._fragments[number]:
            for parameters in self._replicas:
                if self._case.alpha:
                    parameters[place].lerp_(self._anchors[place], 1 - self._case.alpha)
                else:
                    parameters[place].copy_(self._anchors[place])


def cut(sizes: Sequence[int], pieces: int) -> list[list[int]]:
    """Divides tensors into pieces of about equal size: each tensor begins in the piece that its first element is in."""
    result: list[list[int]] = [[] for _ in range(pieces)]
    begins = [0, *accumulate(sizes)][:-1]
    for place, begin in enumerate(begins):
        result[begin * pieces // sum(sizes)].append(place)
    return result


def owners(sizes: Sequence[int], fragments: Sequence[Sequence[int]], peers: int) -> dict[int, int]:
    """The peer that reduces each tensor: the first one with most of its elements, if equal shares are cut in order."""
    found = {}
    for fragment in fragments:
        total, begin = sum(sizes[place] for place in fragment), 0
        for place in fragment:
            end = begin + sizes[place]
            inside = [
                min(end, total * (peer + 1) // peers) - max(begin, total * peer // peers) for peer in range(peers)
            ]
            found[place] = inside.index(max(inside))
            begin = end
    return found


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The mean of the peers' values in the order of the peers."""
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total += value * weight
    return total / sum(weights)


def int8_round(
    changes: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    losses: Sequence[torch.Tensor],
    weights: Sequence[float],
    owner: int,
) -> torch.Tensor:
    """A round with BLOCKWISE_INT8 and error feedback; the peer that reduces a tensor adds its own change exactly.

    Args:
        changes: of each peer, flat.
        residuals: of each peer; updated.
        losses: what the last reply of each peer has lost, which its contribution returns; updated.
        weights: of the peers.
        owner: the peer that reduces the tensor.
    """
    sent = []
    for peer, (change, residual, lost) in enumerate(zip(changes, residuals, losses, strict=True)):
        exact = (change + residual).add_(lost, alpha=sum(weights) / weights[peer])
        sent.append(exact if peer == owner else int8(exact))
        torch.sub(exact, sent[-1], out=residual)
        lost.zero_()
    mean = weighted_mean(sent, weights)
    reply = int8(mean)
    torch.sub(mean, reply, out=losses[owner])
    return reply


def int8(values: torch.Tensor) -> torch.Tensor:
    """The values as a receiver decodes them: blocks of 1,024, each scaled to a largest magnitude of 127."""
    result = torch.empty_like(values)
    for start in range(0, len(values), INT8_BLOCK):
        block = values[start : start + INT8_BLOCK]
        largest = block.abs().max()
        codes = (block * (127 / largest)).round() if largest > 0 else torch.zeros_like(block)
        result[start : start + INT8_BLOCK] = codes * (largest / 127)
    return result


def all_in_two_bit(
    changes: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """A round in which all weights are sent in 2 bit, with error feedback (MuLoCo, arXiv:2505.23725)."""
    sent = []
    for change, residual in zip(changes, residuals, strict=True):
        exact = change + residual
        sent.append(quantised(exact, 2))
        torch.sub(exact, sent[-1], out=residual)
    return weighted_mean(sent, weights)


def top_k_round(
    case: Case,
    shape: tuple[int, ...],
    changes: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    weights: Sequence[float],
    lost: torch.Tensor | None = None,
) -> torch.Tensor:
    """A round with top-k, whose contributions no peer may dominate: each is scaled to at most the lower median norm.

    Args:
        shape: of the tensor.
        changes: of each peer, flat.
        residuals: of each peer, flat and in the order of the blocks; updated.
        weights: of the peers.
        lost: what earlier replies of the peer that reduces the tensor have lost, in the order of the blocks; updated.
            None sends all averages exactly.
    """
    order, runs = blocks(shape)
    sent, chosen = [], []
    for change, residual in zip(changes, residuals, strict=True):
        exact = torch.add(change[order], residual, alpha=case.decay)
        kept = largest(exact, runs, case.keeps)
        values = torch.zeros_like(exact)
        values[kept] = quantised(exact[kept], case.bits)
        torch.sub(exact, values, out=residual)
        sent.append(values)
        chosen.append(torch.zeros_like(exact).index_fill_(0, kept, 1.0))
    result = torch.empty_like(changes[0])
    for run in runs:  # the elements of a run are one part of a round
        part = slice(run.start, run.stop)
        masks = [mask[part] for mask in chosen]
        mean = mean_of_sparse([values[part] for values in sent], masks, weights, case.senders)
        if lost is not None and not comes_as_sent(case, run, masks):
            union = torch.stack(masks).amax(dim=0) > 0
            exact = torch.where(union, mean + lost[part], 0.0)
            mean = exact.bfloat16().float() if reply_bits(run, union) == 16 else coarse(exact, union)
            lost[part] = torch.where(union, exact - mean, lost[part])
        result[order[part]] = mean
    return result


def comes_as_sent(case: Case, run: Run, masks: Sequence[torch.Tensor]) -> bool:
    """Whether the contributions as they came are a shorter reply than their mean."""
    kept = int(masks[0].sum())
    few = kept < 2**case.bits
    contribution = math.ceil(1.5 * kept) + (4 * kept if few else (4 << case.bits) + math.ceil(kept * case.bits / 8))
    union = torch.stack(list(masks)).amax(dim=0)
    return 3 + len(masks) * (8 + contribution) <= min(reply_sizes(run, int(union.sum())).values())


def reply_sizes(run: Run, count: int) -> dict[int, int]:
    """Bytes of a mean of `count` elements with values of 8 and of 16 bit."""
    numel = run.stop - run.start
    places = min(2 * (numel // run.size) + math.ceil(1.5 * count), math.ceil(numel / 8))
    return {8: 1 + places + (4 << 8) + count, 16: 1 + places + 2 * count}


def reply_bits(run: Run, union: torch.Tensor) -> int:
    """Bits of each value in the shorter of the two."""
    sizes = reply_sizes(run, int(union.sum()))
    return min(sizes, key=lambda bits: sizes[bits])


def coarse(values: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    """The values with 8 bit for those in the union, and 0 for the others."""
    result = torch.zeros_like(values)
    result[union] = quantised(values[union], 8)
    return result


def mean_of_sparse(
    sent: Sequence[torch.Tensor], chosen: Sequence[torch.Tensor], weights: Sequence[float], senders: bool
) -> torch.Tensor:
    """The mean of one part, per element over those that sent it or over all."""
    norms = [float(torch.linalg.vector_norm(values, dtype=torch.float64)) for values in sent]
    median = statistics.median_low([norm for norm in norms if norm] or [0.0])
    # In double precision, so that the order of the peers does not matter; weights and scales are sent as float32.
    total, count = torch.zeros(2, len(sent[0]), dtype=torch.float64)
    for values, mask, norm, weight in zip(sent, chosen, norms, weights, strict=True):
        scale = float(torch.tensor(min(1.0, median / norm) if norm else 1.0))
        total += values.double() * scale * weight
        count += mask * weight if senders else weight
    return torch.where(count > 0, total / count.clamp(min=1e-30), 0.0).float()


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one size: elements `start` to `stop` in the order of the blocks."""

    start: int
    stop: int
    size: int


@cache
def blocks(shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[Run, ...]]:
    """The flat index of each element in the order of the blocks, and the runs of blocks of one size.

    A matrix has its full tiles row by row, then those at the right edge, at the bottom edge, and in the corner.
    """
    flat = torch.arange(math.prod(shape))
    if len(shape) < 2:
        whole = len(flat) // TILE**2 * TILE**2
        pieces = [
            list(torch.split(flat[:whole], TILE**2)) if whole else [],
            [flat[whole:]] if whole < len(flat) else [],
        ]
    else:
        matrix = flat.view(shape[0], -1)
        down, right = (extent // TILE * TILE for extent in matrix.shape)
        quarters = (
            matrix[:down, :right], matrix[:down, right:], matrix[down:, :right], matrix[down:, right:],
        )  # fmt: skip
        pieces = [tiles(quarter) if quarter.numel() else [] for quarter in quarters]
    runs, start = [], 0
    for same in filter(None, pieces):
        size = len(same[0])
        runs.append(Run(start, start + size * len(same), size))
        start = runs[-1].stop
    return torch.cat([block for same in pieces for block in same]), tuple(runs)


def tiles(quarter: torch.Tensor) -> list[torch.Tensor]:
    return [tile.reshape(-1) for rows in torch.split(quarter, TILE) for tile in torch.split(rows, TILE, dim=1)]


def largest(values: torch.Tensor, runs: Sequence[Run], keeps: int) -> torch.Tensor:
    """Indices of the largest magnitudes of each block: one of `keeps` of its elements, at least one."""
    found = []
    for run in runs:
        matrix = values[run.start : run.stop].view(-1, run.size)
        inside = matrix.abs().topk(max(1, round(run.size / keeps)), dim=1).indices.sort(dim=1).values
        firsts = torch.arange(run.start, run.stop, run.size)
        found.append((inside + firsts[:, None]).reshape(-1))
    return torch.cat(found)


def quantised(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The values as a receiver decodes them: the mean of all values in the same of 2^bits bins of 6 std / 2^bits."""
    bins = 2**bits
    if len(values) <= bins:
        return values
    exact = values.double()
    centred = exact - exact.mean()
    width = 6 * exact.std() / bins
    if not width:
        return exact.mean().float().expand_as(values)
    codes = ((centred / width).round() + bins // 2).clamp(0, bins - 1).long()
    sums, counts = torch.bincount(codes, exact, bins), torch.bincount(codes, minlength=bins)
    return (sums / counts.clamp(min=1)).float()[codes]
