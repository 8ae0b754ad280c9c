"""A schedule-free SGD, as small as it can be, for tests that run without other packages."""

from collections.abc import Callable
from typing import Any

import torch

BETA = 0.75


class ScheduleFreeSGD(torch.optim.Optimizer):
    """The model holds y = (1 - beta) z + beta x to train, or x to evaluate; x is the mean of all z so far."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "train_mode": False})

    def _switch(self, weight: float, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = training

    @torch.no_grad()
    def train(self) -> None:
        self._switch(1 - BETA, True)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(1 - 1 / BETA, False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "the weights to evaluate were trained"
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    x = parameter.lerp(z, 1 - 1 / BETA)
                    z.sub_(parameter.grad, alpha=group["lr"])
                    x.lerp_(z, 1 / group["k"])
                    parameter.copy_(x.lerp(z, 1 - BETA))
