"""Requests of a master: what they and their replies say, how they travel, and the master's side of each worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Protocol, Self, TypeAlias, TypeVar

import msgspec

from averaging.common import is_loopback, parse_address
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ConfigError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
    TransportError,
    WorkerError,
)
from averaging.rl.workers.plan import Plan
from averaging.rpc import Credentials, Deadline, FairTimeout, RpcChannel, RpcMethod
from averaging.security import local_credentials
from averaging.wire.workers_pb2 import Attach, Attached, FetchDataRequest, NamedTensor, Reply, Request

T = TypeVar("T")
Datas: TypeAlias = Sequence[Any] | None
Samples: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=1 << 20)]  # their ids
Names: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=256)]  # of tensors

logger = logging.getLogger("averaging.rl.workers")

MAX_HOOKS = 64  # before or after one request
MESSAGE_BYTES = 16 << 20  # of a message: a plan for tens of thousands of samples
PAYLOAD_BYTES = MESSAGE_BYTES - (2 << 20)  # of a request or reply; the rest is for ids of replies that have arrived
RETRY_SECONDS = 0.5  # between two attempts to attach to a worker that does not answer
MAX_BLOCKING = 100  # requests that wait at one worker for a flush, which needs one of the connection's 128 calls
SERVICE = "workers"  # name of the token of workers and masters without credentials, see `local_credentials`


class Handle(StrEnum):
    """The kinds of requests, with the data of their replies."""

    FETCH = "fetch"  # Fetched: samples of the worker's part of the dataset, which it has loaded
    SPEC = "spec"  # DatasetSpec
    MODEL_CONFIG = "model_config"  # the mapping that the backend returns
    CLEAR_DATA_CACHE = "clear_data_cache"  # None, when samples are forgotten
    FLUSH = "flush"  # the number of blocking requests that were sent before it, and run now
    INITIALIZE = "initialize"  # version of the model
    GENERATE = "generate"  # Computed, as for the next ones
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EMPTY = "empty"  # runs hooks only: the side of a `param_realloc` that makes no call itself
    SYN = "syn"  # None: the worker has received a request, which is the data, and waits until it is sent


# Requests that wait for a flush. The others run at once.
BLOCKING = frozenset({Handle.INITIALIZE, Handle.GENERATE, Handle.INFERENCE, Handle.TRAIN_STEP, Handle.EMPTY})


class Payload(msgspec.Struct):
    """One request or reply. The hooks before and after a request run in order."""

    handler: str  # name of a worker, or of a model's shard such as `actor@dp0-tp0-pp0`
    handle_name: str  # a `Handle`
    request_id: str  # a reply has that of its request
    syn_reply_id: str = ""  # without `no_syn`: of the request `syn` with which it was announced
    ack_reply_id: str = ""  # without `no_syn`: its own, for the ack is that it is sent
    no_syn: bool = True
    send_time: float = 0.0  # seconds since the epoch, of the clock of the master
    data: Any = None  # a class below, or what msgpack can encode; what was received is plain until `convert`
    pre_hooks: list[str] = []  # names
    pre_hook_data: list[Any] = []
    post_hooks: list[str] = []
    post_hook_data: list[Any] = []
    error: str = ""  # why the request has failed, in a reply

    def reply(self, data: Any = None, error: str = "") -> Payload:
        return Payload(self.handler, self.handle_name, self.request_id, data=data, error=error)


class Count(msgspec.Struct, frozen=True):
    count: int  # data of `fetch`: the maximum number of samples


class Fetched(msgspec.Struct, frozen=True):
    """Samples that were loaded, without those that the worker already held."""

    ids: Samples
    seqlens: list[int]  # first dimension of the first tensor of each sample
    keys: Names
    dp_rank: int  # of the worker, among those that hold a part of the dataset


class DatasetSpec(msgspec.Struct, frozen=True):
    """What a worker holds of the dataset."""

    n_datasets: int  # 1, or 0 if the worker has no part
    dataset_size: int  # samples in its part


class Inventory(msgspec.Struct, frozen=True):
    """What a worker holds when a master attaches."""

    versions: dict[str, int]  # train steps of each model that is initialized
    samples: dict[str, list[str]]  # names of the tensors of each sample
    lengths: dict[str, int]  # of each sample


class Ids(msgspec.Struct, frozen=True):
    ids: Samples  # data of `clear_data_cache`; in data of `flush` the blocking requests that were sent before it


class Compute(msgspec.Struct, frozen=True):
    """Data of a call: what it computes."""

    call: str
    model: str
    mesh: int = 1  # number of workers of the model
    step: int = 0  # from 1
    ids: Samples = []  # of this data-parallel rank
    inputs: Names = []  # tensors that the call gets
    outputs: Names = []  # tensors that it must return


class Computed(msgspec.Struct, frozen=True):
    keys: Names  # of the tensors that this worker stores for the samples; empty unless it is a DP head
    stats: dict[str, float]  # of the call and of its hooks, the latter as `evaluate/loss`


class Step(msgspec.Struct, frozen=True):
    """One step of a plan that moves tensors of samples between workers; a hook `data_transfer` has a list of them."""

    comm_type: str  # bcast: the same samples for all dsts; scatter: for each its own; gather: from each of srcs
    root: str  # the only sender, or the only receiver of a gather
    srcs: list[str]
    dsts: list[str]
    ids: list[Samples]  # of each of dsts in a scatter, of each of srcs in a gather; one list for all in a bcast
    keys: Names

    def sources_of(self, worker: str) -> list[tuple[str, Samples]]:
        """The samples that a worker receives, by their senders."""
        if worker not in self.dsts:
            return []
        if self.comm_type == "gather":
            return list(zip(self.srcs, self.ids, strict=True))
        return [(self.root, self.ids[0 if self.comm_type == "bcast" else self.dsts.index(worker)])]


class Realloc(msgspec.Struct, frozen=True):
    """Data of a hook `param_realloc`: target = eta · source + (1 - eta) · target.

    The source stores a copy of its parameters like the tensors of a sample, and the target fetches it from there. If
    the source waited for its targets instead, two workers that are source and target of each other would never end.
    """

    transfer: str  # the name of that sample, until the master clears it
    source: str  # model that publishes its parameters
    target: str  # model that takes them
    eta: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    origin: str = ""  # worker from which the target takes them; empty in the request to the source


pack = msgspec.msgpack.encode


def unpack(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolationError(f"a message with data that is no {kind.__name__}: {error}") from None


def convert(data: object, kind: type[T]) -> T:
    """Makes the data of a payload a class of this module, or raises a ProtocolViolationError."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ProtocolViolationError(f"a message with data that is no {kind.__name__}: {error}") from None


