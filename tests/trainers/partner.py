"""A peer that no trainer trains, beside one that a trainer trains; and a strategy that notes what it is told."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from averaging import DecentralizedAverager, GradientAveraging, LocalSGD
from tests.support.training import Run

RUN_ID = "test"


class Noted(GradientAveraging):
    """Keeps the samples that it is told with each step."""

    def __init__(self, target_batch_size: int) -> None:
        super().__init__(target_batch_size)
        self.told: list[int | None] = []

    def step(self, training: Any, closure: Any = None, batch_size: int | None = None) -> float | None:
        """A step as usual."""
        self.told.append(batch_size)
        return super().step(training, closure, batch_size)


def founder(run: Run, model: torch.nn.Module, steps: int) -> DecentralizedAverager:
    """A peer with a copy of the model that averages at every fourth step, and has made so many steps already."""
    opt = run.add(LocalSGD(4), partial(torch.optim.SGD, lr=0.01), copy.deepcopy(model), run_id=RUN_ID, group_size=2)
    train(run, 0, steps)
    return opt


def train(run: Run, number: int, steps: int) -> None:
    """Steps with gradients of one."""
    for _ in range(steps):
        for parameter in run.models[number].parameters():
            parameter.grad = torch.ones_like(parameter)
        run.averagers[number].step()


@contextmanager
def going_on(run: Run, steps: int) -> Iterator[list[str]]:
    """Once there is another peer, the founder makes so many more steps and finishes, in another thread.

    Gives what its `finish` told in the end.
    """
    told: list[str] = []

    def go_on() -> None:
        run.averagers[0].wait_for_peers(2, 60.0)
        train(run, 0, steps)
        told.append(str(run.averagers[0].finish()))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield told
    finally:
        thread.join(60.0)
