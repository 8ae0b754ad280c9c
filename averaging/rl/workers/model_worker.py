"""`ModelWorker`: serves a master and other workers."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Self

from averaging.errors import AveragingError, ClosedError, ConfigError, ProtocolViolationError
from averaging.metrics import CERTIFICATE_METRICS, MetricsListener, Samples, certificate_samples, counter, gauge
from averaging.rl.workers.backend import Backend, Dataset
from averaging.rl.workers.data_manager import DataManager
from averaging.rl.workers.executor import Computations, Executor
from averaging.rl.workers.master_session import MAX_QUEUED, MasterSession, Next, RequestBook
from averaging.rl.workers.parameters import ParameterExchange
from averaging.rl.workers.payload import (
    FETCH_DATA,
    FETCH_PARAMETERS,
    NO_REPLY,
    REQUEST_REPLY_STREAM,
    SERVICE,
    Connect,
    Handle,
    Inventory,
    Payload,
    WorkerChannels,
    connector,
    decode_payload,
    pack,
    unpack,
)
from averaging.rl.workers.plan import Placement
from averaging.rpc import Credentials, EventLoopThread, RpcHandler, RpcServer
from averaging.security import local_credentials
from averaging.wire.workers_pb2 import Attach, Attached, MasterMessage, WorkerMessage

logger = logging.getLogger("averaging.rl.workers")

MASTER_SECONDS = 15.0
"""Seconds of silence after which a worker accepts another master, although the stream of the first is open."""


ATTACH_SECONDS = 10.0
"""Seconds within which a master must attach after it has opened its stream."""

MAX_PLACEMENT_BYTES = 4 << 20
"""Maximum bytes of what a worker must know of a plan: enough for tens of thousands of workers."""

MAX_MASTER_NAME = 128
"""Maximum characters of the random name of a master's process."""


HANDLES = frozenset(Handle)

