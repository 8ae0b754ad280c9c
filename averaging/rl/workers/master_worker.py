"""`MasterWorker`: drives the model workers of one site through the steps of a plan."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Self, TypeAlias, TypeVar

from averaging.common import on_loop
from averaging.errors import WorkerError
from averaging.rl.workers.data_manager import OwnerTracker, Redistributor, balance
from averaging.rl.workers.plan import Call, Hook, HookName, ModelShardID, ParamRealloc, Plan, Save
from averaging.rl.workers.requests import (
    Compute,
    Computed,
    Connect,
    Count,
    Datas,
    DatasetSpec,
    Fetched,
    Handle,
    Ids,
    Inventory,
    Payload,
    Realloc,
    RequestClient,
    connector,
    convert,
)
from averaging.rpc import Credentials, EventLoopThread

T = TypeVar("T")
_Stats: TypeAlias = dict[str, dict[str, float]]  # by call and name

logger = logging.getLogger("averaging.rl.workers")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step has done."""

    step: int  # from 1
    stats: dict[str, dict[str, float]]  # by call: means over the workers of the numbers that the backends returned
    seconds: float
    samples: list[str]  # their ids


@dataclass(frozen=True, slots=True)
class _Job:
    """A request under way at one worker: a call for some samples, or only hooks."""

    request: str  # its id
    worker: str
    call: Call | None = None
    ids: Sequence[str] = ()


