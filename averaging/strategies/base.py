"""The contract between `DecentralizedAverager` and what decides what is averaged, and when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from averaging.errors import TensorError
from averaging.observe.receipts import Receipt


class Averaging(Protocol):
    """What a strategy may ask of the averager it works for."""

    @property
    def local_step(self) -> int:
        """Steps that have been made, those of the downloaded state included."""
        ...

    def average_now(self, *, weight: float | None = None, gather: Any = None) -> Receipt:
        """Averages the strategy's tensors with a group; a round that fails returns a receipt that says so."""
        ...


class Strategy(ABC):
    """Decides what is averaged, and when. One object serves one averager.

    All methods are called in the training thread. A strategy that must act before the step as well, such as averaging
    of gradients per global batch, calls for a `before_step` beside `after_step`; one that averages tensors of its own,
    such as the pseudo-gradients of DiLoCo, returns them from `tensors`.
    """

    @abstractmethod
    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """What is averaged, by name, in an order that is the same at all peers; asked once, before the peer starts.

        Raises:
            TensorError: the optimizer has tensors that cannot be averaged.
        """

    @abstractmethod
    def after_step(self, averaging: Averaging) -> None:
        """Called after each step of the optimizer, with the tensors unlocked; it may average them."""


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer, each once, in the order of its groups.

    Their names are those the optimizer was given (`AdamW(model.named_parameters())`), else `group0.param0` and so on.

    Raises:
        TensorError: a parameter is not floating-point or does not require a gradient, or two have the same name.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group{number}.param{place}" for place in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if not parameter.is_floating_point():
                raise TensorError(f"parameter {name!r} is {parameter.dtype}; only floating-point ones can be averaged")
            if not parameter.requires_grad:
                raise TensorError(
                    f"parameter {name!r} does not require a gradient; give the optimizer only those that do: "
                    "[p for p in model.parameters() if p.requires_grad]"
                )
            if name in named:
                raise TensorError(f"two parameters of the optimizer are named {name!r}; give each its own name")
            named[name] = parameter
    return named
