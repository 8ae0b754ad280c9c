"""What a user writes for a worker: the `Backend` of a model, and the `Dataset` with its samples."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from averaging.errors import ConfigError
from averaging.rl.workers.plan import ModelShardID, Topology


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a dataset."""

    id: str  # unique in the dataset
    data: Mapping[str, torch.Tensor]  # by name, at least one


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples with the same tensors. Another number of tensors than of samples is a ConfigError."""

    ids: Sequence[str]
    data: Mapping[str, Sequence[torch.Tensor]]  # for each name one tensor per sample; first dimensions may differ

    def __post_init__(self) -> None:
        for key, tensors in self.data.items():
            if len(tensors) != len(self.ids):
                raise ConfigError(f"{len(self.ids)} samples have {len(tensors)} tensors {key!r}; give one each")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Sequence[torch.Tensor]:
        return self.data[key]

    def stacked(self, key: str) -> torch.Tensor:
        """The tensors of one name with a new first dimension. They must have equal shapes."""
        return torch.stack(list(self.data[key]))


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
        """Returns a mapping of statistics to numbers."""
        raise self._lacks("evaluate")

    def offload(self) -> Any:
        """Moves the model out of the way, for example from the GPU."""
        raise self._lacks("offload")

    def save(self, path: str) -> Any:
        """Saves the model at an absolute path in the `save_folder` of the worker."""
        raise self._lacks("save")

    def average(self) -> Any:
        """Joins a round with the other sites; returns a mapping of statistics to numbers, or None, when it is over."""
        raise self._lacks("average")

    def parameters(self) -> Any:
        """Returns a mapping of names to tensors, which `param_realloc` reads or writes in place."""
        raise self._lacks("parameters")

    def _lacks(self, method: str) -> ConfigError:
        return ConfigError(f"{type(self).__name__}, the backend of {self.shard.model!r}, has no method {method!r}")


def check_numbers(stats: object, method: str) -> dict[str, float]:
    if stats is None:
        return {}
    try:
        return {str(name): float(number) for name, number in stats.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{method} must return a mapping of names to numbers, not {stats!r:.200}") from None


def check_outputs(batch: SampleBatch, outputs: list[str], result: object, method: str) -> SampleBatch:
    if not isinstance(result, Mapping):
        raise ConfigError(f"{method} must return a mapping of names to tensors, not {result!r:.200}")
    if lacking := [key for key in outputs if key not in result]:
        raise ConfigError(f"{method} returned no {lacking[0]!r}; the plan names it as an output")
    tensors_of = {key: list(result[key]) for key in outputs}
    for key, tensors in tensors_of.items():
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ConfigError(f"{method} returned something else than tensors for {key!r}")
    return SampleBatch(batch.ids, tensors_of)


class Dataset(Protocol):
    """Where a worker gets samples. Its methods run in the thread of the computations."""

    def place(self, dp_rank: int, dp_size: int) -> None:
        """Called once before `fetch`: `dp_size` workers hold a part each, without overlap."""
        ...

    @property
    def size(self) -> int:
        """Samples in the part of this worker."""
        ...

    def fetch(self, count: int) -> Sequence[Sample]:
        """The next samples of the part: at most `count`, and an empty sequence if nothing is there now."""
        ...


class ListDataset(Dataset):
    """A dataset that every worker can read as a whole, such as a list or a file.

    Args:
        samples: All samples, in the same order at all workers.
        seed: Order in each epoch; None keeps the order.

    Raises:
        ConfigError: Two samples have the same id.
    """

    def __init__(self, samples: Sequence[Sample], seed: int | None = None) -> None:
        self._by_id = {sample.id: sample for sample in samples}
        if len(self._by_id) < len(samples):
            raise ConfigError("two samples of the dataset have the same id; give each its own")
        self._seed = seed
        self._all = list(self._by_id)
        self._part: Sequence[str] = []
        self._left: deque[str] = deque()
        self._epochs = 0  # that have begun

    def place(self, dp_rank: int, dp_size: int) -> None:
        self._part, self._epochs = self._all[dp_rank::dp_size], 0
        self._left.clear()

    @property
    def size(self) -> int:
        return len(self._part)

    def fetch(self, count: int) -> list[Sample]:
        # It begins again after the last sample, in another order if there is a seed.
        ids: list[str] = []
        while len(ids) < min(count, self.size):
            if not self._left:
                self._left.extend(self._part)
                if self._seed is not None:
                    random.Random(f"{self._seed} {self._epochs}").shuffle(self._left)
                self._epochs += 1
            ids.append(self._left.popleft())
        return [self._by_id[sample] for sample in dict.fromkeys(ids)]
