"""The methods of `averaging.synchronizer.v1.Synchronizer`: one table, from which both of its ends come.

`SynchronizerService` answers a method with the method of `Synchronizer` that has its name, and `RemoteSynchronizer`
calls it under that name. The fields of a request are the arguments, and the first field of a reply is the result. The
second table has the commands, which a synchronizer gives to the modules of its sessions.

The weights of one version are a stream of messages: names and shapes, bytes, and a digest of all. A reader gets all
tensors of one version or an error. Nothing is allocated before the layout has been checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from averaging.common import format_address, parse_address
from averaging.errors import ConfigError, ProtocolViolationError, TensorError
from averaging.rl.synchronizer.coordination import RunningStatus
from averaging.rpc import MessageType, RpcMethod, check_named
from averaging.tensors import (
    DTYPES,
    TensorInfo,
    check_tensors,
    copy_to_cpu,
    dtype_name,
    nbytes_of,
    objection_to,
    offload,
    pieces_of,
    view_memory,
)
from averaging.wire import synchronizer_pb2 as wire

StateDict: TypeAlias = "dict[str, torch.Tensor]"
ModelState: TypeAlias = "StateDict | str | None"  # tensors by name, a path, or None if the weights are elsewhere
Meta: TypeAlias = list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of each tensor

PIECE_BYTES = 1 << 18  # 8 s on a link of 256 kbit/s, so that the messages of a session are not held up
MAX_PART_BYTES = 16 << 20  # of a message. The first one describes all tensors
MAX_NAME, MAX_PATH = 1024, 4096


def copy_of(state: object) -> ModelState:
    """Returns a copy on the CPU that its owner no longer changes."""
    if state is None or isinstance(state, str):
        return state
    if not isinstance(state, Mapping):
        raise TensorError(f"a state must be a dict of tensors, a path or None, not {type(state).__name__}")
    copied: StateDict = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TensorError(f"{name!r} of the state is {type(tensor).__name__}; give tensors by name")
        if objection := objection_to(tensor, DTYPES, "sent"):
            raise TensorError(f"tensor {name!r} {objection}; give another one")
        copied[name] = copy_to_cpu(tensor)
    return copied


async def copy_in_thread(state: object) -> ModelState:
    values = state.values() if isinstance(state, Mapping) else ()
    nbytes = sum(each.numel() * each.element_size() for each in values if isinstance(each, torch.Tensor))
    return await offload(lambda: copy_of(state), nbytes)


def meta_of(state: StateDict) -> Meta:
    return [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()]


def tensors_of(meta: Meta) -> list[wire.Tensor]:
    return [wire.Tensor(name=name, dtype=dtype, shape=shape) for name, dtype, shape in meta]


def meta_from(tensors: Sequence[wire.Tensor]) -> Meta:
    infos = [TensorInfo(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    check_tensors(infos, DTYPES)
    if wrong := [len(info.name) for info in infos if not 0 < len(info.name) <= MAX_NAME]:
        raise ProtocolViolationError(f"a tensor with a name of {wrong[0]} characters")
    return [(info.name, info.dtype, info.shape) for info in infos]


def parts_of(state: ModelState, version: int = 0) -> Iterator[wire.StatePart]:
    """Yields the messages of a state, which nobody writes to meanwhile: the head, the bytes in order, the digest."""
    head = wire.StateHead(version=version)
    if isinstance(state, str):
        head.path = state
    if not isinstance(state, dict):
        yield wire.StatePart(head=head)
        return
    meta = meta_of(state)
    head.has_tensors = True
    head.tensors.extend(tensors_of(meta))
    yield wire.StatePart(head=head)
    digest = _digest_of(meta)
    for tensor in state.values():
        for piece in pieces_of(view_memory(tensor), PIECE_BYTES) if tensor.numel() else ():
            digest.update(piece)
            yield wire.StatePart(data=bytes(piece))
    yield wire.StatePart(digest=digest.digest())


class TensorAssembler:
    """Puts the messages of one state of at most `max_bytes` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head: wire.StateHead | None = None
        self._state: StateDict = {}
        self._room: deque[memoryview] = deque()  # the bytes of its tensors that have not arrived
        self.finished = False  # whether the state is complete and its digest is right
        self.nbytes = 0  # of all tensors, once the head has come

    def add(self, part: wire.StatePart) -> None:
        if self.finished:
            raise ProtocolViolationError("a state with a message after its end")
        if self._head is None:
            self._begin(part)
        elif part.data:
            self._add(part.data)
        elif self._room:
            raise ProtocolViolationError("a state with fewer bytes than its tensors have")
        elif part.digest != self._digest.digest():
            raise ProtocolViolationError("a state whose digest is not that of its bytes")
        else:
            self.finished = True

    def result(self) -> tuple[ModelState, int]:
        """Returns the state and the version that its sender gave it."""
        if self._head is None or not self.finished:
            raise ProtocolViolationError("a state that ends before its digest")
        state = self._state if self._head.has_tensors else self._head.path or None
        return state, self._head.version

    def _begin(self, part: wire.StatePart) -> None:
        if not part.HasField("head"):
            raise ProtocolViolationError("a state without a head")
        head, meta = part.head, meta_from(part.head.tensors)
        self.nbytes, most = nbytes_of(TensorInfo(*entry) for entry in meta), self._max_bytes
        if self.nbytes > most:
            text = f"a state of {self.nbytes} bytes; at most {most} are accepted (`max_state_bytes`)"
            raise ProtocolViolationError(text)
        if len(head.path) > MAX_PATH or (head.has_tensors and head.path) or (meta and not head.has_tensors):
            raise ProtocolViolationError("a state with an invalid path")
        self._head, self._digest, self.finished = head, _digest_of(meta), not head.has_tensors
        # Memory is taken from the system when it is written to, so a head alone takes none.
        self._state = {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in meta}
        self._room.extend(view_memory(tensor) for tensor in self._state.values() if tensor.numel())

    def _add(self, data: bytes) -> None:
        room = self._room.popleft() if self._room else memoryview(b"")
        if len(data) > len(room):
            raise ProtocolViolationError("a state with more bytes than its tensors have")
        self._digest.update(data)
        room[: len(data)] = data
        if len(data) < len(room):
            self._room.appendleft(room[len(data) :])


