"""The averager as an optimizer, alone in its run, on the memory network."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from averaging import LocalSGD
from averaging.errors import ConfigError
from tests.support.alone import Make, backward, linear, train


def test_it_trains_exactly_as_the_inner_optimizer(make: Make) -> None:
    model, plain = linear(), linear()
    opt = make(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, opt, 5)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), 5)
    assert torch.equal(model.weight, plain.weight)
    assert opt.local_step == 5


def test_a_closure_is_called_and_its_loss_returned(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.LBFGS(model.parameters(), max_iter=3))
    losses = []

    def closure() -> float:
        opt.zero_grad()
        losses.append(backward(model).item())
        return losses[-1]

    assert opt.step(closure) == losses[0]
    assert len(losses) > 1
    assert opt.local_step == 1


def test_what_a_closure_raises_is_raised_and_the_step_not_counted(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))

    def closure() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert opt.local_step == 0
    train(model, opt, 1)
    assert opt.local_step == 1


@pytest.mark.parametrize(
    ("schedule", "loss"),
    [
        (lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)), None),
        (lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10), None),
        (lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3), None),
        (lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0), 1.0),
    ],
)
def test_schedulers_drive_it_as_they_drive_the_inner_optimizer(
    make: Make, schedule: Callable[[torch.optim.Optimizer], Any], loss: float | None
) -> None:
    rates: list[list[float]] = []
    for wrap in (make, lambda optimizer: optimizer):
        model = linear()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        scheduler = schedule(optimizer)
        rates.append([])
        for _ in range(8):
            train(model, optimizer, 1)
            scheduler.step(*([] if loss is None else [loss]))
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 2


def test_hooks_are_called_once_with_the_averager(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()), sync_every=1)
    happened: list[Any] = []
    opt.register_step_pre_hook(lambda this, args, kwargs: happened.append(("before", this)))
    opt.register_step_post_hook(lambda this, args, kwargs: happened.append(("after", this, opt.last_receipt is None)))
    opt.optimizer.register_step_post_hook(lambda this, args, kwargs: happened.append(("inner", this)))
    train(model, opt, 1)
    assert happened == [("before", opt), ("inner", opt.optimizer), ("after", opt, False)]


def test_param_groups_are_fixed(make: Make) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    with pytest.raises(ConfigError, match="inner optimizer before"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(opt.param_groups) == 1


def test_it_is_neither_copied_nor_pickled(make: Make) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="cannot be copied or pickled; save its state_dict"):
            attempt(opt)


def test_a_strategy_is_copied_and_pickled_only_until_an_averager_has_it(make: Make) -> None:
    strategy = LocalSGD(sync_every=7)
    for copied in (copy.copy(strategy), copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied.sync_every == 7
    opt = make(torch.optim.SGD(linear().parameters()), strategy=strategy)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"cannot be copied or pickled; make a new strategy .*state_dict"):
            attempt(opt.strategy)
