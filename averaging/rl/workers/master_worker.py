"""`MasterWorker`: drives the model workers of one site."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from averaging.common import on_loop
from averaging.rl.workers.data_manager import OwnerTracker
from averaging.rl.workers.payload import Connect
from averaging.rl.workers.plan import Plan
from averaging.rl.workers.request_client import RequestClient
from averaging.rl.workers.step_runner import StepResult, StepRunner
from averaging.rpc import Credentials, EventLoopThread

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    part: str, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[MasterWorker, P], T]:
    """A coroutine method of a part of the master, which runs in the master's thread, as a method that blocks."""

    @wraps(method)
    def call(master: MasterWorker, /, *args: P.args, **options: P.kwargs) -> T:
        return master._thread.run(method(getattr(master, part), *args, **options))

    return call


def _in_thread(method: Callable[Concatenate[RequestClient, P], T]) -> Callable[Concatenate[MasterWorker, P], T]:
    """A method of the client, called in the master's thread."""

    @wraps(method)
    def call(master: MasterWorker, /, *args: P.args, **options: P.kwargs) -> T:
        return master._thread.run(on_loop(partial(method, master._client, *args, **options)))

    return call


def _awaitable(
    method: Callable[Concatenate[RequestClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[MasterWorker, P], Coroutine[Any, Any, T]]:
    """A coroutine method of the client, which runs in the master's thread, as a coroutine for any event loop."""

    @wraps(method)
    async def call(master: MasterWorker, /, *args: P.args, **options: P.kwargs) -> T:
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
                result = await method(master._client, *args, **options)
            except Exception as error:
                loop.call_soon_threadsafe(finish, None, error)
            except BaseException:
                loop.call_soon_threadsafe(done.cancel)
                raise
            else:
                loop.call_soon_threadsafe(finish, result, None)

        master._thread.start(run())
        return await done

    return call


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
        connect: Function that opens channels; for tests.

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

    def run(self, steps: int) -> Iterator[StepResult]:
        """Initializes the models and yields the results of the steps up to number `steps`. For errors see `step`."""
        self.initialize()
        while self.step_number < steps:
            yield self.step()

    def new_id(self) -> str:
        """A new id of a request."""
        return self._client.new_id()

    initialize = _blocking("_runner", StepRunner.initialize)
    """Prepares the models at all workers, and takes over what the workers held for an earlier master."""

    spec = _blocking("_runner", StepRunner.spec)
    """Returns the `DatasetSpec` of each DP head of the first model: its part of the dataset."""

    step = _blocking("_runner", StepRunner.step)
    """Runs all calls of the plan once, for the next samples, and returns a `StepResult`.

    If it raises, the samples stay in the buffer, and the next call runs the same step again.

    Raises:
        WorkerError: A worker has failed, or the dataset has too few samples; with `lost` if a worker is lost
            and its samples cannot be assigned to others, or it alone held tensors that a call needs.
    """

    post = _in_thread(RequestClient.post)
    """`post(payload)`: sends one request and returns its id."""

    request = _blocking("_client", RequestClient.request)
    """`request(handlers, handle_name, datas=None, *, no_syn=True)`: sends a request to each handler, returns their ids.

    With `no_syn=False` no worker begins before all have received the request.
    """

    call = _blocking("_client", RequestClient.call)
    """`call(handlers, handle_name, datas=None, *, no_syn=True, timeout=None)`: like `request`, but returns the data of
    the replies."""

    call_async = _awaitable(RequestClient.call)
    """Like `call`."""

    gather = _blocking("_client", RequestClient.gather)
    """`gather(ids, timeout=None)`: waits for the replies to these requests.

    Raises:
        WorkerError: A request has failed, or its worker is lost. The replies to the others are
            dropped.
        TimeoutError: A reply is missing after `timeout` seconds. It can still be gathered later.
    """

    gather_async = _awaitable(RequestClient.gather)
    """Like `gather`."""

    poll = _in_thread(RequestClient.poll)
    """`poll(ids=None)`: takes the first reply to any request, or to one of these; None if none has arrived.

    Raises:
        WorkerError: The request has failed.
    """

    poll_async = _awaitable(RequestClient.poll_async)
    """`poll_async(ids=None)`: waits for the next reply, to any request or to one of these. For errors see `poll`."""

    poll_batch = _in_thread(RequestClient.poll_batch)
    """`poll_batch(ids=None)`: takes all replies that have arrived, to any requests or to these.

    Raises:
        WorkerError: A request has failed. The replies before it are dropped.
    """
