"""The sessions of other processes at a synchronizer. A session that can do it is a module of a weight sync group."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import Any

from averaging.errors import ProtocolViolationError, StateError, printable
from averaging.rl.synchronizer import methods
from averaging.rl.synchronizer.modules import Module
from averaging.rl.synchronizer.state_stream import Meta
from averaging.rpc import rpc_caller
from averaging.weights import Place, SlotTable
from averaging.wire import synchronizer_pb2 as wire

MAX_SESSIONS, MAX_SESSIONS_PER_HOST, MAX_SESSIONS_PER_CONNECTION = 1024, 256, 64
MAX_NAME, MAX_ERROR = 100, 1000


class ServerSession:
    """One process that attends; a module that lives as long as its connection.

    Attributes:
        number: Names the session in calls. It is secret, because it stands for the statuses of this process.
        member: Name of the process among the members.
        place: Its place among the sessions.
        serial: Its number in the order in which sessions were opened.
    """

    def __init__(self, name: str, namespace: str, serial: int, place: Place) -> None:
        self.number = secrets.token_bytes(16)
        self.serial = serial
        self.member = f"{printable(name, MAX_NAME) or 'session'} {serial}"
        self.namespace = namespace
        self.place = place
        self._commands: asyncio.Queue[wire.Command] = asyncio.Queue()
        self._asked: dict[int, asyncio.Future[wire.ModuleReply]] = {}
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
        kind = _SessionSender if module.sends_weights else _Receiver if module.receives_weights else _Plain
        self._module = kind(self)
        return self._module

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
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
        self._asked[number] = future
        command = wire.Command(number=number)
        getattr(command, kind).SetInParent()
        methods.filled(getattr(command, kind), dict(zip(methods.COMMANDS[kind], arguments, strict=True)))
        self._commands.put_nowait(command)
        try:
            reply = await future
        finally:
            self._asked.pop(number, None)
        if reply.error:
            raise StateError(printable(reply.error, MAX_ERROR))
        return reply

    def take(self, reply: wire.ModuleReply) -> None:
        """Takes the reply to a command. Late ones are ignored."""
        future = self._asked.get(reply.number)
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
        for future in self._asked.values():
            if not future.done():
                future.set_exception(StateError(f"{self.member} is gone"))


class Sessions:
    """The open sessions."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, ServerSession] = {}
        self._places = SlotTable("sessions", MAX_SESSIONS, MAX_SESSIONS_PER_HOST, MAX_SESSIONS_PER_CONNECTION)
        self._serials = itertools.count(1)

    def open(self, name: str, namespace: str) -> ServerSession:
        """Opens a session.

        Raises:
            BusyError: There are too many.
        """
        place = Place(rpc_caller())
        self._places.enter(place, now=0.0)
        session = ServerSession(name, namespace, next(self._serials), place)
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
        """Closes a session."""
        session.close()
        self._places.leave(session.place)
        self._sessions.pop(session.number, None)


class _Plain:
    """A process that is tracked and in no weight sync group."""

    def __init__(self, session: ServerSession) -> None:
        self._session = session

    def is_alive(self) -> bool:
        return self._session.open


class _SessionModule(_Plain):
    """A process that can be in a weight sync group."""

    async def setup_weight_sync_group(self, *arguments: Any) -> None:
        await self._session.ask("setup_weight_sync_group", *arguments)

    async def teardown_weight_sync_group(self) -> None:
        await self._session.ask("teardown_weight_sync_group")


class _SessionSender(_SessionModule):
    """A trainer."""

    async def get_weight_sync_info(self) -> tuple[Any, ...]:
        reply = await self._session.ask("get_weight_sync_info")
        return tuple((await methods.values_of(reply, methods.SYNC_INFO)).values())


class _Receiver(_SessionModule):
    """An explorer."""

    async def set_state_dict_meta(self, state_dict_meta: Meta) -> None:
        await self._session.ask("set_state_dict_meta", state_dict_meta)
