"""`ModelWorker`: serves a master and other workers, and carries out the requests of its master."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import queue
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from averaging.errors import AveragingError, ClosedError, ConfigError, ProtocolViolationError, printable
from averaging.metrics import CERTIFICATE_METRICS, MetricsListener, Samples, certificate_samples, counter, gauge
from averaging.rl.workers.backend import Backend, Dataset, Sample, check_numbers, check_outputs
from averaging.rl.workers.data_manager import SILENCE_SECONDS, DataManager, blend
from averaging.rl.workers.plan import HookName, ModelShardID, Placement
from averaging.rl.workers.requests import (
    ATTACH,
    BLOCKING,
    FETCH_DATA,
    REQUEST,
    SERVICE,
    Compute,
    Computed,
    Connect,
    Count,
    DatasetSpec,
    Fetched,
    Handle,
    Ids,
    Inventory,
    Payload,
    Realloc,
    Step,
    connector,
    convert,
    decode_payload,
    encode_payload,
    pack,
    unpack,
)
from averaging.rpc import Credentials, EventLoopThread, RpcHandler, RpcServer
from averaging.security import local_credentials
from averaging.tensors import copy_to_cpu
from averaging.wire.workers_pb2 import Attach, Attached, Reply, Request

logger = logging.getLogger("averaging.rl.workers")

BEAT_SECONDS = 1.0  # interval of the messages that tell a master that its worker lives
MAX_REQUESTS = 1 << 16  # that wait or run, and replies that the master has not received

WORKER_METRICS = (
    counter("worker_requests", "Requests of the master that were answered, by what they ask for.", "handle"),
    gauge("worker_running_requests", "Requests that are being answered."),
    gauge("worker_samples", "Samples of which the worker holds tensors."),
    gauge("worker_attached", "Whether a master is attached: 1 or 0."),
    *CERTIFICATE_METRICS,
)
"""What a model worker tells Prometheus."""


class Computations:
    """Runs functions one after the other, in a thread, or in the event loop for simulations on virtual time."""

    def __init__(self, *, inline: bool) -> None:
        self._inline = inline
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()

    def work(self) -> None:
        """Runs functions in the calling thread until `close`."""
        while (call := self._calls.get()) is not None:
            function, done = call
            finish: Callable[[], None]
            try:
                finish = partial(done.set_result, function())
            except Exception as error:
                finish = partial(done.set_exception, error)
            done.get_loop().call_soon_threadsafe(lambda done, finish: done.cancelled() or finish(), done, finish)
            del call, function, done, finish  # arguments and result would stay in memory until the next call

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function, or a coroutine function in the event loop, and returns its result."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        if self._inline:
            return function(*args)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put((partial(function, *args), done))
        return await done

    def close(self) -> None:
        """Ends `work` after the function in progress."""
        self._calls.put(None)


@dataclass(eq=False)
class Job:
    """A request at its worker."""

    request: Payload
    reply: asyncio.Future[Payload]
    begun: bool = False  # blocking requests wait for a flush


def flush_order(request: Payload) -> tuple[int, int, str]:
    """The sort key of the blocking requests of a flush, which does not depend on the order of arrival.

    1. Requests that only publish parameters, since others wait for them.
    2. Calls of smaller meshes first, then by name.
    3. Calls with an averaging round, by name. Their mesh does not count, because the same model may have another mesh
       at another site, and two sites that enter two rounds in different orders wait for each other.
    4. Requests that only take parameters, since the calls publish them.
    """
    compute = convert(request.data, Compute)
    hooks = zip(request.post_hooks, request.post_hook_data, strict=True)
    reallocs = [convert(data, Realloc) for name, data in hooks if name == HookName.PARAM_REALLOC]
    publishes = any(not realloc.origin for realloc in reallocs)
    if request.handle_name == Handle.EMPTY:
        return (0 if publishes else 3), 0, compute.call
    if HookName.AVERAGE in request.post_hooks:
        return 2, 0, compute.call
    return 1, compute.mesh, compute.call


@dataclass(eq=False)
class Executor:
    """Carries out requests: calls of backends and hooks."""

    worker: str
    backends: Mapping[str, Backend]
    dataset: Dataset | None
    save_folder: Path | None
    data: DataManager
    computations: Computations
    versions: dict[str, int] = field(default_factory=dict)  # train steps of each model that is initialized
    _shards: Mapping[str, ModelShardID] = field(default_factory=dict)  # by handler
    _dp: tuple[int, int] = (-1, 0)  # rank among the workers with a part of the dataset, -1 for none; and their number
    _one_flush: asyncio.Lock = field(default_factory=asyncio.Lock)

    def place(self, placement: Placement) -> str:
        """Takes its part in a plan. Returns why that is impossible, and then changes nothing; empty if it is not."""
        dp = placement.dp_rank, placement.dp_size
        for shard, _ in placement.shards:
            if shard.model not in self.backends:
                known = ", ".join(self.backends) or "none"
                return f"{self.worker} has no backend of model {shard.model!r:.200}; it has {known}"
        if not -1 <= dp[0] < max(0, dp[1]) or (dp[0] >= 0 and self.dataset is None):
            return f"{self.worker} cannot hold part {dp[0]} of {dp[1]} of the dataset; give it a dataset"
        if dp[0] >= 0 and dp != self._dp and self.dataset is not None:
            self.dataset.place(*dp)
        self._dp = dp
        self._shards = {str(shard): shard for shard, _ in placement.shards}
        for shard, topology in placement.shards:
            backend = self.backends[shard.model]
            backend.shard, backend.topology = shard, topology
        self.data.endpoints = placement.endpoints
        return ""

    async def answer(self, job: Job) -> None:
        """Carries out a request that does not wait for a flush, and replies."""
        request = job.request
        data: object = None
        with self._replying(job):
            match request.handle_name:
                case Handle.SYN:
                    convert(request.data, Payload)
                case Handle.FETCH:
                    data = await self._fetch(convert(request.data, Count).count)
                case Handle.SPEC:
                    size = 0 if self._source is None else self._source.size
                    data = DatasetSpec(1 if size else 0, size)
                case Handle.MODEL_CONFIG:
                    backend = self.backends[self._shard(request.handler).model]
                    data = dict(await self.computations.run(backend.model_config))
                case Handle.CLEAR_DATA_CACHE:
                    self.data.remove(convert(request.data, Ids).ids)
                case unknown:
                    raise ConfigError(f"{self.worker} knows no request {unknown!r:.200}; give both the same version")
            job.reply.set_result(request.reply(data))

    async def _fetch(self, count: int) -> Fetched:
        source = self._source
        if source is None:
            raise ConfigError(f"{self.worker} holds no part of a dataset; give it one, or fetch from the DP heads")
        loaded: Sequence[Sample] = await self.computations.run(source.fetch, count)
        new = [sample for sample in loaded if not self.data.has_data(sample.id)]
        self.data.store(new)
        ids = [sample.id for sample in new]
        keys = sorted(set.intersection(*(set(sample.data) for sample in new))) if new else []
        return Fetched(ids, [self.data.length(sample) for sample in ids], keys, self._dp[0])

    @property
    def _source(self) -> Dataset | None:
        return self.dataset if self._dp[0] >= 0 else None

    async def flush(self, jobs: Sequence[Job]) -> None:
        """Carries out the requests of one level, after those of the level before, and replies to each.

        All pre-hooks run before the first computation, because the pre-hook of another worker may wait for tensors that
        a worker stores early, and computations may meet in a collective. The order is that of `flush_order`.
        """
        async with self._one_flush:
            queued: list[tuple[tuple[int, int, str], Job]] = []
            for job in jobs:
                with self._replying(job):
                    queued.append((flush_order(job.request), job))
            ordered = [job for _, job in sorted(queued, key=itemgetter(0))]
            for request, job in ((job.request, job) for job in ordered):
                with self._replying(job):
                    for name, data in zip(request.pre_hooks, request.pre_hook_data, strict=True):
                        if name != HookName.DATA_TRANSFER:
                            raise ConfigError(f"{name!r:.200} cannot run before a request; data_transfer can")
                        await self.data.redistribute(convert(data, list[Step]))
            for job in ordered:
                if not job.reply.done():  # a pre-hook may have failed
                    with self._replying(job):
                        job.reply.set_result(job.request.reply(await self._carry_out(job.request)))

    @contextmanager
    def _replying(self, job: Job) -> Iterator[None]:
        """Makes an error the reply."""
        try:
            yield
        except AveragingError as error:
            job.reply.set_result(job.request.reply(error=str(error)))
        except Exception as error:
            logger.exception("%s of %s has failed at %s", job.request.handle_name, job.request.handler, self.worker)
            job.reply.set_result(job.request.reply(error=f"{type(error).__name__}: {error}"))

    async def _carry_out(self, request: Payload) -> object:
        """Runs a call and its post-hooks, and returns the data of the reply."""
        run, handle = self.computations.run, request.handle_name
        shard, compute = self._shard(request.handler), convert(request.data, Compute)
        backend = self.backends[shard.model]
        if handle == Handle.INITIALIZE and shard.model not in self.versions:
            await run(backend.initialize)
            self.versions[shard.model] = 0
        if handle == Handle.INITIALIZE:
            return self.versions[shard.model]
        if shard.model not in self.versions:
            raise ConfigError(f"model {shard.model!r} at {self.worker} is not initialized; send initialize")
        keys: list[str] = []
        stats: dict[str, float] = {}
        if handle != Handle.EMPTY:
            batch = self.data.get(compute.ids, compute.inputs)
            result = await run(getattr(backend, handle), batch, compute.step)
            method = f"{type(backend).__name__}.{handle}"
            if handle == Handle.TRAIN_STEP:
                self.versions[shard.model] += 1
                stats = check_numbers(result, method)
            elif shard.is_dp_head:
                self.data.update(check_outputs(batch, compute.outputs, result, method))
                keys = compute.outputs
        for name, data in zip(request.post_hooks, request.post_hook_data, strict=True):
            numbers = await self._post_hook(name, data, compute, backend)
            stats |= {f"{name}/{key}": number for key, number in numbers.items()}
        return Computed(keys, stats)

    async def _post_hook(self, name: str, data: object, compute: Compute, backend: Backend) -> dict[str, float]:
        run = self.computations.run
        match name:
            case HookName.EVALUATE:
                return check_numbers(await run(backend.evaluate, compute.step), "evaluate")
            case HookName.OFFLOAD:
                await run(backend.offload)
            case HookName.SAVE:
                await run(backend.save, await run(self._path_to_save, convert(data, str)))
            case HookName.AVERAGE:
                return check_numbers(await run(backend.average), "average")
            case HookName.PARAM_REALLOC:
                realloc, own = convert(data, Realloc), await run(backend.parameters)
                if realloc.origin:
                    source = await self.data.parameters_of(realloc.origin, realloc.transfer)
                    await run(blend, own, source, realloc.eta, realloc.target)
                else:
                    copy = await run(lambda: {name: copy_to_cpu(tensor) for name, tensor in own.items()})
                    self.data.store([Sample(realloc.transfer, copy)])
            case _:
                raise ConfigError(f"{self.worker} knows no hook {name!r:.200}; give both the same version")
        return {}

    def _path_to_save(self, path: str) -> str:
        """The absolute path that a hook `save` means, which must be in the folder that this worker was given."""
        folder = self.save_folder
        if folder is None:
            raise ConfigError(f"{self.worker} has no folder for {path!r:.200}; give ModelWorker(save_folder=…) for it")
        try:
            folder, target = folder.resolve(), (folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{path!r:.200} is no path: {error}") from None
        if not target.is_relative_to(folder):
            raise ConfigError(f"{path!r:.200} is not below {folder}, the folder in which {self.worker} may save")
        return str(target)

    def _shard(self, handler: str) -> ModelShardID:
        if handler not in self._shards:
            known = ", ".join(self._shards) or "none"
            raise ConfigError(f"{self.worker} holds no shard {handler!r:.200}; it holds {known}")
        return self._shards[handler]


class ModelWorker:
    """One process with a part of one or several models. It computes what a master requests.

    ```python
    ModelWorker("worker/0", {"actor": MyActor()}, listen="127.0.0.1:7001").run()
    ```

    `run` calls the backends in the calling thread. As an async context manager, the worker calls them in a thread of
    its own. The master connects to the worker, so the order in which they start does not matter.

    Args:
        name: Name of the worker in the plan of the master.
        backends: The backend of each model of which the worker holds a shard.
        listen: `host:port` to listen on; port 0 takes a free one. None if a server or peer has it in `services`, whose
            credentials then decide who may connect.
        dataset: Source of samples, for a worker that may be a DP head of the first call's model.
        credentials: Certificates and tokens, see `averaging.rpc.read_credentials`. Without them only processes of this
            user on this machine may connect: they share a token in ~/.local/state/averaging/workers.token.
        save_folder: Folder below which the hook `save` may write. Without it, the hook is refused.
        metrics_listen: `host:port` for /metrics, /healthz and /readyz, see docs/operate/prometheus.md.
        connect: Function that opens channels to other workers, for simulations: backends then run in the event loop.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        name: str,
        backends: Mapping[str, Backend],
        *,
        listen: str | None = None,
        dataset: Dataset | None = None,
        credentials: Credentials | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        metrics_listen: str | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.name = name
        data = DataManager(name, connect or connector(credentials, named_by_master=True))
        folder, computations = None if save_folder is None else Path(save_folder), Computations(inline=bool(connect))
        self._executor = Executor(name, dict(backends), dataset, folder, data, computations)
        self._server = None
        if listen is not None:
            own = local_credentials(SERVICE) if credentials is None else credentials
            self._server = RpcServer(listen, [self], credentials=own)
        self._needs_thread = connect is None
        self._is_running = False
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._incarnation = uuid.uuid4().hex
        self._master = self._session = ""  # random names of the last master, and of its call while that lasts
        self._book: dict[str, Job] = {}  # by request_id, until the master has received the reply
        self._arrived = asyncio.Event()  # set, and replaced, when a request has arrived
        self._answered: Counter[str] = Counter()  # by handle
        self._credentials = credentials or Credentials()
        self._metrics = MetricsListener(metrics_listen, f"the model worker {name}", WORKER_METRICS, self._sample)

    @property
    def endpoint(self) -> str:
        if self._server is None:
            raise ConfigError(f"{self.name} has no server of its own; it was created without listen")
        return self._server.endpoint

    @property
    def metrics_endpoint(self) -> str:
        return self._metrics.endpoint

    async def __aenter__(self) -> Self:
        """Starts to serve. Raises a ListenError if the address is not available."""
        computations = self._executor.computations
        async with AsyncExitStack() as stack:
            if self._server is not None:  # not in simulations
                await stack.enter_async_context(self._metrics)
            if self._needs_thread:
                thread = threading.Thread(target=computations.work, name=f"computations of {self.name}", daemon=True)
                thread.start()
                stack.push_async_callback(asyncio.to_thread, thread.join)
            stack.callback(computations.close)
            stack.push_async_callback(self._executor.data.close)
            stack.push_async_callback(self._end_tasks)
            self._is_running = True
            if self._server is not None:
                await stack.enter_async_context(self._server)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stops serving, after the method of a backend that is running."""
        self._is_running, self._session = False, ""
        await self._stack.aclose()

    def run(self, on_ready: Callable[[str], object] | None = None) -> None:
        """Serves until Ctrl+C, and calls the backends in this thread. `on_ready` gets the endpoint once it listens.

        Raises:
            ListenError: The address is not available.
            ClosedError: The worker has ended after an error, which is its cause.
        """
        self._needs_thread = False
        thread = EventLoopThread(self, f"the model worker {self.name}")
        try:
            if on_ready is not None:
                on_ready(self.endpoint)
            self._executor.computations.work()
            thread.check()
        except KeyboardInterrupt:
            logger.info("%s ends", self.name)
        finally:
            thread.close()

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        return [
            ATTACH.streams(self._attach),
            REQUEST.answers(self._answer),
            FETCH_DATA.streams(self._executor.data.serve),
        ]

    async def _attach(self, request: Attach) -> AsyncGenerator[Attached, None]:
        if not self._is_running:
            raise ClosedError(f"the model worker {self.name} is not running")
        executor = self._executor
        if refusal := self._refusal(request) or executor.place(unpack(request.placement, Placement)):
            logger.warning("refused a master: %s", refusal)
            yield Attached(refused=refusal)
            return
        session = self._session = uuid.uuid4().hex
        self._master = request.master
        outstanding = set(request.outstanding)
        self._forget(self._book.keys() - outstanding)
        samples = executor.data.inventory()
        inventory = Inventory(dict(executor.versions), samples, {name: executor.data.length(name) for name in samples})
        logger.info("%s serves the master %s", self.name, printable(self._master[:8]))
        try:
            yield Attached(incarnation=self._incarnation, inventory=pack(inventory), session=session)
            while self._session == session:
                await asyncio.sleep(BEAT_SECONDS)
                yield Attached()
        finally:
            if self._session == session:
                self._session = ""

    def _refusal(self, request: Attach) -> str:
        if request.worker != self.name:
            return f"this is {self.name!r}, not {request.worker!r:.200}; correct the endpoints of the plan"
        if self._session and request.master != self._master:
            other = printable(self._master[:8])  # with the whole name, another process could take its place
            return f"{self.name} serves another master ({other}), which lives; end that master first"
        return ""

    async def _answer(self, message: Request) -> Reply:
        """Carries out a request once, although the master may send it several times: its id is in the book.

        A request of a session that has ended is not accepted. It may have waited in a broken connection, while the
        master has attached again, received the reply over the new one, and had the worker forget it.
        """
        if not self._session or message.session != self._session:
            return Reply(stale=True)
        self._forget(message.received)
        request = decode_payload(message.payload)
        if request.handle_name == Handle.FLUSH and request.request_id not in self._book:
            await self._arrival_of(convert(request.data, Ids).ids)
        job = self._book.get(request.request_id) or self._begin(request)
        reply = await asyncio.shield(job.reply)
        try:
            return Reply(payload=encode_payload(reply))
        except ConfigError as error:
            return Reply(payload=encode_payload(reply.reply(error=f"its reply is lost: {error}")))

    async def _arrival_of(self, ids: Sequence[str]) -> None:
        """Waits for the requests that were sent before a flush, which may overtake them."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                while not self._book.keys() >= set(ids):
                    await self._arrived.wait()
        except TimeoutError:
            raise ProtocolViolationError("a flush whose requests have not arrived in time") from None

    def _begin(self, request: Payload) -> Job:
        """Begins a request, unless it waits for a flush."""
        book, handle = self._book, request.handle_name
        if len(book) >= MAX_REQUESTS:
            raise ProtocolViolationError(f"too many requests wait at {self.name}")
        job = Job(request, asyncio.get_running_loop().create_future(), begun=handle not in BLOCKING)
        book[request.request_id] = job
        job.reply.add_done_callback(self._count)
        if handle == Handle.FLUSH:
            jobs = [book[name] for name in request.data["ids"] if name in book and not book[name].begun]
            for waiting in jobs:
                waiting.begun = True
            job.reply.set_result(request.reply(len(jobs)))
            self._start(self._executor.flush(jobs))
        elif job.begun:
            self._start(self._executor.answer(job))
        self._arrived.set()
        self._arrived = asyncio.Event()
        return job

    def _forget(self, ids: Iterable[str]) -> None:
        for request_id in ids:
            self._book.pop(request_id, None)

    def _count(self, reply: asyncio.Future[Payload]) -> None:
        handle = reply.result().handle_name
        self._answered[handle if handle in list(Handle) else "other"] += 1

    def _sample(self) -> Samples:
        running = sum(job.begun and not job.reply.done() for job in self._book.values())
        return {
            "averaging_worker_requests_total": {(handle,): count for handle, count in self._answered.items()},
            "averaging_worker_running_requests": running,
            "averaging_worker_samples": len(self._executor.data),
            "averaging_worker_attached": float(bool(self._session)),
            **certificate_samples(self._credentials),
        }

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