def encode_payload(payload: Payload) -> bytes:
    """The bytes of a request or reply. Raises a ConfigError if it cannot be sent, because of its data or its size."""
    try:
        raw = pack(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"it cannot be sent: {error}") from None
    if len(raw) > PAYLOAD_BYTES:
        raise ConfigError(f"it has {len(raw)} bytes, and {PAYLOAD_BYTES} can be sent; give less at once")
    return raw


def decode_payload(raw: bytes) -> Payload:
    """What `encode_payload` encoded. Raises a ProtocolViolationError if it is malformed."""
    payload = unpack(raw, Payload)
    for hooks, data in (payload.pre_hooks, payload.pre_hook_data), (payload.post_hooks, payload.post_hook_data):
        if len(hooks) != len(data) or len(hooks) > MAX_HOOKS:
            raise ProtocolViolationError(f"a request with {len(hooks)} hooks and data for {len(data)}")
    return payload


_PATH = "/averaging.workers.v1.Workers/"
_LARGE: dict[str, Any] = {"max_request_bytes": MESSAGE_BYTES}
ATTACH = RpcMethod(_PATH + "attach", Attach, Attached, replies_stream=True, **_LARGE)
REQUEST = RpcMethod(_PATH + "request", Request, Reply, **_LARGE)
FETCH_DATA = RpcMethod(_PATH + "fetch_data", FetchDataRequest, NamedTensor, replies_stream=True, **_LARGE)


class Channel(Protocol):
    async def call(self, method: RpcMethod[Any, Any], request: Any, timeout: float) -> Any: ...

    def stream(self, method: RpcMethod[Any, Any], request: Any) -> AsyncGenerator[Any, None]: ...

    async def close(self) -> None: ...


Connect: TypeAlias = Callable[[str], Channel]  # of an endpoint


def connector(credentials: Credentials | None, *, named_by_master: bool = False) -> Connect:
    """Returns what opens channels to workers; without credentials those on loopback get this user's token."""

    def connect(endpoint: str) -> Channel:
        own = credentials
        if own is None and is_loopback(parse_address(endpoint)[0]):
            own = local_credentials(SERVICE)
        # An address that a master has named is not dialled if no worker can be there.
        return RpcChannel(endpoint, credentials=own, named_by_peer=named_by_master, loopback=True)

    return connect


