"""Carries out the requests of a master at one worker: calls of backends and hooks."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from averaging.errors import AveragingError, ConfigError, WorkerError
from averaging.rl.workers.backend import Backend, Dataset, check_numbers, check_outputs
from averaging.rl.workers.data_manager import DataManager
from averaging.rl.workers.parameters import ParameterExchange, blend, copy_of
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
from averaging.rl.workers.plan import HookName, ModelShardID, Placement

# A thread for the methods of backends, which block.


_Job: TypeAlias = "tuple[Callable[..., Any], tuple[Any, ...], asyncio.AbstractEventLoop, asyncio.Future[Any]]"


class Computations:
    """Runs functions one after the other, in a thread or in the event loop.

    Args:
        inline: Runs them in the event loop, for simulations on virtual time.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Starts a thread that calls `work`."""
        if not self._inline:
            self._thread = threading.Thread(target=self.work, name=name, daemon=True)
            self._thread.start()

    def work(self) -> None:
        """Runs functions in the calling thread until `end`."""
        while (job := self._jobs.get()) is not None:
            function, args, loop, done = job
            result, error = None, None
            try:
                result = function(*args)
            except Exception as failed:
                error = failed
            loop.call_soon_threadsafe(_finish, done, result, error)
            # The last arguments and result would stay in memory until the next job.
            del job, function, args, loop, done, result, error

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, or a coroutine function in the event loop, and returns its result."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        if self._inline:
            return function(*args)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((function, args, loop, done))
        return await done

    async def close(self) -> None:
        """Ends `work` after the function in progress, and waits for the thread if there is one."""
        self._jobs.put(None)
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.join)


def _finish(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)


def flush_order(request: Payload) -> tuple[int, int, str]:
    """The sort key of the blocking requests of a flush.

    It depends on the plan alone and not on the order of arrival, so the order is the same at all workers and sites.

    1. Requests that only publish parameters, since others wait for them.
    2. Calls of smaller meshes first, then by name.
    3. Calls with an averaging round, by name. Their mesh does not count, because the same model may have another mesh
       at another site, and two sites that enter two rounds in different orders wait for each other.
    4. Requests that only take parameters, since the calls publish them.

    Raises:
        ProtocolViolationError: The data of the request or of a hook is malformed.
    """
    compute = convert(request.data, Compute)
    publishes = bool(_published_by(request))
    if request.handle_name == Handle.EMPTY:
        return (0 if publishes else 3), 0, compute.call
    if HookName.AVERAGE in request.post_hooks:
        return 2, 0, compute.call
    return 1, compute.mesh, compute.call


def _published_by(request: Payload) -> list[Realloc]:
    """The transfers of a `param_realloc` whose parameters a request publishes."""
    hooks = zip(request.post_hooks, request.post_hook_data, strict=True)
    reallocs = [convert(data, Realloc) for name, data in hooks if name == HookName.PARAM_REALLOC]
    return [realloc for realloc in reallocs if not realloc.origin]


logger = logging.getLogger("averaging.rl.workers")


class Executor:
    """Carries out requests.

    Args:
        worker: Name of this worker.
        backends: The backend of each model.
        dataset: Source of samples; None if this worker has none.
        data: The tensors of samples.
        parameters: The parameters under way.
        computations: The thread of the backends.
        loading: The thread of the dataset.
        save_folder: Folder in which the hook `save` may write; None if it may not.
        reply: Function that gets the reply to each request as soon as it is complete.
    """

    def __init__(
        self,
        worker: str,
        backends: Mapping[str, Backend],
        dataset: Dataset | None,
        data: DataManager,
        parameters: ParameterExchange,
        computations: Computations,
        loading: Computations,
        save_folder: Path | None,
        reply: Callable[[Payload], None],
    ) -> None:
        self.shards: Mapping[str, ModelShardID] = {}
        """The shards that this worker holds, by handler."""
        self.dp = (-1, 0)
        """Rank of this worker among those that hold a part of the dataset, -1 if it holds none; and their number."""
        self.versions: dict[str, int] = {}
        """Train steps of each model that is initialized."""
        self.data, self.parameters = data, parameters
        self._worker = worker
        self._backends = backends
        self._dataset = dataset
        self._computations = computations
        self._loading = loading
        self._save_folder = save_folder
        self._reply = reply
        self._one_flush = asyncio.Lock()

    def place(self, placement: Placement) -> str:
        """Takes its part in a plan. Returns why that is impossible, and then changes nothing; empty if it is not."""
        dp = placement.dp_rank, placement.dp_size
        for shard, _ in placement.shards:
            if shard.model not in self._backends:
                known = ", ".join(self._backends) or "none"
                return f"{self._worker} has no backend of model {shard.model!r:.200}; it has {known}"
        if not -1 <= dp[0] < max(0, dp[1]):
            return f"{self._worker} is to be rank {dp[0]} of {dp[1]} that hold a part of the dataset"
        if dp[0] >= 0 and self._dataset is None:
            return f"{self._worker} is to hold a part of the dataset, and has none; give it a dataset"
        if dp[0] >= 0 and dp != self.dp and self._dataset is not None:
            self._dataset.place(*dp)
        self.dp = dp
        self.shards = {str(shard): shard for shard, _ in placement.shards}
        for shard, topology in placement.shards:
            backend = self._backends[shard.model]
            backend.shard, backend.topology = shard, topology
        self.data.endpoints = self.parameters.endpoints = placement.endpoints
        self.data.keys = placement.keys
        return ""

    # Requests that run at once

    async def answer(self, request: Payload) -> None:
        """Carries out a request that does not wait for a flush, and replies."""
        try:
            data: object = None
            match request.handle_name:
                case Handle.FETCH:
                    data = await self._fetch(convert(request.data, SampleQuery))
                case Handle.SPEC:
                    size = 0 if self._source is None else self._source.size
                    data = DatasetSpec(1 if size else 0, size)
                case Handle.MODEL_CONFIG:
                    shard = self._shard(request.handler)
                    data = dict(await self._computations.run(self._backends[shard.model].model_config))
                case Handle.CLEAR_DATA_CACHE:
                    self.data.remove(convert(request.data, Clear).ids)
                case unknown:
                    raise ConfigError(f"{self._worker} knows no request {unknown!r:.200}; give both the same version")
            reply = request.reply(data)
        except Exception as error:
            reply = self._failed(request, error)
        self._reply(reply)

    async def _fetch(self, request: SampleQuery) -> Fetched:
        source = self._source
        if source is None:
            raise ConfigError(f"{self._worker} holds no part of a dataset; give it one, or fetch from the DP heads")
        loaded = await self._loading.run(source.load if request.ids else source.fetch, request.ids or request.count)
        new = [sample for sample in loaded if not self.data.has_data(sample.id, sample.data if request.ids else ())]
        self.data.store(new)
        ids = [sample.id for sample in new]
        keys = sorted(set.intersection(*(set(sample.data) for sample in new))) if new else []
        return Fetched(ids, [self.data.length(sample) for sample in ids], keys, self.dp[0], source.epoch)

    @property
    def _source(self) -> Dataset | None:
        return self._dataset if self.dp[0] >= 0 else None

    # Requests that wait for a flush

    async def flush(self, requests: Sequence[Payload]) -> None:
        """Carries out the requests of one level, after those of the level before, and replies to each.

        All pre-hooks run before the first computation, because the pre-hook of another worker may wait for tensors that
        a worker stores early, and computations may meet in a collective. The order is that of `flush_order`.
        """
        async with self._one_flush:
            queued: list[tuple[tuple[int, int, str], Payload]] = []
            for request in requests:
                await asyncio.sleep(0)  # there can be tens of thousands
                try:
                    self._shard(request.handler)
                    queued.append((flush_order(request), request))
                except AveragingError as error:
                    self._reply(self._failed(request, error))
            queued.sort(key=itemgetter(0))
            ready = [request for _, request in queued if await self._prepare(request)]
            for request in ready:
                await asyncio.sleep(0)
                self._reply(await self._carry_out(request))

    async def _prepare(self, request: Payload) -> bool:
        """Runs the pre-hooks of a request. Returns whether they have succeeded; if not, replies."""
        try:
            for name, data in zip(request.pre_hooks, request.pre_hook_data, strict=True):
                if name != HookName.DATA_TRANSFER:
                    raise ConfigError(f"{name!r:.200} cannot run before a request; {HookName.DATA_TRANSFER} can")
                await self.data.redistribute(convert(data, Transfer).steps)
        except Exception as error:
            self._publish_nothing(request)
            self._reply(self._failed(request, error))
            return False
        return True

    async def _carry_out(self, request: Payload) -> Payload:
        """Runs a call and its post-hooks, and returns the reply."""
        try:
            shard = self._shard(request.handler)
            compute = convert(request.data, Compute)
            backend = self._backends[shard.model]
            if request.handle_name == Handle.INITIALIZE:
                data: object = await self._initialize(shard.model)
            else:
                if shard.model not in self.versions:
                    raise ConfigError(f"model {shard.model!r} at {self._worker} is not initialized; send initialize")
                began = time.monotonic()
                keys, stats = await self._compute(request.handle_name, compute, shard, backend)
                seconds = time.monotonic() - began
                for name, hook in zip(request.post_hooks, request.post_hook_data, strict=True):
                    numbers = await self._post_hook(name, hook, compute, backend)
                    stats |= {f"{name}/{key}": number for key, number in numbers.items()}
                data = Computed(keys, stats, self.versions[shard.model], seconds)
        except Exception as error:
            self._publish_nothing(request)
            return self._failed(request, error)
        return request.reply(data)

    def _publish_nothing(self, request: Payload) -> None:
        """Tells those who wait for parameters that a request has failed."""
        for realloc in _published_by(request):
            self.parameters.publish(realloc, None)

    async def _initialize(self, model: str) -> int:
        if model not in self.versions:
            await self._computations.run(self._backends[model].initialize)
            self.versions[model] = 0
        return self.versions[model]

    async def _compute(
        self, handle: str, compute: Compute, shard: ModelShardID, backend: Backend
    ) -> tuple[list[str], dict[str, float]]:
        if handle == Handle.EMPTY:
            return [], {}
        batch = self.data.get(compute.ids, compute.inputs)
        method = f"{type(backend).__name__}.{handle}"
        if handle == Handle.TRAIN_STEP:
            stats = await self._computations.run(backend.train_step, batch, compute.step)
            self.versions[shard.model] += 1
            return [], check_numbers(stats, method)
        function = backend.generate if handle == Handle.GENERATE else backend.inference
        result = await self._computations.run(function, batch, compute.step)
        if not shard.is_dp_head:
            return [], {}
        self.data.update(check_outputs(batch, compute.outputs, result, method))
        return list(compute.outputs), {}

    async def _post_hook(self, name: str, data: object, compute: Compute, backend: Backend) -> dict[str, float]:
        run = self._computations.run
        match name:
            case HookName.EVALUATE:
                return check_numbers(await run(backend.evaluate, compute.step), "evaluate")
            case HookName.OFFLOAD:
                await run(backend.offload)
            case HookName.SAVE:
                await run(backend.save, await run(self._path_to_save, convert(data, SaveRequest).path))
            case HookName.AVERAGE:
                return check_numbers(await run(backend.average), "average")
            case HookName.PARAM_REALLOC:
                await self._param_realloc(convert(data, Realloc), backend)
            case _:
                raise ConfigError(f"{self._worker} knows no hook {name!r:.200}; give both the same version")
        return {}

    def _path_to_save(self, path: str) -> str:
        """The absolute path that a hook `save` means, which must be in the folder that this worker was given."""
        if self._save_folder is None:
            raise ConfigError(
                f"{self._worker} has no folder for {path!r:.200}; give ModelWorker(save_folder=…) to let masters save"
            )
        try:
            folder = self._save_folder.resolve()
            target = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{path!r:.200} is no path: {error}") from None
        if not target.is_relative_to(folder):
            raise ConfigError(f"{path!r:.200} is not below {folder}, the folder in which {self._worker} may save")
        return str(target)

    async def _param_realloc(self, realloc: Realloc, backend: Backend) -> None:
        own = await self._computations.run(backend.parameters)
        if realloc.origin:
            source = await self.parameters.take(realloc, own)
            await self._computations.run(blend, own, source, realloc.eta, realloc.target)
        else:
            self.parameters.publish(realloc, await self._computations.run(copy_of, own))

    def _shard(self, handler: str) -> ModelShardID:
        try:
            return self.shards[handler]
        except KeyError:
            raise ConfigError(
                f"{self._worker} holds no shard {handler!r:.200}; it holds {', '.join(self.shards) or 'none'}"
            ) from None

    def _failed(self, request: Payload, error: Exception) -> Payload:
        if not isinstance(error, AveragingError):
            logger.exception("%s of %s has failed at %s", request.handle_name, request.handler, self._worker)
        text = str(error) if isinstance(error, AveragingError) else f"{type(error).__name__}: {error}"
        reply = request.reply(error=text)
        if isinstance(error, WorkerError) and error.lost:
            reply.unreachable = error.worker
        return reply
