"""Requests and replies: what they say, the messages and methods on which they travel, and the channels."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

import msgspec

from averaging.common import is_loopback, parse_address
from averaging.common import unpack as unpack_safely
from averaging.errors import ConfigError, ProtocolViolationError
from averaging.rpc import Credentials, RpcChannel, RpcMethod
from averaging.security import local_credentials
from averaging.wire import workers_pb2
from averaging.wire.workers_pb2 import (
    FetchDataRequest,
    FetchParametersRequest,
    MasterMessage,
    NamedTensor,
    WorkerMessage,
)

T = TypeVar("T")

MAX_ITEMS = 1 << 21
"""Maximum number of items in the plain data of one reply."""

MAX_SAMPLES = 1 << 20
"""Maximum number of samples in one request or reply."""

MAX_NAMES = 256
"""Maximum number of names of tensors in one request or reply."""

Samples: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=MAX_SAMPLES)]
"""Ids of samples."""

Names: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=MAX_NAMES)]
"""Names of tensors. Work on samples with tensors is proportional to the product of both numbers."""


class Handle(StrEnum):
    """The kinds of requests."""

    FETCH = "fetch"
    """Loads samples of the worker's part of the dataset. The reply is a `Fetched`."""
    SPEC = "spec"
    """The reply is a `DatasetSpec`."""
    MODEL_CONFIG = "model_config"
    """The reply is the mapping that the backend returns."""
    CLEAR_DATA_CACHE = "clear_data_cache"
    """Forgets samples. There is no reply."""
    FLUSH = "flush"
    """Says that all blocking requests of a level have been sent. The reply is their number."""
    INITIALIZE = "initialize"
    """Prepares a model. The reply is the version of the model."""
    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    """The reply of these three is a `Computed`."""
    EMPTY = "empty"
    """Runs hooks only: the side of a `param_realloc` that makes no call itself. The reply is a `Computed`."""
    SYN = "syn"
    """In a reply: the request has arrived, and waits for ack."""
    ACK = "ack"
    """All workers have received the request. Its data is whether it is carried out."""


BLOCKING = frozenset({Handle.INITIALIZE, Handle.GENERATE, Handle.INFERENCE, Handle.TRAIN_STEP, Handle.EMPTY})
"""Requests that wait for a flush. The others run at once."""

NO_REPLY = frozenset({Handle.CLEAR_DATA_CACHE, Handle.ACK})
"""Requests without a reply."""


@dataclass(slots=True)
class Payload:
    """One request or reply.

    Attributes:
        handler: Name of a worker, or of a model's shard such as `actor@dp0-tp0-pp0`.
        handle_name: A `Handle`.
        request_id: Id of the request, which its reply has, too.
        syn_reply_id: Id of the reply which says that the request has arrived; empty without syn and ack.
        ack_reply_id: Id of the message that lets the worker begin.
        no_syn: Whether the worker carries the request out without syn and ack.
        send_time: Monotonic seconds of the sender.
        data: A dataclass of this module, or what msgpack can encode. At a worker it stays packed until `convert`, which
            knows what it must be.
        pre_hooks: Names of the hooks before the request, in order.
        pre_hook_data: Their data.
        post_hooks: Names of the hooks after the request, in order.
        post_hook_data: Their data.
        error: Reason why the request failed, in a reply.
        unreachable: Worker from which data could not be fetched, in a reply with an error.
    """

    handler: str
    handle_name: str
    request_id: str
    syn_reply_id: str = ""
    ack_reply_id: str = ""
    no_syn: bool = True
    send_time: float = 0.0
    data: Any = None
    pre_hooks: list[str] = field(default_factory=list)
    pre_hook_data: list[Any] = field(default_factory=list)
    post_hooks: list[str] = field(default_factory=list)
    post_hook_data: list[Any] = field(default_factory=list)
    error: str = ""
    unreachable: str = ""

    def reply(self, data: Any = None, error: str = "") -> Payload:
        """The reply to this request."""
        return Payload(self.handler, self.handle_name, self.request_id, data=data, error=error)


