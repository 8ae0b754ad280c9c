"""The arithmetic of the strategies against references computed by hand, in one process."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Receipt
from averaging.training import StrategyContext
from averaging.training.takeover import BackgroundDownload
from tests.support.selection import rest_is_long
from tests.support.training import Run, backward, batch_of, equal, model_of, parameters_of, run_of
from tests.tensors.dumb_top_k import chosen, quantised

PlainSGD = partial(torch.optim.SGD, lr=0.05)
Optimizers = Callable[..., torch.optim.Optimizer]


def train_apart(run: Run, steps: int) -> None:
    """Local steps of each peer, each with its own data."""

    def train(number: int) -> None:
        for step in range(steps):
            backward(run.models[number], batch_of(100 * number + step, 4))
            run.averagers[number].step()

    run.each(train)


def test_diloco_with_a_plain_outer_step_is_local_sgd(start: Callable[[], Run]) -> None:
    """The pseudo-gradient's average, subtracted once, leaves the parameters' average."""
    outer = partial(torch.optim.SGD, lr=1.0, momentum=0.0)
    adam = partial(torch.optim.AdamW, lr=0.01)
    diloco = run_of(start, 3, lambda: DiLoCo(3, outer=outer), adam)
    local = run_of(start, 3, lambda: LocalSGD(3), adam)
    for run in (diloco, local):
        train_apart(run, 30)
    assert [averager.global_step for averager in diloco.averagers] == [10] * 3
    for ours, theirs in zip(diloco.parameters()[0], local.parameters()[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert all(equal(diloco.parameters()[0], other) for other in diloco.parameters())


def diloco_by_hand(peers: int, rounds: int, sync_every: int, outer: Optimizers) -> list[torch.Tensor]:
    """DiLoCo as in algorithm 1 of arXiv:2311.08105, without any of the library."""
    models = [model_of(0) for _ in range(peers)]
    inner = [PlainSGD(model.parameters()) for model in models]
    anchors = [torch.nn.Parameter(parameter) for parameter in parameters_of(models[0])]
    optimizer = outer(anchors)
    for step in range(rounds * sync_every):
        for number, model in enumerate(models):
            backward(model, batch_of(100 * number + step, 4))
            inner[number].step()
        if (step + 1) % sync_every:
            continue
        for place, anchor in enumerate(anchors):
            changes = [anchor.detach() - list(model.parameters())[place].detach() for model in models]
            anchor.grad = torch.stack(changes).sum(dim=0) / peers
        optimizer.step()
        with torch.no_grad():
            for model in models:
                for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                    parameter.copy_(anchor)
    return parameters_of(models[0])


def test_diloco_is_the_papers_bit_for_bit(start: Callable[[], Run]) -> None:
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    strategy = partial(DiLoCo, 4, outer=outer, fragments=1, delay=0, alpha=0.0)
    run = run_of(start, 2, strategy, PlainSGD)
    train_apart(run, 20)
    expected = diloco_by_hand(2, 5, 4, outer)
    assert equal(run.parameters()[0], expected)
    assert equal(run.parameters()[1], expected)


def wide_model() -> torch.nn.Sequential:
    """A network whose tensors are one block each."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 64, bias=False)]
    return torch.nn.Sequential(*layers)


def wide_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 64, generator=generator), torch.randn(4, 64, generator=generator)


