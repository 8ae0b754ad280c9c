"""What docs/trainers.md tells to do, with an optimizer that is wrapped as trainers do it; the trainers are not here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiplicativeLR

from averaging import DecentralizedAverager, GradientAveraging, LocalSGD

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SETUP, HOOK, TRAINER, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
JOIN = 'join=["192.0.2.7:4222"]'
STRATEGY = "strategy=LocalSGD(every=50)"
AS_IT_IS = "MultiplicativeLR(opt, lambda _: 1.0)"


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: loads the state dict at once, and tells `step` nothing but a closure."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        optimizer.load_state_dict(optimizer.state_dict())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's."""
        return self.optimizer.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The inner optimizer's."""
        return self.optimizer.step(closure)


@pytest.mark.parametrize("in_closure", [False, True])
def test_a_wrapped_averager_is_told_the_samples_by_a_hook_and_keeps_its_schedule(in_closure: bool) -> None:
    names: dict[str, Any] = {
        "DecentralizedAverager": DecentralizedAverager,
        "GradientAveraging": GradientAveraging,
        "LinearLR": LinearLR,
        "LocalSGD": LocalSGD,
        "Model": partial(torch.nn.Linear, 3, 1),
        "MultiplicativeLR": MultiplicativeLR,
        "device": "cpu",
        "n": 32,
        "partial": partial,
        "torch": torch,
    }
    assert JOIN in SETUP
    assert STRATEGY in SETUP
    exec(SETUP.replace(JOIN, "join=[]").replace(STRATEGY, "strategy=GradientAveraging(64)"), names)
    exec(HOOK, names)
    model, opt = names["model"], names["opt"]
    assert AS_IT_IS in TRAINER
    as_it_is: LRScheduler = eval(AS_IT_IS, names)
    wrapped = Wrapped(opt)

    def closure() -> float:
        opt.zero_grad()
        loss = model(torch.ones(32, 3)).pow(2).mean()
        loss.backward()
        return loss.item()  # type: ignore[no-any-return]

    with opt:
        rates = []
        for _ in range(4):
            if in_closure:
                wrapped.step(closure)
            else:
                closure()
                wrapped.step()
            as_it_is.step()
            rates.append(wrapped.param_groups[0]["lr"])
        assert opt.global_step == 2
    rate = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    schedule = LinearLR(rate, total_iters=100)
    expected = [schedule.get_last_lr()[0]]
    for _ in range(2):
        rate.step()
        schedule.step()
        expected.append(schedule.get_last_lr()[0])
    assert rates == pytest.approx([expected[0], expected[1], expected[1], expected[2]])
