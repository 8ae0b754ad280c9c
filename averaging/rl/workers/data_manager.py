"""Which workers hold which tensors of samples; the plan of their transfers, and its execution at a worker."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress

import torch

from averaging.errors import ConfigError, ProtocolViolationError, WorkerError
from averaging.rl.workers.backend import Sample, SampleBatch, kind_of
from averaging.rl.workers.parameters import SILENCE_SECONDS, receive, send
from averaging.rl.workers.payload import FETCH_DATA, MAX_NAMES, Step, WorkerChannels
from averaging.rl.workers.plan import KeySpec
from averaging.wire.workers_pb2 import FetchDataRequest, NamedTensor

MAX_IDS = 1000
"""Samples in one request for tensors."""


MAX_TRANSFERS = 4096
"""Transfers to one worker before one request, all at the same time."""


class OwnerTracker:
    """The master's record of the tensors at the workers."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, set[str]]] = {}  # sample, tensor, workers

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, worker: str, ids: Iterable[str], keys: Iterable[str]) -> None:
        """Records that a worker holds these tensors of these samples."""
        keys = list(keys)
        for sample in ids:
            of_sample = self._owners.setdefault(sample, {})
            for key in keys:
                of_sample.setdefault(key, set()).add(worker)

    def replace(self, worker: str, ids: Iterable[str], keys: Iterable[str]) -> None:
        """Records that a worker has computed these tensors; copies elsewhere are outdated."""
        keys = list(keys)
        for sample in ids:
            of_sample = self._owners.setdefault(sample, {})
            for key in keys:
                of_sample[key] = {worker}

    def owners(self, sample: str, key: str) -> frozenset[str]:
        """The workers that hold a tensor; an empty set if it is unknown."""
        return frozenset(self._owners.get(sample, {}).get(key, ()))

    def remove(self, ids: Iterable[str]) -> None:
        """Forgets samples."""
        for sample in ids:
            self._owners.pop(sample, None)

    def remove_worker(self, worker: str) -> None:
        """Forgets everything that a lost worker held."""
        for of_sample in self._owners.values():
            for key in [key for key, workers in of_sample.items() if worker in workers]:
                of_sample[key].discard(worker)
                if not of_sample[key]:
                    del of_sample[key]

    def missing(self, ids: Iterable[str], keys: Iterable[str]) -> dict[str, list[str]]:
        """The tensors that no worker holds: names by sample."""
        keys = list(keys)
        missing = {sample: [key for key in keys if not self.owners(sample, key)] for sample in ids}
        return {sample: names for sample, names in missing.items() if names}


class Redistributor:
    """Plans the transfers before a call.

    Args:
        tracker: The record of which worker holds which tensors.
    """

    def __init__(self, tracker: OwnerTracker) -> None:
        self._tracker = tracker

    def plan(self, wanted: Mapping[str, Sequence[str]], keys: Sequence[str]) -> list[Step]:
        """The steps after which every worker holds these tensors of its samples.

        Each missing tensor is received once, from an owner. If a tensor has several owners, the one with the fewest
        transfers so far sends it. Tensors that a worker holds are not sent to it.

        Args:
            wanted: Samples by worker.
            keys: Names of the tensors.

        Raises:
            WorkerError: No worker holds one of the tensors.
        """
        load: Counter[str] = Counter()
        transfers: defaultdict[tuple[str, tuple[str, ...], str], list[str]] = defaultdict(list)
        for worker, ids in wanted.items():
            for sample in dict.fromkeys(ids):
                missing: defaultdict[str, list[str]] = defaultdict(list)  # names by source
                for key in keys:
                    owners = self._tracker.owners(sample, key)
                    if worker in owners:
                        continue
                    if not owners:
                        raise WorkerError("", f"no worker holds {key!r} of sample {sample}, which {worker} needs")
                    # The name decides between owners with equal loads, so that a plan depends on the record alone.
                    source = min(owners, key=lambda owner: (load[owner], owner))
                    load[source] += 1
                    missing[source].append(key)
                for source, names in missing.items():
                    transfers[source, tuple(names), worker].append(sample)
        return _steps(transfers)


