"""The server as an async context manager: its socket, its store, and the time that connections get."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from averaging.common.addresses import is_loopback, parse_address
from averaging.errors import ConfigError, ListenError
from averaging.feed.book import Book
from averaging.feed.ledger import Ledger
from averaging.feed.routes import Event, Limits, Routes
from averaging.feed.store import Store
from averaging.security.credentials import read_tls, read_tokens

KEEP_ALIVE = 30
"""Seconds for which a connection without a request is kept."""

GRACE = 10
"""Seconds for requests in hand when the server ends."""


class FeedServer:
    """Serves a feed while it is entered with `async with`.

    Args:
        store: the SQLite file that holds the run; it is made if needed. ":memory:" keeps nothing.
        listen: "HOST:PORT"; port 0 takes a free one.
        token_file: tokens, one a line; each request must come with one of them.
        tls_ca, tls_cert, tls_key: files for TLS. Without `token_file` clients must show a certificate of `tls_ca`.
        insecure: whether other machines may connect although there is no TLS.
        fsync: whether an acknowledged post survives a power failure, too; it always survives the end of this process.
        limits: what the server takes.
        on_event: is told what happens, as `averaging feed --json` tells it.

    Attributes:
        url: where it serves.

    Raises:
        ConfigError: an argument cannot work, or the store cannot be used; when it is entered.
        ListenError: the address is taken or unknown; when it is entered.
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
        fsync: bool = False,
        limits: Limits | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._listen, self._limits = listen, limits or Limits()
        self._tokens = read_tokens(token_file)
        self._tls = read_tls(tls_ca, tls_cert, tls_key, time.time)
        self._tls_files = {"ssl_ca_certs": tls_ca, "ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
        host, _ = parse_address(listen)
        if not (self._tls or insecure or is_loopback(host)):
            raise ConfigError(
                f"other machines can reach {listen}, and without TLS anybody on the way can change what is sent; "
                "give tls_ca, tls_cert and tls_key (`averaging ca` makes them), or insecure=True in a trusted network"
            )
        new_book = partial(
            Book,
            max_bytes=self._limits.queue_bytes,
            max_groups=self._limits.queue_groups,
            max_replay_bytes=self._limits.replay_bytes,
        )
        self._open = partial(Ledger, store, fsync=fsync, new_book=new_book)
        self._on_event = on_event
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(_listening(self._listen))
            store = await stack.enter_async_context(Store(self._open))
            routes = Routes(store, self._tokens, self._limits, self._on_event)
            config = self._config(routes)
            config.load()
            server = uvicorn.Server(config)  # its parts, since serve() would take the signals
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
        """Waits until it ends, which it only does if it fails."""
        await asyncio.shield(self._serving)

    async def _end(self, server: uvicorn.Server) -> None:
        server.should_exit = True
        await asyncio.wait({self._serving})

    def _config(self, routes: Routes) -> uvicorn.Config:
        options: dict[str, Any] = {}
        if self._tls:
            asked = ssl.CERT_NONE if self._tokens else ssl.CERT_REQUIRED
            options = self._tls_files | {"ssl_cert_reqs": asked}
        return uvicorn.Config(
            routes.application,
            http=type("Bounded", (_Bounded,), {"seconds": self._limits.seconds}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=self._limits.connections,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
            **options,
        )


class _Bounded(H11Protocol):
    """Cuts a connection on which nothing goes forward for `seconds`: no request begins, or nobody reads the reply."""

    seconds: float
    _looking: asyncio.TimerHandle
    _seen: tuple[object, int] = (None, 0)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._looking = self.loop.call_later(self.seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        unread = self.transport.get_write_buffer_size()
        in_hand = not getattr(self.cycle, "response_complete", True)
        request, left = self._seen
        if request is self.cycle and (unread >= left if unread else not in_hand):
            self.transport.abort()
            return
        self._seen = (self.cycle, unread)
        self._looking = self.loop.call_later(self.seconds, self._look)


def _listening(address: str) -> socket.socket:
    """A socket that listens.

    Raises:
        ListenError: the address is taken or unknown.
    """
    host, port = parse_address(address)
    # Without its protocol asyncio would leave out TCP_NODELAY.
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
