"""Which workers hold which tensors of samples; the plan of their transfers, and its execution at a worker."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TypeAlias

import torch

from averaging.errors import (
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    ProtocolViolationError,
    TensorError,
    WorkerError,
)
from averaging.rl.workers.backend import Sample, SampleBatch
from averaging.rl.workers.requests import FETCH_DATA, Channel, Connect, Step
from averaging.rpc import TensorReader, tensor_messages
from averaging.tensors import STATE_DTYPES, dtype_name
from averaging.wire.workers_pb2 import FetchDataRequest, NamedTensor

# A transfer without a message for this time has failed: its source hangs, or never gets the tensors itself.
SILENCE_SECONDS = 60.0

Tensors: TypeAlias = list[tuple[str, str, torch.Tensor]]  # with their samples and names


class OwnerTracker:
    """The master's record of the tensors at the workers."""

    def __init__(self) -> None:
        self._owners: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def add(self, worker: str, ids: Iterable[str], keys: Collection[str]) -> None:
        for sample in ids:
            for key in keys:
                self._owners[sample][key].add(worker)

    def replace(self, worker: str, ids: Iterable[str], keys: Collection[str]) -> None:
        """Records that a worker has computed these tensors; copies elsewhere are outdated."""
        for sample in ids:
            for key in keys:
                self._owners[sample][key] = {worker}

    def owners(self, sample: str, key: str) -> set[str]:
        return self._owners[sample][key] if sample in self._owners else set()

    def missing(self, ids: Iterable[str], keys: Collection[str]) -> list[str]:
        """The samples that lack one of these tensors."""
        return [sample for sample in ids if not all(self.owners(sample, key) for key in keys)]

    def remove(self, ids: Iterable[str]) -> None:
        for sample in ids:
            self._owners.pop(sample, None)

    def remove_worker(self, worker: str) -> None:
        for of_sample in self._owners.values():
            for workers in of_sample.values():
                workers.discard(worker)


class Redistributor:
    """Plans the transfers before a call."""

    def __init__(self, tracker: OwnerTracker) -> None:
        self._tracker = tracker

    def plan(self, wanted: Mapping[str, Sequence[str]], keys: Sequence[str]) -> list[Step]:
        """The steps after which every worker holds these tensors of its samples, given as samples by worker.

        Each missing tensor is received once, from an owner. If a tensor has several owners, the one with the fewest
        transfers so far sends it. Tensors that a worker holds are not sent to it.

        Raises:
            WorkerError: No worker holds one of the tensors.
        """
        load: Counter[str] = Counter()
        # Samples by receiver, for each source and the names of the tensors.
        transfers: defaultdict[tuple[str, tuple[str, ...]], dict[str, list[str]]] = defaultdict(dict)
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
                    transfers[source, tuple(names)].setdefault(worker, []).append(sample)
        steps = []
        for (source, shared), ids_of in transfers.items():
            lists, receivers = list(ids_of.values()), list(ids_of)
            if all(samples == lists[0] for samples in lists):
                steps.append(Step("bcast", source, [source], receivers, lists[:1], list(shared)))
            else:
                steps.append(Step("scatter", source, [source], receivers, lists, list(shared)))
        return steps


