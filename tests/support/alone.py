"""An averager that is alone in its run, and its model."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, LocalSGD
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.testing.transport import MemoryNetwork

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


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an averager that starts a run and finds nobody, at once."""
    made = []

    def make_one(optimizer: torch.optim.Optimizer, sync_every: int = 1000, **options: Any) -> DecentralizedAverager:
        defaults: dict[str, Any] = {"round_timeout": 0.02, "strategy": LocalSGD(sync_every), "run_id": "alone"}
        transport = MemoryNetwork(random.Random(0)).transport("192.0.2.1:1")
        registry = MemoryRegistry()
        made.append(
            DecentralizedAverager(
                optimizer,
                transport=transport,
                discovery=lambda endpoint, _: MemoryDiscovery(registry),
                **(defaults | options),
            )
        )
        return made[-1]

    yield make_one
    for averager in made:
        averager.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("the averager")]