def _digest_of(meta: Meta) -> hashlib._Hash:
    digest = hashlib.sha256()
    for name, dtype, shape in meta:
        digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\n".encode())
    return digest


Result = TypeVar("Result")
Message = TypeVar("Message", wire.FromModule, wire.ToModule)

META = "state_dict_meta"  # the argument that travels as the field `meta`, or as a message `Meta` of its own
ALIVE_SECONDS = 1.0  # interval of the messages with which both ends of a session say that they are alive

_TO_WIRE: Mapping[RunningStatus, int] = {status: wire.RunningStatus.Value(status.name) for status in RunningStatus}
_FROM_WIRE = {number: status for status, number in _TO_WIRE.items()}


@dataclass(frozen=True)
class SynchronizerMethod(Generic[Result]):
    """One method of the service."""

    rpc: RpcMethod[Any, Any]
    session: bool = False  # whether the caller needs an open session
    member: bool = False  # whether the method takes the member that has the caller's session; None without a session
    waits: bool = False  # whether the answer may take as long as the session lives, and not only `timeout`
    leaves_out: str = ""  # a field of the request that is no argument, besides `namespace` and `session`
    late: Any = None  # the reply after a `WaitTimeoutError`

    @property
    def name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.rpc.name).lower()

    @property
    def argument_names(self) -> list[str]:
        names = [field.name for field in self.rpc.request.FromString(b"").DESCRIPTOR.fields]
        names = [name for name in names if name not in ("namespace", "session", self.leaves_out)]
        return [META if name == "meta" else name for name in names]

    def request(self, namespace: str, session: bytes, arguments: Mapping[str, Any]) -> Any:
        request = self.rpc.request.FromString(b"")
        request.namespace = namespace
        if self.session or self.member:
            request.session = session
        return filled(request, arguments)

    def reply(self, result: Any) -> Any:
        reply = self.rpc.reply.FromString(b"")
        return filled(reply, result if isinstance(result, dict) else {_first_field(reply): result})

    def result(self, reply: Any) -> Result:
        field = _first_field(reply)
        value: Any = value_of(reply, field) if field else None
        return None if value == "" else value  # type: ignore[return-value]


def _rpc(name: str, request: MessageType[Any], reply: MessageType[Any], **options: Any) -> RpcMethod[Any, Any]:
    return RpcMethod(f"/averaging.synchronizer.v1.Synchronizer/{name}", request, reply, **options)


_LARGE_REQUEST, _LARGE_REPLY = {"max_request_bytes": MAX_PART_BYTES}, {"max_reply_bytes": MAX_PART_BYTES}
_BOTH_STREAM = {"requests_stream": True, "replies_stream": True}

