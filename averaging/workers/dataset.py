"""The part of a dataset that one worker holds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from averaging.errors import ConfigError
from averaging.workers.redistributor import part_of
from averaging.workers.samples import Sample


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
        self._part = part_of(self._all, dp_rank, dp_size)
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
