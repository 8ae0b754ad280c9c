"""`MasterWorker`: drives the model workers of one site."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

from averaging.rl.workers.methods import Connect
from averaging.rl.workers.payload import DatasetSpec, Payload
from averaging.rl.workers.plan import Plan
from averaging.rl.workers.redistributor import OwnerTracker
from averaging.rl.workers.request_client import RequestClient
from averaging.rl.workers.step_runner import StepResult, StepRunner
from averaging.rpc import Credentials, EventLoopThread

T = TypeVar("T")


class MasterWorker:
    """Drives the model workers of a plan. Use it as a context manager.

    ```python
    with MasterWorker(plan) as master:
        for result in master.run(steps=100):
            print(result.step, result.stats)
    ```

    The methods `post` to `gather` send single requests. Those whose names end in `_async` are coroutines for any event
    loop; the others block. All may be called in any thread.

    A second master is refused while the first one lives. A master that is started again attaches to the workers, and
    goes on with the models and samples that they hold.

    Args:
        plan: The plan.
        credentials: Certificates and tokens, see `averaging.rpc.read_credentials`. Without them, workers on loopback
            get the token of this user's processes.
        attach_timeout: Seconds to wait for all workers at the start.
        ping_seconds: Interval of the pings to each worker.
        min_stall_timeout: Seconds that a worker may at least take to answer a ping.
        stall_timeout: Seconds that it may at most take. In between, the limit is learned from its earlier answers.
        connect: Opens channels; for tests.

    Raises:
        ConfigError: An argument is invalid.
        MasterRefusedError: A worker serves another master, or does not match the plan.
        WorkerLostError: A worker cannot be reached within `attach_timeout`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        credentials: Credentials | None = None,
        attach_timeout: float = 60.0,
        ping_seconds: float = 1.0,
        min_stall_timeout: float = 2.0,
        stall_timeout: float = 30.0,
        connect: Connect | None = None,
    ) -> None:
        tracker = OwnerTracker()
        client = RequestClient(
            plan,
            credentials=credentials,
            ping_seconds=ping_seconds,
            min_stall_timeout=min_stall_timeout,
            stall_timeout=stall_timeout,
            connect=connect,
            on_lost=tracker.remove_worker,
        )
        self.plan = plan
        self._client = client
        self._runner = StepRunner(plan, client, tracker)
        self._thread = EventLoopThread(client, "the master")
        try:
            self._thread.run(client.attach(attach_timeout))
        except BaseException:
            self._thread.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the streams to the workers, which keep what they hold. A second call does nothing."""
        self._thread.close()

    @property
    def step_number(self) -> int:
        """Number of the last step that is complete."""
        return self._runner.step_number

    @property
    def lost(self) -> dict[str, str]:
        """The workers that are lost now, and why."""
        return {worker: str(link.lost) for worker, link in self._client.links.items() if link.lost is not None}

    # The plan

    def initialize(self) -> None:
        """Prepares the models at all workers, and takes over what the workers held for an earlier master.

        Raises:
            WorkerError: A worker has failed.
        """
        self._thread.run(self._runner.initialize())

    def spec(self) -> list[DatasetSpec]:
        """The parts of the dataset at the DP heads of the first model."""
        return self._thread.run(self._runner.spec())

    def step(self) -> StepResult:
        """Runs all calls of the plan once, for the next samples.

        If it raises, the samples stay in the buffer, and the next call runs the same step again.

        Raises:
            WorkerLostError: A worker is lost, and its samples cannot be assigned to others.
            DataLostError: Tensors that a call needs were held by a lost worker alone.
            WorkerError: A worker has failed, or the dataset has too few samples.
        """
        return self._thread.run(self._runner.step())

    def run(self, steps: int) -> Iterator[StepResult]:
        """Initializes the models and yields the results of the steps up to number `steps`. For errors see `step`."""
        self.initialize()
        while self.step_number < steps:
            yield self.step()

    # Single requests

    def post(self, payload: Payload) -> str:
        """Sends one request and returns its id. See `RequestClient.post`."""

        async def post() -> str:
            return self._client.post(payload)

        return self._thread.run(post())

    def new_id(self) -> str:
        """A new id of a request."""
        return self._client.new_id()

    def request(
        self, handlers: Sequence[str], handle_name: str, datas: Sequence[Any] | None = None, *, no_syn: bool = True
    ) -> list[str]:
        """Sends a request to each handler and returns their ids. See `RequestClient.request`."""
        return self._thread.run(self._client.request(handlers, handle_name, datas, no_syn=no_syn))

    def call(
        self,
        handlers: Sequence[str],
        handle_name: str,
        datas: Sequence[Any] | None = None,
        *,
        no_syn: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Sends a request to each handler and returns the data of the replies. See `RequestClient.call`."""
        return self._thread.run(self._client.call(handlers, handle_name, datas, no_syn=no_syn, timeout=timeout))

    async def call_async(
        self,
        handlers: Sequence[str],
        handle_name: str,
        datas: Sequence[Any] | None = None,
        *,
        no_syn: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Like `call`."""
        return await self._bridge(self._client.call(handlers, handle_name, datas, no_syn=no_syn, timeout=timeout))

    def gather(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        """Waits for the replies to these requests. See `RequestClient.gather`."""
        return self._thread.run(self._client.gather(ids, timeout))

    async def gather_async(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        """Like `gather`."""
        return await self._bridge(self._client.gather(ids, timeout))

    def poll(self, ids: Collection[str] | None = None) -> Payload | None:
        """Takes the first reply that has arrived, to any request or to one of these; None if there is none.

        Raises:
            WorkerError: The request has failed.
        """
        return self._in_loop(lambda: self._client.poll(ids))

    async def poll_async(self, ids: Collection[str] | None = None) -> Payload:
        """Waits for the next reply, to any request or to one of these.

        Raises:
            WorkerError: The request has failed.
        """
        return await self._bridge(self._client.poll_async(ids))

    def poll_batch(self, ids: Collection[str] | None = None) -> list[Payload]:
        """Takes all replies that have arrived, to any requests or to these.

        Raises:
            WorkerError: A request has failed. The replies before it are dropped.
        """
        return self._in_loop(lambda: self._client.poll_batch(ids))

    def _in_loop(self, read: Callable[[], T]) -> T:
        async def call() -> T:
            return read()

        return self._thread.run(call())

    async def _bridge(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread of the master and awaits it in the running loop."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        async def run() -> None:
            try:
                result = await coroutine
            except Exception as error:
                loop.call_soon_threadsafe(finish, None, error)
            except BaseException:
                loop.call_soon_threadsafe(done.cancel)
                raise
            else:
                loop.call_soon_threadsafe(finish, result, None)

        self._thread.start(run())
        return await done
