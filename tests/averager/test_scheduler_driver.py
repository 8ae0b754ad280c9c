"""A scheduler that the averager drives is at the step of its run, also if that goes back."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from averaging.training.training_state import SchedulerDriver


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=3), StepLR(optimizer, 2)], milestones=[4])


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ChainedScheduler([LinearLR(optimizer, total_iters=3), StepLR(optimizer, 2)])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": partial(CosineAnnealingLR, T_max=9),
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 0.9**step),
    "one cycle": partial(OneCycleLR, max_lr=1.0, total_steps=20),
    "sequential": sequential,
    "chained": chained,
}


def driven(make: Callable[[torch.optim.Optimizer], LRScheduler], steps: list[int]) -> list[dict[str, Any]]:
    """The hyperparameters after a scheduler was driven to these steps, one after the other."""
    parameters = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.AdamW(parameters)
    driver = SchedulerDriver(make(optimizer), optimizer)
    for step in steps:
        driver.drive(step)
    return [{key: group[key] for key in ("lr", "betas")} for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_run_at_an_earlier_step_is_followed_there(kind: str) -> None:
    """As when a peer takes over the state of another origin."""
    make = SCHEDULERS[kind]
    for last in (0, 1, 3, 7, 11):
        assert driven(make, [5, 8, 2, last]) == driven(make, [last])
