"""`averaging.synchronizer.v1.Synchronizer`: serves the synchronizers of a peer or a server by namespace."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar
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
from averaging.rl.synchronizer.coordination import RunningStatus, SynchronizerConfig
from averaging.rl.synchronizer.modules import Module, result_of
from averaging.rl.synchronizer.state_stream import Meta, ModelState, TensorAssembler, parts_of
from averaging.rpc import Deadline, FairTimeout, RpcHandler, rpc_caller
from averaging.wire import synchronizer_pb2 as wire

MAX_STATES = 4
"""States that are read at the same time, including the newest one."""


@dataclass(eq=False, slots=True)
class Pinned:
    """A state that is being read.

    Attributes:
        dropped: Whether its readers have to end.
    """

    readers: int = 0
    dropped: bool = False


class PinnedStates:
    """The states that are being read, the oldest first."""

    def __init__(self) -> None:
        self._states: dict[int, Pinned] = {}

    @contextmanager
    def reading(self, state: object) -> Iterator[Pinned]:
        """A context for one reader of a state. The oldest state is dropped if there are too many."""
        key = id(state)  # unique as long as the reader holds the state
        pinned = self._states.setdefault(key, Pinned())
        pinned.readers += 1
        if len(self._states) > MAX_STATES:
            oldest = next(iter(self._states))
            self._states.pop(oldest).dropped = True
        try:
            yield pinned
        finally:
            pinned.readers -= 1
            if not pinned.readers and self._states.get(key) is pinned:
                del self._states[key]


logger = logging.getLogger("averaging.rl.synchronizer")

Request = TypeVar("Request")

MAX_UPLOADS = 4
"""Number of states that may be received at the same time by one synchronizer. Together they have at most the bytes of
two largest ones."""

HELLO_SECONDS = 10.0
"""A call that should open a session, or send a state, must begin within this time."""

MAX_EXPLORERS = 10_000
"""Explorers of one member."""

LEAST_RATE = 16 << 10
"""Bytes per second at which a state must arrive."""

ALIVE_SECONDS = 1.0
"""Interval of the messages with which both ends of a session say that they are alive."""


MAX_SESSIONS, MAX_SESSIONS_PER_HOST = 1024, 256
MAX_NAME, MAX_ERROR = 100, 1000


class ServerSession:
    """One process that attends; a module that lives as long as its connection.

    Attributes:
        number: Names the session in calls. It is secret, because it stands for the statuses of this process.
        member: Name of the process among the members.
        host: Where the process is.
    """

    def __init__(self, name: str, namespace: str, serial: int, host: str) -> None:
        self.number = secrets.token_bytes(16)
        self.member = f"{printable(name, MAX_NAME) or 'session'} {serial}"
        self.namespace = namespace
        self.host = host
        self._commands: asyncio.Queue[wire.Command] = asyncio.Queue()
        self._pending: dict[int, asyncio.Future[wire.ModuleReply]] = {}
        self._serials = itertools.count(1)
        self._gone = False
        self._module: Module | None = None

    def attach(self, module: wire.Module) -> Module:
        """Returns the module that the process is, to be tracked.

        Raises:
            ProtocolViolationError: The process is another module already.
        """
        if self._module is not None:
            raise ProtocolViolationError("a session is one module; open another session for a second one")
        kind = _SessionSender if module.sends_weights else _SessionReceiver if module.receives_weights else _Plain
        self._module = kind(self)
        return self._module

    @property
    def open(self) -> bool:
        return not self._gone

    async def ask(self, kind: str, *arguments: Any) -> wire.ModuleReply:
        """Gives the process a command of the table `COMMANDS` and waits for its reply.

        Raises:
            StateError: The command failed, or the process is gone.
        """
        if self._gone:
            raise StateError(f"{self.member} is gone")
        number = next(self._serials)
        future: asyncio.Future[wire.ModuleReply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        command = wire.Command(number=number)
        getattr(command, kind).SetInParent()
        methods.filled(getattr(command, kind), dict(zip(methods.COMMANDS[kind], arguments, strict=True)))
        self._commands.put_nowait(command)
        try:
            reply = await future
        finally:
            self._pending.pop(number, None)
        if reply.error:
            raise StateError(printable(reply.error, MAX_ERROR))
        return reply

    def take(self, reply: wire.ModuleReply) -> None:
        future = self._pending.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    async def next_command(self, seconds: float, until: asyncio.Future[Any]) -> wire.ToModule | None:
        """Returns the next command; None after `seconds`, or when `until` is done."""
        if self._commands.empty():
            getting = asyncio.ensure_future(self._commands.get())
            try:
                await asyncio.wait([getting, until], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                return wire.ToModule(command=getting.result()) if getting.done() else None
            finally:
                getting.cancel()
        return wire.ToModule(command=self._commands.get_nowait())

    def close(self) -> None:
        """Ends the session; commands in progress fail."""
        self._gone = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(StateError(f"{self.member} is gone"))


class Sessions:
    """The open sessions."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, ServerSession] = {}
        self._quota = HostQuota(MAX_SESSIONS, MAX_SESSIONS_PER_HOST)
        self._serials = itertools.count(1)

    def open(self, name: str, namespace: str) -> ServerSession:
        """Opens a session.

        Raises:
            BusyError: There are too many.
        """
        host = rpc_caller().host
        if not self._quota.take(host):
            raise BusyError(f"there are {self._quota.taken_by(host)} sessions of your host here; try again later")
        session = ServerSession(name, namespace, next(self._serials), host)
        self._sessions[session.number] = session
        return session

    def find(self, number: bytes, namespace: str) -> ServerSession:
        """Returns an open session.

        Raises:
            ProtocolViolationError: There is none with this number in this namespace.
        """
        session = self._sessions.get(number)
        if session is None or session.namespace != namespace:
            raise ProtocolViolationError(
                "this call needs the number of an open session of its namespace; Attend opens one, and what it has "
                "counted ends with it"
            )
        return session

    def close(self, session: ServerSession) -> None:
        session.close()
        self._quota.leave(session.host)
        self._sessions.pop(session.number, None)


