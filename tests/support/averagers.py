"""What tests of the averager have in common."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, LocalSGD
from averaging.testing.discovery import MemoryDiscovery, MemoryRegistry
from averaging.testing.transport import MemoryNetwork
from tests.support.alone import Make


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
