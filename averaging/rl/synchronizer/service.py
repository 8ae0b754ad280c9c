"""`averaging.synchronizer.v1.Synchronizer`: serves the synchronizers of a peer or a server by namespace."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from averaging.common import HostQuota
from averaging.errors import (
    AveragingError,
    BusyError,
    ConfigError,
    ProtocolViolationError,
    StateError,
    WaitTimeoutError,
    printable,
)
from averaging.peer import Peer
from averaging.receipts import WeightReader
from averaging.rl.synchronizer import methods
from averaging.rl.synchronizer.coordination import RunningStatus
from averaging.rl.synchronizer.groups import result_of
from averaging.rl.synchronizer.methods import ModelState, TensorAssembler, parts_of
from averaging.rpc import Deadline, FairTimeout, RpcHandler, rpc_caller
from averaging.wire import synchronizer_pb2 as wire

if TYPE_CHECKING:
    from averaging.rl.synchronizer.synchronizer import Synchronizer

MAX_STATES = 4  # versions of one synchronizer that are read at a time: slow readers would otherwise keep all in memory
MAX_UPLOADS = 4  # states that one receives at a time; together they have at most the bytes of two largest ones
MAX_SESSIONS, MAX_SESSIONS_PER_HOST = 1024, 256
HELLO_SECONDS = 10.0  # for the first message of a session or a state
MAX_EXPLORERS = 10_000  # of one member
MAX_NAME, MAX_ERROR = 100, 1000

Request = TypeVar("Request")


class ServerSession:
    """One process that attends. It is a module that lives as long as its connection."""

    def __init__(self, name: str, namespace: str, serial: int) -> None:
        self.number = secrets.token_bytes(16)  # secret: it stands for the statuses of this process
        self.member = f"{printable(name, MAX_NAME) or 'session'} {serial}"
        self.namespace = namespace
        self.messages: asyncio.Queue[wire.ToModule] = asyncio.Queue()
        self._pending: dict[int, asyncio.Future[wire.ModuleReply]] = {}
        self._serials = itertools.count(1)
        self._gone = self._described = False

    def is_alive(self) -> bool:
        return not self._gone

    def describe(self, module: wire.Module) -> None:
        """Gives this object the methods of the process, which make it a `SendsWeights` or a `ReceivesWeights`."""
        if self._described:
            raise ProtocolViolationError("a session is one module; open another session for a second one")
        self._described = True
        commands = methods.SENDER if module.sends_weights else methods.RECEIVER if module.receives_weights else ()
        for name in commands:
            setattr(self, name, partial(self._ask, name))

    async def _ask(self, kind: str, *arguments: Any) -> tuple[Any, ...]:
        if self._gone:
            raise StateError(f"{self.member} is gone")
        names, results = methods.COMMANDS[kind]
        command = wire.Command(number=next(self._serials))
        getattr(command, kind).SetInParent()
        methods.filled(getattr(command, kind), dict(zip(names, arguments, strict=True)))
        future = self._pending[command.number] = asyncio.get_running_loop().create_future()
        self.messages.put_nowait(wire.ToModule(command=command))
        try:
            reply = await future
        finally:
            del self._pending[command.number]
        if reply.error:
            raise StateError(printable(reply.error, MAX_ERROR))
        return tuple((await methods.values_of(reply, results)).values())

    def take(self, reply: wire.ModuleReply) -> None:
        future = self._pending.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def close(self) -> None:
        """Ends the session; commands in progress fail."""
        self._gone = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(StateError(f"{self.member} is gone"))


class SynchronizerService:
    """Serves synchronizers of different namespaces; give it to `RpcServer` or to `Peer(services=…)`."""

    def __init__(self, synchronizers: Iterable[Synchronizer] = ()) -> None:
        self.synchronizers: dict[str, Synchronizer] = {}
        for synchronizer in synchronizers:
            self.add(synchronizer)
        self._sessions: dict[bytes, ServerSession] = {}
        self._session_quota = HostQuota(MAX_SESSIONS, MAX_SESSIONS_PER_HOST)
        self._serials = itertools.count(1)
        self._uploads: WeakKeyDictionary[Synchronizer, HostQuota] = WeakKeyDictionary()
        self._reading: dict[tuple[str, int], int] = {}  # readers of each (namespace, version), the oldest first

    def add(self, synchronizer: Synchronizer) -> None:
        """Serves a synchronizer in its namespace, also in the place of a synchronizer that has ended."""
        namespace = synchronizer.config.namespace
        present = self.synchronizers.get(namespace)
        if present is not None and not present.ended:
            raise ConfigError(f"a synchronizer is served in namespace {namespace!r} already; choose another namespace")
        self.synchronizers[namespace] = synchronizer

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        calls = [call for call in vars(methods).values() if isinstance(call, methods.SynchronizerMethod)]
        return [RpcHandler(call.rpc, getattr(self, f"_{call.name}", partial(self._answer, call))) for call in calls]

    def readers(self) -> Iterable[WeightReader]:
        return itertools.chain.from_iterable(each.readers() for each in self.synchronizers.values() if not each.ended)

    def _find(self, namespace: str) -> Synchronizer:
        synchronizer = self.synchronizers.get(namespace)
        if synchronizer is None:
            known = ", ".join(map(repr, sorted(self.synchronizers)[:10]))
            raise ConfigError(f"there is no synchronizer in namespace {namespace[:40]!r} here; there are {known}")
        return synchronizer

    async def _answer(self, call: methods.SynchronizerMethod[Any], request: Any) -> Any:
        synchronizer, member = self._find(request.namespace), None
        if call.session or (call.member and request.session):
            member = self._member(request.session, request.namespace)
        arguments = await methods.values_of(request, call.argument_names)
        if call.member:
            arguments["member"] = member
        try:
            return call.reply(await result_of(getattr(synchronizer, call.name)(**arguments)))
        except WaitTimeoutError:
            if call.late is not None:
                return call.late
            raise

    async def _attend(self, messages: AsyncIterator[wire.FromModule]) -> AsyncGenerator[wire.ToModule, None]:
        first = await _first(messages)
        if first is None or not first.HasField("hello"):
            raise ProtocolViolationError("a session that does not begin with `hello`")
        synchronizer, host = self._find(first.hello.namespace), rpc_caller().host
        synchronizer.start()
        if not self._session_quota.take(host):
            count = self._session_quota.taken_by(host)
            raise BusyError(f"there are {count} sessions of your host here; try again later")
        session = ServerSession(first.hello.name, first.hello.namespace, next(self._serials))
        self._sessions[session.number] = session
        reading = asyncio.ensure_future(_read(messages, session, synchronizer))
        reading.add_done_callback(lambda _: session.messages.put_nowait(wire.ToModule()))  # ends the loop below
        # The statuses of a process last as long as this call, however that ends: none of a dead process stays counted.
        try:
            await _restore(synchronizer, session.member, first.hello)
            yield wire.ToModule(session=session.number)
            while not reading.done():
                yield await methods.next_message(session.messages, wire.ToModule)
            reading.result()
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, AveragingError):
                await reading
            session.close()
            self._session_quota.leave(host)
            del self._sessions[session.number]
            synchronizer.remove_member(session.member)

    def _member(self, number: bytes, namespace: str) -> str:
        session = self._sessions.get(number)
        if session is None or session.namespace != namespace:
            raise ProtocolViolationError("this call needs the number of an open session of its namespace (Attend)")
        return session.member

    async def _set_model_state_dict(self, parts: AsyncIterator[wire.StatePart]) -> wire.Version:
        first = await _first(parts)
        if first is None:
            raise ProtocolViolationError("a state without messages")
        synchronizer = self._find(first.namespace)
        self._member(first.session, first.namespace)
        state = await self._receive(first, parts, synchronizer)
        member = self._member(first.session, first.namespace)  # it may have left meanwhile
        version = await synchronizer.set_model_state_dict(state, first.step, member=member, copy=False)
        return wire.Version(version=version)

    async def _receive(
        self, first: wire.StatePart, parts: AsyncIterator[wire.StatePart], synchronizer: Synchronizer
    ) -> ModelState:
        config, host = synchronizer.config, rpc_caller().host
        assembler = TensorAssembler(config.max_state_bytes)
        assembler.add(first)
        most = 2 * config.max_state_bytes
        quota = self._uploads.setdefault(synchronizer, HostQuota(most, most))
        amount = max(assembler.nbytes, most // MAX_UPLOADS)
        if not quota.take(host, amount):
            raise BusyError("other states are on their way here; try again later")
        deadline = Deadline(config.silence_timeout, "silence_timeout")
        try:
            # Seconds in which this process was busy or stopped do not count.
            async with FairTimeout(deadline, deadline.seconds) as limit:
                while not assembler.finished and (part := await anext(parts, None)) is not None:
                    limit.restart(deadline)
                    assembler.add(part)
        except TimeoutError as error:
            raise ProtocolViolationError(f"a state that stopped arriving: {error}") from None
        finally:
            quota.leave(host, amount)
        return assembler.result()[0]

    async def _get_model_state_dict(self, request: wire.Request) -> AsyncGenerator[wire.StatePart, None]:
        synchronizer = self._find(request.namespace)
        state, version = synchronizer.get_model_state_dict()
        read = request.namespace, version
        self._reading[read] = self._reading.get(read, 0) + 1
        versions = [each for each in self._reading if each[0] == request.namespace]
        if len(versions) > MAX_STATES:
            del self._reading[versions[0]]  # its readers end with their next part
        try:
            for part in parts_of(state, version):
                if read not in self._reading:
                    raise BusyError(f"version {version} is gone, because newer ones are read; ask for the newest one")
                yield part
        finally:
            if read in self._reading:
                self._reading[read] -= 1
                if not self._reading[read]:
                    del self._reading[read]
        with suppress(ProtocolViolationError):  # a caller without a session, or its session has ended
            synchronizer.note_received(self._member(request.session, request.namespace), version)


async def _first(messages: AsyncIterator[Request]) -> Request | None:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return await anext(messages, None)
    except TimeoutError:
        raise ProtocolViolationError(f"a call without a message for {HELLO_SECONDS:g} s") from None


async def _read(messages: AsyncIterator[wire.FromModule], session: ServerSession, synchronizer: Synchronizer) -> None:
    """Reads what a module says, until it is gone, or silent for too long."""
    limit = synchronizer.config.silence_timeout
    while True:
        try:
            async with asyncio.timeout(limit):
                message = await anext(messages, None)
        except TimeoutError:
            raise ProtocolViolationError(f"nothing came from you for {limit:g} s, so your session has ended") from None
        if message is None:
            return
        if message.HasField("module"):
            session.describe(message.module)
            await synchronizer.add_module(session, member=session.member)
        if message.HasField("reply"):
            session.take(message.reply)


async def _restore(synchronizer: Synchronizer, member: str, hello: wire.Hello) -> None:
    """Gives a module the statuses that it had before its connection broke."""
    trainer_status = methods.status_from(hello.trainer_status)
    if trainer_status is not None:
        await synchronizer.set_trainer_status(trainer_status, member=member)
    counts = {status: getattr(hello, f"explorers_{status.value}") for status in RunningStatus}
    if sum(counts.values()) > MAX_EXPLORERS:
        raise ProtocolViolationError(f"{sum(counts.values())} explorers of one member; at most {MAX_EXPLORERS}")
    for status, count in counts.items():
        for _ in range(count):
            await synchronizer.set_explorer_status(status, member=member)


# Of each peer, and of each event loop, whose synchronizers only this process can find.
_services: WeakKeyDictionary[object, SynchronizerService] = WeakKeyDictionary()


def serve_on(home: Peer | asyncio.AbstractEventLoop, synchronizer: Synchronizer) -> None:
    """Adds a synchronizer to a peer, which serves it, or to an event loop."""
    service = _services.get(home)
    if service is None:
        service = SynchronizerService()
        if isinstance(home, Peer):
            home.add_service(service)
        _services[home] = service
    service.add(synchronizer)


def served_on(home: Peer | asyncio.AbstractEventLoop, namespace: str) -> Synchronizer | None:
    """Returns the synchronizer of a peer or an event loop, unless it has ended."""
    service = _services.get(home)
    synchronizer = None if service is None else service.synchronizers.get(namespace)
    return None if synchronizer is None or synchronizer.ended else synchronizer
