"""`RunShards`: data that is read shard by shard, such as files, dealt out among the peers of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from averaging.averager import DecentralizedAverager
from averaging.data.dealing import LEASE_SECONDS, MAX_BLOCKS, DataStatistics
from averaging.data.sampler import RunSampler
from averaging.errors import ConfigError

Shard = TypeVar("Shard")
Sample = TypeVar("Sample")


class RunShards(IterableDataset[Sample], Generic[Shard, Sample]):
    """Deals out the shards of a dataset among the peers that are there. A block is a shard.

    ```python
    shards = RunShards(sorted(glob("data/*.jsonl")), read_lines, opt, num_workers=4)
    loader = DataLoader(shards, batch_size=32)
    for epoch in shards.epochs(3):
        for batch in loader:
            loss(model, batch).backward()
            opt.step(batch_size=len(batch))
            opt.zero_grad()
    ```

    For all else see `RunSampler`. A shard is trained twice, in part, if its peer dies in its midst, so use many small
    ones. In a site each rank reads all shards of the site, and takes each n-th sample.

    Args:
        shards: What `read` takes, such as paths; the same at all peers.
        read: Function that yields the samples of a shard. With `num_workers` it must be picklable if processes are not
            forked.
        opt: The averager.
        num_workers: Processes that read shards ahead, two whole shards each. Give the loader around it none.
        shuffle: Whether the shards of each epoch are in random order.
        seed: Of that order; the same at all peers.
        batch_size: See `RunSampler`.
        lease_timeout: See `RunSampler`.

    Attributes:
        sampler: The sampler of the shards.

    Raises:
        ConfigError: An argument is invalid, or the run has other shards.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[Shard], Iterable[Sample]],
        opt: DecentralizedAverager,
        *,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        batch_size: int | None = None,
        lease_timeout: float = LEASE_SECONDS,
    ) -> None:
        self._reader, self._num_workers = _ShardReader(shards, read), num_workers
        self._rank, self._ranks = opt.site.rank, opt.site.size
        least = -(-len(shards) // MAX_BLOCKS)
        self.sampler = RunSampler(
            len(shards),
            opt,
            block_size=max(1, -(-least // self._ranks)) * self._ranks,
            shuffle=shuffle,
            seed=seed,
            batch_size=batch_size,
            lease_timeout=lease_timeout,
        )

    def epochs(self, count: int) -> Iterator[int]:
        """See `RunSampler.epochs`."""
        return self.sampler.epochs(count)

    @property
    def statistics(self) -> DataStatistics:
        """See `RunSampler.statistics`; its blocks are shards."""
        return self.sampler.statistics

    def state_dict(self) -> dict[str, Any]:
        """See `RunSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RunSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[Sample]:
        """Yields the samples of one pass.

        Raises:
            ConfigError: It is read in the worker processes of a loader.
        """
        if get_worker_info() is not None:
            raise ConfigError("give RunShards num_workers, and the DataLoader around it none")
        self.sampler.begin_pass()
        return self._pass()

    def _pass(self) -> Iterator[Sample]:
        dealt: deque[tuple[int, bool]] = deque()  # of the shards that are being read: the block, and if it is its last

        def shards() -> Iterator[int]:
            for epoch, block in self.sampler.blocks():
                indices = self.sampler.places(epoch, block)
                for index in indices:
                    dealt.append((block, index == indices[-1]))
                    yield index

        for samples in self._read(shards()):
            block, is_last = dealt.popleft()
            yield from self._of_shard(samples, block, is_last=is_last)

    def _read(self, shards: Iterator[int]) -> Iterable[Iterable[Sample]]:
        if not self._num_workers:
            return (self._reader.open(shard) for shard in shards)
        return DataLoader(
            self._reader, batch_size=None, sampler=_Once(shards), num_workers=self._num_workers, collate_fn=_as_it_is
        )

    def _of_shard(self, samples: Iterable[Sample], block: int, *, is_last: bool) -> Iterator[Sample]:
        """This rank's samples of a shard. The last one is marked, and only known once the shard has ended."""
        before: list[Sample] = []
        for chunk in _chunks(samples, self._ranks):
            if before:
                self.sampler.hand_out(block)
                yield before.pop()
                if not self.sampler.has(block):
                    return
            before.append(chunk[min(self._rank, len(chunk) - 1)])
        if before:
            self.sampler.hand_out(block, is_last=is_last)
            yield before.pop()
        elif is_last:  # an empty shard
            self.sampler.hand_out_nothing(block)


def _chunks(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    chunk: list[Sample] = []
    for sample in samples:
        chunk.append(sample)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _as_it_is(item: Any) -> Any:
    return item


class _Once:
    """A sampler of indices that are dealt once."""

    def __init__(self, indices: Iterator[int]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        return self._indices


class _ShardReader(Dataset[list[Sample]], Generic[Shard, Sample]):
    """Whole shards by their index, for the processes that read ahead."""

    def __init__(self, shards: Sequence[Shard], read: Callable[[Shard], Iterable[Sample]]) -> None:
        self._shards, self._function = shards, read

    def open(self, index: int) -> Iterable[Sample]:
        """The samples of a shard, one after the other."""
        return self._function(self._shards[index])

    def __getitem__(self, index: int) -> list[Sample]:
        return list(self.open(index))