def balance(lengths: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Divides samples over ranks: their numbers differ by at most one, and their lengths sum to about the same."""
    ids_of: list[list[str]] = [[] for _ in range(ranks)]
    for place, sample in enumerate(sorted(lengths, key=lambda sample: -lengths[sample])):
        row, column = divmod(place, ranks)
        ids_of[column if row % 2 == 0 else ranks - 1 - column].append(sample)  # to and fro, from the longest
    order = {sample: place for place, sample in enumerate(lengths)}
    return [sorted(ids, key=order.__getitem__) for ids in ids_of]


class DataManager:
    """Stores the tensors of samples, and executes the steps of a `Redistributor`."""

    def __init__(self, worker: str, connect: Connect) -> None:
        self.endpoints: Mapping[str, str] = {}  # of all workers, by name
        self._worker = worker
        self._connect = connect
        self._channels: dict[str, Channel] = {}  # by endpoint
        self._data: dict[str, dict[str, torch.Tensor]] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._data)

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    def inventory(self) -> dict[str, list[str]]:
        return {sample: list(tensors) for sample, tensors in self._data.items()}

    def length(self, sample: str) -> int:
        """First dimension of the first tensor of a sample; 1 for a scalar."""
        tensor = next(iter(self._data[sample].values()))
        return len(tensor) if tensor.dim() else 1

    def store(self, samples: Iterable[Sample]) -> None:
        """Stores samples. Tensors that are there already are replaced."""
        samples = list(samples)
        for sample in samples:
            if not sample.data:
                raise ConfigError(f"sample {sample.id} has no tensors")
        self._put([(sample.id, key, tensor) for sample in samples for key, tensor in sample.data.items()])

    def update(self, batch: SampleBatch) -> None:
        """Adds tensors to samples, or replaces them."""
        for key, tensors in batch.data.items():
            self._put([(sample, key, tensor) for sample, tensor in zip(batch.ids, tensors, strict=True)])

    def get(self, ids: Sequence[str], keys: Sequence[str]) -> SampleBatch:
        """Returns these tensors, or raises a WorkerError if one is not stored here."""
        self._check(ids, keys)
        return SampleBatch(list(ids), {key: [self._data[sample][key] for sample in ids] for key in keys})

    def has_data(self, sample: str, keys: Collection[str] = ()) -> bool:
        """Whether a sample is stored here, with all of these tensors."""
        return sample in self._data and self._data[sample].keys() >= set(keys)

    def remove(self, ids: Iterable[str]) -> None:
        for sample in ids:
            self._data.pop(sample, None)

    async def redistribute(self, steps: Sequence[Step]) -> None:
        """Receives what this worker receives in these steps, from all sources at the same time.

        Raises:
            WorkerError: A source is unknown, cannot be reached, or is silent for too long.
            ProtocolViolationError: A source sent something else.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for step in steps:
                    for source, ids in step.sources_of(self._worker):
                        group.create_task(self._fetch(source, ids, step.keys))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _fetch(self, source: str, ids: Sequence[str], keys: Sequence[str]) -> None:
        received = await self._receive(source, ids, keys)
        wanted = {(sample, key) for sample in ids for key in keys}
        if wanted != {(sample, key) for sample, key, _ in received}:
            raise ProtocolViolationError(f"sent {len(received)} tensors, not the {len(wanted)} requested ones", source)
        self._put(received)

    async def parameters_of(self, origin: str, transfer: str) -> dict[str, torch.Tensor]:
        """The parameters that a worker, perhaps this one, publishes as a sample. For errors see `redistribute`."""
        if origin == self._worker:
            tensors = await self._stored([transfer], [])
        else:
            tensors = await self._receive(origin, [transfer], [])
        return {key: tensor for _, key, tensor in tensors}

    async def _receive(self, source: str, ids: Sequence[str], keys: Sequence[str]) -> Tensors:
        if source not in self.endpoints:
            raise WorkerError(source, f"{self._worker} is to get tensors of {source!r}, which is not in its plan")
        endpoint = self.endpoints[source]
        if endpoint not in self._channels:
            self._channels[endpoint] = self._connect(endpoint)
        request = FetchDataRequest(caller=self._worker, ids=ids, keys=keys)
        received: Tensors = []
        reader, head = TensorReader(), NamedTensor()
        async with aclosing(self._channels[endpoint].stream(FETCH_DATA, request)) as messages:
            while (message := await _next(source, messages)) is not None:
                if reader.complete:
                    head = message
                    if head.dtype not in STATE_DTYPES:
                        raise ProtocolViolationError(f"sent a tensor of the unknown dtype {head.dtype!r:.100}", source)
                tensor = reader.read(message.tensor)
                if tensor is not None:
                    received.append((head.id, head.key, tensor.to(STATE_DTYPES[head.dtype])))
        if not reader.complete:
            raise ProtocolViolationError("sent an incomplete tensor", source)
        return received

    async def serve(self, request: FetchDataRequest) -> AsyncGenerator[NamedTensor, None]:
        """Answers `fetch_data`: waits until all tensors are there, and sends them."""
        for sample, key, tensor in await self._stored(request.ids, request.keys):
            head = {"id": sample, "key": key, "dtype": dtype_name(tensor.dtype)}
            for message in tensor_messages(tensor):
                yield NamedTensor(tensor=message, **head)
                head = {}  # in the first message only
                await asyncio.sleep(0)  # long transfers leave time for heartbeats

    async def _stored(self, ids: Iterable[str], keys: Iterable[str]) -> Tensors:
        """These tensors, or all of the samples without `keys`, as soon as they are there."""
        ids, keys = list(dict.fromkeys(ids)), list(dict.fromkeys(keys))
        with suppress(TimeoutError):  # the caller has given up by then; `_check` names what is missing
            async with asyncio.timeout(SILENCE_SECONDS):
                for sample in ids:
                    while not self.has_data(sample, keys):
                        await self._changed.wait()
        self._check(ids, keys)
        return [(sample, key, self._data[sample][key]) for sample in ids for key in keys or self._data[sample]]

    def _check(self, ids: Iterable[str], keys: Sequence[str]) -> None:
        for sample in ids:
            if not self.has_data(sample, keys):
                missing = next((repr(key) for key in keys if not self.has_data(sample, [key])), "anything")
                raise WorkerError(self._worker, f"{self._worker} does not hold {missing} of sample {sample}")

    def _put(self, tensors: Tensors) -> None:
        for sample, key, tensor in tensors:
            self._data.setdefault(sample, {})[key] = tensor
        self._changed.set()
        self._changed = asyncio.Event()


async def _next(source: str, messages: AsyncGenerator[NamedTensor, None]) -> NamedTensor | None:
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await anext(messages, None)
    except TimeoutError:
        raise WorkerError(source, f"{source} sent no tensors for {SILENCE_SECONDS:g} s", lost=True) from None
    except PeerUnreachableError as error:
        raise WorkerError(source, f"tensors of {source} cannot be fetched: {error}", lost=True) from error
    except CallRefusedError as error:
        raise WorkerError(source, f"{source} gives no tensors: {error}") from error


def blend(target: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor], eta: float, model: str) -> None:
    """Sets target = eta · source + (1 - eta) · target, in place. Tensors of integers are copied unless eta is 0.

    Raises:
        TensorError: The two have different names, shapes or dtypes. Nothing is changed then.
    """
    for name in sorted(target.keys() ^ source.keys()):
        raise TensorError(f"param_realloc to {model!r}: only one of the two models has the parameter {name!r:.200}")
    for name, tensor in target.items():
        other = source[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            raise TensorError(
                f"param_realloc to {model!r}: {name!r} is {other.dtype}{list(other.shape)} at the source and "
                f"{tensor.dtype}{list(tensor.shape)} at the target"
            )
    with torch.no_grad():
        for name, tensor in target.items():
            new = source[name].to(tensor.device)
            if eta == 1.0 or not tensor.is_floating_point():
                if eta > 0.0:
                    tensor.copy_(new)
            else:
                tensor.mul_(1.0 - eta).add_(new, alpha=eta)
