"""Requests and replies: what they say, the methods on which they travel, and the channels."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

import msgspec

from averaging.common import is_loopback, parse_address
from averaging.errors import ConfigError, ProtocolViolationError
from averaging.rpc import Credentials, RpcChannel, RpcMethod
from averaging.security import local_credentials
from averaging.wire.workers_pb2 import Attach, Attached, FetchDataRequest, NamedTensor, Reply, Request

T = TypeVar("T")

MAX_HOOKS = 64
"""Maximum number of hooks before or after one request."""

MESSAGE_BYTES = 16 << 20
"""Maximum bytes of a message: a plan for tens of thousands of samples."""

PAYLOAD_BYTES = MESSAGE_BYTES - (2 << 20)
"""Maximum bytes of a request or reply; the rest of the message is for ids of replies that have arrived."""

Samples: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=1 << 20)]
"""Ids of samples."""

Names: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=256)]
"""Names of tensors."""


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
    SYN = "syn"  # None, when the worker holds the request whose `syn_reply_id` is the id of this one
    ACK = "ack"  # None: the request whose `ack_reply_id` is the id of this one is held no longer


BLOCKING = frozenset({Handle.INITIALIZE, Handle.GENERATE, Handle.INFERENCE, Handle.TRAIN_STEP, Handle.EMPTY})
"""Requests that wait for a flush. The others run at once."""


@dataclass(slots=True)
class Payload:
    """One request or reply. The hooks before and after a request run in order."""

    handler: str  # name of a worker, or of a model's shard such as `actor@dp0-tp0-pp0`
    handle_name: str  # a `Handle`
    request_id: str  # a reply has that of its request
    syn_reply_id: str = ""  # of the request `syn` that belongs to it; both are needed without `no_syn`
    ack_reply_id: str = ""  # of the request `ack`
    no_syn: bool = True  # if not, the worker holds the request until `ack`
    send_time: float = 0.0  # seconds since the epoch, of the clock of the master
    data: Any = None  # a dataclass, or what msgpack can encode; what was received is plain until `convert`
    pre_hooks: list[str] = field(default_factory=list)  # names
    pre_hook_data: list[Any] = field(default_factory=list)
    post_hooks: list[str] = field(default_factory=list)
    post_hook_data: list[Any] = field(default_factory=list)
    error: str = ""  # why the request has failed, in a reply

    def reply(self, data: Any = None, error: str = "") -> Payload:
        return Payload(self.handler, self.handle_name, self.request_id, data=data, error=error)


@dataclass(frozen=True, slots=True)
class Count:
    """Data of `fetch`: the maximum number of samples."""

    count: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Samples that were loaded, without those that the worker already held."""

    ids: Samples
    seqlens: list[int]  # first dimension of the first tensor of each sample
    keys: Names
    dp_rank: int  # of the worker, among those that hold a part of the dataset


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """What a worker holds of the dataset."""

    n_datasets: int  # 1, or 0 if the worker has no part
    dataset_size: int  # samples in its part


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a worker holds when a master attaches."""

    versions: dict[str, int]  # train steps of each model that is initialized
    samples: dict[str, list[str]]  # names of the tensors of each sample
    lengths: dict[str, int]  # of each sample


@dataclass(frozen=True, slots=True)
class Ids:
    """Data of `clear_data_cache`: samples. Data of `flush`: the blocking requests that were sent before it."""

    ids: Samples


@dataclass(frozen=True, slots=True)
class Compute:
    """What a call computes."""

    call: str
    model: str
    mesh: int = 1  # number of workers of the model
    step: int = 0  # from 1
    ids: Samples = field(default_factory=list)  # of this data-parallel rank
    inputs: Names = field(default_factory=list)  # tensors that the call gets
    outputs: Names = field(default_factory=list)  # tensors that it must return


@dataclass(frozen=True, slots=True)
class Computed:
    """What a call has computed."""

    keys: Names  # of the tensors that this worker stores for the samples; empty unless it is a DP head
    stats: dict[str, float]  # of the call and of its hooks, the latter as `evaluate/loss`


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan that moves tensors of samples between workers; a hook `data_transfer` has a list of them.

    In a `bcast` root sends the same samples to all dsts, in a `scatter` to each dst its own. In a `gather` root gets
    samples from each of srcs.
    """

    comm_type: str
    root: str  # a worker
    srcs: list[str]  # the senders; only root unless this is a gather
    dsts: list[str]  # the receivers; only root if this is a gather
    ids: list[Samples]  # of each of srcs in a gather, of each of dsts in a scatter; one list for all in a bcast
    keys: Names

    def sources_of(self, worker: str) -> list[tuple[str, Samples]]:
        """The samples that a worker receives, by their senders."""
        if worker not in self.dsts:
            return []
        if self.comm_type == "gather":
            return list(zip(self.srcs, self.ids, strict=True))
        return [(self.root, self.ids[0 if self.comm_type == "bcast" else self.dsts.index(worker)])]


@dataclass(frozen=True, slots=True)
class Realloc:
    """Data of a hook `param_realloc`: target = eta · source + (1 - eta) · target.

    The source stores a copy of its parameters like the tensors of a sample, and the target fetches it from there. If
    the source waited for its targets instead, two workers that are source and target of each other would never end.
    """

    transfer: str  # the name of that sample, until the master clears it
    source: str  # model that publishes its parameters
    target: str  # model that takes them
    eta: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    origin: str = ""  # worker from which the target takes them; empty in the request to the source


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(raw: bytes, kind: type[T]) -> T:
    """Decodes what `pack` encoded. Raises a ProtocolViolationError if it is no such value."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolationError(f"a message with data that is no {kind.__name__}: {error}") from None


def convert(data: object, kind: type[T]) -> T:
    """Makes the data of a payload a dataclass of this module, or raises a ProtocolViolationError."""
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

ATTACH = RpcMethod(_PATH + "attach", Attach, Attached, replies_stream=True, max_request_bytes=MESSAGE_BYTES)
REQUEST = RpcMethod(_PATH + "request", Request, Reply, max_request_bytes=MESSAGE_BYTES)
FETCH_DATA = RpcMethod(
    _PATH + "fetch_data", FetchDataRequest, NamedTensor, replies_stream=True, max_request_bytes=MESSAGE_BYTES
)

SERVICE = "workers"
"""Name of the token that workers and masters share if they are given no credentials, see `local_credentials`."""


class Channel(Protocol):
    """A connection to one worker, such as an `RpcChannel`."""

    async def call(self, method: RpcMethod[Any, Any], request: Any, timeout: float) -> Any: ...

    def stream(self, method: RpcMethod[Any, Any], request: Any) -> AsyncGenerator[Any, None]: ...

    async def close(self) -> None: ...


Connect: TypeAlias = Callable[[str], Channel]
"""Returns a channel to an endpoint."""


def connector(credentials: Credentials | None, *, named_by_master: bool = False) -> Connect:
    """Returns what opens channels to workers; without credentials those on loopback get this user's token.

    Addresses that a master has named are not dialled if no worker can be there.
    """

    def connect(endpoint: str) -> Channel:
        own = credentials
        if own is None and is_loopback(parse_address(endpoint)[0]):
            own = local_credentials(SERVICE)
        return RpcChannel(endpoint, credentials=own, named_by_peer=named_by_master, loopback=True)

    return connect
