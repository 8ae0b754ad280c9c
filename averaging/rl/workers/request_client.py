"""A master's side of its workers: attaches to them, sends requests by name, and collects the replies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    RefusalCause,
    WorkerError,
)
from averaging.rl.workers.payload import (
    ATTACH,
    BLOCKING,
    REQUEST,
    Connect,
    Handle,
    Ids,
    Inventory,
    Payload,
    connector,
    decode_payload,
    encode_payload,
    pack,
    unpack,
)
from averaging.rl.workers.plan import Plan
from averaging.rpc import Credentials, Deadline, FairTimeout
from averaging.wire.workers_pb2 import Attach, Attached, Request

logger = logging.getLogger("averaging.rl.workers")

RETRY_SECONDS = 0.5
"""Seconds between two attempts to attach to a worker that does not answer."""

MAX_BLOCKING = 100
"""Maximum number of blocking requests at one worker; a connection has 128 calls, and the flush needs one."""


@dataclass(eq=False)
class _Sent:
    """A request, until its outcome is taken.

    Attributes:
        worker: Name of its worker.
        waits: Whether it is blocking, and no flush was sent after it.
        outcome: The reply, or why there is none.
    """

    worker: str
    waits: bool
    outcome: asyncio.Future[Payload | WorkerError]


class WorkerLink:
    """Keeps a master attached to one worker.

    The worker is lost if nothing listens at its endpoint any more, if it is silent for `stall_timeout`, or if it has
    restarted. The link goes on trying, so that a worker can come back.

    Attributes:
        inventory: Models and samples of the worker when it attached; None while it is not attached.
        session: Name of this attachment, which requests need; empty before, and once one of them could not be sent.
        lost: Error that says why the worker is lost; None while it is attached, and before it has attached at all.
        was_lost: Whether it has been lost, until the step runner has taken it back.
        refusal: Error of the last attempt, if further attempts would fail as well.
        reason: Text that says why the last attempt has failed; empty if none has.
        changed: Event that is set, and replaced, when an attribute above has changed.
        received: Ids of requests that the worker may forget. The next request tells it.
    """

    def __init__(
        self,
        attach: Attach,
        endpoint: str,
        connect: Connect,
        stall_timeout: float,
        sent: dict[str, _Sent],
        on_lost: Callable[[str], None],
    ) -> None:
        self.worker, self.endpoint = attach.worker, endpoint
        self.channel = connect(endpoint)
        self.inventory: Inventory | None = None
        self.session = ""
        self.lost: WorkerError | None = None
        self.was_lost = False
        self.refusal: WorkerError | None = None
        self.reason = ""
        self.changed = asyncio.Event()
        self.received: list[str] = []
        self._attach, self._stall_timeout, self._sent, self._on_lost = attach, stall_timeout, sent, on_lost
        self._incarnation = ""

    @property
    def outstanding(self) -> dict[str, _Sent]:
        """The requests whose replies are awaited, by id."""
        return {
            name: sent for name, sent in self._sent.items() if sent.worker == self.worker and not sent.outcome.done()
        }

    async def run(self) -> None:
        """Stays attached until it is cancelled."""
        loop = asyncio.get_running_loop()
        broken = loop.time()
        try:
            while True:
                reason, final = await self._attempt()
                if self.inventory is not None:
                    broken = loop.time()
                    logger.info("the call to %s has ended: %s", self.worker, reason)
                self.reason, self.inventory, self.session = reason, None, ""
                if self._incarnation and self.lost is None and (final or loop.time() - broken > self._stall_timeout):
                    self._lose(reason)
                self._notify()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            await self.channel.close()

    async def _attempt(self) -> tuple[str, bool]:
        """Attaches until the call ends. Returns why it has ended, and whether the worker is lost at once."""
        self.refusal = None
        try:
            return await self._stay_attached(), False
        except WorkerError as error:
            self.refusal = error
            return str(error), True
        except (AveragingError, TimeoutError) as error:
            reason = str(error)
            if isinstance(error, CallRefusedError) and error.cause is RefusalCause.UNAUTHENTICATED:
                reason += "; give the master the credentials of its workers"
            if isinstance(error, CallRefusedError | PeerUnreachableError) and error.definite:
                self.refusal = WorkerError(self.worker, f"{self.worker} cannot be reached: {reason}", lost=True)
            return reason, error.refused if isinstance(error, PeerUnreachableError) else True

    async def _stay_attached(self) -> str:
        request = Attach()
        request.CopyFrom(self._attach)
        request.outstanding.extend(self.outstanding)
        self.received.clear()  # the worker forgets all but `outstanding`
        deadline = Deadline(self._stall_timeout, "stall_timeout")
        messages = self.channel.stream(ATTACH, request)
        # Seconds in which this process was stopped do not count: the worker is not silent, it was not heard.
        async with aclosing(messages), FairTimeout(deadline, self._stall_timeout) as limit:
            first: Attached | None = None
            async for message in messages:
                limit.restart(deadline)
                if message.refused:
                    raise WorkerError(self.worker, f"{self.worker} refuses this master: {message.refused}")
                if first is None:
                    first = message
                    self._begin(message)
                elif self.session != first.session:
                    return "a request could not be sent"
        return "the worker has ended it"

    def _begin(self, attached: Attached) -> None:
        if self._incarnation not in ("", attached.incarnation) and self.lost is None:
            self._lose("it has restarted, and lost what it held")
        self._incarnation, self.session = attached.incarnation, attached.session
        self.inventory, self.lost = unpack(attached.inventory, Inventory), None
        self._notify()

    async def deliver(self, request_id: str, payload: bytes) -> Payload:
        """Sends a request until its reply arrives, in one attachment after the other. The worker carries it out once.

        In each attachment it is sent once only. After an error the session ends, even if the worker still answers: what
        is left in the broken connection could otherwise arrive after the worker was told to forget this request.
        """
        while True:
            while not self.session:
                await self.changed.wait()
            session = self.session
            received, self.received = self.received, []
            try:
                request = Request(session=session, payload=payload, received=received)
                answer = await self.channel.call(REQUEST, request, math.inf)
                reply = None if answer.stale else decode_payload(answer.payload)
            except PeerUnreachableError as error:
                logger.info("a request to %s is sent again: %s", self.worker, error)
                reply = None
            except AveragingError as error:
                reply = Payload("", "", request_id, error=str(error))
            if reply is not None:
                self.received.append(request_id)
                return reply
            if self.session == session:
                self.session = ""

    def _lose(self, reason: str) -> None:
        self.lost = WorkerError(self.worker, f"{self.worker} at {self.endpoint} is lost: {reason}", lost=True)
        self.was_lost = True
        logger.warning("%s", self.lost)
        self._on_lost(self.worker)
        for sent in self.outstanding.values():
            sent.outcome.set_result(self.lost)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class RequestClient:
    """The requests of one master; an async context manager that belongs to one event loop.

    Args:
        plan: The plan.
        credentials: Certificates and tokens, see `averaging.rpc.read_credentials`. Without them, workers on loopback
            get the token of this user's processes.
        stall_timeout: Seconds of silence after which a worker is lost.
        connect: Function that opens channels; for tests.
        on_lost: Function that gets the name of each worker that is lost.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        credentials: Credentials | None = None,
        stall_timeout: float = 30.0,
        connect: Connect | None = None,
        on_lost: Callable[[str], None] = lambda worker: None,
    ) -> None:
        if not stall_timeout > 0:
            raise ConfigError("stall_timeout must be above 0 s")
        self.plan = plan
        self.name = uuid.uuid4().hex
        self._ids = itertools.count(1)
        self._sent: dict[str, _Sent] = {}  # by id, in the order of sending
        self._arrival = asyncio.Event()  # set, and replaced, when an outcome is there
        self._tasks: set[asyncio.Task[None]] = set()
        connect = connect or connector(credentials)
        self.links = {
            worker: WorkerLink(
                Attach(master=self.name, worker=worker, placement=pack(plan.placement_of(worker))),
                endpoint,
                connect,
                stall_timeout,
                self._sent,
                on_lost,
            )
            for worker, endpoint in plan.workers.items()
        }

    async def __aenter__(self) -> Self:
        for link in self.links.values():
            self._start(link.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()  # perhaps again, since a call that fails at the same time may hide it
            await asyncio.wait(self._tasks, timeout=RETRY_SECONDS)

    def __len__(self) -> int:
        """Requests whose outcome was not taken."""
        return len(self._sent)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def attach(self, timeout: float) -> None:
        """Waits until all workers are attached.

        Raises:
            WorkerError: A worker refuses this master, or cannot be reached in time.
        """
        try:
            async with asyncio.timeout(timeout):
                for link in self.links.values():
                    while link.inventory is None and link.refusal is None:
                        await link.changed.wait()
                    if link.refusal is not None:
                        raise link.refusal
        except TimeoutError:
            missing = {worker: link for worker, link in self.links.items() if link.inventory is None}
            reasons = ", ".join(f"{worker} ({link.reason or link.endpoint})" for worker, link in missing.items())
            raise WorkerError(
                next(iter(missing)),
                f"{reasons} cannot be reached within {timeout:g} s; start it, or correct the plan",
                lost=True,
            ) from None

    def new_id(self) -> str:
        """A new id of a request; unique over all masters."""
        return f"{self.name[-12:]}-{next(self._ids)}"  # other masters may see the first characters

    def post(self, payload: Payload) -> str:
        """Sends one request and returns its id. Its outcome is an error if it cannot be sent or the worker is lost.

        Raises:
            ConfigError: The plan has no such handler.
        """
        worker = self.plan.worker_of(payload.handler)
        link = self.links[worker]
        blocks, waiting = payload.handle_name in BLOCKING, []
        if blocks or payload.handle_name == Handle.FLUSH:
            waiting = [name for name, sent in link.outstanding.items() if sent.waits]
        if not blocks and waiting:
            # It may overtake them on the way, so the worker must know for which it waits.
            payload.data = Ids(waiting)
            for name in waiting:
                self._sent[name].waits = False
        sent = self._sent[payload.request_id] = _Sent(worker, blocks, asyncio.get_running_loop().create_future())
        try:
            if link.lost is not None:
                raise link.lost
            if len(waiting) >= MAX_BLOCKING and blocks:
                raise ConfigError(f"{MAX_BLOCKING} requests wait for a flush there; send one")
            sending = self._start(self._deliver(link, sent, payload, encode_payload(payload)))
            sent.outcome.add_done_callback(lambda _: sending.cancel())
        except ConfigError as error:
            sent.outcome.set_result(_failure(worker, payload, str(error)))
        except WorkerError as error:
            sent.outcome.set_result(error)
        sent.outcome.add_done_callback(self._notify)
        return payload.request_id

    async def _deliver(self, link: WorkerLink, sent: _Sent, payload: Payload, message: bytes) -> None:
        reply = await link.deliver(payload.request_id, message)
        if not sent.outcome.done():  # the worker may have been lost, or the request forgotten, at the same moment
            sent.outcome.set_result(_failure(link.worker, payload, reply.error) if reply.error else reply)

    def request(self, handlers: Sequence[str], handle_name: str, datas: Sequence[Any] | None = None) -> list[str]:
        """Sends a request to each handler and returns their ids.

        Args:
            handlers: Names of workers or shards.
            handle_name: A `Handle`.
            datas: The data for each handler.

        Raises:
            ConfigError: The plan has no such handler, or the numbers of handlers and datas differ.
        """
        if datas is None:
            datas = [None] * len(handlers)
        if len(datas) != len(handlers):
            raise ConfigError(f"{len(handlers)} handlers got data for {len(datas)}; give each its own")
        pairs = zip(handlers, datas, strict=True)
        return [self.post(Payload(handler, handle_name, self.new_id(), data)) for handler, data in pairs]

    async def call(
        self,
        handlers: Sequence[str],
        handle_name: str,
        datas: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Sends a request to each handler and returns the data of their replies. Blocking requests need a flush."""
        ids = self.request(handlers, handle_name, datas)
        return [reply.data for reply in await self.gather(ids, timeout)]

    async def gather(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        """Waits for the replies to these requests. For errors see `MasterWorker.gather`."""
        for request_id in ids:
            if request_id not in self._sent:
                raise ConfigError(f"there is no request {request_id!r}, or its reply was taken already")
        waiting = [self._sent[request_id] for request_id in ids]
        try:
            async with asyncio.timeout(timeout):
                for sent in waiting:
                    await asyncio.shield(sent.outcome)
        except TimeoutError:
            missing = [sent.worker for sent in waiting if not sent.outcome.done()]
            workers = ", ".join(sorted(set(missing)))
            raise TimeoutError(f"{len(missing)} of {len(ids)} replies are missing: of {workers}") from None
        for request_id in ids:
            self._sent.pop(request_id, None)
        return [_reply(sent.outcome.result()) for sent in waiting]

    def poll(self, ids: Collection[str] | None = None) -> Payload | None:
        """Takes a reply to one of these requests, or of all, that has arrived; None if there is none.

        Raises:
            WorkerError: The request has failed.
        """
        arrived = (name for name, sent in self._sent.items() if sent.outcome.done() and (ids is None or name in ids))
        request_id = next(arrived, None)
        return None if request_id is None else _reply(self._sent.pop(request_id).outcome.result())

    async def poll_async(self, ids: Collection[str] | None = None) -> Payload:
        """Waits for the next reply to one of these requests, or of all. For errors see `poll`."""
        while (reply := self.poll(ids)) is None:
            await self._arrival.wait()
        return reply

    def poll_batch(self, ids: Collection[str] | None = None) -> list[Payload]:
        """Takes all replies to these requests, or of all, that have arrived.

        Raises:
            WorkerError: A request has failed. The replies before it are dropped.
        """
        return list(iter(lambda: self.poll(ids), None))

    def forget(self, ids: Iterable[str]) -> None:
        """Drops the replies to these requests, also if they arrive later."""
        for request_id in ids:
            if (sent := self._sent.pop(request_id, None)) is not None:
                self.links[sent.worker].received.append(request_id)
                sent.outcome.cancel()

    def _notify(self, _: object) -> None:
        self._arrival.set()
        self._arrival = asyncio.Event()


def _failure(worker: str, payload: Payload, reason: str) -> WorkerError:
    text = f"{payload.handle_name} of {payload.handler} has failed at {worker}: {reason}"
    return WorkerError(worker, text, payload.handle_name)


def _reply(outcome: Payload | WorkerError) -> Payload:
    if isinstance(outcome, WorkerError):
        raise outcome
    return outcome