class StepRunner:
    """Drives the workers of a plan through one `RequestClient`. A step needs all of them."""

    def __init__(self, plan: Plan, client: RequestClient, tracker: OwnerTracker) -> None:
        self.step_number = 0  # of the last step that is complete
        self._plan, self._client, self._tracker = plan, client, tracker
        self._buffer: dict[str, int] = {}  # lengths of the samples that wait for a step, by id
        self._transfers: list[str] = []  # parameters that workers hold for a `param_realloc`
        self._has_taken_over = False

    async def initialize(self) -> None:
        """Prepares the models that are not initialized yet. The first call takes over what an earlier master left."""
        if not self._has_taken_over:
            for worker in self._plan.workers:
                inventory = self._inventory(worker)
                self.step_number = max([self.step_number, *inventory.versions.values()])
                for sample, keys in inventory.samples.items():
                    self._tracker.add(worker, [sample], keys)
                    if set(keys) >= set(self._plan.data_keys):
                        self._buffer.setdefault(sample, inventory.lengths.get(sample, 1))
            self._has_taken_over = True
            await self._clear([sample for sample in self._tracker if sample not in self._buffer])
        await self._initialize_models(self._plan.workers)

    async def step(self) -> StepResult:
        began = time.monotonic()
        number = self.step_number + 1
        for worker, link in self._client.links.items():
            if link.was_lost:
                await self._take_back(worker)
        for sample in self._tracker.missing(self._buffer, self._plan.data_keys):
            del self._buffer[sample]  # a lost worker held it alone; it begins its part of the dataset again
        await self._fill()
        lengths = dict(list(self._buffer.items())[: self._plan.batch_size])
        stats: _Stats = {}
        for level in self._plan.levels:
            stats |= await self._run_level(level, lengths, number)
        self.step_number = number
        for sample in lengths:
            del self._buffer[sample]
        await self._clear([*lengths, *self._transfers])
        self._transfers.clear()
        return StepResult(number, stats, time.monotonic() - began, list(lengths))

    async def _fill(self) -> None:
        heads = self._plan.data_heads
        while (missing := self._plan.batch_size - len(self._buffer)) > 0:
            count, before = Count(math.ceil(missing / len(heads))), len(self._buffer)
            failure: WorkerError | None = None
            requests = self._client.request(heads, Handle.FETCH, [count] * len(heads))
            for head, request in zip(heads, requests, strict=True):
                try:
                    [reply] = await self._client.gather([request])
                except WorkerError as error:
                    failure = error  # what the others have fetched must be known before
                    continue
                fetched = convert(reply.data, Fetched)
                self._tracker.add(head, fetched.ids, fetched.keys)
                self._buffer |= dict(zip(fetched.ids, fetched.seqlens, strict=True))
            if failure is not None:
                raise failure
            if len(self._buffer) == before:
                needs = f"a step needs {self._plan.batch_size}, and {before} are there"
                text = f"the dataset has no further samples at {', '.join(heads)}: {needs}; reduce batch_size, or end"
                raise WorkerError(heads[0], text, Handle.FETCH)

    async def _clear(self, ids: Sequence[str]) -> None:
        """Has all workers forget samples. One that is lost meanwhile does so when it is back."""
        workers = list(self._plan.workers)
        self._tracker.remove(ids)
        for request in self._client.request(workers, Handle.CLEAR_DATA_CACHE, [Ids(list(ids))] * len(workers)):
            with suppress(WorkerError):
                await self._client.gather([request])

    async def _take_back(self, worker: str) -> None:
        """Goes on with a worker that was lost, with the parameters of another rank if possible."""
        link, samples = self._client.links[worker], self._inventory(worker).samples
        for sample in samples.keys() & self._buffer.keys():
            self._tracker.add(worker, [sample], samples[sample])
        await self._clear([sample for sample in samples if sample not in self._buffer])
        await self._initialize_models([worker])
        for shard, _ in self._plan.placement_of(worker).shards:
            await self._restore(shard, worker)
        link.was_lost = link.lost is not None

    async def _restore(self, shard: ModelShardID, worker: str) -> None:
        model = self._plan.by_name[shard.model]
        peers = [replace(shard, dp_rank=rank) for rank in range(model.layout.dp) if rank != shard.dp_rank]
        peers = [peer for peer in peers if not self._client.links[model.shards[peer]].was_lost]
        if not model.replicated or not peers:
            logger.warning("%s has come back, with its own parameters of model %s", worker, model.name)
            return
        origin, transfer = model.shards[peers[0]], self._client.new_id()
        self._transfers.append(transfer)
        ids = []
        for handler, source in ((peers[0], ""), (shard, origin)):
            request = self._client.new(str(handler), Handle.EMPTY, Compute(model.name, model.name))
            request.post_hooks = [HookName.PARAM_REALLOC]
            request.post_hook_data = [Realloc(transfer, model.name, model.name, 1.0, source)]
            ids.append(self._client.post(request))
        await self._flush_and_gather([origin, worker], ids)
        logger.info("%s has come back with the parameters of %s", worker, origin)

    def _inventory(self, worker: str) -> Inventory:
        link = self._client.links[worker]
        if link.inventory is None:
            raise link.lost or WorkerError(worker, f"{worker} is not attached: {link.reason}", lost=True)
        return link.inventory

    async def _initialize_models(self, workers: Collection[str]) -> None:
        shards = [placed for worker in workers for placed in self._plan.placement_of(worker).shards]
        datas = [Compute(shard.model, shard.model, topology.size) for shard, topology in shards]
        ids = self._client.request([str(shard) for shard, _ in shards], Handle.INITIALIZE, datas)
        await self._flush_and_gather(workers, ids)

    async def _flush_and_gather(self, workers: Collection[str], ids: Sequence[str]) -> None:
        await self._client.gather([*self._client.request(list(workers), Handle.FLUSH), *ids])

    async def _run_level(self, calls: Sequence[Call], lengths: Mapping[str, int], step: int) -> _Stats:
        """Runs the calls of one level for samples with these lengths. Returns the statistics by call."""
        jobs: list[_Job] = []
        numbers: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        try:
            for call in calls:
                self._post_call(call, lengths, step, jobs)
            flushes = self._client.request(sorted({job.worker for job in jobs}), Handle.FLUSH)
            replies = await self._client.gather([*(job.request for job in jobs), *flushes])
        finally:
            self._client.forget(job.request for job in jobs)
        for job, reply in zip(jobs, replies, strict=False):  # behind them are those to the flushes
            if job.call is not None:
                computed = convert(reply.data, Computed)
                self._tracker.add(job.worker, job.ids, job.call.inputs)
                self._tracker.replace(job.worker, job.ids, computed.keys)
                for name, number in computed.stats.items():
                    numbers[job.call.name][name].append(number)
        return {call: {name: fmean(values) for name, values in stats.items()} for call, stats in numbers.items()}

    def _post_call(self, call: Call, lengths: Mapping[str, int], step: int, jobs: list[_Job]) -> None:
        """Posts a call to all shards of its model, with the transfers that it needs."""
        model = self._plan.by_name[call.model]
        ids_of = balance(lengths, model.layout.dp)
        wanted = {worker: ids_of[shard.dp_rank] for shard, worker in model.shards.items()}
        transfers = Redistributor(self._tracker).plan(wanted, call.inputs)
        hooks = [(hook, f"{self._client.new_id()}-{hook.name}") for hook in call.post_hooks if step % hook.every == 0]
        for shard, worker in model.shards.items():
            ids = ids_of[shard.dp_rank]
            data = Compute(call.name, call.model, model.layout.size, step, ids, list(call.inputs), list(call.outputs))
            request = self._client.new(str(shard), call.interface, data)
            if own := [transfer for transfer in transfers if worker in transfer.dsts]:
                request.pre_hooks, request.pre_hook_data = [HookName.DATA_TRANSFER], [own]
            for hook, name in hooks:
                self._add_hook(request, hook, shard, name, step)
            jobs.append(_Job(self._client.post(request), worker, call, ids))
        # The model of a `param_realloc` that makes no call itself only runs the hook.
        for hook, name in hooks:
            if isinstance(hook, ParamRealloc):
                self._transfers.append(name)
                other = self._plan.by_name[hook.target if call.model == hook.source else hook.source]
                for shard, worker in other.shards.items():
                    data = Compute(f"{call.name}/{other.name}", other.name, other.layout.size, step)
                    request = self._client.new(str(shard), Handle.EMPTY, data)
                    self._add_hook(request, hook, shard, name, step)
                    jobs.append(_Job(self._client.post(request), worker))

    def _add_hook(self, request: Payload, hook: Hook, shard: ModelShardID, transfer: str, step: int) -> None:
        data: Any = None
        if isinstance(hook, Save):
            data = hook.path.replace("{step}", str(step))
        elif isinstance(hook, ParamRealloc) and (data := self._realloc(hook, shard, transfer)) is None:
            return
        request.post_hooks.append(hook.name)
        request.post_hook_data.append(data)

    def _realloc(self, hook: ParamRealloc, shard: ModelShardID, transfer: str) -> Realloc | None:
        """A shard's part in a `param_realloc`, if any; target shards are assigned to source shards round-robin."""
        source, target = self._plan.by_name[hook.source], self._plan.by_name[hook.target]
        origin = ""
        if shard.model == hook.target:
            origin = source.shards[replace(shard, model=source.name, dp_rank=shard.dp_rank % source.layout.dp)]
        elif shard.dp_rank >= target.layout.dp:
            return None  # nobody takes its parameters
        return Realloc(transfer, hook.source, hook.target, hook.eta, origin)


