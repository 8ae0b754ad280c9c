"""The gRPC methods of a model worker, their messages, and the channels on which they are called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import fields
from typing import Any, Protocol, TypeAlias

from averaging.common import is_loopback, parse_address
from averaging.errors import ConfigError, ProtocolViolationError
from averaging.rl.workers.payload import Payload, pack
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
    """A connection to one worker; `RpcChannel` is one."""

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
