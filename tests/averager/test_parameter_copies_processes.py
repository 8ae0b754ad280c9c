"""Rounds, late changes, outer steps and downloads reach the copies of parameters that an optimizer keeps."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from averaging import DecentralizedAverager, DiLoCo, LocalSGD, Strategy
from tests.averager.test_parameter_copies import InState, Masters
from tests.support.training import PATIENCE, Run, Start, batch_of, equal, model_of

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "LocalSGD": partial(LocalSGD, 2),
    "LocalSGD with overlap": partial(LocalSGD, 2, overlap=True),
    "DiLoCo": partial(DiLoCo, 2),
    "DiLoCo with delay": partial(DiLoCo, 4, delay=1, fragments=2),
}


def add(run: Run, strategy: Strategy, kind: Callable[..., Masters], model: torch.nn.Module) -> DecentralizedAverager:
    """Adds a peer whose optimizer's copies are named, unless they are in its state."""
    optimizer = kind(model.parameters())
    masters = None if isinstance(optimizer, InState) else optimizer.kept
    return run.add(strategy, lambda _: optimizer, model, group_size=2, masters=masters)


def in_sync(optimizer: torch.optim.Optimizer) -> bool:
    assert isinstance(optimizer, Masters)
    return all(torch.equal(m.to(p.dtype), p) for m, p in zip(optimizer.kept(), optimizer.all(), strict=True))


@pytest.mark.parametrize("kind", [Masters, InState])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_what_is_averaged_stays(start: Start, strategy: Callable[[], Strategy], kind: type[Masters]) -> None:
    run = start()
    for _ in range(2):
        add(run, strategy(), partial(kind, lr=0.1), model_of(0, torch.bfloat16))
    run.meet()

    def whole(number: int) -> bool:
        opt = run.averagers[number]
        for seed in range(6):
            inputs, targets = batch_of(10 * seed + number, 4, torch.bfloat16)
            opt.zero_grad()
            (run.models[number](inputs) - targets).pow(2).mean().backward()
            opt.step()
            assert in_sync(opt.optimizer)
        return opt.finish(PATIENCE).alike and in_sync(opt.optimizer)

    assert run.each(whole) == [True, True]


@pytest.mark.parametrize("kind", [Masters, InState])
def test_a_newcomer_has_the_copies_of_what_it_downloads(start: Start, kind: type[Masters]) -> None:
    run = start()
    for seed in range(2):
        opt = add(run, LocalSGD(1), kind, model_of(seed, torch.bfloat16))
        assert in_sync(opt.optimizer)
        for parameter in run.models[seed].parameters():
            parameter.grad = torch.ones_like(parameter)
        if not seed:
            opt.step()
    assert equal(*run.parameters())
    for opt in run.averagers:
        opt.optimizer.step()
    if kind is InState:  # elsewhere the copies begin with the rounded parameters
        assert equal(*run.parameters())
