"""An optimizer that wraps another one, for subclasses that change `step`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch

from averaging.common import InProcess
from averaging.errors import ConfigError


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
    _instead = "save its state_dict(), or copy the inner `optimizer`"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        # This only prepares the hooks; super().__init__ would create parameter groups.
        super().__setstate__({})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the inner optimizer."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Defaults of the inner optimizer; empty if it is none of torch's class and has none."""
        return getattr(self._inner, "defaults", {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients with the inner optimizer."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Not possible.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "the averaged tensors cannot change after the averager has started; add the group to the inner optimizer "
            "before, or close this averager and make a new one"
        )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, with the averager's own state under `state_key`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = {**self._inner.state_dict(), self.state_key: self._own_state()}
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
        self._load(inner, state_dict.get(self.state_key, self._own_state()))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _own_state(self) -> dict[str, Any]:
        """The value of `state_key` in the state dict."""
        raise NotImplementedError

    def _load(self, inner: dict[str, Any], own: object) -> None:
        """Loads the inner optimizer's state dict and a value of `_own_state`, which may be malformed."""
        raise NotImplementedError


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` requires a closure, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


# The two sets of weights of a schedule-free optimizer: the model holds those to train, or those to evaluate.


MODE = "train_mode"
"""Where schedule-free optimizers keep their mode: a key of their parameter groups, or an attribute."""

ITERATE = "z"
"""The third sequence of a schedule-free optimizer in its state: both sets of weights are averages that involve it."""


class WeightModes:
    """Switches a schedule-free optimizer between its modes (Defazio et al., 2024, arXiv:2405.15682).

    Its steps and all rounds use the training weights. While the evaluation weights are in the model, a copy of the
    training weights is kept: the optimizer would compute them back with rounding errors, and a peer that evaluates
    would differ from one that does not.

    Args:
        optimizer: any optimizer; if it has no modes, nothing here has an effect.
        lock: the tensors' lock, see `Peer.tensors`.
    """

    def __init__(self, optimizer: Any, lock: Callable[[], AbstractContextManager[object]]) -> None:
        self._optimizer, self._lock = optimizer, lock
        self._kept: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # parameter, training weights, version
        self._wanted: bool | None = None

    @property
    def exist(self) -> bool:
        """Whether the optimizer has modes."""
        switches = all(callable(getattr(self._optimizer, name, None)) for name in ("train", "eval"))
        return switches and (hasattr(self._optimizer, MODE) or any(MODE in group for group in self._groups))

    @property
    def training(self) -> bool:
        """Whether the model holds the training weights; True without modes."""
        if not self.exist:
            return True
        mode = getattr(self._optimizer, MODE, None)
        return bool(self._groups[0].get(MODE) if mode is None else mode)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def eval(self) -> None:
        """Puts the evaluation weights into the model."""
        if not (self.exist and self.training):
            return
        with self._lock(), torch.no_grad():
            parameters = [parameter for group in self._groups for parameter in group["params"]]
            kept = [parameter.detach().clone() for parameter in parameters]
            self._optimizer.eval()
            self._kept = [(one, was, one._version) for one, was in zip(parameters, kept, strict=True)]

    def train(self) -> None:
        """Puts the training weights into the model."""
        if self.training:
            return
        with self._lock(), torch.no_grad():
            untouched = [(one, was) for one, was, version in self._kept if one._version == version]
            self._optimizer.train()
            for parameter, was in untouched:
                if _differ_by_rounding(parameter, was):
                    parameter.copy_(was)
            self._kept = []

    @contextmanager
    def weights(self, *, training: bool) -> Iterator[None]:
        """Within the block the model holds the weights of that mode; afterwards those that it held before."""
        before = self.training
        self._switch(training)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, training: bool) -> None:
        self.train() if training else self.eval()

    def received(self, *, training: bool) -> None:
        """Called with the mode of a state that is taken over; the caller holds the lock. See `settle`."""
        self._kept = []
        if not self.exist:
            return
        if self._wanted is None:
            self._wanted = self.training
        if hasattr(self._optimizer, MODE):
            self._optimizer.train_mode = training
        for group in self._groups:
            if MODE in group:
                group[MODE] = training

    def settle(self, *, wanted: bool = True) -> None:
        """Called when a state has been taken over: switches to the mode from before, if that is `wanted`."""
        if self._wanted is not None and wanted:
            self._switch(self._wanted)
        self._wanted = None


def _differ_by_rounding(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding errors; if not, the weights were replaced meanwhile."""
    limit = 64 * torch.finfo(tensor.dtype).eps * other.abs().amax() if tensor.numel() else 0.0
    return bool(((tensor - other).abs() <= limit).all())
