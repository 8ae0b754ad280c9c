"""An in-memory network for tests and simulations, with delays, losses, killed and frozen peers, and partitions.

It implements the interface of `transport.base`: messages arrive in order, a broken call raises on both sides, and a
call that its caller closes is closed at the callee. Messages are passed as objects, not encoded.

Each peer is served in its own event loop, so peers may live in several threads. In one event loop all is deterministic.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from averaging.common import CLIENT_PREFIX, call_in, client_name
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ListenError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
)
from averaging.protocol import (
    AveragingData,
    Digest,
    DownloadData,
    ExchangeReply,
    JoinRequest,
    MessageFromLeader,
    Record,
    Refusal,
    Resume,
    Rumour,
)
from averaging.tensors import Schema
from averaging.transport import AveragingService, GossipService

logger = logging.getLogger(__name__)

T = TypeVar("T")

WINDOW = 4  # messages in flight in one direction of a call before its sender waits


class MemoryNetwork:
    """The network of all peers of a simulation.

    Args:
        rng: source of every delay and loss.
        latency: minimum and maximum delay of a message, in seconds.
        loss: probability that a message breaks its call instead of arriving.

    Attributes:
        calls: number of calls by method.
        errors: exceptions of services that their interface does not allow. Tests expect none.
    """

    def __init__(
        self, rng: random.Random, *, latency: tuple[float, float] = (0.0005, 0.005), loss: float = 0.0
    ) -> None:
        self.rng = rng
        self.latency = latency
        self.loss = loss
        self.calls: Counter[str] = Counter()
        self.errors: list[Exception] = []
        self._serving: dict[str, MemoryTransport] = {}
        self._open: dict[_MemoryCall, None] = {}  # in order, so that a run can be repeated
        self._frozen: dict[str, _Freeze] = {}
        self._parts: list[frozenset[str]] = []
        self._refused: set[tuple[str, str]] = set()  # caller and callee

    def transport(self, endpoint: str | None) -> MemoryTransport:
        return MemoryTransport(self, endpoint)

    def kill(self, endpoint: str) -> None:
        """Breaks every call from and to `endpoint` and serves no further one, as if its process died."""
        self._serving.pop(endpoint, None)
        self._break_calls(lambda call: endpoint in (call.caller, call.callee), f"{endpoint} died")

    def freeze(self, endpoint: str) -> None:
        self._frozen.setdefault(endpoint, _Freeze())

    def thaw(self, endpoint: str) -> None:
        """Ends a freeze; delayed messages arrive."""
        if freeze := self._frozen.pop(endpoint, None):
            freeze.end()

    def cut(self, *parts: frozenset[str]) -> None:
        """Partitions the network into these sets of endpoints until `heal`."""
        self._parts = list(parts)
        self._break_calls(lambda call: not self._connected(call.caller, call.callee), "the network is cut")

    def refuse(self, caller: str, callee: str) -> None:
        """Refuses all calls from `caller` to `callee`, as a firewall does. Calls in the other direction arrive."""
        self._refused.add((caller, callee))
        self._break_calls(lambda call: (call.caller, call.callee) == (caller, callee), "connection reset")

    def heal(self) -> None:
        """Ends all cuts and refusals."""
        self._parts = []
        self._refused.clear()

    def _connected(self, caller: str, callee: str) -> bool:
        if (caller, callee) in self._refused:
            return False
        sides = [part for part in self._parts if caller in part or callee in part]
        return all(caller in part and callee in part for part in sides)

    def _break_calls(self, concerned: Callable[[_MemoryCall], bool], reason: str) -> None:
        for call in tuple(self._open):  # a peer in another thread may call or end a call
            if concerned(call):
                call.break_off(reason)

    def _delay(self) -> float:
        return self.rng.uniform(*self.latency)

    async def _not_frozen(self, *endpoints: str) -> None:
        while freeze := next(filter(None, map(self._frozen.get, endpoints)), None):
            await freeze.wait()


class _Freeze:
    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self._over = False

    async def wait(self) -> None:
        event = asyncio.Event()
        self._waiting[event] = asyncio.get_running_loop()
        if not self._over:  # looked at after the event is there, so that its end is not missed
            await event.wait()
        self._waiting.pop(event, None)

    def end(self) -> None:
        self._over = True
        for event, loop in tuple(self._waiting.items()):
            call_in(loop, event.set)


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    """A message, the end of the stream, or its error, and its time of arrival."""

    due: float
    message: T | None = None
    error: Exception | None = None


def _copied(message: T) -> T:
    """The message as a network carries it: the sender may change its tensors afterwards, as after a failed round."""
    if not isinstance(message, AveragingData | DownloadData) or message.tensor_part is None:
        return message
    return cast(T, message.with_tensor(message.tensor_part.with_buffer(bytes(message.tensor_part.buffer))))


class _Pipe(Generic[T]):
    """One direction of a call, from one event loop to another or the same.

    Args:
        call: the call.
        writer: event loop of the messages' sender.
        reader: event loop of their receiver.
    """

    def __init__(self, call: _MemoryCall, writer: asyncio.AbstractEventLoop, reader: asyncio.AbstractEventLoop) -> None:
        self._call, self._writer, self._reader = call, writer, reader
        self._queue: asyncio.Queue[_Item[T]] = asyncio.Queue()
        self._window = asyncio.Semaphore(WINDOW)
        self._due = 0.0

    async def put(self, message: T) -> None:
        await self._window.acquire()
        network = self._call.network
        if network.loss and network.rng.random() < network.loss:
            self._call.break_off("connection lost")
        self._deliver(_copied(message), None)

    def end(self, error: Exception | None = None) -> None:
        call_in(self._writer, self._deliver, None, error)  # after what the sender has sent

    def _deliver(self, message: T | None, error: Exception | None) -> None:
        self._due = max(self._due, self._writer.time() + self._call.network._delay())
        call_in(self._reader, self._queue.put_nowait, _Item(self._due, message, error))

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        while True:
            item = await self._queue.get()
            await asyncio.sleep(max(0.0, item.due - asyncio.get_running_loop().time()))
            await self._call.network._not_frozen(self._call.caller, self._call.callee)
            if self._call.broken and item.error is None:
                continue  # the error follows in the queue
            call_in(self._writer, self._window.release)
            if item.error is not None:
                raise item.error
            if item.message is None:
                return
            yield item.message


class _MemoryCall:
    """A call in progress between two endpoints, from the running event loop to `serving`."""

    def __init__(self, network: MemoryNetwork, caller: str, callee: str, serving: asyncio.AbstractEventLoop) -> None:
        self.network, self.caller, self.callee = network, caller, callee
        calling = asyncio.get_running_loop()
        self.up: _Pipe[Any] = _Pipe(self, calling, serving)
        self.down: _Pipe[Any] = _Pipe(self, serving, calling)
        self.broken = False
        self.over = asyncio.Event()  # set and awaited in `serving`
        self._serving = serving
        self._server: asyncio.Task[None] | None = None

    def serve(self, start: Callable[[], asyncio.Task[None]]) -> None:

        def begin() -> None:
            self._server = start()

        call_in(self._serving, begin)

    def stop(self) -> None:
        """Cancels that task."""

        def cancel() -> None:
            self.over.set()
            server, self._server = self._server, None  # which breaks a cycle of the task, its frames and the call
            if server is not None:
                server.cancel()

        call_in(self._serving, cancel)

    def break_off(self, reason: str) -> None:
        """Raises at both ends, as a lost connection does."""
        if self.broken:
            return
        self.broken = True
        self.up.end(PeerUnreachableError(self.caller, reason))
        self.down.end(PeerUnreachableError(self.callee, reason))
        self.stop()


class MemoryTransport:
    """One peer's transport on a `MemoryNetwork`; implements `transport.base.Transport`."""

    def __init__(self, network: MemoryNetwork, endpoint: str | None) -> None:
        self._network = network
        self._listens = endpoint is not None
        self.endpoint = endpoint or client_name(network.rng.randbytes(16))
        self._averaging: AveragingService | None = None
        self._gossip: GossipService | None = None
        self._context: contextvars.Context | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answering: dict[asyncio.Task[None], None] = {}

    async def bind(self) -> str:
        """Returns the endpoint; raises ListenError if another peer serves there."""
        if self.endpoint in self._network._serving:
            raise ListenError(f"{self.endpoint} is taken")
        return self.endpoint

    async def serve(self, averaging: AveragingService, gossip: GossipService | None) -> None:
        """Starts to serve calls, each in its own task, in the context of this call."""
        self._averaging, self._gossip = averaging, gossip
        self._context, self._loop = contextvars.copy_context(), asyncio.get_running_loop()
        if self._listens:
            self._network._serving[self.endpoint] = self

    async def close(self, grace: float = 0.0) -> None:
        """Stops serving, waits for at most `grace` seconds for the calls that it serves, and breaks all others."""
        if self._network._serving.get(self.endpoint) is self:
            del self._network._serving[self.endpoint]
        if grace:
            served = [call for call in tuple(self._network._open) if call.callee == self.endpoint]
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    for call in served:
                        await call.over.wait()
        self._network._break_calls(lambda call: self.endpoint in (call.caller, call.callee), f"{self.endpoint} left")
        for task in (answering := list(self._answering)):
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    def join_group(self, endpoint: str, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        return self._call("join_group", endpoint, lambda peer, _: peer._service.join_group(request))

    def aggregate_part(
        self, endpoint: str, messages: AsyncIterator[AveragingData]
    ) -> AsyncGenerator[AveragingData, None]:
        return self._call("aggregate_part", endpoint, lambda peer, up: peer._service.aggregate_part(up), messages)

    def prepare_lane(self, endpoint: str) -> None:
        """See `transport.base.Transport`."""

    def lane(self, endpoint: str) -> None:
        """See `transport.base.Transport`."""

    def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        host = self.endpoint if self.endpoint.startswith(CLIENT_PREFIX) else self.endpoint.rpartition(":")[0]
        return self._call("download_state", endpoint, lambda peer, _: peer._service.download_state(resume, host))

    async def get_schema(self, endpoint: str) -> Schema:
        async def answer(peer: MemoryTransport) -> AsyncGenerator[Schema, None]:
            yield peer._service.get_schema()

        return await self._unary("get_schema", endpoint, answer)

    def exchange(self, endpoint: str, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        return self._call("exchange", endpoint, lambda peer, _: peer._records.exchange(digest))

    async def push(self, endpoint: str, run_id: str, rumours: tuple[Rumour, ...]) -> tuple[Refusal, ...]:
        async def answer(peer: MemoryTransport) -> AsyncGenerator[tuple[Refusal, ...], None]:
            yield await peer._records.push(run_id, rumours)

        return await self._unary("push", endpoint, answer)

    def subscribe(self, endpoint: str, digest: Digest) -> AsyncGenerator[tuple[Record, ...], None]:
        return self._call("subscribe", endpoint, lambda peer, _: peer._records.subscribe(digest))

    @property
    def _service(self) -> AveragingService:
        if self._averaging is None:
            raise CallRefusedError("", RefusalCause.NOT_SERVED.value, RefusalCause.NOT_SERVED)
        return self._averaging

    @property
    def _records(self) -> GossipService:
        if self._gossip is None:
            raise CallRefusedError("", RefusalCause.NOT_SERVED.value, RefusalCause.NOT_SERVED)
        return self._gossip

    async def _unary(
        self, method: str, endpoint: str, answer: Callable[[MemoryTransport], AsyncGenerator[T, None]]
    ) -> T:
        async with aclosing(self._call(method, endpoint, lambda peer, _: answer(peer))) as replies:
            async for reply in replies:
                return reply
        raise CallRefusedError(endpoint, "answered with nothing")

    async def _call(
        self,
        method: str,
        endpoint: str,
        handler: Callable[[MemoryTransport, AsyncIterator[Any]], AsyncGenerator[T, None]],
        messages: AsyncIterator[Any] | None = None,
    ) -> AsyncGenerator[T, None]:
        """Makes one call: runs the handler at the callee, uploads `messages` as it reads, and yields its replies."""
        network = self._network
        if endpoint.startswith(CLIENT_PREFIX):
            raise ProtocolViolationError("is a client, which is never dialled", endpoint)
        network.calls[method] += 1
        await asyncio.sleep(network._delay())
        await network._not_frozen(self.endpoint, endpoint)
        peer = network._serving.get(endpoint)
        if peer is None or peer._loop is None or not network._connected(self.endpoint, endpoint):
            raise PeerUnreachableError(endpoint, "connection refused", refused=True)
        call = _MemoryCall(network, self.endpoint, endpoint, peer._loop)
        network._open[call] = None
        call.serve(lambda: peer._answer(call, lambda: handler(peer, call.up.__aiter__())))
        upload = None if messages is None else asyncio.create_task(self._upload(call, messages))
        try:
            async with aclosing(call.down.__aiter__()) as replies:
                async for reply in replies:
                    yield cast(T, reply)
        finally:
            network._open.pop(call, None)
            call.stop()  # not awaited: the callee may be frozen
            if upload is not None:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)

    async def _upload(self, call: _MemoryCall, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                await call.up.put(message)
        except Exception as error:  # raised at the caller, which reads the replies
            call.down.end(error)
            raise
        call.up.end()

    def _answer(self, call: _MemoryCall, handler: Callable[[], AsyncGenerator[Any, None]]) -> asyncio.Task[None]:
        context = None if self._context is None else self._context.copy()
        task = asyncio.create_task(self._serve(call, handler), context=context)
        self._answering[task] = None
        task.add_done_callback(self._answering.pop)
        return task

    async def _serve(self, call: _MemoryCall, handler: Callable[[], AsyncGenerator[Any, None]]) -> None:
        try:
            async with aclosing(handler()) as replies:
                async for reply in replies:
                    await call.down.put(reply)
        except ProtocolViolationError as error:
            call.down.end(CallRefusedError(self.endpoint, str(error)))
        except PeerUnreachableError:
            call.down.end(PeerUnreachableError(self.endpoint, "connection lost"))
        except CallRefusedError as error:
            call.down.end(CallRefusedError(self.endpoint, str(error), error.cause))
        except AveragingError as error:
            call.down.end(CallRefusedError(self.endpoint, str(error)))
        except Exception as error:
            logger.exception("%s failed to answer %s", self.endpoint, call.caller)
            self._network.errors.append(error)
            call.down.end(CallRefusedError(self.endpoint, "internal error"))
        else:
            call.down.end()