@dataclass(eq=False)
class _Sent:
    """A request, until its outcome is taken: a reply or a WorkerError."""

    worker: str
    waits: bool  # whether it is blocking, and no flush was sent after it
    outcome: asyncio.Future[Payload]


class WorkerLink:
    """Keeps a master attached to one worker, and goes on trying if that is lost, so that it can come back."""

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
                self.refusal, is_lost = None, False
                try:
                    reason = await self._stay_attached()
                except WorkerError as error:
                    reason, is_lost, self.refusal = str(error), True, error
                except (AveragingError, TimeoutError) as error:
                    reason = str(error)
                    is_lost = not isinstance(error, PeerUnreachableError) or error.refused
                    if isinstance(error, CallRefusedError) and error.cause is RefusalCause.UNAUTHENTICATED:
                        reason += "; give the master the credentials of its workers"
                    if isinstance(error, TransportError) and error.definite:
                        self.refusal = WorkerError(self.worker, f"{self.worker} cannot be reached: {reason}", lost=True)
                if self.inventory is not None:
                    broken = loop.time()
                    logger.info("the call to %s has ended: %s", self.worker, reason)
                self.reason, self.inventory, self.session = reason, None, ""
                if is_lost or loop.time() - broken > self._client.stall_timeout:
                    self._lose(reason)
                self._notify()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            await self._channel.close()

    async def _stay_attached(self) -> str:
        """Attaches until the call ends, and returns why it has ended."""
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
    """The requests of one master; see `MasterWorker`. `on_lost` gets the name of each worker that is lost."""

    def __init__(
        self, plan: Plan, connect: Connect, on_lost: Callable[[str], None], stall_timeout: float = 30.0
    ) -> None:
        if not stall_timeout > 0:
            raise ConfigError("stall_timeout must be above 0 s")
        self.plan, self.connect, self.stall_timeout = plan, connect, stall_timeout
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
        if blocks or payload.handle_name == Handle.FLUSH:
            waiting = {name: sent for name, sent in self.outstanding(worker).items() if sent.waits}
        if payload.handle_name == Handle.FLUSH:
            payload.data = Ids(list(waiting))  # it may overtake them on the way
            for sent in waiting.values():
                sent.waits = False
        outcome: asyncio.Future[Payload] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(self._arrived)
        self._sent[payload.request_id] = _Sent(worker, blocks, outcome)
        try:
            if (lost := self.links[worker].lost) is not None:
                raise lost
            if blocks and len(waiting) >= MAX_BLOCKING:
                raise ConfigError(f"{MAX_BLOCKING} requests wait for a flush there; send one")
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
        payloads = self._payloads(handlers, handle_name, datas)
        if not no_syn:
            for payload in payloads:
                payload.no_syn, payload.syn_reply_id, payload.ack_reply_id = False, self.new_id(), payload.request_id
            syns = [self.post(Payload(each.handler, Handle.SYN, each.syn_reply_id, data=each)) for each in payloads]
            try:
                await self.gather(syns)
            finally:
                self.forget(syns)
        return [self.post(payload) for payload in payloads]

    async def call(
        self, handlers: Sequence[str], handle_name: str, datas: Datas = None, *, no_syn: bool = True
    ) -> list[Any]:
        ids = await self.request_async(handlers, handle_name, datas, no_syn=no_syn)
        return [reply.data for reply in await self.gather(ids)]

    async def gather(self, ids: Sequence[str], timeout: float | None = None) -> list[Payload]:
        for request_id in ids:
            if request_id not in self._sent:
                raise ConfigError(f"there is no request {request_id!r}, or its reply was taken already")
        waiting = [self._sent[request_id] for request_id in ids]
        if waiting:
            outcomes = [sent.outcome for sent in waiting]
            await asyncio.wait(outcomes, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        done = [sent.outcome for sent in waiting if sent.outcome.done()]
        failure = next((error for outcome in done if (error := outcome.exception()) is not None), None)
        if failure is None and len(done) < len(waiting):
            workers = ", ".join(sorted({sent.worker for sent in waiting if not sent.outcome.done()}))
            raise TimeoutError(f"{len(waiting) - len(done)} of {len(ids)} replies are missing: of {workers}")
        self.forget(ids)
        if failure is not None:
            raise failure
        return [outcome.result() for outcome in done]

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