@dataclass(frozen=True, slots=True)
class SampleQuery:
    """Asks for samples.

    Attributes:
        count: Maximum number of samples.
        ids: Samples to load instead if not empty, also those of another worker's part.
    """

    count: int = 0
    ids: Samples = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Samples that were loaded. Samples that the worker already held are left out.

    Attributes:
        ids: Ids of the samples.
        seqlens: Length of each: the first dimension of its first tensor.
        keys: Names of their tensors.
        dp_rank: Rank of the worker among those that hold a part of the dataset.
        epoch: Passes over the part that are complete.
    """

    ids: Samples
    seqlens: list[int]
    keys: Names
    dp_rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """What a worker holds of the dataset.

    Attributes:
        n_datasets: 1, or 0 if the worker has no part.
        dataset_size: Samples in its part.
    """

    n_datasets: int
    dataset_size: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a worker holds.

    Attributes:
        versions: Train steps of each model that is initialized.
        samples: Names of the tensors of each sample.
        lengths: Length of each sample.
    """

    versions: dict[str, int]
    samples: dict[str, list[str]]
    lengths: dict[str, int]


@dataclass(frozen=True, slots=True)
class Clear:
    """Forgets all tensors of these samples."""

    ids: Samples


@dataclass(frozen=True, slots=True)
class Compute:
    """What a call computes.

    Attributes:
        call: Name of the call.
        model: Name of the model.
        mesh: Number of workers of the model.
        step: Number of the step, from 1.
        ids: The samples of this data-parallel rank.
        inputs: Names of the tensors that the call gets.
        outputs: Names of the tensors that it must return.
    """

    call: str
    model: str
    mesh: int = 1
    step: int = 0
    ids: Samples = field(default_factory=list)
    inputs: Names = field(default_factory=list)
    outputs: Names = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a call has computed.

    Attributes:
        keys: Names of the tensors that this worker stores for the samples; empty unless it is a DP head.
        stats: Numbers of the call and of its hooks, the latter as `evaluate/loss`.
        version: Train steps of the model so far.
        seconds: Duration of the call without hooks.
    """

    keys: Names
    stats: dict[str, float]
    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan that moves tensors of samples between workers.

    Attributes:
        comm_type: `bcast`: root sends the same samples to all dsts. `scatter`: root sends each dst its own samples.
            `gather`: root gets samples from each of srcs.
        root: Name of a worker.
        srcs: The senders; only root unless this is a gather.
        dsts: The receivers; only root if this is a gather.
        ids: Samples of each of srcs in a gather, of each of dsts in a scatter; one list for all in a bcast.
        keys: Names of the tensors.
    """

    comm_type: str
    root: str
    srcs: list[str]
    dsts: list[str]
    ids: list[Samples]
    keys: Names

    def sources_of(self, worker: str) -> list[tuple[str, Samples]]:
        """The samples that a worker receives, by their senders."""
        if worker not in self.dsts:
            return []
        if self.comm_type == "gather":
            return list(zip(self.srcs, self.ids, strict=True))
        return [(self.root, self.ids[0 if self.comm_type == "bcast" else self.dsts.index(worker)])]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Data of a hook `data_transfer`: the steps in which the worker receives."""

    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Realloc:
    """Data of a hook `param_realloc`: target = eta · source + (1 - eta) · target.

    Attributes:
        transfer: Name of this transfer, equal on both sides.
        source: Name of the model that publishes its parameters.
        target: Name of the model that takes them.
        eta: Share of the source, from 0 to 1.
        origin: Worker from which the target takes the parameters; empty in the request to the source.
        takers: Number of workers that take them, in the request to the source.
    """

    transfer: str
    source: str
    target: str
    eta: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
    origin: str = ""
    takers: int = 0


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Data of a hook `save`: where the backend saves the model."""

    path: str


def pack(value: object) -> bytes:
    """Encodes a dataclass of this module, or plain data."""
    return msgspec.msgpack.encode(value)


def unpack(raw: bytes, kind: type[T]) -> T:
    """Decodes what `pack` encoded. Time and memory are proportional to the number of bytes.

    Args:
        raw: Untrusted bytes.
        kind: A dataclass; or `object` for plain data, of at most `MAX_ITEMS` items.

    Raises:
        ProtocolViolationError: It is no such value.
    """
    try:
        return unpack_safely(raw, MAX_ITEMS) if kind is object else msgspec.msgpack.decode(raw, type=kind)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolationError(f"a message with data that is no {kind.__name__}: {error}") from None


