"""A master's side of its workers: attaches to them, sends requests by name, and collects the replies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    RefusalCause,
    TransportError,
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

Datas: TypeAlias = Sequence[Any] | None

logger = logging.getLogger("averaging.rl.workers")

RETRY_SECONDS = 0.5
"""Seconds between two attempts to attach to a worker that does not answer."""

MAX_BLOCKING = 100
"""Maximum requests that wait at one worker for a flush or an ack, which needs one of the connection's 128 calls."""


@dataclass(eq=False)
class _Sent:
    """A request, until its outcome is taken: a reply or a WorkerError."""

    worker: str
    waits: bool  # whether it is blocking, and no flush was sent after it
    ack: str  # the id of the ack that it needs, until that is sent
    outcome: asyncio.Future[Payload]


class WorkerLink:
    """Keeps a master attached to one worker.

    The worker is lost if nothing listens at its endpoint any more, if it is silent for `stall_timeout`, or if it has
    restarted. The link goes on trying, so that a worker can come back.
    """

    def __init__(self, worker: str, client: RequestClient) -> None:
        self.worker, self._client = worker, client
        self.endpoint = client.plan.workers[worker]
        self.inventory: Inventory | None = None  # of the worker when it attached; None while it is not attached
        self.session = ""  # name of this attachment; empty without, and once a request could not be sent in it
        self.lost: WorkerError | None = None  # why it is lost; None while it is attached, and before it has been
        self.was_lost = False  # until the step runner has taken it back
        self.refusal: WorkerError | None = None  # of the last attempt, if further ones would fail as well
        self.reason = ""  # why the last attempt has failed
        self.changed = asyncio.Event()  # set, and replaced, when one of these has changed
        self.received: list[str] = []  # ids that the worker may forget, which the next request tells it
        self._incarnation = ""
        self._channel = client.connect(self.endpoint)

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
                if final or loop.time() - broken > self._client.stall_timeout:
                    self._lose(reason)
                self._notify()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            await self._channel.close()

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
            if isinstance(error, TransportError) and error.definite:
                self.refusal = WorkerError(self.worker, f"{self.worker} cannot be reached: {reason}", lost=True)
            return reason, not isinstance(error, PeerUnreachableError) or error.refused

    async def _stay_attached(self) -> str:
        client = self._client
        placement = pack(client.plan.placement_of(self.worker))
        request = Attach(master=client.name, worker=self.worker, placement=placement)
        request.outstanding.extend(client.outstanding(self.worker))
        self.received.clear()  # the worker forgets all but `outstanding`
        messages = self._channel.stream(ATTACH, request)
        deadline, session = Deadline(client.stall_timeout, "stall_timeout"), ""
        # Seconds in which this process was stopped do not count: the worker was not silent, it was not heard.
        async with aclosing(messages), FairTimeout(deadline, client.stall_timeout) as limit:
            async for message in messages:
                limit.restart(deadline)
                if message.refused:
                    raise WorkerError(self.worker, f"{self.worker} refuses this master: {message.refused}")
                if not session:
                    session = message.session
                    self._begin(message)
                elif self.session != session:
                    return "a request could not be sent"
        return "the worker has ended it"

    def _begin(self, attached: Attached) -> None:
        if self._incarnation != attached.incarnation:
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
                answer = await self._channel.call(REQUEST, request, math.inf)
                if not answer.stale:
                    self.received.append(request_id)
                    return decode_payload(answer.payload)
            except PeerUnreachableError as error:
                logger.info("a request to %s is sent again: %s", self.worker, error)
            except AveragingError:
                self.received.append(request_id)  # the worker may have carried it out
                raise
            if self.session == session:
                self.session = ""

    def _lose(self, reason: str) -> None:
        if not self._incarnation or self.lost is not None:  # it was never attached, or is lost already
            return
        self.lost = WorkerError(self.worker, f"{self.worker} at {self.endpoint} is lost: {reason}", lost=True)
        self.was_lost = True
        logger.warning("%s", self.lost)
        self._client.lose(self.lost)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class RequestClient:
    """The requests of one master; an async context manager that belongs to one event loop.

    For the arguments and most methods see `MasterWorker`. `on_lost` gets the name of each worker that is lost.
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
        self.plan, self.stall_timeout, self.connect = plan, stall_timeout, connect or connector(credentials)
        self.name = uuid.uuid4().hex
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._sent: dict[str, _Sent] = {}  # by id, in the order of sending
        self._arrival = asyncio.Event()  # set, and replaced, when an outcome is there
        self._tasks: set[asyncio.Task[None]] = set()
        self.links = {worker: WorkerLink(worker, self) for worker in plan.workers}

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
        return len(self._sent)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def attach(self, timeout: float) -> None:
        """Waits until all workers are attached. Raises a WorkerError if one refuses, or cannot be reached in time."""
        try:
            async with asyncio.timeout(timeout):
                for link in self.links.values():
                    while link.inventory is None and link.refusal is None:
                        await link.changed.wait()
                    if link.refusal is not None:
                        raise link.refusal
        except TimeoutError:
            missing = [link for link in self.links.values() if link.inventory is None]
            reasons = ", ".join(f"{link.worker} ({link.reason or link.endpoint})" for link in missing)
            text = f"{reasons} cannot be reached within {timeout:g} s; start it, or correct the plan"
            raise WorkerError(missing[0].worker, text, lost=True) from None

    def new_id(self) -> str:
        return f"{self.name[-12:]}-{next(self._ids)}"  # other masters may see the first characters

    def new(self, handler: str, handle_name: str, data: Any) -> Payload:
        return Payload(handler, handle_name, self.new_id(), data=data)

    def outstanding(self, worker: str) -> dict[str, _Sent]:
        own = {name: sent for name, sent in self._sent.items() if sent.worker == worker}
        return {name: sent for name, sent in own.items() if not sent.outcome.done()}

    def lose(self, error: WorkerError) -> None:
        self._on_lost(error.worker)
        for sent in self.outstanding(error.worker).values():
            sent.outcome.set_exception(error)

    def post(self, payload: Payload) -> str:
        """Sends one request and returns its id. Its outcome is an error if it cannot be sent or the worker is lost."""
        worker, blocks = self.plan.worker_of(payload.handler), payload.handle_name in BLOCKING
        payload.send_time = time.time()
        waiting: dict[str, _Sent] = {}
        if blocks or not payload.no_syn or payload.handle_name in (Handle.FLUSH, Handle.ACK):
            waiting = {name: sent for name, sent in self.outstanding(worker).items() if sent.waits or sent.ack}
        if payload.handle_name == Handle.ACK:
            for sent in waiting.values():
                sent.ack = "" if sent.ack == payload.request_id else sent.ack
        if payload.handle_name == Handle.FLUSH:
            flushed = [name for name, sent in waiting.items() if not sent.ack]
            payload.data = Ids(flushed)  # it may overtake them on the way
            for name in flushed:
                waiting.pop(name).waits = False
        outcome: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(self._arrived)
        self._sent[payload.request_id] = _Sent(worker, blocks, "" if payload.no_syn else payload.ack_reply_id, outcome)
        try:
            if (lost := self.links[worker].lost) is not None:
                raise lost
            if (blocks or not payload.no_syn) and len(waiting) >= MAX_BLOCKING:
                raise ConfigError(f"{MAX_BLOCKING} requests wait for a flush or an ack there; send one")
            sending = self._start(self._deliver(worker, payload, encode_payload(payload), outcome))
            outcome.add_done_callback(lambda _: sending.cancel())
        except AveragingError as error:
            outcome.set_exception(_failure(worker, payload, error))
        return payload.request_id

    async def _deliver(self, worker: str, payload: Payload, message: bytes, outcome: asyncio.Future[Payload]) -> None:
        try:
            reply = await self.links[worker].deliver(payload.request_id, message)
            if reply.error:
                raise WorkerError(worker, reply.error)
        except AveragingError as error:
            if not outcome.done():  # the worker may have been lost, or the request forgotten, at the same moment
                outcome.set_exception(_failure(worker, payload, error))
        else:
            if not outcome.done():
                outcome.set_result(reply)

    def _payloads(self, handlers: Sequence[str], handle_name: str, datas: Datas) -> list[Payload]:
        datas = [None] * len(handlers) if datas is None else datas
        if len(datas) != len(handlers):
            raise ConfigError(f"{len(handlers)} handlers got data for {len(datas)}; give each its own")
        for handler in handlers:
            self.plan.worker_of(handler)  # an unknown one is an error before the first request is sent
        return [self.new(handler, handle_name, data) for handler, data in zip(handlers, datas, strict=True)]

    def request(self, handlers: Sequence[str], handle_name: str, datas: Datas = None) -> list[str]:
        return [self.post(payload) for payload in self._payloads(handlers, handle_name, datas)]

    async def request_async(
        self, handlers: Sequence[str], handle_name: str, datas: Datas = None, *, no_syn: bool = True
    ) -> list[str]:
        if no_syn:
            return self.request(handlers, handle_name, datas)
        payloads = self._payloads(handlers, handle_name, datas)
        for payload in payloads:
            payload.no_syn, payload.syn_reply_id, payload.ack_reply_id = False, self.new_id(), self.new_id()
        syns = [Payload(payload.handler, Handle.SYN, payload.syn_reply_id) for payload in payloads]
        acks = [Payload(payload.handler, Handle.ACK, payload.ack_reply_id) for payload in payloads]
        ids = [self.post(payload) for payload in payloads]
        try:
            # A worker would wait in vain for a request that could not be sent.
            await self.gather([request_id for request_id in ids if self._sent[request_id].outcome.done()])
            for calls in syns, acks:
                await self.gather([self.post(call) for call in calls])
        except BaseException:
            self.forget(payload.request_id for payload in (*payloads, *syns, *acks))
            raise
        return ids

    async def call(
        self,
        handlers: Sequence[str],
        handle_name: str,
        datas: Datas = None,
        *,
        no_syn: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        ids = await self.request_async(handlers, handle_name, datas, no_syn=no_syn)
        return [reply.data for reply in await self.gather(ids, timeout)]

    async def gather(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        for request_id in ids:
            if request_id not in self._sent:
                raise ConfigError(f"there is no request {request_id!r}, or its reply was taken already")
        waiting = [self._sent[request_id] for request_id in ids]
        if waiting:
            await asyncio.wait([sent.outcome for sent in waiting], timeout=timeout)
        if missing := [sent.worker for sent in waiting if not sent.outcome.done()]:
            workers = ", ".join(sorted(set(missing)))
            raise TimeoutError(f"{len(missing)} of {len(ids)} replies are missing: of {workers}")
        for request_id in ids:
            self._sent.pop(request_id, None)
        return [sent.outcome.result() for sent in waiting]

    def poll(self, ids: Collection[str] | None = None) -> Payload | None:
        arrived = (name for name, sent in self._sent.items() if sent.outcome.done() and (ids is None or name in ids))
        request_id = next(arrived, None)
        return None if request_id is None else self._sent.pop(request_id).outcome.result()

    async def poll_async(self, ids: Collection[str] | None = None) -> Payload:
        while (reply := self.poll(ids)) is None:
            await self._arrival.wait()
        return reply

    def poll_batch(self, ids: Collection[str] | None = None) -> list[Payload]:
        return list(iter(lambda: self.poll(ids), None))

    def forget(self, ids: Iterable[str]) -> None:
        """Drops the replies to these requests, also if they arrive later."""
        for request_id in ids:
            if (sent := self._sent.pop(request_id, None)) is not None:
                self.links[sent.worker].received.append(request_id)
                sent.outcome.cancel()

    def _arrived(self, outcome: asyncio.Future[Payload]) -> None:
        _ = outcome.cancelled() or outcome.exception()  # nobody may ever ask for it, which asyncio would log
        self._arrival.set()
        self._arrival = asyncio.Event()


def _failure(worker: str, payload: Payload, error: AveragingError) -> WorkerError:
    if isinstance(error, WorkerError) and error.lost:
        return error
    text = f"{payload.handle_name} of {payload.handler} has failed at {worker}: {error}"
    return WorkerError(worker, text, payload.handle_name)
