"""An averager inside another optimizer, as trainers wrap it; tests/trainers has the trainers themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

from averaging import DecentralizedAverager, GradientAveraging


class Wrapped(torch.optim.Optimizer):
    """Like that of accelerate: loads the state dict at once, and passes only a closure to `step`."""

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
def test_a_wrapped_averager_gets_the_samples_by_a_hook_and_keeps_its_schedule(in_closure: bool) -> None:
    model = torch.nn.Linear(3, 1)
    opt = DecentralizedAverager(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model=model,
        run_id="example",
        strategy=GradientAveraging(64),
        scheduler=partial(LinearLR, total_iters=100),
    )
    opt.register_step_pre_hook(lambda opt, args, kwargs: (args, {**kwargs, "batch_size": 32}))
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