class MasterWorker:
    """Drives the model workers of a plan. Use it as a context manager.

    ```python
    with MasterWorker(plan) as master:
        for result in master.run(steps=100):
            print(result.step, result.stats)
    ```

    The methods from `post` on send single requests, in any thread. Those that end in `_async` are coroutines for any
    event loop. A second master is refused while the first one lives. One that is started again goes on with the models
    and samples that the workers hold.

    Without `credentials`, see `averaging.rpc.read_credentials`, workers on loopback get the token of this user's
    processes. It waits `attach_timeout` seconds for all workers at the start. A worker is lost after `stall_timeout`
    seconds of silence. `connect` opens channels, for tests.

    Raises:
        ConfigError: An argument is invalid.
        WorkerError: A worker serves another master, does not match the plan, or cannot be reached within
            `attach_timeout`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        credentials: Credentials | None = None,
        attach_timeout: float = 60.0,
        stall_timeout: float = 30.0,
        connect: Connect | None = None,
    ) -> None:
        tracker = OwnerTracker()
        self.plan = plan
        connect = connect or connector(credentials)
        self._client = RequestClient(plan, connect, tracker.remove_worker, stall_timeout)
        self._runner = StepRunner(plan, self._client, tracker)
        self._thread = EventLoopThread(self._client, "the master")
        try:
            self._thread.run(self._client.attach(attach_timeout))
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the workers, which keep what they hold. A second call does nothing."""
        self._thread.close()

    @property
    def step_number(self) -> int:
        """Number of the last step that is complete."""
        return self._runner.step_number

    @property
    def lost(self) -> dict[str, str]:
        """The workers that are lost now, and why."""
        return {worker: str(link.lost) for worker, link in self._client.links.items() if link.lost is not None}

    def run(self, steps: int) -> Iterator[StepResult]:
        """Initializes the models and yields the results of the steps up to number `steps`. Errors as `step`."""
        self.initialize()
        while self.step_number < steps:
            yield self.step()

    def initialize(self) -> None:
        """Prepares the models at all workers, and takes over what they held for an earlier master. Errors as `step`."""
        self._thread.run(self._runner.initialize())

    def step(self) -> StepResult:
        """Runs all calls of the plan once, for the next samples. If it raises, the next call runs the same step again.

        Raises:
            WorkerError: A worker has failed, or the dataset has too few samples; with `lost` if a worker is lost. Steps
                fail until all are back.
        """
        return self._thread.run(self._runner.step())

    def spec(self) -> list[DatasetSpec]:
        """The part of the dataset that each DP head of the first call's model holds. Errors as `gather`."""
        return [convert(data, DatasetSpec) for data in self.call(self.plan.data_heads, Handle.SPEC)]

    def new_id(self) -> str:
        """A new id of a request."""
        return self._client.new_id()

    def post(self, payload: Payload) -> str:
        """Sends one request and returns its id."""
        return self._thread.run(on_loop(lambda: self._client.post(payload)))

    def request(
        self, handlers: Sequence[str], handle_name: str, datas: Datas = None, *, no_syn: bool = True
    ) -> list[str]:
        """Sends a request to each handler, with data for each, and returns their ids.

        Without `no_syn` the requests are sent (ack) after all workers have answered that they have received them (syn).

        Raises:
            WorkerError: Without `no_syn`: a request cannot be sent, or a worker is lost. None is carried out then.
        """
        return self._thread.run(self._client.request_async(handlers, handle_name, datas, no_syn=no_syn))

    def call(self, handlers: Sequence[str], handle_name: str, datas: Datas = None, *, no_syn: bool = True) -> list[Any]:
        """Like `request`, but returns the data of the replies. Errors as `gather`."""
        return self._thread.run(self._client.call(handlers, handle_name, datas, no_syn=no_syn))

    async def call_async(
        self, handlers: Sequence[str], handle_name: str, datas: Datas = None, *, no_syn: bool = True
    ) -> list[Any]:
        """Like `call`."""
        return await self._awaited(self._client.call(handlers, handle_name, datas, no_syn=no_syn))

    def gather(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        """Waits for the replies to these requests.

        Raises:
            WorkerError: At once if a request has failed, or its worker is lost. Replies to the others are dropped.
            TimeoutError: A reply is missing after `timeout` seconds. It can still be gathered later.
        """
        return self._thread.run(self._client.gather(ids, timeout))

    async def gather_async(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        """Like `gather`."""
        return await self._awaited(self._client.gather(ids, timeout))

    def poll(self, ids: Collection[str] | None = None) -> Payload | None:
        """Takes a reply that has arrived, to any request or to one of these, or None. Errors as `gather`."""
        return self._thread.run(on_loop(lambda: self._client.poll(ids)))

    async def poll_async(self, ids: Collection[str] | None = None) -> Payload:
        """Waits for the next reply, to any request or to one of these. Errors as `gather`."""
        return await self._awaited(self._client.poll_async(ids))

    def poll_batch(self, ids: Collection[str] | None = None) -> list[Payload]:
        """Takes all replies that have arrived, to any requests or to these. An error drops the replies before it."""
        return self._thread.run(on_loop(lambda: self._client.poll_batch(ids)))

    async def _awaited(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the master's thread. No thread waits for it."""
        done: Future[T] = Future()

        async def run() -> None:
            with suppress(InvalidStateError):  # the caller was cancelled
                try:
                    done.set_result(await coroutine)
                except BaseException as error:  # a CancelledError if the master is closed
                    done.set_exception(error)

        self._thread.start(run())
        return await asyncio.wrap_future(done)
