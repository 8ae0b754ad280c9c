"""`Backend`: what a user writes for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from averaging.errors import ConfigError
from averaging.rl.workers.plan import ModelShardID, Topology
from averaging.rl.workers.samples import SampleBatch


class Backend:
    """A model at one worker. Override what the plan calls; the rest raises a ConfigError that names it.

    All methods run in one thread, one after the other. A method may also be a coroutine function. It then runs in the
    event loop and must not block it.

    Attributes:
        shard: The part of the model that this worker holds, and its ranks. Set when a master attaches.
        topology: The topology of the model.
    """

    shard: ModelShardID
    topology: Topology

    def initialize(self) -> Any:
        """Creates parameters and optimizer. Called once, on the first `initialize` of a master."""

    def model_config(self) -> Mapping[str, Any]:
        """Returns the configuration of the model: what msgpack can encode."""
        return {}

    def generate(self, batch: SampleBatch, step: int) -> Any:
        """Generates from samples.

        Args:
            batch: The samples of this data-parallel rank, with the inputs of the call.
            step: Number of the step, from 1.

        Returns:
            A mapping of the outputs of the call: for each name one tensor per sample, in order. The outputs of
            workers that are no DP heads are ignored.
        """
        raise self._lacks("generate")

    def inference(self, batch: SampleBatch, step: int) -> Any:
        """Computes tensors with one forward pass, or with a rule. Arguments and result are those of `generate`."""
        raise self._lacks("inference")

    def train_step(self, batch: SampleBatch, step: int) -> Any:
        """Trains on samples. Returns a mapping of statistics to numbers. For the arguments see `generate`."""
        raise self._lacks("train_step")

    def evaluate(self, step: int) -> Any:
        """The hook `evaluate`. Returns a mapping of statistics to numbers."""
        raise self._lacks("evaluate")

    def offload(self) -> Any:
        """The hook `offload`: moves the model out of the way, for example from the GPU."""
        raise self._lacks("offload")

    def save(self, path: str) -> Any:
        """The hook `save`. `path` is absolute and in the `save_folder` of the worker."""
        raise self._lacks("save")

    def average(self) -> Any:
        """The hook `average`: joins a round with the other sites and returns when it is over.

        Returns:
            A mapping of statistics to numbers, or None.
        """
        raise self._lacks("average")

    def parameters(self) -> Any:
        """The hook `param_realloc`: returns a mapping of names to tensors, which the hook reads or writes in place."""
        raise self._lacks("parameters")

    def _lacks(self, method: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}, the backend of {self.shard.model!r}, has no method {method!r}")


def check_numbers(stats: object, method: str) -> dict[str, float]:
    """Returns statistics as numbers; none for None. Tensors with one element count as numbers.

    Raises:
        ConfigError: They are something else.
    """
    if stats is None:
        return {}
    try:
        return {str(name): float(number) for name, number in stats.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{method} must return a mapping of names to numbers, not {stats!r:.200}") from None


def check_outputs(batch: SampleBatch, outputs: list[str], result: object, method: str) -> SampleBatch:
    """Returns the outputs of a call as samples.

    Raises:
        ConfigError: The result is no mapping, lacks an output, or does not have one tensor for each sample.
    """
    if not isinstance(result, Mapping):
        raise ConfigError(f"{method} must return a mapping of names to tensors, not {result!r:.200}")
    if lacking := [key for key in outputs if key not in result]:
        raise ConfigError(f"{method} returned no {lacking[0]!r}; the plan names it as an output")
    found = {key: list(result[key]) for key in outputs}
    for key, tensors in found.items():
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ConfigError(f"{method} returned something else than tensors for {key!r}")
    return SampleBatch(batch.ids, found)
