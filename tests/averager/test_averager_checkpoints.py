"""Checkpoints of an averager that is alone in its run, on the memory network."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.errors import ConfigError
from tests.support.alone import Make, linear, train


def test_a_checkpoint_whose_last_outer_state_is_unreadable_changes_none(make: Make) -> None:
    model, strategy = linear(), DiLoCo(2, fragments=2)
    opt = make(torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy)
    fresh = opt.state_dict()
    train(model, opt, 4)
    before = [fragment.outer.state_dict()["state"][0]["momentum_buffer"].clone() for fragment in strategy._fragments]
    fresh["averaging"]["strategy"]["user"]["outer"][1]["class"] = "Adam"
    with pytest.raises(ConfigError, match="its optimizer is Adam, but this peer's is SGD"):
        opt.load_state_dict(fresh)
    after = [fragment.outer.state_dict()["state"][0]["momentum_buffer"] for fragment in strategy._fragments]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_checkpoint_of_another_scheduler_changes_nothing_and_is_reported(make: Make) -> None:
    model = linear()
    opt = make(
        torch.optim.SGD(model.parameters(), lr=0.5),
        strategy=DiLoCo(1),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    )
    train(model, opt, 3)
    saved = opt.state_dict()
    fresh = linear()
    again = make(
        torch.optim.SGD(fresh.parameters(), lr=0.25),
        strategy=DiLoCo(1),
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0),
    )
    with pytest.raises(
        ConfigError, match=r"another scheduler than LambdaLR \(KeyError: 'lr_lambdas'\); use the same scheduler"
    ):
        again.load_state_dict(saved)
    assert (again.local_step, again.global_step, again.param_groups[0]["lr"]) == (0, 0, 0.25)
    del saved["averaging"]["scheduler"]  # as the error says
    again.load_state_dict(saved)
    assert (again.local_step, again.global_step, again.scheduler and again.scheduler.last_epoch) == (3, 3, 3)


def test_a_checkpoint_brings_back_state_and_counter(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, opt, 3)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    train(model, opt, 2)
    expected = model.weight.detach().clone()
    other = linear()
    again = make(torch.optim.AdamW(other.parameters(), lr=0.1))
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    assert again.local_step == 3
    train(other, again, 2)
    assert torch.equal(other.weight, expected)


def test_the_inner_optimizers_checkpoint_fits_and_the_other_way_round(make: Make) -> None:
    model = linear()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, plain, 3)
    opt = make(torch.optim.AdamW(linear().parameters(), lr=0.7))
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["lr"] == 0.1
    assert opt.local_step == 0
    plain.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("own", [None, {}, {"local_step": -1}, {"local_step": "3"}, {"local_step": True}])
def test_a_malformed_checkpoint_changes_nothing(make: Make, own: object) -> None:
    opt = make(torch.optim.SGD(linear().parameters(), lr=0.5))
    saved = opt.state_dict() | {"averaging": own}
    saved["param_groups"] = [saved["param_groups"][0] | {"lr": 0.1}]
    with pytest.raises(ConfigError, match="not a step counter"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("steps", [0, 5])
def test_a_checkpoint_is_read_without_pickled_objects(make: Make, tmp_path: Path, steps: int) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.5), strategy=DiLoCo(1))
    train(model, opt, steps)
    torch.save(opt.state_dict(), tmp_path / "checkpoint.pt")
    history = opt.strategy.history
    opt.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert (opt.strategy.history, opt.strategy.history.trail) == (history, history.trail)


@pytest.mark.parametrize(
    "strategy", [lambda: LocalSGD(1), lambda: DiLoCo(1), lambda: GradientAveraging(1)], ids=["LocalSGD", "DiLoCo", "GA"]
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_state_dict_of_an_optimizer_makes_no_step(
    make: Make, strategy: Callable[[], Strategy], kind: Callable[..., torch.optim.Optimizer]
) -> None:
    """torch steps a fresh optimizer with a learning rate and gradients of 0, so that it has a state to save or load."""
    model = linear()
    opt = make(kind(model.parameters(), lr=0.5), strategy=strategy())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = get_optimizer_state_dict(model, opt)
    set_optimizer_state_dict(model, opt, state)
    assert (opt.local_step, opt.global_step or 0, opt.last_receipt) == (0, 0, None)
    assert [group["lr"] for group in opt.param_groups] == [0.5]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), before))
    opt.step(batch_size=1)
    assert opt.local_step == 1


def test_a_first_step_of_a_warm_up_from_0_is_a_step(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.0), strategy=LocalSGD(1))
    train(model, opt, 1)
    assert opt.local_step == 1
