"""An averager that is alone in its run, and its model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from averaging import DecentralizedAverager

Make = Callable[..., DecentralizedAverager]


def linear() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 2)


def backward(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 3)).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
