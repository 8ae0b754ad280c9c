"""`averaging.synchronizer.v1.Synchronizer`: serves the synchronizers of a peer or a server by namespace."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from averaging.errors import AveragingError, BusyError, ConfigError, ProtocolViolationError, SyncTimeoutError
from averaging.peer import Peer
from averaging.rl.synchronizer import methods
from averaging.rl.synchronizer.coordination import RunningStatus
from averaging.rl.synchronizer.sessions import ServerSession, Sessions
from averaging.rl.synchronizer.state_stream import ModelState, TensorAssembler, meta_from, parts_of, tensors_of
from averaging.rl.synchronizer.synchronizer import Synchronizer
from averaging.rpc import Deadline, FairTimeout, RpcCaller, RpcHandler, rpc_caller
from averaging.weights import LEAST_RATE, Place, SlotTable
from averaging.wire import synchronizer_pb2 as wire

# Bounds how many states are kept in memory because somebody reads them slowly. Pure.


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

LATE_SECONDS, LATE_SECONDS_OF_TRAINER = 2.0, 10.0
"""An upload that is so far behind the least rate gives way to others."""

ALIVE_SECONDS = 1.0
"""Interval of the messages with which both ends of a session say that they are alive."""

_DONE = wire.Done()


class SynchronizerService:
    """Serves synchronizers; give it to `RpcServer` or to `Peer(services=…)`.

    Args:
        synchronizers: Their namespaces must differ.
    """

    def __init__(self, synchronizers: Iterable[Synchronizer] = ()) -> None:
        self.synchronizers: dict[str, Synchronizer] = {}
        for synchronizer in synchronizers:
            self.add(synchronizer)
        self._sessions = Sessions()
        self._pinned = PinnedStates()
        self._uploads: WeakKeyDictionary[Synchronizer, SlotTable] = WeakKeyDictionary()

    def add(self, synchronizer: Synchronizer) -> None:
        """Serves another one. One that has ended makes room in its namespace.

        Raises:
            ConfigError: There is one in its namespace.
        """
        namespace = synchronizer.config.namespace
        present = self.synchronizers.get(namespace)
        if present is not None and not present.ended:
            raise ConfigError(f"a synchronizer is served in namespace {namespace!r} already; choose another namespace")
        self.synchronizers[namespace] = synchronizer

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `RpcService`."""
        return [
            methods.GET_STATUS.answers(self._get_status),
            methods.ATTEND.exchanges(self._attend),
            methods.SET_TRAINER_STATUS.answers(self._set_trainer_status),
            methods.TRAINER_REQUIRES_WEIGHT_SYNC.answers(self._trainer_requires_weight_sync),
            methods.SET_EXPLORER_STATUS.answers(self._set_explorer_status),
            methods.EXPLORER_REQUIRES_SYNC.answers(self._explorer_requires_sync),
            methods.SET_MODEL_STATE_DICT.collects(self._set_model_state_dict),
            methods.GET_MODEL_STATE_DICT.streams(self._get_model_state_dict),
            methods.GET_STATE_DICT_META.answers(self._get_state_dict_meta),
            methods.WAIT_NEW_MODEL_STATE_DICT.answers(self._wait_new_model_state_dict),
            methods.NOTIFY_NO_NEW_MODEL_STATE_DICT.answers(self._notify_no_new_model_state_dict),
            methods.GET_LATEST_MODEL_VERSION.answers(self._get_latest_model_version),
            methods.GET_LATEST_MODEL_PATH.answers(self._get_latest_model_path),
            methods.SETUP_WEIGHT_SYNC_GROUP.answers(self._setup_weight_sync_group),
            methods.COORDINATE_WEIGHT_SYNC_SETUP.answers(self._coordinate_weight_sync_setup),
            methods.COORDINATE_WEIGHT_SYNC_TEARDOWN.answers(self._coordinate_weight_sync_teardown),
            methods.READY_TO_NCCL_SYNC.answers(self._ready_to_nccl_sync),
        ]

    def _find(self, namespace: str) -> Synchronizer:
        found = self.synchronizers.get(namespace)
        if found is None:
            raise ConfigError(
                f"there is no synchronizer in namespace {namespace[:40]!r} here; "
                f"there are {', '.join(map(repr, sorted(self.synchronizers)[:10]))}"
            )
        return found

    # Sessions

    async def _attend(self, messages: AsyncIterator[wire.FromModule]) -> AsyncGenerator[wire.ToModule, None]:
        first = await _first(messages)
        if first is None or not first.HasField("hello"):
            raise ProtocolViolationError("a session that does not begin with `hello`")
        synchronizer = self._find(first.hello.namespace)
        synchronizer.start()
        session = self._sessions.open(first.hello.name, synchronizer.config.namespace)
        reading = asyncio.ensure_future(self._read(messages, session, synchronizer))
        session.place.lose = reading.cancel
        try:
            await _restore(synchronizer, session.member, first)
            yield wire.ToModule(session=session.number)
            while not reading.done():
                yield await session.next_command(ALIVE_SECONDS, reading) or wire.ToModule()
            if session.place.lost:
                raise BusyError("your host has the most sessions, and another one needs a place; try again later")
            reading.result()
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, AveragingError):
                await reading
            self._sessions.close(session)
            synchronizer.remove_member(session.member)

    async def _read(
        self, messages: AsyncIterator[wire.FromModule], session: ServerSession, synchronizer: Synchronizer
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
        """The member of a session, which every call that changes something needs."""
        return self._sessions.find(session, namespace).member

    # Statuses

    async def _get_status(self, request: wire.Request) -> wire.Status:
        synchronizer = self._find(request.namespace)
        counts = synchronizer.explorer_status_counts
        stopped = synchronizer.trainer_status is RunningStatus.STOPPED
        came = not stopped or synchronizer.trainer_requires_weight_sync() is None
        return wire.Status(
            trainer_status=methods.STATUSES[synchronizer.trainer_status] if came else wire.UNSET,
            explorers_running=counts[RunningStatus.RUNNING],
            explorers_require_sync=counts[RunningStatus.REQUIRE_SYNC],
            explorers_stopped=counts[RunningStatus.STOPPED],
            version=synchronizer.model_version,
            path=await synchronizer.get_latest_model_path() or "",
            modules=synchronizer.module_count,
        )

    async def _set_trainer_status(self, request: wire.StatusRequest) -> wire.Done:
        status = methods.status_from(request.status)
        member = self._member(request.session, request.namespace)
        await self._find(request.namespace).set_trainer_status(status, member=member)
        return _DONE

    async def _trainer_requires_weight_sync(self, request: wire.Request) -> wire.TrainerReply:
        required = self._find(request.namespace).trainer_requires_weight_sync()
        return wire.TrainerReply() if required is None else wire.TrainerReply(required=required)

    async def _set_explorer_status(self, request: wire.StatusRequest) -> wire.Done:
        status, old = methods.status_from(request.status), None
        if request.old_status:
            old = methods.status_from(request.old_status)
        member = self._member(request.session, request.namespace)
        await self._find(request.namespace).set_explorer_status(status, old, member=member)
        return _DONE

    async def _explorer_requires_sync(self, request: wire.Request) -> wire.ExplorerReply:
        return wire.ExplorerReply(required=self._find(request.namespace).explorer_requires_sync())

    # The state

    async def _set_model_state_dict(self, parts: AsyncIterator[wire.StatePart]) -> wire.Version:
        first = await _first(parts)
        if first is None:
            raise ProtocolViolationError("a state without messages")
        synchronizer = self._find(first.namespace)
        session = self._sessions.find(first.session, first.namespace)
        assembler = TensorAssembler(synchronizer.config.max_state_bytes)
        assembler.add(first)
        state = await self._receive(parts, assembler, synchronizer, session)
        member = self._member(first.session, first.namespace)  # it may have left meanwhile
        version = await synchronizer.adopt_model_state_dict(state, first.step, member)
        return wire.Version(version=version)

    async def _receive(
        self,
        parts: AsyncIterator[wire.StatePart],
        assembler: TensorAssembler,
        synchronizer: Synchronizer,
        session: ServerSession,
    ) -> ModelState:
        """Receives the rest of a state. The upload of a trainer takes the place of one of a stranger."""
        config, host, now = synchronizer.config, rpc_caller().host, asyncio.get_running_loop().time
        most = 2 * config.max_state_bytes
        places = self._uploads.setdefault(synchronizer, SlotTable("states on their way", most, most, most))
        trains = synchronizer.is_trainer(session.member)
        late = LATE_SECONDS_OF_TRAINER if trains else LATE_SECONDS
        amount = max(assembler.nbytes, most // MAX_UPLOADS)
        place = Place(RpcCaller(host, session.member), amount, int(trains), session.serial, now() + late)
        places.enter(place, now())
        left = longest = config.silence_timeout  # seconds without progress; each byte adds to them
        try:
            async with FairTimeout(Deadline(longest, "silence_timeout"), longest) as limit:
                place.lose = lambda: limit.restart(Deadline(0.0, "another state"))
                while not (assembler.finished or place.lost) and (part := await anext(parts, None)) is not None:
                    left = min(left - limit.waited + len(part.data) / LEAST_RATE, longest)
                    limit.restart(Deadline(left, f"{LEAST_RATE >> 10} KiB/s"))
                    place.due = now() + late - (longest - left)
                    assembler.add(part)
        except TimeoutError:
            if not place.lost:
                raise ProtocolViolationError(
                    f"a state that stopped arriving: in {longest:g} s less than {LEAST_RATE >> 10} KiB/s"
                ) from None
        finally:
            places.leave(place)
        if place.lost:
            raise BusyError("the state of another caller is received instead; try again later")
        return assembler.result().state

    async def _get_model_state_dict(self, request: wire.Request) -> AsyncGenerator[wire.StatePart, None]:
        state, version = self._find(request.namespace).get_model_state_dict()
        with self._pinned.reading(state) as pinned:
            for part in parts_of(state, version):
                if pinned.dropped:
                    raise BusyError(f"version {version} is gone, because newer ones are read; ask for the newest one")
                yield part

    async def _get_state_dict_meta(self, request: wire.Request) -> wire.Meta:
        meta = await self._find(request.namespace).get_state_dict_meta()
        return wire.Meta() if meta is None else wire.Meta(has_tensors=True, tensors=tensors_of(meta))

    async def _wait_new_model_state_dict(self, request: wire.WaitRequest) -> wire.WaitReply:
        synchronizer = self._find(request.namespace)
        limit = synchronizer.config.sync_timeout
        if 0 < request.timeout < limit:
            limit = request.timeout
        counted = bool(request.session)
        member = self._member(request.session, request.namespace) if counted else ""
        try:
            version = await synchronizer.wait_new(request.current_version, member, limit, counted=counted)
        except SyncTimeoutError:
            return wire.WaitReply(timed_out=True)
        return wire.WaitReply(version=version)

    async def _notify_no_new_model_state_dict(self, request: wire.Request) -> wire.Done:
        self._member(request.session, request.namespace)
        await self._find(request.namespace).notify_no_new_model_state_dict()
        return _DONE

    async def _get_latest_model_version(self, request: wire.Request) -> wire.Version:
        return wire.Version(version=await self._find(request.namespace).get_latest_model_version())

    async def _get_latest_model_path(self, request: wire.PathRequest) -> wire.Path:
        path = await self._find(request.namespace).get_latest_model_path(request.use_huggingface)
        return wire.Path(path=path or "")

    # Groups

    async def _setup_weight_sync_group(self, request: wire.GroupRequest) -> wire.Done:
        self._member(request.session, request.namespace)
        address, port = await methods.address_from(request.master_address, request.master_port)
        meta = meta_from(request.meta.tensors) if request.HasField("meta") else None
        await self._find(request.namespace).setup_weight_sync_group(address, port, meta)
        return _DONE

    async def _coordinate_weight_sync_setup(self, request: wire.TimeoutRequest) -> wire.Done:
        synchronizer = self._find(request.namespace)
        limit = min(request.timeout, synchronizer.config.sync_timeout) if request.timeout > 0 else None
        member = self._member(request.session, request.namespace)
        await synchronizer.coordinate_weight_sync_setup(limit, member=member)
        return _DONE

    async def _coordinate_weight_sync_teardown(self, request: wire.Request) -> wire.Done:
        self._member(request.session, request.namespace)
        await self._find(request.namespace).coordinate_weight_sync_teardown()
        return _DONE

    async def _ready_to_nccl_sync(self, request: wire.ReadyRequest) -> wire.WaitReply:
        synchronizer = self._find(request.namespace)
        member = self._member(request.session, request.namespace)
        version = await synchronizer.ready_to_nccl_sync(request.module, request.trainer_step, member=member)  # type: ignore[arg-type]
        return wire.WaitReply() if version is None else wire.WaitReply(version=version)


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


async def _restore(synchronizer: Synchronizer, member: str, first: wire.FromModule) -> None:
    """Gives a module the statuses that it had before its connection broke."""
    hello = first.hello
    if hello.trainer_status:
        await synchronizer.set_trainer_status(methods.status_from(hello.trainer_status), member=member)
    counts = {
        RunningStatus.RUNNING: hello.explorers_running,
        RunningStatus.REQUIRE_SYNC: hello.explorers_require_sync,
        RunningStatus.STOPPED: hello.explorers_stopped,
    }
    if sum(counts.values()) > methods.MAX_EXPLORERS:
        raise ProtocolViolationError(f"{sum(counts.values())} explorers of one member; at most {methods.MAX_EXPLORERS}")
    for status, count in counts.items():
        for _ in range(count):
            await synchronizer.set_explorer_status(status, member=member)


_services: WeakKeyDictionary[Peer, SynchronizerService] = WeakKeyDictionary()


def serve_on(peer: Peer, synchronizer: Synchronizer) -> None:
    """Serves a synchronizer on a peer, beside those that are served there.

    Raises:
        ConfigError: The peer is running and serves none yet, or serves one in this namespace.
    """
    service = _services.get(peer)
    if service is None:
        service = SynchronizerService()
        peer.add_service(service)
        _services[peer] = service
    service.add(synchronizer)


def served_on(peer: Peer) -> dict[str, Synchronizer]:
    """Returns the synchronizers that are served on a peer, by namespace."""
    service = _services.get(peer)
    return {} if service is None else service.synchronizers
