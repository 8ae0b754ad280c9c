"""The gRPC methods of a model worker, and the channels on which they are called."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, TypeAlias

from averaging.common import is_loopback, parse_address
from averaging.rpc import Credentials, RpcChannel, RpcMethod
from averaging.security import local_credentials
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
