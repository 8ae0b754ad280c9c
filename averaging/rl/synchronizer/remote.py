"""`RemoteSynchronizer`: the methods of a synchronizer that another process serves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar

from averaging.common import Backoff, one_of
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    ClosedError,
    ConfigError,
    PeerUnreachableError,
    TransportError,
    WaitTimeoutError,
)
from averaging.rl.synchronizer import methods
from averaging.rl.synchronizer.coordination import RunningStatus
from averaging.rl.synchronizer.groups import Module, ReceivesWeights, SendsWeights, result_of
from averaging.rl.synchronizer.methods import (
    Meta,
    ModelState,
    StateDict,
    TensorAssembler,
    copy_in_thread,
    parts_of,
)
from averaging.rpc import Credentials, RpcChannel
from averaging.timing import is_set_within
from averaging.wire import synchronizer_pb2 as wire

logger = logging.getLogger("averaging.rl.synchronizer")

T = TypeVar("T")
Result = TypeVar("Result")

SILENCE_SECONDS = 30.0  # a server that is silent for this time is lost
RETRY_SECONDS = 0.2, 5.0  # first and longest pause before a new connection
READS = 4  # times that a state is asked for, if newer ones replace it while it is read
MAX_STATE_BYTES = 1 << 40
_FOREVER = 1e9  # seconds for calls that end with their session


class ClientSession:
    """One session at a synchronizer, at the side of the process that has it: it is alive, and carries out commands."""

    def __init__(self, endpoint: str, hello: wire.Hello) -> None:
        self.number = b""  # which calls carry; empty until the synchronizer has given it
        self._endpoint = endpoint
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason
        self._messages: asyncio.Queue[wire.FromModule] = asyncio.Queue()
        self._messages.put_nowait(wire.FromModule(hello=hello))
        self._module: Module | None = None
        self._commands: set[asyncio.Task[None]] = set()

    def announce(self, module: Module) -> None:
        if self._module is None:
            self._module = module
            sends, receives = isinstance(module, SendsWeights), isinstance(module, ReceivesWeights)
            kind = wire.Module(sends_weights=sends, receives_weights=receives)
            self._messages.put_nowait(wire.FromModule(module=kind))

    async def outgoing(self) -> AsyncGenerator[wire.FromModule, None]:
        while True:
            yield await methods.next_message(self._messages, wire.FromModule)

    async def until_lost(self, call: Awaitable[T]) -> T:
        """Awaits a call. Raises a `PeerUnreachableError` if the session has ended meanwhile."""
        calling = asyncio.ensure_future(call)
        waiting: list[asyncio.Future[Any]] = [calling, self._lost]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        raise PeerUnreachableError(self._endpoint, self._lost.result())

    def execute(self, command: wire.Command) -> None:
        """Starts to carry out a command of the synchronizer, and replies at its end."""
        task = asyncio.ensure_future(self._execute(command))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def close(self, reason: str) -> None:
        """Ends all calls and commands of the session."""
        self._lost.set_result(reason)
        for task in self._commands:
            task.cancel()
        if self._commands:
            await asyncio.wait(self._commands)

    async def _execute(self, command: wire.Command) -> None:
        reply = wire.ModuleReply(number=command.number)
        kind = command.WhichOneof("command") or ""
        method = getattr(self._module, kind, None)
        try:
            if kind not in methods.COMMANDS or not callable(method):
                raise ConfigError(f"this process cannot carry out {kind}; its module lacks that method")
            names, results = methods.COMMANDS[kind]
            arguments = await methods.values_of(getattr(command, kind), names)
            result = await result_of(method(*arguments.values()))
            if results:
                methods.filled(reply, dict(zip(results, result, strict=True)))
        except Exception as error:
            reply.error = str(error) if isinstance(error, AveragingError) else repr(error)
        self._messages.put_nowait(wire.FromModule(reply=reply))


class RemoteSynchronizer:
    """A synchronizer elsewhere; see `Synchronizer.connect`. It has the methods of `Synchronizer`, as coroutines.

    While it is entered, this process has a session there. When the session ends, because this process closes it, dies,
    or is cut off, its statuses and waits end there. A process that was cut off connects again, with its statuses.

    Raises:
        PeerUnreachableError: From all methods: there is no connection, or it broke during the call.
        CallRefusedError: The synchronizer refused the call, for example because a status is wrong.
    """

    def __init__(self, endpoint: str, credentials: Credentials, *, namespace: str, name: str, timeout: float) -> None:
        self._namespace, self._name, self._timeout = namespace, name, timeout
        self._channel = RpcChannel(endpoint, credentials=credentials)
        self._trainer_status: RunningStatus | None = None
        self._explorers: Counter[RunningStatus] = Counter()
        self._module: Module | None = None
        self._session: ClientSession | None = None
        self._attached = asyncio.Event()
        self._failure: AveragingError | None = None
        self._attending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RemoteSynchronizer at {self._channel.endpoint}>"

    async def __aenter__(self) -> Self:
        self._attending = asyncio.get_running_loop().create_task(self._stay_attached())
        try:
            await self._open_session()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        attending, self._attending = self._attending, None
        if attending is not None:
            attending.cancel()
            await asyncio.wait([attending])
        await self._channel.close()

    async def add_module(self, module: Module) -> None:
        """Makes this process a module there. A `ConfigError` is raised if it is another module already."""
        if self._module not in (None, module):
            raise ConfigError("a connection is one module; make another connection for a second one")
        self._module = module
        (await self._open_session()).announce(module)  # again after a session was lost, as the statuses are

    async def set_trainer_status(self, status: RunningStatus | str) -> None:
        status = one_of(RunningStatus, status, "status")
        await self._call(methods.SET_TRAINER_STATUS, status=status)
        self._trainer_status = status

    async def trainer_requires_weight_sync(self) -> bool | None:
        return await self._call(methods.TRAINER_REQUIRES_WEIGHT_SYNC)

    async def set_explorer_status(
        self, status: RunningStatus | str, old_status: RunningStatus | str | None = None
    ) -> None:
        status = one_of(RunningStatus, status, "status")
        old = None if old_status is None else one_of(RunningStatus, old_status, "old_status")
        await self._call(methods.SET_EXPLORER_STATUS, status=status, old_status=old)
        self._explorers[status] += 1
        if old is not None:
            self._explorers[old] -= 1

    async def explorer_requires_sync(self) -> bool:
        return await self._call(methods.EXPLORER_REQUIRES_SYNC)

    async def set_model_state_dict(self, model_state_dict: StateDict | str | None, trainer_step: int) -> int:
        """Sends the state; see `Synchronizer.set_model_state_dict`. There is no time limit as long as bytes travel."""
        session = await self._open_session()
        if not 0 <= trainer_step < 1 << 63:
            raise ConfigError(f"the step of a trainer must be 0 or more, not {trainer_step}")
        state = await copy_in_thread(model_state_dict)
        parts = parts_of(state)
        head = next(parts)
        head.namespace, head.session, head.step = self._namespace, session.number, trainer_step

        async def outgoing() -> AsyncGenerator[wire.StatePart, None]:
            yield head
            for part in parts:
                yield part

        return await self._send(session, methods.SET_MODEL_STATE_DICT, outgoing())

    async def get_model_state_dict(self) -> tuple[ModelState, int]:
        """Receives the newest state; a `ProtocolViolationError` is raised if its digest is wrong."""
        for _ in range(READS - 1):
            with suppress(CallRefusedError):
                return await self._read_state()
        return await self._read_state()

    async def get_model_state_dict_iterator(self) -> AsyncIterator[tuple[str, object]]:
        state, _ = await self.get_model_state_dict()
        if isinstance(state, str):
            raise ConfigError(f"the state is a path, {state}; get_model_state_dict() returns it")
        for item in (state or {}).items():
            yield item

    async def get_state_dict_meta(self) -> Meta | None:
        return await self._call(methods.GET_STATE_DICT_META)

    async def wait_new_model_state_dict(self, current_version: int, *, timeout: float = 0.0) -> int:
        call = methods.WAIT_NEW_MODEL_STATE_DICT
        version = await self._call(call, current_version=current_version, timeout=timeout)
        if version is None:
            raise WaitTimeoutError(f"no version above {current_version} came to {self._channel.endpoint} in time")
        return version

    async def notify_no_new_model_state_dict(self) -> None:
        await self._call(methods.NOTIFY_NO_NEW_MODEL_STATE_DICT)

    async def get_latest_model_version(self) -> int:
        return await self._call(methods.GET_LATEST_MODEL_VERSION)

    async def get_latest_model_path(self, use_huggingface: bool = False) -> str | None:
        return await self._call(methods.GET_LATEST_MODEL_PATH, use_huggingface=use_huggingface)

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Meta | None = None
    ) -> None:
        address = {"master_address": master_address, "master_port": master_port}
        await self._call(methods.SETUP_WEIGHT_SYNC_GROUP, **address, state_dict_meta=state_dict_meta)

    async def coordinate_weight_sync_setup(self, timeout: float | None = None) -> None:
        await self._call(methods.COORDINATE_WEIGHT_SYNC_SETUP, timeout=timeout)

    async def coordinate_weight_sync_teardown(self) -> None:
        await self._call(methods.COORDINATE_WEIGHT_SYNC_TEARDOWN)

    async def ready_to_nccl_sync(self, module: str, trainer_step: int) -> int | None:
        version = await self._call(methods.READY_TO_NCCL_SYNC, module=module, trainer_step=trainer_step)
        if module == "trainer":
            self._trainer_status = RunningStatus.RUNNING
        return version

    async def _call(self, call: methods.SynchronizerMethod[Result], **arguments: Any) -> Result:
        session = await self._open_session()
        return await self._send(session, call, call.request(self._namespace, session.number, arguments))

    async def _send(self, session: ClientSession, call: methods.SynchronizerMethod[Result], request: Any) -> Result:
        limit = _FOREVER if call.waits else self._timeout
        return call.result(await session.until_lost(self._channel.call(call.rpc, request, limit)))

    async def _read_state(self) -> tuple[ModelState, int]:
        session = await self._open_session()
        request = wire.Request(namespace=self._namespace, session=session.number)
        assembler = TensorAssembler(MAX_STATE_BYTES)

        async def read() -> None:
            async with aclosing(self._channel.stream(methods.GET_MODEL_STATE_DICT.rpc, request)) as parts:
                async for part in parts:
                    assembler.add(part)

        await session.until_lost(read())
        return assembler.result()

    async def _open_session(self) -> ClientSession:
        """Returns the session, after at most `timeout` seconds for a new connection."""
        if self._attending is None:
            raise ClosedError(f"{self!r} is not connected; use it inside `async with`")
        await is_set_within(self._timeout, self._attached)
        if self._session is not None:
            return self._session
        endpoint = self._channel.endpoint
        raise self._failure or PeerUnreachableError(endpoint, f"no answer within {self._timeout:g} s")

    async def _stay_attached(self) -> None:
        backoff = Backoff(*RETRY_SECONDS)
        while True:
            try:
                await self._attend()
            except AveragingError as error:
                self._failure = error
                # Nothing changes by itself: let the calls fail now, and try again later.
                if isinstance(error, CallRefusedError) or (isinstance(error, TransportError) and error.definite):
                    self._attached.set()
                logger.info("the session at %s has ended: %s", self._channel.endpoint, error)
            else:
                self._failure = None
                backoff.reset()
            await asyncio.sleep(backoff.next_delay())
            self._attached.clear()

    async def _attend(self) -> None:
        session = ClientSession(self._channel.endpoint, self._hello())
        if self._module is not None:
            session.announce(self._module)
        reason = "the session has ended"
        try:
            async with aclosing(self._channel.stream(methods.ATTEND.rpc, session.outgoing())) as messages:
                while True:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        message = await anext(messages, None)
                    if message is None:
                        return
                    if message.session and not session.number:
                        session.number = message.session
                        self._session = session
                        self._attached.set()
                    elif message.HasField("command"):
                        session.execute(message.command)
        except TimeoutError:
            reason = f"the synchronizer was silent for {SILENCE_SECONDS:g} s"
            raise PeerUnreachableError(self._channel.endpoint, reason) from None
        except AveragingError as error:
            reason = error.reason if isinstance(error, TransportError) else str(error)
            raise
        finally:
            self._session = None
            self._attached.clear()
            await session.close(reason)

    def _hello(self) -> wire.Hello:
        explorers = {f"explorers_{status.value}": count for status, count in self._explorers.items()}
        hello: wire.Hello = methods.filled(wire.Hello(), {"trainer_status": self._trainer_status, **explorers})
        hello.namespace, hello.name = self._namespace, self._name
        return hello