# The streams have a handler each in the service. All other calls have the same handler.
ATTEND = SynchronizerMethod[None](
    _rpc("Attend", wire.FromModule, wire.ToModule, **_BOTH_STREAM, **_LARGE_REQUEST, **_LARGE_REPLY)
)
SET_MODEL_STATE_DICT = SynchronizerMethod[int](
    _rpc("SetModelStateDict", wire.StatePart, wire.Version, requests_stream=True, **_LARGE_REQUEST), waits=True
)
GET_MODEL_STATE_DICT = SynchronizerMethod[None](
    _rpc("GetModelStateDict", wire.Request, wire.StatePart, replies_stream=True, **_LARGE_REPLY)
)
GET_STATUS = SynchronizerMethod[dict[str, Any]](_rpc("GetStatus", wire.Request, wire.Status))
SET_TRAINER_STATUS = SynchronizerMethod[None](
    _rpc("SetTrainerStatus", wire.StatusRequest, wire.Done), session=True, member=True, leaves_out="old_status"
)
TRAINER_REQUIRES_WEIGHT_SYNC = SynchronizerMethod[bool | None](
    _rpc("TrainerRequiresWeightSync", wire.Request, wire.TrainerReply)
)
SET_EXPLORER_STATUS = SynchronizerMethod[None](
    _rpc("SetExplorerStatus", wire.StatusRequest, wire.Done), session=True, member=True
)
EXPLORER_REQUIRES_SYNC = SynchronizerMethod[bool](_rpc("ExplorerRequiresSync", wire.Request, wire.ExplorerReply))
GET_STATE_DICT_META = SynchronizerMethod[Meta | None](_rpc("GetStateDictMeta", wire.Request, wire.Meta, **_LARGE_REPLY))
WAIT_NEW_MODEL_STATE_DICT = SynchronizerMethod[int | None](
    _rpc("WaitNewModelStateDict", wire.WaitRequest, wire.WaitReply),
    member=True,
    waits=True,
    late=wire.WaitReply(timed_out=True),
)
NOTIFY_NO_NEW_MODEL_STATE_DICT = SynchronizerMethod[None](
    _rpc("NotifyNoNewModelStateDict", wire.Request, wire.Done), session=True
)
GET_LATEST_MODEL_VERSION = SynchronizerMethod[int](_rpc("GetLatestModelVersion", wire.Request, wire.Version))
GET_LATEST_MODEL_PATH = SynchronizerMethod[str | None](_rpc("GetLatestModelPath", wire.PathRequest, wire.Path))
SETUP_WEIGHT_SYNC_GROUP = SynchronizerMethod[None](
    _rpc("SetupWeightSyncGroup", wire.GroupRequest, wire.Done, **_LARGE_REQUEST), session=True, waits=True
)
COORDINATE_WEIGHT_SYNC_SETUP = SynchronizerMethod[None](
    _rpc("CoordinateWeightSyncSetup", wire.TimeoutRequest, wire.Done), session=True, member=True, waits=True
)
COORDINATE_WEIGHT_SYNC_TEARDOWN = SynchronizerMethod[None](
    _rpc("CoordinateWeightSyncTeardown", wire.Request, wire.Done), session=True, waits=True
)
READY_TO_NCCL_SYNC = SynchronizerMethod[int | None](
    _rpc("ReadyToNcclSync", wire.ReadyRequest, wire.WaitReply), session=True, member=True, waits=True
)

# The arguments of each command in the order of the module's method, and its results as fields of a `ModuleReply`.
COMMANDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "get_weight_sync_info": ((), ("master_address", "master_port", META)),
    "setup_weight_sync_group": (("master_address", "master_port", "world_size", "group_name", "timeout", "rank"), ()),
    "set_state_dict_meta": ((META,), ()),
    "teardown_weight_sync_group": ((), ()),
}
SENDER = ("get_weight_sync_info", "setup_weight_sync_group", "teardown_weight_sync_group")
RECEIVER = ("set_state_dict_meta", "setup_weight_sync_group", "teardown_weight_sync_group")


async def next_message(messages: asyncio.Queue[Message], empty: type[Message]) -> Message:
    try:
        async with asyncio.timeout(ALIVE_SECONDS):
            return await messages.get()
    except TimeoutError:
        return empty()


def filled(message: Any, values: Mapping[str, Any]) -> Any:
    """Writes values into the fields of a message, and returns it. None leaves a field out."""
    for name, value in values.items():
        if name == META and value is not None:
            meta = message if isinstance(message, wire.Meta) else message.meta
            meta.MergeFrom(wire.Meta(has_tensors=True, tensors=tensors_of(value)))
        elif value is not None:
            setattr(message, name, _TO_WIRE[value] if isinstance(value, RunningStatus) else value)
    return message


def value_of(message: Any, name: str) -> Any:
    if name == META:
        if isinstance(message, wire.Meta):
            return meta_from(message.tensors) if message.has_tensors else None
        return meta_from(message.meta.tensors) if message.HasField("meta") else None
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.has_presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    return status_from(value) if field.enum_type is not None else value


async def values_of(message: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the values of fields by name. An address, which another process names here, is checked.

    Loopback and link-local IPv6 are allowed: all members may be on one machine or link, and torch's store sends nothing
    that others choose.
    """
    values = {name: value_of(message, name) for name in names}
    if "master_address" in values:
        host, port = values["master_address"], values["master_port"]
        endpoint = format_address(host, port)
        try:
            parse_address(endpoint)
            await check_named(endpoint, loopback=True, link_local=True)
        except (ConfigError, ProtocolViolationError) as error:
            raise ProtocolViolationError(f"the address of a weight sync group: {error}") from None
        if not port:
            raise ProtocolViolationError("the address of a weight sync group has port 0")
    return values


def status_from(number: int) -> RunningStatus | None:
    if number and number not in _FROM_WIRE:
        raise ProtocolViolationError(f"status {number}; give RUNNING, REQUIRE_SYNC or STOPPED")
    return _FROM_WIRE.get(number)


def _first_field(reply: Any) -> str:
    fields = reply.DESCRIPTOR.fields
    return META if isinstance(reply, wire.Meta) else fields[0].name if fields else ""