class _Plain:
    """A process that is tracked and in no weight sync group."""

    def __init__(self, session: ServerSession) -> None:
        self._session = session

    def is_alive(self) -> bool:
        return self._session.open


class _SessionModule(_Plain):
    async def setup_weight_sync_group(self, *arguments: Any) -> None:
        await self._session.ask("setup_weight_sync_group", *arguments)

    async def teardown_weight_sync_group(self) -> None:
        await self._session.ask("teardown_weight_sync_group")


class _SessionSender(_SessionModule):
    async def get_weight_sync_info(self) -> tuple[Any, ...]:
        reply = await self._session.ask("get_weight_sync_info")
        return tuple((await methods.values_of(reply, methods.SYNC_INFO)).values())


class _SessionReceiver(_SessionModule):
    async def set_state_dict_meta(self, state_dict_meta: Meta) -> None:
        await self._session.ask("set_state_dict_meta", state_dict_meta)


class _Served(Protocol):
    """What the service needs of a `Synchronizer`, besides the methods of the table."""

    config: SynchronizerConfig

    @property
    def ended(self) -> bool: ...
    def start(self) -> None: ...
    async def add_module(self, module: Module, *, member: str = "") -> None: ...
    def remove_member(self, member: str) -> None: ...
    def readers(self) -> Iterable[WeightReader]: ...
    def note_received(self, member: str, version: int) -> None: ...
    async def set_trainer_status(self, status: RunningStatus, *, member: str = "") -> None: ...
    async def set_explorer_status(
        self, status: RunningStatus, old_status: RunningStatus | None = None, *, member: str = ""
    ) -> None: ...
    def get_model_state_dict(self) -> tuple[ModelState, int]: ...
    async def set_model_state_dict(
        self, model_state_dict: ModelState, trainer_step: int, *, member: str = "", copy: bool = True
    ) -> int: ...