def _steps(transfers: Mapping[tuple[str, tuple[str, ...], str], list[str]]) -> list[Step]:
    """The steps of transfers, which are given as samples by (source, names of tensors, receiver)."""
    receivers: defaultdict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for (source, keys, worker), ids in transfers.items():
        receivers[source, keys, tuple(ids)].append(worker)
    fan_out = Counter((source, keys) for (source, keys, _), workers in receivers.items() if len(workers) == 1)
    steps: list[Step] = []
    others: defaultdict[tuple[str, str, tuple[str, ...]], dict[str, list[str]]] = defaultdict(dict)
    for (source, keys, shared), workers in receivers.items():
        if len(workers) > 1:
            steps.append(Step("bcast", source, [source], workers, [list(shared)], list(keys)))
        elif fan_out[source, keys] > 1:
            others["scatter", source, keys][workers[0]] = list(shared)
        else:
            others["gather", workers[0], keys][source] = list(shared)
    for (kind, root, keys), ids_of in others.items():
        srcs, dsts = ([root], list(ids_of)) if kind == "scatter" else (list(ids_of), [root])
        steps.append(Step(kind, root, srcs, dsts, list(ids_of.values()), list(keys)))
    return steps


def balance(lengths: Mapping[str, int], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Divides samples over ranks, so that their numbers differ by at most one and their lengths sum to about the same.

    Args:
        lengths: Length of each sample, by id.
        ranks: The ranks.

    Returns:
        The samples of each rank, in their order in `lengths`.
    """
    order = {sample: place for place, sample in enumerate(lengths)}
    ids_of: dict[int, list[str]] = {rank: [] for rank in ranks}
    total: Counter[int] = Counter()
    most, longer = divmod(len(lengths), len(ranks))
    for sample in sorted(lengths, key=lambda sample: (-lengths[sample], order[sample])):
        full = sum(len(ids) > most for ids in ids_of.values())  # ranks that have `most` + 1
        open_ranks = [rank for rank in ranks if len(ids_of[rank]) < most + (full < longer)]
        rank = min(open_ranks, key=lambda rank: (total[rank], rank))
        ids_of[rank].append(sample)
        total[rank] += lengths[sample]
    return {rank: sorted(ids, key=order.__getitem__) for rank, ids in ids_of.items()}


class DataManager:
    """Stores the tensors of samples, and executes the steps of a `Redistributor`. It belongs to one event loop.

    Args:
        worker: Name of this worker.
        channels: Channels to the other workers.
        endpoints: `host:port` of each worker, by name.
        keys: Dtype and shape of tensors, by name; others are not checked.
        compression: Compression of floating tensors that this worker sends.
    """

    def __init__(
        self,
        worker: str,
        channels: WorkerChannels,
        endpoints: Mapping[str, str] | None = None,
        keys: Mapping[str, KeySpec] | None = None,
        compression: str = "none",
    ) -> None:
        self.endpoints: Mapping[str, str] = endpoints or {}
        self.keys: Mapping[str, KeySpec] = keys or {}
        self._worker = worker
        self._channels = channels
        self._compression = compression
        self._data: dict[str, dict[str, torch.Tensor]] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._data)

    def inventory(self) -> dict[str, list[str]]:
        """Names of the tensors that are stored, by sample."""
        return {sample: list(tensors) for sample, tensors in self._data.items()}

    def length(self, sample: str) -> int:
        """First dimension of the first tensor of a sample; 1 for a scalar."""
        tensor = next(iter(self._data[sample].values()))
        return len(tensor) if tensor.dim() else 1

    def store(self, samples: Iterable[Sample]) -> None:
        """Stores samples. Tensors that are there already are replaced.

        Raises:
            TensorError: A tensor has another dtype or shape than the plan says. Nothing is stored then.
            ConfigError: A sample has no tensors.
        """
        samples = list(samples)
        for sample in samples:
            if not sample.data:
                raise ConfigError(f"sample {sample.id} has no tensors")
        self._put([(sample.id, key, tensor) for sample in samples for key, tensor in sample.data.items()])

    def update(self, batch: SampleBatch) -> None:
        """Adds tensors to samples, or replaces them.

        Raises:
            TensorError: A tensor has another dtype or shape than the plan says. Nothing is stored then.
        """
        self._put(
            [
                (sample, key, tensor)
                for key, tensors in batch.data.items()
                for sample, tensor in zip(batch.ids, tensors, strict=True)
            ]
        )

    def get(self, ids: Sequence[str], keys: Sequence[str]) -> SampleBatch:
        """Returns these tensors.

        Raises:
            WorkerError: One is not stored here.
        """
        for sample in ids:
            for key in keys:
                if not self.has_data(sample, [key]):
                    raise WorkerError(self._worker, f"{self._worker} does not hold {key!r} of sample {sample}")
        return SampleBatch(list(ids), {key: [self._data[sample][key] for sample in ids] for key in keys})

    def has_data(self, sample: str, keys: Collection[str] = ()) -> bool:
        """Whether a sample is stored here, with all of these tensors."""
        return sample in self._data and self._data[sample].keys() >= set(keys)

    def remove(self, ids: Iterable[str]) -> None:
        """Forgets samples. Unknown ones are ignored."""
        for sample in ids:
            self._data.pop(sample, None)

    async def redistribute(self, steps: Sequence[Step]) -> None:
        """Receives what this worker receives in these steps, from all sources at the same time.

        Raises:
            WorkerError: A source cannot be reached.
            WorkerError: A source is unknown.
            ProtocolViolationError: A source sent something else.
            TensorError: A tensor has another dtype or shape than the plan says.
        """
        transfers = [
            (source, ids[start : start + MAX_IDS], step.keys)
            for step in steps
            for source, ids in step.sources_of(self._worker)
            for start in range(0, len(ids), MAX_IDS)
        ]
        if len(transfers) > MAX_TRANSFERS:
            raise ProtocolViolationError(f"{len(transfers)} transfers before one request; {MAX_TRANSFERS} are allowed")
        try:
            async with asyncio.TaskGroup() as group:
                for source, ids, keys in transfers:
                    group.create_task(self._fetch(source, ids, keys))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fetch(self, source: str, ids: Sequence[str], keys: Sequence[str]) -> None:
        if source not in self.endpoints:
            raise WorkerError(source, f"{self._worker} is to get tensors of {source!r}, which is not in its plan")
        request = FetchDataRequest(caller=self._worker, ids=ids, keys=keys)
        left = {(sample, key) for sample in ids for key in keys}

        def admit(head: NamedTensor) -> None:
            if (head.id, head.key) not in left:
                raise ProtocolViolationError(
                    f"{source} sent {head.key!r:.100} of sample {head.id!r:.100} without a request"
                )
            left.remove((head.id, head.key))
            self._check(head.id, head.key, head.dtype, head.tensor.size)

        messages = self._channels[self.endpoints[source]].stream(FETCH_DATA, request)
        async with aclosing(receive(source, messages, admit)) as tensors:
            received = [tensor async for tensor in tensors]
        if left:
            raise ProtocolViolationError(f"did not send {len(left)} of {len(ids) * len(keys)} tensors", source)
        self._put(received)

    async def serve(self, request: FetchDataRequest) -> AsyncGenerator[NamedTensor, None]:
        """Answers `fetch_data`: waits until all tensors are there, and sends them.

        Raises:
            ProtocolViolationError: The request names too many samples or tensors.
            WorkerError: A tensor did not come in time, or was removed meanwhile.
        """
        ids, keys = list(dict.fromkeys(request.ids)), list(dict.fromkeys(request.keys))
        if len(ids) > MAX_IDS or len(keys) > MAX_NAMES:
            raise ProtocolViolationError(
                f"a request for {len(keys)} tensors of {len(ids)} samples; {MAX_NAMES} and {MAX_IDS} are allowed"
            )
        with suppress(TimeoutError):  # the caller has given up by then; `get` names what is missing
            async with asyncio.timeout(SILENCE_SECONDS):
                for sample in ids:
                    while not self.has_data(sample, keys):
                        await self._changed.wait()
        batch = self.get(ids, keys)
        tensors = ((sample, key, batch[key][place]) for place, sample in enumerate(ids) for key in keys)
        async with aclosing(send(tensors, self._compression)) as messages:
            async for message in messages:
                yield message

    def _check(self, sample: str, key: str, dtype: str, shape: Sequence[int]) -> None:
        if key in self.keys:
            self.keys[key].check(key, sample, dtype, shape)

    def _put(self, tensors: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """Stores tensors, given with sample and name. Nothing is stored if a tensor is not as the plan says."""
        tensors = list(tensors)
        for sample, key, tensor in tensors:
            self._check(sample, key, *kind_of(tensor))
        for sample, key, tensor in tensors:
            self._data.setdefault(sample, {})[key] = tensor
        self._changed.set()
        self._changed = asyncio.Event()
