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
    """The scheduler that the averager drives.

    Raises:
        ConfigError: `make` does not make one, or one that wants to be told a loss.
    """
    if not callable(make):
        raise ConfigError(
            "scheduler must make one of an optimizer, such as functools.partial(StepLR, step_size=30), not "
            f"{type(make).__name__}; one that is made already is stepped by the training loop"
        )
    made = make(optimizer)
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            f"the averager cannot drive {type(made).__name__}; make it around the averager, and step it in the "
            "training loop"
        )
    return made


@contextmanager
def loaded(scheduler: LRScheduler | None, saved: object) -> Iterator[None]:
    """Loads a scheduler's state, if there are both, and gives it back its own if that or the block raises.

    Raises:
        ConfigError: it is the state of another kind.
    """
    if scheduler is None or not isinstance(saved, dict):
        yield
        return
    before = copy.deepcopy(scheduler.state_dict())
    try:
        try:
            scheduler.load_state_dict(saved)
        except Exception as error:  # whatever it stumbles over in the state of another kind
            raise ConfigError(
                f"the state dict has the state of another scheduler than {type(scheduler).__name__} "
                f"({type(error).__name__}: {error}); use the same one, or drop it: "
                "del state_dict['averaging']['scheduler']"
            ) from error
        yield
    except BaseException:
        scheduler.load_state_dict(before)
        raise


def drive(scheduler: LRScheduler, steps: int) -> None:
    """Steps it until it has made so many steps."""
    with warnings.catch_warnings():
        # A newcomer's schedule goes on where the run is, before the inner optimizer has made its first step.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
        while _steps_of(scheduler) < steps:
            scheduler.step()


def _steps_of(scheduler: Any) -> int:
    """How many it has made; a ChainedScheduler does not count, but each of those that it chains makes every step."""
    while isinstance(scheduler, ChainedScheduler):
        scheduler = scheduler._schedulers[0]
    made: int = scheduler.last_epoch
    return made


def set_initial_lr(optimizer: torch.optim.Optimizer) -> None:
    """Tells the groups their initial learning rate, which a scheduler wants to find if it does not begin at step 0."""
    for group in optimizer.param_groups:
        if (lr := group.get("lr")) is not None:
            group.setdefault("initial_lr", lr.clone() if isinstance(lr, torch.Tensor) else lr)