def convert(value: object, kind: type[T]) -> T:
    """Converts the data of a request or reply, packed or plain, to a dataclass of this module.

    Raises:
        ProtocolViolationError: It is no such value.
    """
    if isinstance(value, bytes):
        return unpack(value, kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ProtocolViolationError(f"a message with data that is no {kind.__name__}: {error}") from None


SERVICE = "workers"
"""Name of the token that workers and masters share if they are given no credentials, see `local_credentials`."""

MESSAGE_BYTES = 16 << 20
"""Maximum bytes of a message on the stream: a plan for tens of thousands of samples."""

BATCH_BYTES = 1 << 20
"""Requests or replies that wait are sent in one message until it has this size."""

REQUEST_REPLY_STREAM = RpcMethod(
    "/averaging.workers.v1.Workers/request_reply_stream",
    MasterMessage,
    WorkerMessage,
    requests_stream=True,
    replies_stream=True,
    max_request_bytes=MESSAGE_BYTES,
    max_reply_bytes=MESSAGE_BYTES,
)
FETCH_DATA = RpcMethod(
    "/averaging.workers.v1.Workers/fetch_data",
    FetchDataRequest,
    NamedTensor,
    replies_stream=True,
    max_request_bytes=1 << 20,
    max_reply_bytes=MESSAGE_BYTES,
)
FETCH_PARAMETERS = RpcMethod(
    "/averaging.workers.v1.Workers/fetch_parameters",
    FetchParametersRequest,
    NamedTensor,
    replies_stream=True,
    max_reply_bytes=MESSAGE_BYTES,
)

PAYLOAD_BYTES = MESSAGE_BYTES - 2 * BATCH_BYTES
"""Maximum size of a request or reply; others that are smaller may be in the same message."""

MAX_HOOKS = 64
"""Maximum number of hooks before or after one request."""


_PACKED = ("data", "pre_hook_data", "post_hook_data")
_PLAIN = [field.name for field in fields(Payload) if field.name not in _PACKED]


def encode_payload(payload: Payload) -> workers_pb2.Payload:
    """The message of a request or reply.

    Raises:
        ConfigError: It cannot be sent, because of its data or its size.
    """
    try:
        message = workers_pb2.Payload(
            **{name: getattr(payload, name) for name in _PLAIN},
            data=pack(payload.data),
            pre_hook_data=map(pack, payload.pre_hook_data),
            post_hook_data=map(pack, payload.post_hook_data),
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"it cannot be sent: {error}") from None
    if (nbytes := message.ByteSize()) > PAYLOAD_BYTES:
        raise ConfigError(f"it has {nbytes} bytes, and {PAYLOAD_BYTES} can be sent; give less at once")
    return message


def encode_reply(reply: Payload) -> workers_pb2.Payload:
    """The message of a reply; of a reply that cannot be sent, an error that says so."""
    try:
        return encode_payload(reply)
    except ConfigError as error:
        return encode_payload(reply.reply(error=f"its reply is lost: {error}"))


def decode_payload(message: workers_pb2.Payload) -> Payload:
    """The request or reply in a message; its data is packed, see `payload.convert`.

    Raises:
        ProtocolViolationError: The numbers of hooks and of their data differ.
    """
    payload = Payload(**{name: getattr(message, name) for name in (*_PLAIN, *_PACKED)})
    for when in ("pre_hook", "post_hook"):
        hooks, data = list(getattr(message, f"{when}s")), list(getattr(message, f"{when}_data"))
        if len(hooks) != len(data) or len(hooks) > MAX_HOOKS:
            raise ProtocolViolationError(f"a request with {len(hooks)} hooks and data for {len(data)}")
        setattr(payload, f"{when}s", hooks)
        setattr(payload, f"{when}_data", data)
    return payload


class Channel(Protocol):
    """A connection to one worker, such as an `RpcChannel`."""

    def stream(self, method: RpcMethod[Any, Any], request: Any | AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Calls a method with many replies."""
        ...

    async def close(self) -> None:
        """Closes the connection."""
        ...


Connect: TypeAlias = Callable[[str], Channel]
"""Returns a channel to an endpoint."""


def connector(credentials: Credentials | None, *, named_by_master: bool = False) -> Connect:
    """Returns what opens channels to workers.

    Args:
        credentials: Certificates and tokens. Without them, workers on loopback get the token of this user's processes.
        named_by_master: Whether a master has named the endpoints. Addresses at which no worker can be are refused then.
    """

    def connect(endpoint: str) -> Channel:
        own = credentials
        if own is None and is_loopback(parse_address(endpoint)[0]):
            own = local_credentials(SERVICE)
        return RpcChannel(endpoint, credentials=own, named_by_peer=named_by_master, loopback=True)

    return connect


class WorkerChannels:
    """The channels to the other workers, each opened when it is first used."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._open: dict[str, Channel] = {}

    def __getitem__(self, endpoint: str) -> Channel:
        if endpoint not in self._open:
            self._open[endpoint] = self._connect(endpoint)
        return self._open[endpoint]

    async def close(self) -> None:
        """Closes all channels."""
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()
