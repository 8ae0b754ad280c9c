"""Runs the steps of a plan: fetches samples, runs the levels of calls, and keeps account of who holds what."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from averaging.errors import DataLostError, WorkerError, WorkerLostError
from averaging.rl.workers.level_runner import LevelRunner
from averaging.rl.workers.payload import (
    Clear,
    Compute,
    DatasetSpec,
    Fetched,
    Handle,
    Payload,
    Realloc,
    SampleQuery,
    convert,
)
from averaging.rl.workers.plan import Model, ModelShardID, Plan
from averaging.rl.workers.redistributor import OwnerTracker
from averaging.rl.workers.request_client import RequestClient

logger = logging.getLogger("averaging.rl.workers")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step has done.

    Attributes:
        step: Its number, from 1.
        stats: By call the means, over the data-parallel ranks, of the numbers that the backends returned.
        seconds: Duration.
        samples: Ids of its samples.
        lost: Workers that are lost.
    """

    step: int
    stats: dict[str, dict[str, float]]
    seconds: float
    samples: list[str]
    lost: list[str] = field(default_factory=list)


class StepRunner:
    """Drives the workers of a plan through one `RequestClient`.

    Args:
        plan: The plan.
        client: Sends the requests.
        tracker: Who holds what; `client` removes lost workers from it.

    Attributes:
        step_number: Number of the last step that is complete.
    """

    def __init__(self, plan: Plan, client: RequestClient, tracker: OwnerTracker) -> None:
        self.step_number = 0
        self._plan, self._client, self._tracker = plan, client, tracker
        self._buffer: dict[str, int] = {}  # lengths of the samples that wait for a step, by id
        self._levels = LevelRunner(plan, client, tracker, self._load_again)

    async def initialize(self) -> None:
        """Prepares the models at all workers that have not done so yet, and takes over the samples that they hold.

        Raises:
            WorkerError: A worker has failed.
        """
        for worker, link in self._client.links.items():
            if link.inventory is None:
                continue
            held = link.inventory
            self.step_number = max([self.step_number, *held.versions.values()])
            for sample, keys in held.samples.items():
                self._tracker.add(worker, [sample], keys)
                if set(keys) >= set(self._plan.data_keys):
                    self._buffer.setdefault(sample, held.lengths.get(sample, 1))
        await self._initialize_models(self._plan.workers)

    async def spec(self) -> list[DatasetSpec]:
        """The parts of the dataset at the DP heads of the first model."""
        heads = list(self._plan.data_model.heads.values())
        return [convert(data, DatasetSpec) for data in await self._client.call(heads, Handle.SPEC)]

    async def step(self) -> StepResult:
        """Runs all calls once, for the next samples.

        If it raises, the samples stay in the buffer, and the next call runs the same step again.

        Raises:
            WorkerLostError: A worker is lost, and the call does not assign its samples to others.
            DataLostError: Tensors that a call needs were held by a lost worker alone.
            WorkerError: A worker has failed, or the dataset has too few samples.
        """
        began = time.monotonic()
        number = self.step_number + 1
        await self._take_back()
        await self._fill()
        ids = list(self._buffer)[: self._plan.batch_size]
        lengths = {sample: self._buffer[sample] for sample in ids}
        stats: dict[str, dict[str, float]] = {}
        for level in self._plan.levels.calls:
            stats |= await self._levels.run(level, lengths, number)
        self.step_number = number
        for worker in sorted(self._client.living):
            self._client.post(Payload(worker, Handle.CLEAR_DATA_CACHE, self._client.new_id(), data=Clear(ids)))
        self._tracker.remove(ids)
        for sample in ids:
            del self._buffer[sample]
        lost = sorted(set(self._plan.workers) - self._client.living)
        return StepResult(number, stats, time.monotonic() - began, ids, lost)

    async def _fill(self) -> None:
        """Fetches samples until there are enough for a step."""
        while (missing := self._plan.batch_size - len(self._buffer)) > 0:
            heads = [worker for worker in self._plan.data_model.heads.values() if worker in self._client.living]
            if not heads:
                raise WorkerError("", f"all workers with a part of the dataset are lost: {self._dataset_heads()}")
            count = math.ceil(missing / len(heads))
            if not await self._fetch(heads, SampleQuery(count)) and self._client.living >= set(heads):
                raise WorkerError(
                    heads[0],
                    f"the dataset has no further samples at {', '.join(heads)}: a step needs {self._plan.batch_size}, "
                    f"and {len(self._buffer)} are there; reduce batch_size, or end the training here",
                    Handle.FETCH,
                )

    async def _fetch(self, heads: Sequence[str], fetch: SampleQuery) -> list[str]:
        got: list[str] = []
        requests = await self._client.request(heads, Handle.FETCH, [fetch] * len(heads))
        for head, request in zip(heads, requests, strict=True):
            try:
                [reply] = await self._client.gather([request])
            except WorkerLostError:
                continue  # the others fetch more
            fetched = convert(reply.data, Fetched)
            if len(fetched.ids) != len(fetched.seqlens):
                raise WorkerError(head, f"{head} has sent {len(fetched.seqlens)} lengths of {len(fetched.ids)} samples")
            self._tracker.add(head, fetched.ids, fetched.keys)
            self._buffer |= dict(zip(fetched.ids, fetched.seqlens, strict=True))
            got += fetched.ids
        return got

    async def _load_again(self, ids: Sequence[str]) -> None:
        """Has a living worker load samples of the dataset that a lost worker held.

        Raises:
            DataLostError: No worker can.
        """
        missing = self._tracker.missing(ids, self._plan.data_keys)
        for head in self._plan.data_model.heads.values():
            if missing and head in self._client.living:
                await self._fetch([head], SampleQuery(ids=list(missing)))
                missing = self._tracker.missing(ids, self._plan.data_keys)
        if missing:
            for sample in missing:
                self._buffer.pop(sample, None)
            raise DataLostError(
                "",
                f"{len(missing)} samples of the dataset were held by a lost worker alone and are dropped; the first is "
                f"{next(iter(missing))}",
            )

    async def _take_back(self) -> None:
        """Initializes workers that were lost and have come back, with the parameters of another rank if possible."""
        for worker in self._client.returned:
            try:
                await self._initialize_models([worker])
                for model in self._plan.models:
                    for shard, at in model.shards.items():
                        if at == worker:
                            await self._restore(model, shard, worker)
            except WorkerLostError as error:
                logger.warning("%s", error)
                continue
            self._client.welcome(worker)

    async def _restore(self, model: Model, shard: ModelShardID, worker: str) -> None:
        peers = [
            (other, at)
            for other, at in model.shards.items()
            if at in self._client.living and (other.tp_rank, other.pp_rank) == (shard.tp_rank, shard.pp_rank)
        ]
        if not model.replicated or not peers:
            logger.warning("%s has come back, with its own parameters of model %s", worker, model.name)
            return
        peer, origin = peers[0]
        transfer = self._client.new_id()
        publish = Realloc(transfer, model.name, model.name, 1.0, takers=1)
        take = Realloc(transfer, model.name, model.name, 1.0, origin=origin)
        ids = []
        for handler, data in ((peer, publish), (shard, take)):
            request = Payload(str(handler), Handle.EMPTY, self._client.new_id(), data=Compute(model.name, model.name))
            request.post_hooks, request.post_hook_data = ["param_realloc"], [data]
            ids.append(self._client.post(request))
        await self._flush_and_gather([origin, worker], ids)
        logger.info("%s has come back with the parameters of %s", worker, origin)

    async def _initialize_models(self, workers: Iterable[str]) -> None:
        ids, involved = [], []
        for worker in workers:
            link = self._client.links[worker]
            shards = [] if link.inventory is None else self._plan.shards_at(worker)
            for shard, topology in shards:
                if link.inventory is not None and shard.model not in link.inventory.versions:
                    data = Compute(shard.model, shard.model, topology.size)
                    ids.append(
                        self._client.post(Payload(str(shard), Handle.INITIALIZE, self._client.new_id(), data=data))
                    )
                    involved.append(worker)
        await self._flush_and_gather(list(dict.fromkeys(involved)), ids)
        for worker in involved:
            inventory = self._client.links[worker].inventory
            if inventory is not None:
                inventory.versions.update({shard.model: 0 for shard, _ in self._plan.shards_at(worker)})

    async def _flush_and_gather(self, workers: Sequence[str], ids: Sequence[str]) -> None:
        flushes = await self._client.request(workers, Handle.FLUSH)
        await self._client.gather([*flushes, *ids])

    def _dataset_heads(self) -> str:
        return ", ".join(self._plan.data_model.heads.values())