def sparse_by_hand(peers: int, rounds: int, sync_every: int, density: float, bits: int, decay: float) -> list[Any]:
    """SparseLoCo as in arXiv:2508.15706 for tensors of one block, with the mean over those that sent an element."""
    models = [wide_model() for _ in range(peers)]
    inner = [PlainSGD(model.parameters()) for model in models]
    anchors = parameters_of(models[0])
    residuals = [[torch.zeros_like(anchor) for anchor in anchors] for _ in models]
    for step in range(rounds * sync_every):
        for number, model in enumerate(models):
            backward(model, wide_batch(100 * number + step))
            inner[number].step()
        if (step + 1) % sync_every:
            continue
        for place, anchor in enumerate(anchors):
            sent = []
            for model, residual in zip(models, residuals, strict=True):
                exact = decay * residual[place] + (anchor - list(model.parameters())[place].detach())
                flat = exact.flatten()
                kept = torch.tensor(chosen(flat.numpy(), round(flat.numel() * density)))
                table, codes = quantised(flat[kept].numpy(), bits)
                decoded = torch.zeros_like(flat)
                decoded[kept] = torch.from_numpy(table)[codes]
                residual[place] = exact - decoded.view_as(exact)
                sent.append((decoded, torch.zeros_like(flat).index_fill_(0, kept, 1.0)))
            limit = statistics.median_low([float(decoded.norm()) for decoded, _ in sent])
            scaled = torch.stack([min(1.0, limit / float(decoded.norm())) * decoded for decoded, _ in sent]).sum(dim=0)
            count = torch.stack([there for _, there in sent]).sum(dim=0).clamp(min=1)
            anchors[place] = anchor - (scaled / count).view_as(anchor)
        with torch.no_grad():
            for model in models:
                for parameter, anchor in zip(model.parameters(), anchors, strict=True):
                    parameter.copy_(anchor)
    return [anchors, residuals]


