"""Runs the steps of a plan: fetches samples, runs the levels of calls, and keeps account of who holds what."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from averaging.errors import WorkerError
from averaging.rl.workers.data_manager import OwnerTracker, Redistributor, balance
from averaging.rl.workers.payload import (
    Clear,
    Compute,
    Computed,
    DatasetSpec,
    Fetched,
    Handle,
    Payload,
    Realloc,
    SampleQuery,
    SaveRequest,
    Transfer,
    convert,
)
from averaging.rl.workers.plan import Call, Hook, HookName, Model, ModelShardID, ParamRealloc, Plan, Save
from averaging.rl.workers.request_client import RequestClient

logger = logging.getLogger("averaging.rl.workers")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step has done.

    Attributes:
        step: Number of the step, from 1.
        stats: Means over the data-parallel ranks of the numbers that the backends returned, by call.
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
        client: The client that sends the requests.
        tracker: The record of which worker holds which tensors; `client` removes lost workers from it.

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
            inventory = link.inventory
            self.step_number = max([self.step_number, *inventory.versions.values()])
            for sample, keys in inventory.samples.items():
                self._tracker.add(worker, [sample], keys)
                if set(keys) >= set(self._plan.data_keys):
                    self._buffer.setdefault(sample, inventory.lengths.get(sample, 1))
        await self._initialize_models(self._plan.workers)

    async def spec(self) -> list[DatasetSpec]:
        """The parts of the dataset at the DP heads of the first model."""
        heads = list(self._plan.data_model.heads.values())
        return [convert(data, DatasetSpec) for data in await self._client.call(heads, Handle.SPEC)]

    async def step(self) -> StepResult:
        """Runs all calls once, for the next samples.

        If it raises, the samples stay in the buffer, and the next call runs the same step again.

        Raises:
            WorkerError: A worker has failed, or the dataset has too few samples; with `lost` if a worker is
                lost and its samples cannot be assigned to others, or it alone held tensors that a call needs.
        """
        began = time.monotonic()
        number = self.step_number + 1
        await self._take_back()
        await self._fill()
        ids = list(self._buffer)[: self._plan.batch_size]
        lengths = {sample: self._buffer[sample] for sample in ids}
        stats: dict[str, dict[str, float]] = {}
        for level in self._plan.levels:
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
            except WorkerError as error:
                if not error.lost:
                    raise
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
            WorkerError: No worker can.
        """
        missing = self._tracker.missing(ids, self._plan.data_keys)
        for head in self._plan.data_model.heads.values():
            if missing and head in self._client.living:
                await self._fetch([head], SampleQuery(ids=list(missing)))
                missing = self._tracker.missing(ids, self._plan.data_keys)
        if missing:
            for sample in missing:
                self._buffer.pop(sample, None)
            raise WorkerError(
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
            except WorkerError as error:
                if not error.lost:
                    raise
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


@dataclass(frozen=True)
class _Part:
    """The samples of one data-parallel rank in a call."""

    call: Call
    rank: int
    ids: Sequence[str]


@dataclass(frozen=True)
class _Job:
    """A request under way.

    Attributes:
        part: None for a flush, and for the other side of a `param_realloc`.
    """

    worker: str
    part: _Part | None
    is_flush: bool = False


class LevelRunner:
    """Runs levels.

    Args:
        plan: The plan.
        client: The client that sends the requests.
        tracker: The record of which worker holds which tensors.
        load_again: Function that loads samples of the dataset that a lost worker held.
    """

    def __init__(
        self,
        plan: Plan,
        client: RequestClient,
        tracker: OwnerTracker,
        load_again: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._plan, self._client, self._tracker = plan, client, tracker
        self._load_again = load_again

    async def run(self, calls: Sequence[Call], lengths: Mapping[str, int], step: int) -> dict[str, dict[str, float]]:
        """Runs the calls of one level for samples with these lengths. Returns the statistics by call.

        Raises:
            WorkerError: A worker has failed; with `lost` if a worker is lost, as for `StepRunner.step`.
        """
        jobs: dict[str, _Job] = {}
        try:
            for call in calls:
                parts = [_Part(call, rank, ids) for rank, ids in balance(lengths, self._ranks(call)).items()]
                jobs |= await self._post(call, parts, step)
            jobs |= await self._flush(jobs)
            return await self._collect(jobs, step)
        finally:
            self._client.forget(jobs)

    async def _collect(self, jobs: dict[str, _Job], step: int) -> dict[str, dict[str, float]]:
        numbers: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        waiting = set(jobs)
        while waiting:
            request_id, outcome = await self._client.next_outcome(waiting)
            if request_id not in waiting:
                continue
            waiting.remove(request_id)
            job = jobs[request_id]
            if isinstance(outcome, WorkerError) and job.is_flush and outcome.lost:
                continue  # the requests of the worker fail as well
            if isinstance(outcome, WorkerError):
                again = await self._reassign(job, outcome, jobs, waiting, step)
                jobs |= again
                waiting |= again.keys()
            elif job.part is not None:
                computed = convert(outcome.data, Computed)
                stored = [key for key in computed.keys if key in job.part.call.outputs]
                self._tracker.replace(job.worker, job.part.ids, stored)
                for name, number in computed.stats.items():
                    numbers[job.part.call.name][name].append(number)
        return {
            call: {name: sum(values) / len(values) for name, values in stats.items()} for call, stats in numbers.items()
        }

    async def _reassign(
        self, job: _Job, error: WorkerError, jobs: Mapping[str, _Job], waiting: set[str], step: int
    ) -> dict[str, _Job]:
        """Posts the samples of a lost rank to another one, and returns the new requests.

        Raises:
            WorkerError: `error`, if that is impossible.
        """
        part = job.part
        if part is None or not error.lost or not part.call.reassigns:
            raise error
        self._tracker.remove_worker(error.worker)
        # The other shards of the rank compute the same samples, which are posted anew as a whole: nobody awaits their
        # replies any more, and tensors that they may store in the meantime are not recorded.
        same = {request_id for request_id in waiting if jobs[request_id].part is part}
        self._client.forget(same)
        waiting -= same
        if error.worker == job.worker:
            ranks = self._ranks(part.call, error)
            rank = ranks[part.rank % len(ranks)]
        else:
            rank = part.rank  # only the source of its data is lost
        logger.warning(
            "%s: data-parallel rank %d of %s gets %d samples of rank %d",
            error,
            rank,
            part.call.name,
            len(part.ids),
            part.rank,
        )
        again = await self._post(part.call, [_Part(part.call, rank, part.ids)], step)
        return again | await self._flush(again)

    def _ranks(self, call: Call, error: WorkerError | None = None) -> list[int]:
        """The data-parallel ranks of which all workers live.

        Raises:
            WorkerError: There is none, or the call needs all.
        """
        model, living = self._plan.by_name[call.model], self._client.living
        ranks = [rank for rank in range(model.layout.dp) if set(model.of_rank(rank).values()) <= living]
        lost = [worker for worker in model.workers if worker not in living]
        if not ranks or (lost and not call.reassigns):
            cause = error or self._client.links[lost[0]].lost
            rest = "no data-parallel rank of it is left" if not ranks else "the call needs all its workers"
            raise WorkerError(
                lost[0], f"{call.name} of model {call.model!r} cannot run, {rest}: {cause}", call.name, lost=True
            )
        return ranks

    async def _post(self, call: Call, parts: Sequence[_Part], step: int) -> dict[str, _Job]:
        """Posts a call for some data-parallel ranks, with the transfers that it needs."""
        model = self._plan.by_name[call.model]
        wanted = {worker: part.ids for part in parts for worker in model.of_rank(part.rank).values()}
        await self._find_data(call, [sample for part in parts for sample in part.ids])
        steps = Redistributor(self._tracker).plan(wanted, call.inputs)
        hooks = [hook for hook in call.post_hooks if step % hook.every == 0]
        transfers = [f"{self._client.new_id()}-{hook.name}" for hook in hooks]
        jobs: dict[str, _Job] = {}
        for part in parts:
            for shard, worker in model.of_rank(part.rank).items():
                own = [transfer for transfer in steps if worker in transfer.dsts]
                request = self._request(call, model, shard, part.ids, step)
                if own:
                    request.pre_hooks, request.pre_hook_data = [HookName.DATA_TRANSFER], [Transfer(own)]
                for hook, transfer in zip(hooks, transfers, strict=True):
                    request.post_hooks.append(hook.name)
                    request.post_hook_data.append(self._hook_data(hook, shard, transfer, step))
                jobs[self._client.post(request)] = _Job(worker, part)
                # The calls that are posted next may take these tensors from here: a source that does not have them yet
                # answers when its own transfers are done.
                self._tracker.add(worker, part.ids, call.inputs)
        for hook, transfer in zip(hooks, transfers, strict=True):
            if isinstance(hook, ParamRealloc):
                jobs |= self._post_other_side(call, hook, transfer, step)
        return jobs

    async def _find_data(self, call: Call, ids: Sequence[str]) -> None:
        missing = self._tracker.missing(ids, call.inputs)
        if not missing:
            return
        lacking = {key for keys in missing.values() for key in keys}
        if lost := lacking - set(self._plan.data_keys):
            raise WorkerError(
                "",
                f"{call.name} needs {min(lost)!r} of {len(missing)} samples, which a lost worker alone held; run the "
                "step again",
            )
        await self._load_again(list(missing))

    def _request(self, call: Call, model: Model, shard: ModelShardID, ids: Sequence[str], step: int) -> Payload:
        data = Compute(call.name, call.model, model.layout.size, step, list(ids), list(call.inputs), list(call.outputs))
        return Payload(str(shard), str(call.interface), self._client.new_id(), data=data)

    def _hook_data(self, hook: Hook, shard: ModelShardID, transfer: str, step: int) -> Any:
        if isinstance(hook, Save):
            return SaveRequest(hook.path.replace("{step}", str(step)))
        if isinstance(hook, ParamRealloc):
            return self._realloc(hook, shard, transfer)
        return None

    def _post_other_side(self, call: Call, hook: ParamRealloc, transfer: str, step: int) -> dict[str, _Job]:
        """Posts the requests to the model of a `param_realloc` that makes no call itself."""
        other = self._plan.by_name[hook.target if call.model == hook.source else hook.source]
        jobs: dict[str, _Job] = {}
        for shard, worker in other.shards.items():
            if worker in self._client.living:
                data = Compute(f"{call.name}/{other.name}", other.name, other.layout.size, step)
                request = Payload(str(shard), Handle.EMPTY, self._client.new_id(), data=data)
                request.post_hooks = [hook.name]
                request.post_hook_data = [self._realloc(hook, shard, transfer)]
                jobs[self._client.post(request)] = _Job(worker, None)
        return jobs

    def _realloc(self, hook: ParamRealloc, shard: ModelShardID, transfer: str) -> Realloc:
        """A shard's part in a `param_realloc`; target shards are assigned to source shards round-robin."""
        living = self._client.living
        source, target = self._plan.by_name[hook.source], self._plan.by_name[hook.target]

        def alike(model: Model) -> list[tuple[ModelShardID, str]]:
            return [
                (other, worker)
                for other, worker in model.shards.items()
                if worker in living and (other.tp_rank, other.pp_rank) == (shard.tp_rank, shard.pp_rank)
            ]

        sources, targets = alike(source), alike(target)
        takers: defaultdict[ModelShardID, list[ModelShardID]] = defaultdict(list)
        for place, (taker, _) in enumerate(targets):
            takers[sources[place % len(sources)][0]].append(taker)
        name = f"{transfer}-{shard.tp_rank}-{shard.pp_rank}"
        if shard.model == hook.source:
            return Realloc(name, hook.source, hook.target, hook.eta, takers=len(takers[shard]))
        origin = next(worker for source_shard, worker in sources if shard in takers[source_shard])
        return Realloc(name, hook.source, hook.target, hook.eta, origin=origin)

    async def _flush(self, jobs: Mapping[str, _Job]) -> dict[str, _Job]:
        workers = list(dict.fromkeys(job.worker for job in jobs.values()))
        ids = await self._client.request(workers, Handle.FLUSH)
        return {flush: _Job(worker, None, is_flush=True) for flush, worker in zip(ids, workers, strict=True)}
