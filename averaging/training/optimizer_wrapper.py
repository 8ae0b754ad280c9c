"""An optimizer around another one that the rest of torch takes for the inner one."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from averaging.errors import ConfigError


class OptimizerWrapper(torch.optim.Optimizer):
    """The parameters, state and defaults of an inner optimizer, with hooks of its own; subclasses define `step`.

    Schedulers, gradient scalers and whatever else asks for a `torch.optim.Optimizer` work with it. It adds one key to
    the state dict, and loads the inner optimizer's as well as its own.

    Args:
        optimizer: the inner one.

    Attributes:
        state_key: the key in the state dict under which the wrapper's own state is found.
    """

    state_key = "averaging"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        # Not super().__init__, which would make groups of its own: this only prepares the hooks.
        super().__setstate__({})

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's."""
        return self._inner.defaults

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} holds a thread and connections, so it cannot be copied or pickled; "
            "save its state_dict(), or copy the inner `optimizer`"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients, as the inner optimizer does."""
        self._inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Not possible.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "what is averaged is fixed when the averager starts; "
            "add the group to the inner optimizer before, or close this averager and make a new one"
        )

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, with the averager's own state under one more key."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = {**self._inner.state_dict(), self.state_key: self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned here, or the state dict of an inner optimizer; that leaves the own state.

        Newcomers get this state from now on, with the parameters that are there: load those first.

        Raises:
            ConfigError: the own state is malformed, or of another strategy or scheduler.
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
        """What the state dict holds besides the inner optimizer's."""
        raise NotImplementedError

    def _load(self, inner: dict[str, Any], own: object) -> None:
        """Loads the inner optimizer's state dict and what `_own_state` returned, which may be malformed."""
        raise NotImplementedError
