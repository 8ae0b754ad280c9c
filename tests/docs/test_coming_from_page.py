"""The code of docs/how-to/coming-from.md works as it stands there, but for addresses and sizes."""

from __future__ import annotations

import asyncio
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LinearLR

from averaging import DecentralizedAverager, GradientAveraging, Peer, Receipt

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md").read_text()
OPTIMIZER, TENSORS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
JOIN = 'join=["192.0.2.7:4222"]'


def test_what_replaces_hivemind_s_optimizer_makes_a_global_step_of_a_joined_batch() -> None:
    model = torch.nn.Linear(3, 1)
    names: dict[str, Any] = {
        "DecentralizedAverager": DecentralizedAverager,
        "GradientAveraging": GradientAveraging,
        "torch": torch,
        "model": model,
        "make_scheduler": partial(LinearLR, total_iters=10),
    }
    model(torch.randn(32, 3)).sum().backward()
    assert JOIN in OPTIMIZER
    assert "=4096" in OPTIMIZER
    exec(OPTIMIZER.replace(JOIN, "join=[]").replace("=4096", "=64"), names)
    with names["opt"] as opt:
        assert opt.global_step == 0
        opt.step(batch_size=32)
        assert opt.global_step == 1


def test_tensors_alone_are_averaged() -> None:
    assert JOIN in TENSORS
    code = TENSORS.replace(JOIN, "join=join").replace("receipt =", "found.put_nowait(peer.endpoint)\n    receipt =")
    names: dict[str, Any] = {"Peer": Peer}
    exec(f"async def average(weight, join, found):\n{textwrap.indent(code, '    ')}    return receipt", names)
    weights = [torch.zeros(4), torch.full((4,), 2.0)]

    async def main() -> list[Receipt]:
        found = asyncio.Queue[str]()
        founder = asyncio.create_task(names["average"](weights[0], [], found))
        newcomer = asyncio.create_task(names["average"](weights[1], [await found.get()], found))
        return [await founder, await newcomer]

    assert all(receipt.averaged for receipt in asyncio.run(main()))
    for weight in weights:
        torch.testing.assert_close(weight, torch.ones(4))
