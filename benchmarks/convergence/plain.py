"""DiLoCo, int8 and top-k in one process with plain PyTorch: the reference for the library's strategies and rounds.

Every replica trains in turn on its own part of the text. A round is what `docs/reference/protocol.md` says that the
members compute: contributions as their receivers decode them, their mean, and the mean as the members decode it. Only
the codecs are the library's, whose own references are in its tests.
"""

import itertools
import statistics
from collections.abc import Sequence
from itertools import accumulate

import torch

from averaging.protocol.messages import CompressionType, TopK
from averaging.tensors.compression import decode, encode
from averaging.tensors.sparse import BlockLayout, Contribution, SparseTensor, encode_union
from benchmarks.convergence.cases import Case, steps_in
from benchmarks.convergence.train import Curve, Inner, Recipe, Say, Trained, batches, train_step
from examples.language_model import LanguageModel


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
        factor, rounds = recipe.lr_factor(tick, ticks), outer.rounds
        for peer, speed in enumerate(speeds):
            if steps_in(tick, speed):
                train_step(recipe, replicas[peer], inners[peer], next(parts[peer]), factor)
                outer.steps[peer] += 1
                curve.trained.samples += recipe.batch
        outer.after(tick + 1, last=tick + 1 == ticks)
        if case.moments is not None and outer.rounds > rounds:
            average_moments(inners, [outer.rounds % each == 0 for each in case.moments])
        curve.note(replicas, tick * steps / ticks, (tick + 1) * steps / ticks)
        if (tick + 1) % 100 == 0:
            say(f"step {tick + 1} of {ticks}")
    trained = curve.end(replicas)
    trained.rounds = outer.rounds
    return trained


@torch.no_grad()
def average_moments(inners: Sequence[Inner], due: Sequence[bool]) -> None:
    """Gives all peers the mean of their first moments, and of their second moments, as far as they are due."""
    for kind in itertools.compress(("exp_avg", "exp_avg_sq"), due):
        for moments in zip(*(inner.statistics(kind) for inner in inners), strict=True):
            mean = torch.stack(moments).mean(0)
            for moment in moments:
                moment.copy_(mean)


class Outer:
    """The outer side of all peers: which tensors are averaged after which step, and what becomes of the average.

    Args:
        replicas: the parameters of each peer.
        orders: see `train_replicas`.

    Attributes:
        steps: local steps of each peer since the last round, the weights of a round.
        rounds: number of rounds so far.
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
        self.rounds = 0

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
        match self._case.codec:
            case "none":
                return weighted_mean(changes, weights).view(anchor.shape)
            case "int8":
                losses = [
                    self._lost.setdefault((peer, place), torch.zeros(anchor.numel())) for peer in range(len(changes))
                ]
                return int8_round(changes, residuals, losses, weights, owner).view(anchor.shape)
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
    """The values as a receiver decodes them."""
    return decode(encode(values, CompressionType.BLOCKWISE_INT8))


def top_k_round(
    case: Case,
    shape: tuple[int, ...],
    changes: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    weights: Sequence[float],
    lost: torch.Tensor,
) -> torch.Tensor:
    """A round with top-k, whose contributions no peer may dominate: each is scaled to at most the lower median norm.

    Args:
        shape: of the tensor.
        changes: of each peer, flat.
        residuals: of each peer, flat and in the order of the blocks; updated.
        weights: of the peers.
        lost: what earlier replies of the peer that reduces the tensor have lost, in the order of the blocks; updated.
    """
    layout, top = BlockLayout(shape), TopK(1 / case.keeps, case.bits)
    sent = []
    for change, residual in zip(changes, residuals, strict=True):
        exact = torch.add(layout.to_blocks(change.view(shape)), residual, alpha=case.decay)
        sent.append(SparseTensor.of(exact, layout, top))
        torch.sub(exact, sent[-1].dense(), out=residual)
    result = torch.empty_like(changes[0])
    for run in layout.runs:  # the elements of a run are one part of a round
        place = slice(run.start, run.stop)
        parts = [one.values(run.start, run.stop) for one in sent]
        norms = [float(torch.linalg.vector_norm(part.values, dtype=torch.float64)) for part in parts]
        median = statistics.median_low([norm for norm in norms if norm] or [0.0])
        came = [
            Contribution(part, one.wire(run.start, run.stop).buffer, weight, min(1.0, median / norm) if norm else 1.0)
            for part, one, weight, norm in zip(parts, sent, weights, norms, strict=True)
        ]
        reply = encode_union(came, run.size, top, lost[place])
        if reply.loss is not None:
            lost[place][reply.part.indices] = reply.loss
        result[place] = reply.part.dense()
    return layout.from_blocks(result).reshape(-1)
