"""Averaging of the parameters every few steps."""

from __future__ import annotations

import torch

from averaging.errors import ConfigError
from averaging.strategies.base import Averaging, Strategy, named_parameters


class LocalSGD(Strategy):
    """Each peer trains on its own, and every `every` steps the parameters are averaged (Stich, 2018, arXiv:1805.09767).

    The training thread waits for the round, at most the peer's `timeout`, also while nobody else is there. If it fails,
    the next one is `every` steps later. The optimizer's statistics (momentum and so on) stay each peer's own.

    Args:
        every: local steps between two rounds, at least 1.

    Raises:
        ConfigError: `every` is not a whole number above 0.
    """

    def __init__(self, every: int) -> None:
        if type(every) is not int or every < 1:
            raise ConfigError(f"every must be a whole number of steps, at least 1, not {every!r}")
        self.every = every

    def __repr__(self) -> str:
        return f"LocalSGD(every={self.every})"

    def tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The parameters."""
        return named_parameters(optimizer)

    def after_step(self, averaging: Averaging) -> None:
        """Averages if it is time."""
        if averaging.local_step % self.every == 0:
            averaging.average_now()
