"""The part of an averager that is an optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from averaging.common import InProcess
from averaging.errors import ConfigError
from averaging.training.context import StrategyContext
from averaging.training.training_state import TrainingState


class OptimizerWrapper(InProcess, torch.optim.Optimizer):
    """Has the parameters, state and defaults of an inner optimizer, and its own hooks; subclasses define `step`.

    Schedulers, gradient scalers and other users of a `torch.optim.Optimizer` work with it. It adds one key to the state
    dict, and loads state dicts with or without that key.

    Args:
        optimizer: the inner optimizer.

    Attributes:
        state_key: key of the wrapper's own state in the state dict.
    """

    state_key = "averaging"
    _training: StrategyContext
    _training_state: TrainingState
    _instead = "save its state_dict(), or copy the inner `optimizer`"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        # This only prepares the hooks; super().__init__ would create parameter groups.
        super().__setstate__({})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return getattr(self._inner, "defaults", {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raises ConfigError: the averaged tensors cannot change after the averager has started."""
        raise ConfigError(
            "the averaged tensors cannot change after the averager has started; add the group to the inner optimizer "
            "before, or close this averager and make a new one"
        )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, with the averager's own state under `state_key`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = {**self._inner.state_dict(), self.state_key: self._training_state.saved()}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict from `state_dict`, or one of the inner optimizer, which leaves the own state unchanged.

        From now on newcomers get this state with the present parameters, so load the parameters first.

        Raises:
            ConfigError: the own state is malformed, or belongs to another strategy or scheduler.
            ClosedError: the averager was closed, or its thread has failed.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        inner = {key: value for key, value in state_dict.items() if key != self.state_key}
        self._training_state.load(inner, state_dict.get(self.state_key, self._training_state.saved()))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def train(self) -> None:
        """Puts the training weights of a schedule-free optimizer into the model; call it before the first step.

        Does nothing with other optimizers.
        """
        self._training.modes.train()

    def eval(self) -> None:
        """Puts the evaluation weights of a schedule-free optimizer into the model; call it before an evaluation.

        Keeps a copy of the training weights, so that an evaluation does not change them by rounding. Does nothing with
        other optimizers.
        """
        self._training.modes.eval()

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Wraps a block in which the model holds the weights to evaluate, to save or to publish.

        These differ from the trained ones with schedule-free optimizers only.
        """
        return self._training.modes.weights(training=False)

    @property
    def local_step(self) -> int:
        return self._training.local_step

    @property
    def weight(self) -> float | str:
        return "samples" if self._training.weights.counts_samples else self._training.weights.number

    @weight.setter
    def weight(self, weight: float | str) -> None:
        self._training.weights.set(weight)

    def check_tensors(self) -> None:
        """Checks that the averaged tensors are the trained ones, as every `step` does; raises TensorError if not."""
        self._training.thread.check()
        self._training.guard.check()
