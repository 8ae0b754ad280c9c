"""The two sets of weights of a schedule-free optimizer: the model holds those to train, or those to evaluate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

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
