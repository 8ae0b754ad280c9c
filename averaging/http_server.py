"""An HTTP server for rooms above the core: uvicorn with limits, on a socket that is bound before. Needs uvicorn.

```python
with listening("127.0.0.1:8000") as listener:
    async with HttpServer(application, listener, connections=100, seconds=60.0) as server:
        await server.wait()
```
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from averaging.common import loopback_here, parse_address, parse_ip
from averaging.errors import ListenError

__all__ = ["HttpServer", "listening", "network_of"]

KEEP_ALIVE = 30
"""Seconds for which a connection without a request is kept open."""

_failures = logging.getLogger(__name__)
"""Failures of applications. Invalid requests are not logged, because strangers can send any number."""

_failures.setLevel(logging.ERROR)

TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 100\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
    b'{"status":"error","message":"this address has too many connections to the server; close some first"}'
)
"""The answer to a connection above the share of its address."""


class HttpServer:
    """Serves an ASGI application while it is entered with `async with`.

    Args:
        application: the ASGI application.
        listener: listening socket; the caller closes it afterwards.
        connections: maximum number of connections, of which one address may have half.
        seconds: a connection is aborted if for this time no request arrives, or the client does not read its reply.
        grace: seconds for unfinished requests when the server ends.
        tls: files for TLS, as uvicorn names them; empty for none.
    """

    def __init__(
        self,
        application: Any,
        listener: socket.socket,
        *,
        connections: int,
        seconds: float,
        grace: int = 10,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        limits = {"seconds": seconds, "share": max(1, connections // 2)}
        self._listener = listener
        self._config = uvicorn.Config(
            application,
            http=type("HTTPProtocol", (_LimitedConnection,), limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=connections + 1,  # uvicorn refuses the connection that reaches the limit
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=grace,
            **(tls or {}),
        )

    async def __aenter__(self) -> Self:
        self._config.load()
        server = uvicorn.Server(self._config)  # not serve(), which would install signal handlers
        server.lifespan = self._config.lifespan_class(self._config)
        async with AsyncExitStack() as stack:
            await server.startup([self._listener])
            stack.push_async_callback(server.shutdown, [self._listener])
            self._serving = asyncio.create_task(server.main_loop())
            stack.push_async_callback(self._end, server)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await asyncio.shield(self._serving)

    async def _end(self, server: uvicorn.Server) -> None:
        server.should_exit = True
        await asyncio.wait({self._serving})


def network_of(host: str | None) -> str:
    """Returns what one client can have many addresses of: the first half of an IPv6 address, or an IPv4 address."""
    host = host or ""
    address = parse_ip(host.partition("%")[0])
    if address is None or address.version == 4 or address.ipv4_mapped:
        return host
    return address.exploded[:19]


class _LimitedConnection(H11Protocol):
    """Aborts a connection without progress for `seconds`: no request arrives, or the client does not read its reply.

    A connection of an address that has `share` connections already is answered with 503 and closed at once.
    """

    seconds: float
    share: int
    _timer: asyncio.TimerHandle
    _last: tuple[object, int] = (None, 0)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = _failures
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.seconds, self._check_progress)
        self.network = network_of(self.client[0] if self.client else None)
        if sum(getattr(each, "network", "") == self.network for each in self.connections) > self.share:
            transport.write(TOO_MANY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _check_progress(self) -> None:
        unread = self.transport.get_write_buffer_size()
        unanswered = not getattr(self.cycle, "response_complete", True)
        last_request, last_unread = self._last
        if last_request is self.cycle and (unread >= last_unread if unread else not unanswered):
            self.transport.abort()
            return
        self._last = (self.cycle, unread)
        self._timer = self.loop.call_later(self.seconds, self._check_progress)


def listening(address: str) -> socket.socket:
    """Listens on the first address of a host that can be listened on.

    Args:
        address: HOST:PORT; port 0 takes a free one. `[::]` means IPv6 only.

    Raises:
        ListenError: the address is taken or unknown.
    """
    host, port = parse_address(loopback_here(address))
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {address}: {host} is unknown ({error}); give one of this machine's addresses"
        ) from None
    for family, _, _, _, where in found:
        # asyncio sets TCP_NODELAY only on sockets whose protocol is given.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(2048)
        except OSError as error:
            listener.close()
            failure = error
        else:
            return listener
    reason = "it has no address" if failure is None else failure.strerror or failure
    raise ListenError(
        f"cannot listen on {address}: {reason}; choose another port or port 0 for a free one, or end the program that "
        "listens there"
    )
