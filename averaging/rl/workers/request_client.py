"""Sends requests of a master to the workers by name, and collects their replies."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

from averaging.errors import ConfigError, WorkerError
from averaging.rl.workers.payload import (
    NO_REPLY,
    Connect,
    Handle,
    Payload,
    connector,
    decode_payload,
    encode_payload,
    unpack,
)
from averaging.rl.workers.plan import Plan
from averaging.rl.workers.worker_link import LinkOptions, WorkerLink
from averaging.rpc import Credentials, Deadlines
from averaging.wire import workers_pb2


class RequestClient:
    """The requests of one master; an async context manager that belongs to one event loop.

    Args:
        plan: The plan.
        credentials: Certificates and tokens, see `averaging.rpc.read_credentials`. Without them, workers on loopback
            get the token of this user's processes.
        ping_seconds: Interval of the pings to each worker.
        min_stall_timeout: Seconds that a worker may at least take to answer a ping.
        stall_timeout: Seconds that it may at most take. In between, the limit is learned from its earlier answers.
        connect: Function that opens channels; for tests.
        on_lost: Function that gets the name of each worker that is lost.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        credentials: Credentials | None = None,
        ping_seconds: float = 1.0,
        min_stall_timeout: float = 2.0,
        stall_timeout: float = 30.0,
        connect: Connect | None = None,
        on_lost: Callable[[str], None] = lambda worker: None,
    ) -> None:
        if not ping_seconds > 0 or not stall_timeout > 0 or not min_stall_timeout > 0:
            raise ConfigError("ping_seconds, min_stall_timeout and stall_timeout must be above 0 s")
        self.plan = plan
        self.name = uuid.uuid4().hex
        self._lost_worker = on_lost
        self._ids = itertools.count(1)
        self._futures: dict[str, asyncio.Future[Payload | WorkerError]] = {}
        self._workers: dict[str, str] = {}  # of each request without an outcome that was taken
        self._arrived: dict[str, None] = {}  # outcomes that were not taken, in order
        self._arrival = asyncio.Event()
        self._away: set[str] = set()  # lost workers, also those that have come back and were not welcomed
        self._tasks: list[asyncio.Task[None]] = []
        options = LinkOptions(
            self.name,
            connect or connector(credentials),
            Deadlines(min_stall_timeout, stall_timeout),
            ping_seconds,
        )
        self.links = {
            worker: WorkerLink(
                worker, endpoint, plan.placement_of(worker, ping_seconds), options, self._on_reply, self._on_lost
            )
            for worker, endpoint in plan.workers.items()
        }

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(link.run()) for link in self.links.values()]
        return self

    async def __aexit__(self, *error: object) -> None:
        for link in self.links.values():
            link.end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        """Requests whose outcome was not taken."""
        return len(self._futures)

    @property
    def living(self) -> frozenset[str]:
        """The workers that are not lost; those that have come back count when they are welcomed."""
        return frozenset(self.links) - self._away

    @property
    def returned(self) -> list[str]:
        """The workers that were lost, are attached again, and were not welcomed."""
        return [worker for worker in sorted(self._away) if self.links[worker].inventory is not None]

    def welcome(self, worker: str) -> None:
        """Counts a worker that has come back as living, unless it is lost again."""
        if self.links[worker].lost is None:
            self._away.discard(worker)

    async def attach(self, timeout: float) -> None:
        """Waits until all workers are attached.

        Raises:
            WorkerError: A worker refuses this master, or cannot be reached in time.
        """
        try:
            async with asyncio.timeout(timeout):
                for link in self.links.values():
                    while link.inventory is None and link.refused is None and not link.hopeless:
                        await link.changed.wait()
                    if link.refused is not None:
                        raise link.refused
                    if link.hopeless:
                        raise WorkerError(link.worker, f"{link.worker} cannot be reached: {link.reason}", lost=True)
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
        payload.send_time = asyncio.get_running_loop().time()
        if payload.handle_name not in NO_REPLY:
            self._expect(payload.request_id, worker)
        error: WorkerError | None = link.lost
        if error is None:
            try:
                message = encode_payload(payload)
            except ConfigError as reason:
                error = _failure(worker, payload, str(reason))
            else:
                if payload.handle_name not in NO_REPLY:
                    link.outstanding[payload.request_id] = message
                link.unsent.put_nowait(message)
        if error is not None:
            for request_id in (payload.syn_reply_id, payload.request_id):
                self._set(request_id, error)
        return payload.request_id

    async def request(
        self,
        handlers: Sequence[str],
        handle_name: str,
        datas: Sequence[Any] | None = None,
        *,
        no_syn: bool = True,
    ) -> list[str]:
        """Sends a request to each handler and returns their ids.

        Args:
            handlers: Names of workers or shards.
            handle_name: A `Handle`.
            datas: The data for each handler.
            no_syn: Whether each worker carries the request out when it arrives. If not, all workers must first say that
                it has arrived (syn), and are told then to carry it out (ack). If a worker is lost before, nobody does.

        Raises:
            ConfigError: The plan has no such handler, or the numbers of handlers and datas differ.
            WorkerError: Without `no_syn`: a worker is lost.
        """
        if datas is None:
            datas = [None] * len(handlers)
        if len(datas) != len(handlers):
            raise ConfigError(f"{len(handlers)} handlers got data for {len(datas)}; give each its own")
        payloads = [
            Payload(handler, handle_name, self.new_id(), data=data, no_syn=no_syn)
            for handler, data in zip(handlers, datas, strict=True)
        ]
        if no_syn:
            return [self.post(payload) for payload in payloads]
        for payload in payloads:
            payload.syn_reply_id, payload.ack_reply_id = self.new_id(), self.new_id()
            self._expect(payload.syn_reply_id, self.plan.worker_of(payload.handler))
        ids = [self.post(payload) for payload in payloads]
        try:
            await self.gather([payload.syn_reply_id for payload in payloads])
        except BaseException:
            self._acknowledge(payloads, go_on=False)
            self.forget([*ids, *(payload.syn_reply_id for payload in payloads)])
            raise
        self._acknowledge(payloads, go_on=True)
        return ids

    async def call(
        self,
        handlers: Sequence[str],
        handle_name: str,
        datas: Sequence[Any] | None = None,
        *,
        no_syn: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Sends a request to each handler and returns the data of their replies. Blocking requests need a flush."""
        ids = await self.request(handlers, handle_name, datas, no_syn=no_syn)
        return [reply.data for reply in await self.gather(ids, timeout)]

    async def gather(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        """Waits for the replies to these requests.

        Raises:
            WorkerError: A request has failed, or its worker is lost. The replies to the others are
                dropped.
            TimeoutError: A reply is missing after `timeout` seconds. It can still be gathered later.
        """
        try:
            async with asyncio.timeout(timeout):
                for request_id in ids:
                    await asyncio.shield(self._future(request_id))
        except TimeoutError:
            missing = [request_id for request_id in ids if not self._future(request_id).done()]
            workers = ", ".join(sorted({self._workers[request_id] for request_id in missing}))
            raise TimeoutError(f"{len(missing)} of {len(ids)} replies are missing: of {workers}") from None
        outcomes = [self._take(request_id) for request_id in ids]
        for outcome in outcomes:
            if isinstance(outcome, WorkerError):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, Payload)]

    async def next_outcome(self, ids: Collection[str] | None = None) -> tuple[str, Payload | WorkerError]:
        """Waits for the next reply, or error, to one of these requests; to any of all if None."""
        while True:
            if (arrived := self._first(ids)) is not None:
                return arrived, self._take(arrived)
            await self._arrival.wait()

    def poll(self, ids: Collection[str] | None = None) -> Payload | None:
        """Takes the first reply to one of these requests, or of all, that has arrived; None if there is none.

        Raises:
            WorkerError: The request has failed.
        """
        arrived = self._first(ids)
        return None if arrived is None else _reply(self._take(arrived))

    async def poll_async(self, ids: Collection[str] | None = None) -> Payload:
        """Waits for the next reply to one of these requests, or of all.

        Raises:
            WorkerError: The request has failed.
        """
        _, outcome = await self.next_outcome(ids)
        return _reply(outcome)

    def poll_batch(self, ids: Collection[str] | None = None) -> list[Payload]:
        """Takes all replies to these requests, or of all, that have arrived.

        Raises:
            WorkerError: A request has failed. The replies before it are dropped.
        """
        wanted = None if ids is None else frozenset(ids)
        arrived = [request_id for request_id in self._arrived if wanted is None or request_id in wanted]
        return [_reply(self._take(request_id)) for request_id in arrived]

    def forget(self, ids: Iterable[str]) -> None:
        """Drops the replies to these requests, also if they arrive later."""
        for request_id in ids:
            worker = self._workers.get(request_id)
            if worker is not None:
                self.links[worker].forget(request_id)
                self._drop(request_id)

    def _acknowledge(self, payloads: Sequence[Payload], *, go_on: bool) -> None:
        for payload in payloads:
            self.post(Payload(payload.handler, Handle.ACK, payload.ack_reply_id, data=go_on))

    def _expect(self, request_id: str, worker: str) -> None:
        self._futures[request_id] = asyncio.get_running_loop().create_future()
        self._workers[request_id] = worker

    def _future(self, request_id: str) -> asyncio.Future[Payload | WorkerError]:
        try:
            return self._futures[request_id]
        except KeyError:
            raise ConfigError(f"there is no request {request_id!r}, or its reply was taken already") from None

    def _first(self, ids: Collection[str] | None) -> str | None:
        return next((request_id for request_id in self._arrived if ids is None or request_id in ids), None)

    def _take(self, request_id: str) -> Payload | WorkerError:
        outcome = self._future(request_id).result()
        self._drop(request_id)
        return outcome

    def _drop(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)
        self._futures.pop(request_id, None)
        self._workers.pop(request_id, None)

    def _on_reply(self, message: workers_pb2.Payload) -> None:
        worker = self._workers.get(message.request_id)
        if worker is None:
            return
        reply = decode_payload(message)
        reply.data = unpack(message.data, object) if message.data else None
        self._set(reply.request_id, _failure(worker, reply, reply.error) if reply.error else reply)

    def _on_lost(self, error: WorkerError) -> None:
        self._away.add(error.worker)
        self._lost_worker(error.worker)
        for request_id in [request_id for request_id, worker in self._workers.items() if worker == error.worker]:
            self._set(request_id, error)

    def _set(self, request_id: str, outcome: Payload | WorkerError) -> None:
        future = self._futures.get(request_id)
        if future is not None and not future.done():
            future.set_result(outcome)
            self._arrived[request_id] = None
            self._arrival.set()
            self._arrival = asyncio.Event()


def _failure(worker: str, payload: Payload, reason: str) -> WorkerError:
    text = f"{payload.handle_name} of {payload.handler} has failed at {worker}: {reason}"
    return WorkerError(payload.unreachable or worker, text, payload.handle_name, lost=bool(payload.unreachable))


def _reply(outcome: Payload | WorkerError) -> Payload:
    if isinstance(outcome, WorkerError):
        raise outcome
    return outcome
