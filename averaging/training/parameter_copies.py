"""Optimizers that hold further weights: copies of the parameters, or a second set of weights to evaluate."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from averaging.errors import ConfigError
from averaging.training.layout import local

logger = logging.getLogger("averaging.training")

MASTER = "master_param"
"""Where Transformer Engine's optimizers keep the float32 copy of a parameter: a key of its state."""

STEP_PARAMETERS = ("torch.optim", "bitsandbytes", "prodigyopt", "schedulefree", "transformers")
"""Packages whose optimizers step the parameters themselves; `make test-optimizers` trains with all of them."""

NamedMasters: TypeAlias = "Callable[[], Iterable[torch.Tensor]]"


@dataclass(frozen=True, slots=True)
class _Master:
    """A copy that the optimizer steps, and the parameter that it overwrites with it."""

    tensor: torch.Tensor
    parameter: torch.Tensor

    def refresh(self) -> None:
        # Elements that are equal in the narrower dtype were not written: the copy keeps its precision there.
        flat, parameter = self.tensor.reshape(-1), self.parameter.reshape(-1).to(self.tensor.device)
        narrower = min(flat.dtype, parameter.dtype, key=lambda dtype: dtype.itemsize)
        kept = torch.where(flat.to(narrower) == parameter.to(narrower), flat, parameter.to(flat.dtype))
        self.tensor.copy_(kept.view(self.tensor.shape))


class ParameterCopies:
    """Writes to an optimizer's copies of the parameters (masters) what is written to the parameters.

    An optimizer that steps a float32 copy of a bfloat16 parameter, and then overwrites the parameter, would undo what a
    round has written to it.
    """

    def __init__(
        self, optimizer: Any, parameters: Mapping[str, torch.Tensor], masters: NamedMasters | None = None
    ) -> None:
        self._optimizer, self._parameters, self._masters = optimizer, parameters, masters
        self._stale: list[_Master] = []  # that the write in progress makes differ
        self._may_be_hidden = (
            masters is None
            and not type(optimizer).__module__.startswith(STEP_PARAMETERS)
            and any(parameter.dtype.itemsize < 4 for parameter in parameters.values())
        )
        self._written = self._versions()  # after the last write that was not the optimizer's

    def _versions(self) -> int:
        return sum(parameter._version for parameter in self._parameters.values())

    @contextmanager
    def following(self) -> Iterator[None]:
        """Wraps a write to the parameters that is not the optimizer's own."""
        self._stale = self._find()
        try:
            yield
        finally:
            self.refresh()
            self._written = self._versions()

    def refresh(self) -> None:
        """Writes the parameters to their copies if a write is in progress; also called before a state is committed."""
        with torch.no_grad():
            for master in self._stale:
                master.refresh()
        self._stale = []

    def _find(self) -> list[_Master]:
        parameters = list(self._parameters.values())
        if self._masters is not None:
            masters = list(self._masters())
            if masters and [local(master).shape for master in masters] != [local(each).shape for each in parameters]:
                raise ConfigError(
                    f"masters= returns {len(masters)} tensors that are not shaped like the {len(self._parameters)} "
                    "parameters in the optimizer's order; return one copy for each parameter"
                )
        else:
            state: Mapping[torch.Tensor, Any] = self._optimizer.state
            kept = {parameter: state[parameter] for parameter in parameters if parameter in state}
            found = {each: of_it[MASTER] for each, of_it in kept.items() if isinstance(of_it, dict) and MASTER in of_it}
            parameters, masters = list(found), list(found.values())
            if self._may_be_hidden and self._versions() != self._written:  # it has made a step
                self._may_be_hidden = False
                if not found:
                    logger.warning(
                        "%s is not known here: if it keeps copies of the parameters in another dtype (masters) and "
                        "overwrites the parameters with them, averaging has no effect until they are named with "
                        "masters=, see docs/how-to/optimizers.md",
                        type(self._optimizer).__name__,
                    )
        return [
            _Master(local(tensor).detach(), local(parameter).detach())
            for tensor, parameter in zip(masters, parameters, strict=False)
        ]


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
    """

    def __init__(self, optimizer: Any, lock: Callable[[], AbstractContextManager[object]]) -> None:
        self._optimizer, self._lock = optimizer, lock
        self._kept: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # parameter, training weights, version
        self._wanted: bool | None = None
        self._warned = False

    def warn_once(self) -> None:
        """Warns that the optimizer keeps no third sequence that could be averaged."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s has training and evaluation weights, but none of its statistics is %r: only the training weights "
                "are averaged, and the evaluation weights of the peers will differ",
                *(type(self._optimizer).__name__, ITERATE),
            )

    @property
    def exist(self) -> bool:
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
        if not (self.exist and self.training):
            return
        with self._lock(), torch.no_grad():
            parameters = [parameter for group in self._groups for parameter in group["params"]]
            kept = [parameter.detach().clone() for parameter in parameters]
            self._optimizer.eval()
            self._kept = [(parameter, was, parameter._version) for parameter, was in zip(parameters, kept, strict=True)]

    def train(self) -> None:
        if self.training:
            return
        with self._lock(), torch.no_grad():
            untouched = [(parameter, was) for parameter, was, version in self._kept if parameter._version == version]
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
