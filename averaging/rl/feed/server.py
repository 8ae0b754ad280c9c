"""`FeedServer`: the socket, the database and the HTTP server as one async context manager."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from socket import gethostname
from types import TracebackType
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from averaging.common import is_loopback, parse_address
from averaging.errors import ConfigError, ListenError
from averaging.rl.feed.database import Database, DatabaseThread
from averaging.rl.feed.routes import Event, Routes, ServerLimits, network_of
from averaging.rl.feed.run_state import RunState
from averaging.security import read_tls, read_tokens

KEEP_ALIVE = 30
"""Seconds for which a connection without a request is kept open."""

TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: 100\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
    b'{"status":"error","message":"this address has too many connections to the server; close some first"}'
)
"""The answer to a connection above the share of its address."""

GRACE = 10
"""Seconds for unfinished requests when the server ends."""


class FeedServer:
    """Serves a feed while it is entered with `async with`.

    Args:
        store: the SQLite file of the run, created if needed. ":memory:" keeps everything in memory.
        listen: "HOST:PORT"; port 0 takes a free port.
        token_file: tokens, one per line; each request except GET / must carry one of them.
        tls_ca, tls_cert, tls_key: files for TLS. Without `token_file` clients must show a certificate of `tls_ca`.
        insecure: whether other machines may connect without TLS.
        hosts: DNS names of this server. Without TLS and tokens, requests for other names with a dot are refused: web
            pages can send those.
        fsync: whether an acknowledged post also survives a power failure. It always survives the end of this process.
        limits: limits of memory, disk, time and connections.
        on_event: called with each event that `averaging feed --json` prints.

    Attributes:
        url: address of the server; empty before it is entered.

    Raises:
        ConfigError: an argument is invalid; on entry, the store cannot be used.
        ListenError: on entry, the address is taken or unknown.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        listen: str = "127.0.0.1:0",
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure: bool = False,
        hosts: Sequence[str] = (),
        fsync: bool = False,
        limits: ServerLimits | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._listen, self._limits = listen, limits or ServerLimits()
        self._tokens = read_tokens(token_file)
        self._tls = read_tls(tls_ca, tls_cert, tls_key, time.time)
        self._tls_files = {"ssl_ca_certs": tls_ca, "ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
        host, _ = parse_address(listen)
        self._hosts = None if self._tls or self._tokens else [*(name.lower() for name in hosts), host, gethostname()]
        if not (self._tls or insecure or is_loopback(host)):
            raise ConfigError(
                f"other machines can reach {listen}, and without TLS anybody in between can read and change requests; "
                "give tls_ca, tls_cert and tls_key (`averaging ca` makes them), or insecure=True in a trusted network"
            )
        new_state = partial(
            RunState,
            max_bytes=self._limits.queue_bytes,
            max_groups=self._limits.queue_groups,
            max_replay_bytes=self._limits.replay_bytes,
            env_timeout=self._limits.env_timeout,
        )
        self._open = partial(Database, store, fsync=fsync, new_state=new_state)
        self._on_event = on_event
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(_listening(self._listen))
            database = await stack.enter_async_context(DatabaseThread(self._open))
            routes = Routes(database, self._tokens, self._hosts, self._limits, self._on_event)
            config = self._config(routes)
            config.load()
            server = uvicorn.Server(config)  # not serve(), which would install signal handlers
            server.lifespan = config.lifespan_class(config)
            await server.startup([listener])
            stack.push_async_callback(server.shutdown, [listener])
            self._serving = asyncio.create_task(server.main_loop())
            stack.push_async_callback(self._end, server)
            host = parse_address(self._listen)[0]
            self.url = f"{'https' if self._tls else 'http'}://{host}:{listener.getsockname()[1]}"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, traceback)

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await asyncio.shield(self._serving)

    async def _end(self, server: uvicorn.Server) -> None:
        server.should_exit = True
        await asyncio.wait({self._serving})

    def _config(self, routes: Routes) -> uvicorn.Config:
        options: dict[str, Any] = {}
        if self._tls:
            verify = ssl.CERT_NONE if self._tokens else ssl.CERT_REQUIRED
            options = self._tls_files | {"ssl_cert_reqs": verify}
        return uvicorn.Config(
            routes.application,
            http=type(
                "HTTPProtocol",
                (_LimitedConnection,),
                {"seconds": self._limits.seconds, "share": max(1, self._limits.connections // 2)},
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=self._limits.connections + 1,  # uvicorn refuses the connection that reaches the limit
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            **options,
        )


class _LimitedConnection(H11Protocol):
    """Aborts a connection without progress for `seconds`: no request arrives, or the client does not read its reply.

    A connection of an address that has `share` connections already is answered with 503 and closed at once.
    """

    seconds: float
    share: int
    _timer: asyncio.TimerHandle
    _last: tuple[object, int] = (None, 0)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
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


def _listening(address: str) -> socket.socket:
    """Returns a listening socket.

    Raises:
        ListenError: the address is taken or unknown.
    """
    host, port = parse_address(address)
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given.
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ListenError(
            f"cannot listen on {address}: {error.strerror or error}; choose another port or port 0 for a free one, or "
            "end the program that listens there"
        ) from None
    return listener
