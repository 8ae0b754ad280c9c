"""Peers with a schedule-free optimizer average all of its sequences, and end with the same weights to evaluate."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.weights.publisher import WeightPublisher
from averaging.weights.snapshot import StateCopy
from tests.schedule_free import ScheduleFreeSGD
from tests.support.training import PATIENCE, Run, Start, backward, batch_of, equal, model_of, run_of

STEPS = 6


def both(start: Start, strategy: Callable[[], Strategy]) -> Run:
    return run_of(start, 2, strategy, ScheduleFreeSGD, group_size=2)


def trained(run: Run, number: int, steps: int = STEPS) -> None:
    opt = run.averagers[number]
    opt.train()
    for seed in range(steps):
        backward(run.models[number], batch_of(10 * seed + number, 4))
        opt.step(batch_size=4)
        if number and seed % 2:
            opt.eval()
            opt.train()


@torch.no_grad()
def averaged(tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for one, other in tensors:
        mean = (one + other) / 2
        one.copy_(mean)
        other.copy_(mean)


def reference() -> list[torch.Tensor]:
    """The evaluation weights of two optimizers whose y and z are averaged every two steps, and the x at the end."""
    models = [model_of(0) for _ in range(2)]
    first, second = (ScheduleFreeSGD(model.parameters()) for model in models)
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    for seed in range(STEPS):
        for number, optimizer in enumerate((first, second)):
            optimizer.train()
            backward(models[number], batch_of(10 * seed + number, 4))
            optimizer.step()
        if seed % 2:
            averaged(pairs)
            averaged([(first.state[one]["z"], second.state[other]["z"]) for one, other in pairs])
    first.eval()
    second.eval()
    averaged(pairs)
    return [one.detach() for one, _ in pairs]


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "LocalSGD": partial(LocalSGD, 2),
    "LocalSGD with overlap": partial(LocalSGD, 2, overlap=True),
    "GradientAveraging": partial(GradientAveraging, 8),
    "DiLoCo": partial(DiLoCo, 2),
    "DiLoCo with delay": partial(DiLoCo, 4, delay=1, fragments=2),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_all_end_with_the_same_weights_to_evaluate(start: Start, strategy: Callable[[], Strategy]) -> None:
    run = both(start, strategy)

    def whole(number: int) -> bool:
        trained(run, number)
        return run.averagers[number].finish(PATIENCE).alike

    assert run.each(whole) == [True, True]
    exported = run.parameters()
    assert equal(*exported)
    for opt in run.averagers:
        opt.eval()  # nothing left to do
    assert equal(run.parameters()[0], exported[0])


def test_rounds_average_both_sequences(start: Start) -> None:
    run = both(start, STRATEGIES["LocalSGD"])

    def whole(number: int) -> None:
        trained(run, number)
        run.averagers[number].finish(PATIENCE)

    run.each(whole)
    assert all(map(torch.allclose, run.parameters()[0], reference()))


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_newcomer_gets_all_sequences_and_the_counter(start: Start, evaluating: bool) -> None:
    run = start()
    first = run.add(LocalSGD(3), ScheduleFreeSGD)
    trained(run, 0, 3)
    if evaluating:
        first.eval()
    newcomer = run.add(LocalSGD(3), ScheduleFreeSGD, model_of(7))
    for opt in run.averagers:
        opt.train()
    assert equal(*run.parameters())
    assert newcomer.param_groups[0]["k"] == first.param_groups[0]["k"] == 3
    for model, opt in zip(run.models, run.averagers, strict=True):
        backward(model, batch_of(1, 4))
        opt.optimizer.step()
    assert equal(*run.parameters())


def test_a_publisher_publishes_the_weights_to_evaluate(start: Start) -> None:
    run, model = start(), model_of(0)
    published: list[dict[str, torch.Tensor]] = []

    class Noted(WeightPublisher):
        def _copy(self, state: Mapping[str, torch.Tensor] | None) -> StateCopy:
            published.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            return super()._copy(state)

    opt = run.add(LocalSGD(1), ScheduleFreeSGD, model, services=[Noted(model)])
    trained(run, 0)
    weights = model.state_dict()
    assert not torch.allclose(published[-1]["0.weight"], weights["0.weight"])
    opt.eval()
    assert all(torch.equal(published[-1][name], weights[name]) for name in weights)
