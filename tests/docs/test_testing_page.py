"""The code of docs/how-to/testing.md runs as it is written, and a training loop takes the same parts."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, LocalSGD
from averaging.testing import MemoryDiscovery, MemoryNetwork, MemoryRegistry

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "testing.md"


def test_the_code_of_the_page_runs_and_gives_what_it_says() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert [tensor.tolist() for tensor in names["tensors"]] == [[3.0] * 4, [3.0] * 4, [1.0] * 4]


@pytest.mark.timeout(60)
def test_averagers_of_one_process_train_over_the_memory_network() -> None:
    network, registry, both = MemoryNetwork(random.Random(1)), MemoryRegistry(), threading.Barrier(2)

    def train(number: int) -> torch.Tensor:
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(float(number))
        with DecentralizedAverager(
            torch.optim.SGD(model.parameters(), lr=0.0),
            model=model,
            run_id="test",
            strategy=LocalSGD(1),
            group_size=2,
            share_state=False,
            transport=network.transport(f"peer-{number}:1"),
            discovery=lambda endpoint, transport: MemoryDiscovery(registry),
        ) as optimizer:
            optimizer.wait_for_peers(2, timeout=30.0, required=True)
            both.wait(30.0)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step(batch_size=1)
        return model.weight.detach()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(train, range(2))
    assert first.tolist() == second.tolist() == [[0.5, 0.5]]
