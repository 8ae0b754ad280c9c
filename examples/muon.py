"""Muon for the matrices of a model and AdamW for everything else, as one optimizer.

An averager has one optimizer, and so has a checkpoint. `torch.optim.Muon` takes matrices only: those of the hidden
layers. Embeddings and heads are matrices too, but their rows are looked up one by one, so they belong to AdamW
(arXiv:2505.23725, and Muon's author).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers with one `state` and one list of `param_groups`: that of Muon, then that of AdamW.

    So a scheduler sees both learning rates, a checkpoint holds both states, and a newcomer gets both.

    Args:
        model: the model; all its parameters are trained.
        lr: learning rate of AdamW. Muon's updates are scaled to the size of AdamW's, so it has the same one.
        betas: coefficients of AdamW.
        momentum: momentum of Muon.
    """

    def __init__(
        self, model: nn.Module, lr: float = 3e-3, betas: tuple[float, float] = (0.9, 0.95), momentum: float = 0.95
    ) -> None:
        matrices, rest = divide(model)
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, betas=betas),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Gives both optimizers the state and the groups of this one, and not copies, so that all see each change."""
        places = iter(self.param_groups)
        for part in self._parts:
            part.state = self.state
            part.param_groups = [next(places) for _ in part.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called with new objects when a state is loaded."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


Named = Iterable[tuple[str, nn.Parameter]]


def divide(model: nn.Module) -> tuple[Named, Named]:
    """The parameters for Muon and those for AdamW, with their names."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = list(model.named_parameters())
    matrices = [(name, one) for name, one in named if one.ndim == 2 and id(one) not in embeddings]
    chosen = {name for name, _ in matrices}
    return matrices, [(name, one) for name, one in named if name not in chosen]
