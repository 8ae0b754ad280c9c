"""Several averagers that train together over gRPC in one process, each in its own thread."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import torch

from averaging import DecentralizedAverager, Strategy
from averaging.training.history import Progress
from tests.support.tuned import tuned

T = TypeVar("T")

SGD = partial(torch.optim.SGD, lr=0.05)

PATIENCE = 100.0
"""Seconds after which a test that waits for a peer fails."""

FOR_EVER = 3000.0
"""Seconds that a peer may wait for others where it must not wait at all: if it does, the test fails."""


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """A small network, the same for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)


def batch_of(seed: int, samples: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 5, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(samples, 3, generator=generator, dtype=torch.float64).to(dtype),
    )


def backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Replaces the gradients by those of the mean squared error on a batch."""
    model.zero_grad()
    inputs, targets = batch
    loss: torch.Tensor = (model(inputs) - targets).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are the same to the bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Run:
    """A run with its peers, all of which begin with the same parameters.

    Attributes:
        models: of the peers, in the order in which they came.
        averagers: likewise.
    """

    def __init__(self) -> None:
        self.models: list[torch.nn.Module] = []
        self.averagers: list[DecentralizedAverager] = []

    def add(
        self,
        strategy: Strategy,
        optimizer: Callable[..., torch.optim.Optimizer],
        model: torch.nn.Module | None = None,
        *,
        gives_model: bool = True,
        **options: Any,
    ) -> DecentralizedAverager:
        """Starts a peer; all but the first join the first."""
        model = model_of(0) if model is None else model
        join = [self.averagers[0].endpoint] if self.averagers else []
        defaults: dict[str, Any] = {"run_id": "test", "join": join, "group_size": 8, "group_wait": 30.0}
        defaults["model"] = model if gives_model else None
        averager = DecentralizedAverager(optimizer(model.parameters()), strategy=strategy, **tuned(defaults | options))
        self.models.append(model)
        self.averagers.append(averager)
        return averager

    def meet(self) -> None:
        """Waits until all peers know each other."""
        assert all(averager.wait_for_peers(len(self.averagers), PATIENCE) for averager in self.averagers)

    def wait_for_progress(self, number: int, global_step: int, of: int = 1) -> None:
        """Waits until a peer knows that `of` others are at that global step or further."""
        averager = self.averagers[number]

        async def wait() -> None:
            async with aclosing(averager._peer.progress.watch()) as changes:
                async for announcements in changes:
                    progress = map(Progress.unpack, announcements.values())
                    if sum(one is not None and one.history.step >= global_step for one in progress) >= of:
                        return

        averager._thread.run(asyncio.wait_for(wait(), PATIENCE))
        averager._training.announcements.refresh()

    def each(self, train: Callable[[int], T]) -> list[T]:
        """Calls `train` with the number of each peer, in a thread for each, at the same time."""
        with ThreadPoolExecutor(len(self.averagers)) as pool:
            futures = [pool.submit(train, number) for number in range(len(self.averagers))]
            return [future.result(PATIENCE) for future in futures]

    def parameters(self) -> list[list[torch.Tensor]]:
        """Copies of the parameters of all peers."""
        return [parameters_of(model) for model in self.models]

    def close(self) -> None:
        """Ends all peers."""
        for averager in self.averagers:
            averager.close()


Start = Callable[[], Run]


def run_of(
    start: Start,
    count: int,
    strategy: Callable[[], Strategy],
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    model: Callable[[], torch.nn.Module] = lambda: model_of(0),
    **options: Any,
) -> Run:
    """A run of so many equal peers that know each other."""
    run = start()
    for _ in range(count):
        run.add(strategy(), optimizer, model(), **options)
    run.meet()
    return run


def end_rounds(run: Run) -> None:
    """Waits for the results of the rounds in progress; all peers have averaged."""
    for averager in run.averagers:
        averager.strategy.finish(averager._training)
        assert averager.last_receipt is not None
        assert averager.last_receipt.averaged


def step(run: Run, number: int, seed: int, samples: int = 4, **options: Any) -> None:
    backward(run.models[number], batch_of(seed, samples))
    run.averagers[number].step(**options)


def steps(run: Run, number: int, seeds: Iterable[int]) -> None:
    for seed in seeds:
        step(run, number, seed)


def gather_until(run: Run, number: int, global_step: int, samples: int = 4) -> None:
    """Steps of GradientAveraging until this peer has made so many global ones."""
    seed = 0
    while (run.averagers[number].global_step or 0) < global_step:
        seed += 1
        step(run, number, 1000 * number + seed, samples, batch_size=samples)


def pushed(run: Run, number: int, gradient: float) -> None:
    """One step of a peer whose model is one tensor, with that gradient everywhere."""
    (weight,) = run.models[number].parameters()
    weight.grad = torch.full_like(weight, gradient)
    run.averagers[number].step()
