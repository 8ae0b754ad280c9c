"""The first updates of a newcomer are equal to the bit to those of the peer that it has joined."""

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim import lr_scheduler

from averaging import DecentralizedAverager, GradientAveraging, LocalSGD, Strategy
from averaging.training.parameter_copies import needs_closure
from tests.optimizers.kinds import (
    CLOSURES,
    MATRICES,
    NOT_IN_BFLOAT16,
    OTHERS,
    SCHEDULERS,
    SPARSE,
    TORCH,
    WITHOUT_SCHEDULERS,
    Make,
)
from tests.support.training import Start, equal, parameters_of

pytestmark = pytest.mark.optimizers

ALL = TORCH | OTHERS

EVERY = 3
SINCE = 2
"""Steps after a join that are compared, fewer than until the next round."""


def kind_of(make: Make) -> str:
    """The name of the class, as far as `make` shows it."""
    kind = getattr(make, "func", make)
    return kind.__name__ if inspect.isclass(kind) else ""


class Model(torch.nn.Module):
    """A matrix large enough for states of 8 bit, and what else the optimizer can train."""

    def __init__(self, seed: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sparse = torch.nn.Embedding(9, 4, sparse=True)
        dense = torch.nn.Linear(80, 64, bias=kind not in MATRICES)
        layers = [sparse] if kind in SPARSE else [dense] if kind in MATRICES else [dense, torch.nn.LayerNorm(64)]
        self.layers = torch.nn.Sequential(*layers)

    def backward(self, seed: int) -> float:
        self.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        if isinstance(self.layers[0], torch.nn.Embedding):
            inputs = torch.randint(9, (3,), generator=generator)
        else:
            inputs = torch.randn(4, 80, generator=generator).to(next(self.parameters()).dtype)
        loss: torch.Tensor = (self.layers(inputs) - 0.5).pow(2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


def step(opt: DecentralizedAverager, model: Model, seed: int, *, alone: bool = False) -> None:
    """One step, or one of the inner optimizer and the scheduler without the other peer."""
    closure = None
    if needs_closure(opt.optimizer) or type(opt.optimizer).__name__ in CLOSURES:
        closure = lambda: model.backward(seed)  # noqa: E731
    else:
        model.backward(seed)
    if not alone and closure is None:
        opt.step(batch_size=4)
    elif not alone and closure is not None:
        opt.step(closure)
    else:
        opt._training.inner_step(closure)
        if opt.scheduler is not None:
            opt.scheduler.step()


def bits(value: object) -> object:
    """A state with its tensors as bytes; newcomers always have `initial_lr`, for schedulers."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items() if key != "initial_lr"}
    return [bits(one) for one in value] if isinstance(value, list | tuple) else value


def check(
    start: Start,
    name: str,
    strategy: Callable[[], Strategy] = lambda: LocalSGD(EVERY),
    schedule: str = "",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Trains one peer, lets another one join, and compares their next steps."""
    run, make = start(), ALL[name]
    models = [Model(number, kind_of(make)).to(dtype) for number in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, and of schedulers
        for model in models:
            opt = run.add(strategy(), make, model, scheduler=SCHEDULERS.get(schedule))
            opt.train()
            for seed in range(2 * EVERY if model is models[0] else 0):
                step(opt, model, seed)
        first, newcomer = run.averagers
        assert newcomer.local_step == first.local_step == 2 * EVERY
        assert equal(*(parameters_of(model) for model in models))
        for seed in range(SINCE):
            before = parameters_of(models[0])
            for opt, model in zip(run.averagers, models, strict=True):
                step(opt, model, 100 + seed, alone=True)
            assert not equal(before, parameters_of(models[0]))
            assert equal(*(parameters_of(model) for model in models))
            assert bits(newcomer.optimizer.state_dict()) == bits(first.optimizer.state_dict())


@pytest.mark.parametrize("name", ALL)
def test_of_every_optimizer(start: Start, name: str) -> None:
    check(start, name)


@pytest.mark.parametrize("name", [name for name in ALL if kind_of(ALL[name]) not in CLOSURES + SPARSE])
def test_of_every_optimizer_with_averaged_gradients(start: Start, name: str) -> None:
    check(start, name, lambda: GradientAveraging(4))


@pytest.mark.parametrize("name", [name for name in ALL if name not in NOT_IN_BFLOAT16])
def test_of_every_optimizer_in_bfloat16(start: Start, name: str) -> None:
    check(start, name, dtype=torch.bfloat16)


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", [name for name in ALL if name not in WITHOUT_SCHEDULERS])
def test_of_every_optimizer_with_every_scheduler(start: Start, name: str, schedule: str) -> None:
    check(start, name, schedule=schedule)


@pytest.mark.parametrize("schedule", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("name", ["SGD, nesterov", "AdamW"])
def test_of_schedulers_that_change_the_momentum(
    start: Start, name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = SCHEDULERS[schedule]
    monkeypatch.setitem(SCHEDULERS, schedule, lambda o: make(o, cycle_momentum=True))
    check(start, name, schedule=schedule)


def test_no_scheduler_of_torch_is_left_out() -> None:
    kinds = {name for name in lr_scheduler.__all__ if issubclass(getattr(lr_scheduler, name), lr_scheduler.LRScheduler)}
    assert kinds - set(SCHEDULERS) == {"LRScheduler", "ReduceLROnPlateau"}  # the last one needs a loss
