"""Serves and calls gRPC methods of packages above the core.

```python
GET = RpcMethod("/averaging.register.v1.Register/Get", register_pb2.GetRequest, register_pb2.Entry)

class Register:
    def rpc_handlers(self):
        return [GET.answers(self.get)]

    async def get(self, request):
        return register_pb2.Entry(value=b"…")

async with RpcServer("127.0.0.1:0", [Register()]) as server, RpcChannel(server.endpoint) as channel:
    entry = await channel.call(GET, register_pb2.GetRequest(key="a"), timeout=5)
```

`Peer(…, services=[Register()])` serves the same on the peer's own port.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from averaging.common import EventLoopThread as EventLoopThread, parse_address, zone_of
from averaging.config import FilePath, TLSFiles
from averaging.errors import ClosedError
from averaging.security import Credentials as Credentials, read_tls, read_tokens
from averaging.tensors import check_size as check_size
from averaging.timing import Deadline as Deadline, Deadlines as Deadlines, FairTimeout as FairTimeout, Phase as Phase
from averaging.transport import (
    Message as Message,
    MessageType as MessageType,
    RpcCaller as RpcCaller,
    RpcHandler as RpcHandler,
    RpcMethod as RpcMethod,
    RpcService as RpcService,
    rpc_caller as rpc_caller,
)
from averaging.transport.grpc import (
    MAX_MESSAGE_BYTES,
    Dialling,
    GrpcTransport,
    RpcChannel as RpcChannel,
    TensorMessage as TensorMessage,
    TensorReader as TensorReader,
    tensor_messages as tensor_messages,
)


def read_credentials(
    *,
    tls: TLSFiles | None = None,
    token_file: FilePath | None = None,
    insecure: bool = False,
) -> Credentials:
    """Reads the files of TLS and tokens once, for servers and channels.

    Args:
        tls: Certificates; None for connections that are neither encrypted nor authenticated.
        token_file: File with tokens, one per line: the first is sent, all are accepted.
        insecure: Whether other machines may connect to a server without TLS.

    Raises:
        ConfigError: A file cannot be read, or does not match the others.
    """
    return Credentials(
        tls=None if tls is None else read_tls(tls.ca, tls.cert, tls.key, time.time),
        tokens=read_tokens(token_file),
        insecure=insecure,
    )


async def check_named(endpoint: str, *, loopback: bool, link_local: bool = False) -> None:
    """Checks that an endpoint which another peer has named may be dialled, as `RpcChannel(named_by_peer=True)` does.

    Args:
        endpoint: `host:port`.
        loopback: Whether it may be on this machine's loopback.
        link_local: Whether it may be a link-local IPv6 address, with the interface of this machine that leads there.

    Raises:
        ProtocolViolationError: No peer can be there.
    """
    zone = zone_of(parse_address(endpoint)[0]) if link_local else None
    await Dialling(loopback=loopback, zone=zone, remedy="").check(endpoint)


class RpcServer:
    """Serves methods on a port of its own, with health checks, reflection and channelz, like a peer.

    It is an async context manager, with the same tokens, TLS, limits and log of refused callers as a peer.

    Args:
        listen: `host:port` to listen on; port 0 takes a free one.
        services: The services.
        advertise: `host:port` at which other machines reach this server, if it differs from `listen`.
        credentials: Certificates and tokens, see `read_credentials`. Without them only this machine may connect.
        max_message_bytes: Maximum size of a message.
        grace: Seconds for calls in progress to end when the server closes.

    Raises:
        ConfigError: An argument is invalid.
        ListenError: On entering: the address is not available.
    """

    def __init__(
        self,
        listen: str,
        services: Sequence[RpcService],
        *,
        advertise: str | None = None,
        credentials: Credentials | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        grace: float = 1.0,
    ) -> None:
        self._grace = grace
        self._endpoint: str | None = None
        self._transport = GrpcTransport(
            listen,
            advertise,
            max_message_bytes=max_message_bytes,
            credentials=credentials,
            services=services,
        )

    @property
    def endpoint(self) -> str:
        """`host:port` at which this server is called."""
        if self._endpoint is None:
            raise ClosedError("this server is not running; use it inside `async with`")
        return self._endpoint

    async def __aenter__(self) -> Self:
        self._endpoint = await self._transport.bind()
        try:
            await self._transport.serve_services()
        except BaseException:
            await self._transport.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._endpoint = None
        await self._transport.close(self._grace)