WORKER_METRICS = (
    counter("worker_requests", "Requests of the master that were answered, by what they ask for.", "handle"),
    gauge("worker_running_requests", "Requests that are being answered."),
    gauge("worker_samples", "Samples of which the worker holds tensors."),
    gauge("worker_attached", "Whether a master is attached and was heard in the last 15 s: 1 or 0."),
    *CERTIFICATE_METRICS,
)
"""What a model worker tells Prometheus."""


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
        advertise: `host:port` at which others reach the worker, if that differs from `listen`.
        credentials: Certificates and tokens, see `averaging.rpc.read_credentials`. Without them only processes of this
            user on this machine may connect: they share a token in ~/.local/state/averaging/workers.token.
        save_folder: Folder below which the hook `save` may write. Without it, the hook is refused.
        compression: Compression of floating tensors of samples on their way to other workers, such as `bfloat16`.
        connect: Function that opens channels to other workers; for tests.
        inline: Whether backends run in the event loop; for simulations.
        metrics_listen: `host:port` for /metrics, /healthz and /readyz, see docs/operate/prometheus.md.

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
        advertise: str | None = None,
        credentials: Credentials | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        compression: str = "none",
        connect: Connect | None = None,
        inline: bool = False,
        metrics_listen: str | None = None,
    ) -> None:
        self.name = name
        self._incarnation = uuid.uuid4().hex
        self._server = None
        if listen is not None:
            own = local_credentials(SERVICE) if credentials is None else credentials
            self._server = RpcServer(listen, [self], advertise=advertise, credentials=own)
        self._channels = WorkerChannels(connect or connector(credentials, named_by_master=True))
        self._computations, self._loading = Computations(inline=inline), Computations(inline=inline)
        self._executor = Executor(
            name,
            dict(backends),
            dataset,
            DataManager(name, self._channels, compression=compression),
            ParameterExchange(name, self._channels),
            self._computations,
            self._loading,
            None if save_folder is None else Path(save_folder),
            self._reply,
        )
        self._in_own_thread = True
        self._is_running = False
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._session: MasterSession | None = None
        self._book = RequestBook()
        self._answered: Counter[str] = Counter()  # by handle
        self._credentials = credentials or Credentials()
        self._metrics = MetricsListener(metrics_listen, f"the model worker {name}", WORKER_METRICS, self._sample)

    @property
    def endpoint(self) -> str:
        """`host:port` at which the master reaches it."""
        if self._server is None:
            raise ConfigError(f"{self.name} has no server of its own; it was created without listen")
        return self._server.endpoint

    @property
    def metrics_endpoint(self) -> str:
        """The address of /metrics, /healthz and /readyz; empty without `metrics_listen`."""
        return self._metrics.endpoint

    async def __aenter__(self) -> Self:
        """Starts to serve.

        Raises:
            ListenError: The address is not available.
        """
        async with AsyncExitStack() as stack:
            if self._server is not None:  # not in simulations
                await stack.enter_async_context(self._metrics)
            if self._in_own_thread:
                self._computations.start(f"computations of {self.name}")
            stack.push_async_callback(self._computations.close)
            self._loading.start(f"dataset of {self.name}")
            stack.push_async_callback(self._loading.close)
            stack.push_async_callback(self._channels.close)
            stack.push_async_callback(self._end_tasks)
            self._is_running = True
            if self._server is not None:
                await stack.enter_async_context(self._server)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stops serving, after the method of a backend that is running."""
        if self._session is not None:
            self._session.close()
        self._is_running = False
        await self._stack.aclose()

    def run(self, on_ready: Any = None) -> None:
        """Serves until Ctrl+C, calls the backends in this thread, and returns.

        Args:
            on_ready: Function that gets the endpoint as soon as the worker listens.

        Raises:
            ListenError: The address is not available.
            ClosedError: The worker has ended after an error, which is its cause.
        """
        self._in_own_thread = False
        thread = EventLoopThread(self, f"the model worker {self.name}")
        try:
            if on_ready is not None:
                on_ready(self.endpoint)
            self._computations.work()
            thread.check()
        except KeyboardInterrupt:
            logger.info("%s ends", self.name)
        finally:
            thread.close()

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `RpcService`."""
        return [
            REQUEST_REPLY_STREAM.exchanges(self.request_reply_stream),
            FETCH_DATA.streams(lambda request: self._open.data.serve(request)),
            FETCH_PARAMETERS.streams(lambda request: self._open.parameters.serve(request)),
        ]

    async def request_reply_stream(self, messages: AsyncIterator[MasterMessage]) -> AsyncGenerator[WorkerMessage, None]:
        """Serves one master: its requests come in, replies go out.

        Raises:
            ProtocolViolationError: A message is malformed.
        """
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_SECONDS):
                first = await anext(messages, None)
        if first is None or not first.HasField("attach"):
            raise ProtocolViolationError("the stream of a master does not begin with attach")
        executor, attach = self._open, first.attach
        if refusal := self._refusal(attach) or executor.place(unpack(attach.placement, Placement)):
            logger.warning("refused a master: %s", refusal)
            yield WorkerMessage(refused=refusal)
            return
        if self._session is not None:
            self._session.close()
        session = self._session = MasterSession(attach.master, asyncio.get_running_loop().time())
        known, replies = self._book.attach(attach.outstanding)
        samples = executor.data.inventory()
        lengths = {sample: executor.data.length(sample) for sample in samples}
        inventory = Inventory(dict(executor.versions), samples, lengths)
        yield WorkerMessage(attached=Attached(incarnation=self._incarnation, inventory=pack(inventory), known=known))
        for reply in replies:
            session.send(reply)
        logger.info("%s serves the master %s", self.name, session.alias)
        # A task of its own, since replies go out also while the master sends nothing. When either side ends, both do.
        reading = self._start(self._read(session, messages))
        try:
            while (message := await session.next_message()) is not None:
                yield message
        finally:
            session.close()
            reading.cancel()
            await asyncio.wait([reading])
        if session.failure is not None:
            raise session.failure

    def _refusal(self, attach: Attach) -> str:
        """Why a master cannot attach, whatever its plan is; empty if it can."""
        if attach.worker != self.name:
            return f"this is {self.name!r}, not {attach.worker!r:.200}; correct the endpoints in the plan of the master"
        if not 0 < len(attach.master) <= MAX_MASTER_NAME:
            return f"the name of a master must have 1 to {MAX_MASTER_NAME} characters, not {len(attach.master)}"
        if len(attach.placement) > MAX_PLACEMENT_BYTES or len(attach.outstanding) > MAX_QUEUED:
            return f"its plan has {len(attach.placement)} bytes, and it waits for {len(attach.outstanding)} replies"
        session, now = self._session, asyncio.get_running_loop().time()
        if session is not None and session.master != attach.master and session.lives(now, MASTER_SECONDS):
            return (
                f"{self.name} serves another master ({session.alias}) since {now - session.since:.0f} s, which lives; "
                f"end that master first"
            )
        return ""

    async def _read(self, session: MasterSession, messages: AsyncIterator[MasterMessage]) -> None:
        """Takes the messages of a master, until it sends no more or another master attaches.

        A master that sends no more, such as a shell command, still gets the replies to the requests under way.
        """
        try:
            async for message in messages:
                session.heard = asyncio.get_running_loop().time()
                self._book.forget(message.received)
                if message.HasField("attach"):
                    raise ProtocolViolationError("a master attaches twice on one stream")
                for request in map(decode_payload, message.requests):
                    if self._session is not session:
                        return  # the rest is no longer wanted
                    self._receive(session, request)
                    await asyncio.sleep(0)  # one message can hold tens of thousands of requests
                if message.ping:
                    session.send(message.ping)
            session.ends = True
            self._close_if_answered(session)
        except AveragingError as error:
            session.failure = error
            session.close()
        except BaseException:
            session.close()
            raise

    def _close_if_answered(self, session: MasterSession) -> None:
        if session.ends and not self._book.running:
            session.close()

    def _receive(self, session: MasterSession, request: Payload) -> None:
        if request.handle_name == Handle.ACK:
            waiting = self._book.acked(request.request_id, go_on=request.data == pack(True))
            if waiting is None:
                return
            request, following = waiting, self._book.begin(waiting)
        else:
            following = self._book.receive(request)
        executor = self._open
        match following:
            case Next.SYN:
                session.send(self._book.syn(request))
            case Next.RUN:
                self._start(executor.answer(request))
            case Next.FLUSH:
                requests = self._book.flushed()
                self._reply(request.reply(len(requests)))
                self._start(executor.flush(requests))
            case Next.TOO_MANY:
                raise ProtocolViolationError(f"too many requests wait for a flush at {self.name}")

    def _sample(self) -> Samples:
        session, now = self._session, asyncio.get_running_loop().time()
        return {
            "averaging_worker_requests_total": {(handle,): count for handle, count in self._answered.items()},
            "averaging_worker_running_requests": self._book.running,
            "averaging_worker_samples": len(self._executor.data),
            "averaging_worker_attached": float(session is not None and session.lives(now, MASTER_SECONDS)),
            **certificate_samples(self._credentials),
        }

    def _reply(self, reply: Payload) -> None:
        self._answered[reply.handle_name if reply.handle_name in HANDLES else "other"] += 1
        wanted = self._book.finish(reply, keep=reply.handle_name not in NO_REPLY)
        if self._session is not None:
            if wanted and reply.handle_name not in NO_REPLY:
                self._session.send(reply)
            self._close_if_answered(self._session)

    @property
    def _open(self) -> Executor:
        if not self._is_running:
            raise ClosedError(f"the model worker {self.name} is not running")
        return self._executor

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine in a task that is cancelled at the end of the worker."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
