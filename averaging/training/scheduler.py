"""The learning rate scheduler that an averager drives."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from averaging.errors import ConfigError


def make_scheduler(make: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Makes the scheduler that the averager drives.

    Raises:
        ConfigError: `make` returns no scheduler, or one whose `step` takes a loss.
    """
    if not callable(make):
        raise ConfigError(
            "scheduler must be a function of the optimizer, such as functools.partial(StepLR, step_size=30), not "
            f"{type(make).__name__}; a scheduler that already exists is stepped by the training loop"
        )
    made = make(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            f"the averager cannot drive {type(made).__name__}; make it with the averager as its optimizer, and "
            "step it in the training loop"
        )
    return made


@contextmanager
def loaded(scheduler: LRScheduler | None, saved: object) -> Iterator[None]:
    """Loads a scheduler's state, if there are both; restores the former state if that or the block raises.

    Raises:
        ConfigError: the state belongs to another class of scheduler.
    """
    if scheduler is None or not isinstance(saved, dict):
        yield
        return
    before = copy.deepcopy(scheduler.state_dict())
    try:
        try:
            scheduler.load_state_dict(saved)
        except Exception as error:  # schedulers do not check their state
            raise ConfigError(
                f"the state dict holds the state of another scheduler than {type(scheduler).__name__} "
                f"({type(error).__name__}: {error}); use the same scheduler, or remove that state: "
                "del state_dict['averaging']['scheduler']"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


SCHEDULED = ("lr", "momentum", "betas")
"""What the schedulers of torch set in parameter groups."""


class SchedulerDriver:
    """Keeps a scheduler at the step of its run, which may also be an earlier one: that of another origin.

    Args:
        scheduler: made from `optimizer`, and not stepped yet.
        optimizer: the inner optimizer.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer
        self._state = copy.deepcopy(scheduler.state_dict())
        groups = optimizer.param_groups
        self._values = [{key: copy.deepcopy(group[key]) for key in SCHEDULED if key in group} for group in groups]

    def drive(self, steps: int) -> None:
        """Steps the scheduler until it has made `steps` steps, from its beginning if it has made more."""
        if _steps_of(self._scheduler) > steps:
            self._rewind()
        with warnings.catch_warnings():
            # A newcomer's scheduler catches up with the run before the inner optimizer has stepped.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            while _steps_of(self._scheduler) < steps:
                self._scheduler.step()

    def _rewind(self) -> None:
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        for group, values in zip(self._optimizer.param_groups, self._values, strict=True):
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _steps_of(scheduler: Any) -> int:
    """Steps made so far. A ChainedScheduler does not count them, but each scheduler in it makes every step."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    made: int = scheduler.last_epoch
    return made


def set_initial_lr(optimizer: torch.optim.Optimizer) -> None:
    """Sets `initial_lr` of the groups, which a scheduler requires if it does not begin at step 0."""
    for group in optimizer.param_groups:
        if (lr := group.get("lr")) is not None:
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, torch.Tensor) else lr)