@pytest.mark.parametrize("peers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_diloco_with_top_k_is_sparseloco(start: Callable[[], Run], peers: int) -> None:
    sparse = partial(DiLoCo, 4, compression="top_k", density=1 / 16, bits=2, decay=0.9)
    run = run_of(start, peers, sparse, PlainSGD, wide_model)

    def train(number: int) -> None:
        for step in range(24):
            backward(run.models[number], wide_batch(100 * number + step))
            run.averagers[number].step()

    run.each(train)
    anchors, residuals = sparse_by_hand(peers, 6, 4, 1 / 16, 2, 0.9)
    for averager, model, unsent in zip(run.averagers, run.models, residuals, strict=True):
        kept = averager.strategy.own_state().values()
        for ours, theirs in zip([*parameters_of(model), *kept], [*anchors, *unsent], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def streaming_by_hand(steps: int, sync_every: int, fragments: list[list[int]], delay: int, alpha: float) -> list[Any]:
    """Streaming DiLoCo of two peers as in arXiv:2501.18512: fragment by fragment, late, and mixed in."""
    models = [model_of(0) for _ in range(2)]
    inner = [PlainSGD(model.parameters()) for model in models]
    anchors = [torch.nn.Parameter(parameter) for parameter in parameters_of(models[0])]
    outer = [torch.optim.SGD([anchors[place] for place in places], lr=0.7, momentum=0.9) for places in fragments]
    interval = sync_every // len(fragments)
    sent: dict[int, torch.Tensor] = {}
    for step in range(1, steps + 1):
        for number, model in enumerate(models):
            backward(model, batch_of(100 * number + step - 1, 4))
            inner[number].step()
        number_of_round, since = divmod(step, interval)
        with torch.no_grad():
            if number_of_round > 0 and since == delay:
                which = (number_of_round - 1) % len(fragments)
                for place in fragments[which]:
                    anchors[place].grad = sent[place]
                outer[which].step()
                for model in models:
                    parameters = list(model.parameters())
                    for place in fragments[which]:
                        parameters[place].mul_(alpha).add_(anchors[place], alpha=1 - alpha)
            if since == 0:
                for place in fragments[(number_of_round - 1) % len(fragments)]:
                    changes = [anchors[place] - list(model.parameters())[place] for model in models]
                    sent[place] = (changes[0] + changes[1]) / 2
    return [parameters_of(model) for model in models]


def test_streaming_diloco_is_the_papers(start: Callable[[], Run]) -> None:
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9)
    run = run_of(start, 2, lambda: DiLoCo(6, outer=outer, fragments=2, delay=2, alpha=0.5), PlainSGD)
    train_apart(run, 24)
    expected = streaming_by_hand(24, 6, [[0], [1, 2, 3]], 2, 0.5)
    for ours, theirs in zip(run.parameters(), expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert not equal(run.parameters()[0], run.parameters()[1])


def test_what_nobody_trains_stays_where_it_is_when_results_are_mixed_in(start: Callable[[], Run]) -> None:
    """Adam as the outer optimizer would turn a rounding error into a full step."""
    run = start()
    for _ in range(2):
        model = model_of(0)
        model.register_parameter("idle", torch.nn.Parameter(torch.linspace(-1, 1, 101)))
        run.add(DiLoCo(2, outer=partial(torch.optim.Adam, lr=0.01), delay=1, alpha=0.6), PlainSGD, model)
    run.meet()
    train_apart(run, 24)
    for trained in run.models:
        assert torch.equal(trained.get_parameter("idle"), torch.linspace(-1, 1, 101))


class Logged(GradientAveraging):
    """Records which batches each global step averages."""

    def __init__(self, target_batch_size: int) -> None:
        super().__init__(target_batch_size)
        self.pending: list[int] = []
        self.included: dict[int, list[int]] = {}

    def _advance(self, training: StrategyContext, receipt: Receipt | None, samples: float) -> None:
        super()._advance(training, receipt, samples)
        assert self.history.step not in self.included, "stepped twice for the same global step"
        self.included[self.history.step] = self.pending
        self.pending = []

    def _take_over(self, training: StrategyContext, fetch: BackgroundDownload) -> None:
        self.pending = []
        super()._take_over(training, fetch)


@pytest.mark.parametrize(
    "optimizer",
    rest_is_long([partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)]),
    ids=["AdamW", "SGD"],
)
def test_gradient_averaging_is_one_process_with_the_joined_batch(
    start: Callable[[], Run], optimizer: Optimizers
) -> None:
    """Peers with unequal batches and speeds make 20 steps that equal those of one process."""
    sizes, steps = [2, 3, 7], 20
    run, strategies = start(), [Logged(sum(sizes)) for _ in sizes]
    for strategy in strategies:
        run.add(strategy, optimizer, model_of(0, torch.float64))
    run.meet()

    def train(number: int) -> None:
        model, averager, strategy = run.models[number], run.averagers[number], strategies[number]
        drawn = 0
        while (averager.global_step or 0) < steps:
            seed = 1000 * number + drawn
            drawn += 1
            backward(model, batch_of(seed, sizes[number], torch.float64))
            strategy.pending.append(seed)
            averager.step(batch_size=sizes[number])

    run.each(train)
    assert [averager.global_step for averager in run.averagers] == [steps] * 3
    assert all(equal(run.parameters()[0], other) for other in run.parameters())

    alone = model_of(0, torch.float64)
    plain = optimizer(alone.parameters())
    for step in range(1, steps + 1):
        batches = [
            batch_of(seed, sizes[number], torch.float64)
            for number, strategy in enumerate(strategies)
            for seed in strategy.included.get(step, [])
        ]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        assert len(inputs) >= sum(sizes)
        backward(alone, (inputs, targets))
        plain.step()
    for ours, theirs in zip(run.parameters()[0], parameters_of(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_local_sgd_at_every_step_is_gradient_averaging(start: Callable[[], Run]) -> None:
    """With plain SGD the average of the peers' steps is the step of the averaged gradient."""
    sizes, steps = [2, 5], 12
    run = start()
    for size in sizes:
        run.add(LocalSGD(1), PlainSGD, model_of(0, torch.float64), weight=size)
    run.meet()

    def train(number: int) -> None:
        for step in range(steps):
            backward(run.models[number], batch_of(100 * number + step, sizes[number], torch.float64))
            run.averagers[number].step()

    run.each(train)
    alone = model_of(0, torch.float64)
    plain = PlainSGD(alone.parameters())
    for step in range(steps):
        batches = [batch_of(100 * number + step, size, torch.float64) for number, size in enumerate(sizes)]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        backward(alone, (inputs, targets))
        plain.step()
    for ours in run.parameters():
        for one, other in zip(ours, parameters_of(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
