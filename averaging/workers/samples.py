"""Samples: tensors by name, and what a plan demands of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from averaging.errors import ConfigError, TensorError


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
    return str(tensor.dtype).removeprefix("torch."), tensor.shape
