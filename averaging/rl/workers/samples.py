"""Samples: tensors by name, and what a plan demands of them. Pure."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from averaging.errors import ConfigError, TensorError
from averaging.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class KeySpec:
    """Dtype and shape of a tensor of each sample.

    Attributes:
        dtype: For example `int64`.
        shape: With None for dimensions of any length.
    """

    dtype: str
    shape: tuple[int | None, ...]

    def check(self, key: str, sample: str, dtype: str, shape: Sequence[int]) -> None:
        """Checks dtype and shape of one tensor.

        Raises:
            TensorError: They are others.
        """
        fits = len(shape) == len(self.shape) and all(
            want is None or have == want for have, want in zip(shape, self.shape, strict=True)
        )
        if dtype != self.dtype or not fits:
            wanted = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
            raise TensorError(
                f"{key!r} of sample {sample} is {dtype}{list(shape)}; the plan says {self.dtype}[{wanted}]"
            )


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a dataset.

    Attributes:
        id: Unique in the dataset; at most 200 characters.
        data: Its tensors by name; at least one.
    """

    id: str
    data: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples with the same tensors.

    Attributes:
        ids: Ids of the samples.
        data: By name, one tensor for each sample in the same order. Their first dimensions may differ.

    Raises:
        ConfigError: The numbers of tensors and samples differ.
    """

    ids: Sequence[str]
    data: Mapping[str, Sequence[torch.Tensor]]

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


def kind_of(tensor: torch.Tensor) -> tuple[str, torch.Size]:
    """Dtype, such as `int64`, and shape of a tensor."""
    return dtype_name(tensor.dtype), tensor.shape


# The part of a dataset that one worker holds.


class Dataset(Protocol):
    """Where a worker gets samples. Its methods run in the thread of the computations."""

    def place(self, dp_rank: int, dp_size: int) -> None:
        """Called once before `fetch`: this worker is one of `dp_size` that hold a part each, without overlap."""
        ...

    @property
    def size(self) -> int:
        """Samples in the part of this worker."""
        ...

    @property
    def epoch(self) -> int:
        """Passes over the part that are complete."""
        ...

    def fetch(self, count: int) -> Sequence[Sample]:
        """The next samples of the part: at most `count`, and none if there are none now."""
        ...

    def load(self, ids: Sequence[str]) -> Sequence[Sample]:
        """These samples, also those of another part whose worker has died. Unknown ones are left out."""
        ...


class ListDataset:
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
        self._epoch = -1

    def place(self, dp_rank: int, dp_size: int) -> None:
        """See `Dataset`."""
        size, longer = divmod(len(self._all), dp_size)  # the parts are consecutive, and the first are longer by one
        start = dp_rank * size + min(dp_rank, longer)
        self._part = self._all[start : start + size + (dp_rank < longer)]
        self._left.clear()
        self._epoch = -1

    @property
    def size(self) -> int:
        """See `Dataset`."""
        return len(self._part)

    @property
    def epoch(self) -> int:
        """See `Dataset`."""
        return max(0, self._epoch)

    def fetch(self, count: int) -> list[Sample]:
        """See `Dataset`. It begins again after the last sample."""
        found: list[str] = []
        while len(found) < min(count, self.size):
            if not self._left:
                self._epoch += 1
                order = list(self._part)
                if self._seed is not None:
                    random.Random(f"{self._seed} {self._epoch}").shuffle(order)
                self._left.extend(order)
            found.append(self._left.popleft())
        return [self._by_id[sample] for sample in dict.fromkeys(found)]

    def load(self, ids: Sequence[str]) -> list[Sample]:
        """See `Dataset`."""
        return [self._by_id[sample] for sample in ids if sample in self._by_id]