class SynchronizerService:
    """Serves synchronizers; give it to `RpcServer` or to `Peer(services=…)`.

    Args:
        synchronizers: Their namespaces must differ.
    """

    def __init__(self, synchronizers: Iterable[_Served] = ()) -> None:
        self.synchronizers: dict[str, _Served] = {}
        for synchronizer in synchronizers:
            self.add(synchronizer)
        self._sessions = Sessions()
        self._pinned = PinnedStates()
        self._uploads: WeakKeyDictionary[_Served, HostQuota] = WeakKeyDictionary()

    def add(self, synchronizer: _Served) -> None:
        """Serves a synchronizer in its namespace, also in the place of a synchronizer that has ended.

        Raises:
            ConfigError: Another synchronizer is served in this namespace.
        """
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

    def _find(self, namespace: str) -> _Served:
        synchronizer = self.synchronizers.get(namespace)
        if synchronizer is None:
            raise ConfigError(
                f"there is no synchronizer in namespace {namespace[:40]!r} here; "
                f"there are {', '.join(map(repr, sorted(self.synchronizers)[:10]))}"
            )
        return synchronizer

    async def _attend(self, messages: AsyncIterator[wire.FromModule]) -> AsyncGenerator[wire.ToModule, None]:
        first = await _first(messages)
        if first is None or not first.HasField("hello"):
            raise ProtocolViolationError("a session that does not begin with `hello`")
        synchronizer = self._find(first.hello.namespace)
        synchronizer.start()
        session = self._sessions.open(first.hello.name, synchronizer.config.namespace)
        reading = asyncio.ensure_future(self._read(messages, session, synchronizer))
        # The statuses of a process last as long as this call, however that ends: none of a dead process stays counted.
        try:
            await _restore(synchronizer, session.member, first)
            yield wire.ToModule(session=session.number)
            while not reading.done():
                yield await session.next_command(ALIVE_SECONDS, reading) or wire.ToModule()
            reading.result()
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, AveragingError):
                await reading
            self._sessions.close(session)
            synchronizer.remove_member(session.member)

    async def _read(
        self, messages: AsyncIterator[wire.FromModule], session: ServerSession, synchronizer: _Served
    ) -> None:
        """Reads what the module says, until it is silent for too long or gone."""
        while True:
            try:
                async with asyncio.timeout(synchronizer.config.silence_timeout):
                    message = await anext(messages, None)
            except TimeoutError:
                raise ProtocolViolationError(
                    f"nothing came from you for {synchronizer.config.silence_timeout:g} s, so your session has ended"
                ) from None
            if message is None:
                return
            if message.HasField("module"):
                await synchronizer.add_module(session.attach(message.module), member=session.member)
            if message.HasField("reply"):
                session.take(message.reply)

    def _member(self, session: bytes, namespace: str) -> str:
        return self._sessions.find(session, namespace).member

    async def _answer(self, call: methods.SynchronizerMethod[Any], request: Any) -> Any:
        """Answers a call as the table says."""
        synchronizer, member = self._find(request.namespace), None
        if call.session or (call.member and request.session):
            member = self._member(request.session, request.namespace)
        arguments = await call.arguments(request)
        if call.member:
            arguments["member"] = member
        try:
            return call.reply(await result_of(getattr(synchronizer, call.name)(**arguments)))
        except WaitTimeoutError:
            if call.late is not None:
                return call.late
            raise

    async def _set_model_state_dict(self, parts: AsyncIterator[wire.StatePart]) -> wire.Version:
        first = await _first(parts)
        if first is None:
            raise ProtocolViolationError("a state without messages")
        synchronizer = self._find(first.namespace)
        self._sessions.find(first.session, first.namespace)
        assembler = TensorAssembler(synchronizer.config.max_state_bytes)
        assembler.add(first)
        state = await self._receive(parts, assembler, synchronizer)
        member = self._member(first.session, first.namespace)  # it may have left meanwhile
        version = await synchronizer.set_model_state_dict(state, first.step, member=member, copy=False)
        return wire.Version(version=version)

    async def _receive(
        self, parts: AsyncIterator[wire.StatePart], assembler: TensorAssembler, synchronizer: _Served
    ) -> ModelState:
        """Receives the rest of a state."""
        config, host = synchronizer.config, rpc_caller().host
        most = 2 * config.max_state_bytes
        quota = self._uploads.setdefault(synchronizer, HostQuota(most, most))
        amount = max(assembler.nbytes, most // MAX_UPLOADS)
        if not quota.take(host, amount):
            raise BusyError("other states are on their way here; try again later")
        left = longest = config.silence_timeout  # seconds without progress; each byte adds to them
        try:
            async with FairTimeout(Deadline(longest, "silence_timeout"), longest) as limit:
                while not assembler.finished and (part := await anext(parts, None)) is not None:
                    left = min(left - limit.waited + len(part.data) / LEAST_RATE, longest)
                    limit.restart(Deadline(left, f"{LEAST_RATE >> 10} KiB/s"))
                    assembler.add(part)
        except TimeoutError:
            raise ProtocolViolationError(
                f"a state that stopped arriving: in {longest:g} s less than {LEAST_RATE >> 10} KiB/s"
            ) from None
        finally:
            quota.leave(host, amount)
        return assembler.result().state

    async def _get_model_state_dict(self, request: wire.Request) -> AsyncGenerator[wire.StatePart, None]:
        synchronizer = self._find(request.namespace)
        state, version = synchronizer.get_model_state_dict()
        with self._pinned.reading(state) as pinned:
            for part in parts_of(state, version):
                if pinned.dropped:
                    raise BusyError(f"version {version} is gone, because newer ones are read; ask for the newest one")
                yield part
        with suppress(ProtocolViolationError):  # a caller without a session, or its session has ended
            synchronizer.note_received(self._member(request.session, request.namespace), version)


async def _first(messages: AsyncIterator[Request]) -> Request | None:
    """Returns the first message of a call; None if there is none.

    Raises:
        ProtocolViolationError: It is late.
    """
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return await anext(messages, None)
    except TimeoutError:
        raise ProtocolViolationError(f"a call without a message for {HELLO_SECONDS:g} s") from None


async def _restore(synchronizer: _Served, member: str, first: wire.FromModule) -> None:
    """Gives a module the statuses that it had before its connection broke."""
    hello = first.hello
    trainer_status = methods.status_from(hello.trainer_status)
    if trainer_status is not None:
        await synchronizer.set_trainer_status(trainer_status, member=member)
    counts = {status: getattr(hello, f"explorers_{status.value}") for status in RunningStatus}
    if sum(counts.values()) > MAX_EXPLORERS:
        raise ProtocolViolationError(f"{sum(counts.values())} explorers of one member; at most {MAX_EXPLORERS}")
    for status, count in counts.items():
        for _ in range(count):
            await synchronizer.set_explorer_status(status, member=member)


_services: WeakKeyDictionary[object, SynchronizerService] = WeakKeyDictionary()
"""The synchronizers of each peer, and those of each event loop that only this process can find."""


def serve_on(home: Peer | asyncio.AbstractEventLoop, synchronizer: _Served) -> None:
    """Adds a synchronizer to a peer, which serves it, or to an event loop.

    Raises:
        ConfigError: The peer is running and serves none yet, or there is one in this namespace.
    """
    service = _services.get(home)
    if service is None:
        service = SynchronizerService()
        if isinstance(home, Peer):
            home.add_service(service)
        _services[home] = service
    service.add(synchronizer)


def served_on(home: Peer | asyncio.AbstractEventLoop) -> dict[str, _Served]:
    """Returns the synchronizers of a peer or an event loop by namespace."""
    service = _services.get(home)
    return {} if service is None else service.synchronizers


def withdraw_from(home: asyncio.AbstractEventLoop, synchronizer: _Served) -> None:
    """Removes a synchronizer that has ended from an event loop, so that its tensors are freed."""
    namespace, served = synchronizer.config.namespace, served_on(home)
    if served.get(namespace) is synchronizer:
        del served[namespace]
