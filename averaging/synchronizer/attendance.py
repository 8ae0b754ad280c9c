"""A session at a synchronizer, at the side of the process that attends it: it is alive, and carries out commands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from averaging.errors import AveragingError, ConfigError, PeerUnreachableError
from averaging.synchronizer import methods
from averaging.synchronizer.modules import Module, ReceivesWeights, SendsWeights, result_of
from averaging.synchronizer.state_stream import meta_from, tensors_of
from averaging.wire import synchronizer_pb2 as wire

T = TypeVar("T")

ALIVE_SECONDS = 1.0
"""Interval of the messages that say that this process is alive."""


class Attendance:
    """One session, at the side of its process.

    Attributes:
        number: Its number, which calls carry; empty until the synchronizer has given it.
    """

    def __init__(self, endpoint: str, hello: wire.SyncHello) -> None:
        self.number = b""
        self._endpoint = endpoint
        self._lost = asyncio.Event()
        self._reason = ""
        self._outgoing: asyncio.Queue[wire.SyncFromModule] = asyncio.Queue()
        self._outgoing.put_nowait(wire.SyncFromModule(hello=hello))
        self._announced: Module | None = None
        self._commands: set[asyncio.Task[None]] = set()

    def announce(self, module: Module) -> None:
        """Says what this process can do."""
        if self._announced is None:
            self._announced = module
            sends = isinstance(module, SendsWeights)
            kind = wire.SyncModule(sends_weights=sends, receives_weights=isinstance(module, ReceivesWeights))
            self._outgoing.put_nowait(wire.SyncFromModule(module=kind))

    async def outgoing(self) -> AsyncGenerator[wire.SyncFromModule, None]:
        """Yields what this process says, at least that it is alive."""
        while True:
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    message = await self._outgoing.get()
            except TimeoutError:
                message = wire.SyncFromModule()
            yield message

    async def until_lost(self, call: Awaitable[T]) -> T:
        """Awaits a call.

        Raises:
            PeerUnreachableError: The session has ended meanwhile.
        """
        calling = asyncio.ensure_future(call)
        losing = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait([calling, losing], return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
        finally:
            for task in (calling, losing):
                task.cancel()
            await asyncio.gather(calling, losing, return_exceptions=True)
        raise PeerUnreachableError(self._endpoint, self._reason)

    def execute(self, command: wire.SyncCommand, module: Module | None) -> None:
        """Starts to carry out a command of the synchronizer, and replies at its end."""
        task = asyncio.ensure_future(self._execute(command, module))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def close(self, reason: str) -> None:
        """Ends all calls and commands of the session."""
        self._reason = reason
        self._lost.set()
        for task in list(self._commands):
            task.cancel()
        if self._commands:
            await asyncio.wait(self._commands)

    async def _execute(self, command: wire.SyncCommand, module: Module | None) -> None:
        reply = wire.SyncModuleReply(number=command.number)
        try:
            await _carry_out(command, module, reply)
        except Exception as error:
            reply.error = str(error) if isinstance(error, AveragingError) else repr(error)
        self._outgoing.put_nowait(wire.SyncFromModule(reply=reply))


async def _carry_out(command: wire.SyncCommand, module: Module | None, reply: wire.SyncModuleReply) -> None:
    kind = command.WhichOneof("command")
    if kind == "get_weight_sync_info" and isinstance(module, SendsWeights):
        host, port, meta = await result_of(module.get_weight_sync_info())
        reply.master_address, reply.master_port = host, port
        reply.meta.CopyFrom(wire.SyncMeta(has_tensors=True, tensors=tensors_of(meta)))
    elif kind == "set_state_dict_meta" and isinstance(module, ReceivesWeights):
        await result_of(module.set_state_dict_meta(meta_from(command.set_state_dict_meta.tensors)))
    elif kind == "setup_weight_sync_group" and isinstance(module, SendsWeights | ReceivesWeights):
        joined = command.setup_weight_sync_group
        host, port = await methods.address_from(joined.master_address, joined.master_port)
        size, rank = joined.world_size, joined.rank
        await result_of(module.setup_weight_sync_group(host, port, size, joined.group_name, joined.timeout, rank))
    elif kind == "teardown_weight_sync_group" and isinstance(module, SendsWeights | ReceivesWeights):
        await result_of(module.teardown_weight_sync_group())
    else:
        raise ConfigError(f"this process cannot carry out {kind}; its module lacks that method")
