"""`FeedServer`: the socket, the database and the HTTP server, and what all requests must pass before their route."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from averaging.common import is_count, loopback_here
from averaging.errors import ConfigError, FeedError
from averaging.http_server import HttpAccess, HttpListener, HttpServer, http_access, listening, network_of
from averaging.rl.feed.database import Database, DatabaseThread
from averaging.rl.feed.routes import CHANGING, ROUTES, Event, Handler, Routes, ServerLimits, error_reply
from averaging.rl.feed.run_state import RunState
from averaging.rl.feed.versions import StaleMode

logger = logging.getLogger(__name__)

UNZIP_BYTES = 1 << 20
"""Bytes that the event loop decompresses before it serves other requests."""

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
        max_staleness: how many versions of the weights a group may be behind the trainer's newest one; 0 means that it
            must be of the newest, None any. Groups that name no version are not limited, and those whose version is
            null do not fit.
        stale: "drop" or "keep": whether groups that are older are dropped, or set aside in the store.
        limits: limits of memory, disk, time and connections.
        on_event: receives each event that `averaging feed --json` prints.

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
        max_staleness: int | None = None,
        stale: StaleMode | str = StaleMode.DROP,
        limits: ServerLimits | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._listen, self._limits = loopback_here(listen), limits or ServerLimits()
        self._access = http_access(
            self._listen,
            token_file=token_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            hosts=hosts,
        )
        if max_staleness is not None and not is_count(max_staleness):
            raise ConfigError(f"max_staleness must be a number of versions, 0 or more, or None, not {max_staleness!r}")
        if stale not in list(StaleMode):
            raise ConfigError(f"stale must be 'drop' or 'keep', not {stale!r}")
        new_state = partial(
            RunState,
            max_bytes=self._limits.queue_bytes,
            max_groups=self._limits.queue_groups,
            max_replay_bytes=self._limits.replay_bytes,
            env_timeout=self._limits.env_timeout,
            max_staleness=max_staleness,
            stale_mode=StaleMode(stale),
        )
        self._open = partial(Database, store, fsync=fsync, new_state=new_state)
        self._on_event = on_event
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening(self._listen))
            database = await stack.enter_async_context(DatabaseThread(self._open))
            routes = Routes(database, self._limits.body_objects, self._on_event)
            gate = Gate(routes, self._access, self._limits)
            self._server = await stack.enter_async_context(self._http_server(gate, listener))
            self.url = self._server.url(self._listen)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await self._server.wait()

    def _http_server(self, gate: Gate, listener: HttpListener) -> HttpServer:
        connections, seconds = self._limits.connections, self._limits.seconds
        tls = self._access.tls
        return HttpServer(gate.application(), listener, connections=connections, seconds=seconds, grace=GRACE, tls=tls)


class Gate:
    """The application: lets requests in, within the limits and with a token, and gives their bodies to `routes`.

    Args:
        routes: answers the requests.
        access: decides who may send requests; GET / needs no token.
        limits: limits of the bodies.
    """

    def __init__(self, routes: Routes, access: HttpAccess, limits: ServerLimits) -> None:
        self._routes, self._access, self._limits = routes, access, limits
        self._body_bytes: Counts[str] = Counts()  # by network

    def application(self) -> Starlette:
        """Returns the application with all of `ROUTES`."""
        return Starlette(
            routes=[self._route(name, handler) for name, handler in ROUTES.items()],
            exception_handlers={HTTPException: _no_such_route},
        )

    def _route(self, name: str, handler: Handler) -> Route:
        method, _, path = name.partition(" ")
        route = Route(path, self._endpoint(path, handler), methods=[method])
        if path in CHANGING and route.methods:
            route.methods.discard("HEAD")  # Starlette adds it to GET
        return route

    def _endpoint(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                if (refusal := self._access.refusal(request.headers, needs_token=path != "/")) is not None:
                    raise FeedError(refusal.text, refusal.status)
                response = await self._with_body(request, handler)
            except FeedError as error:
                later = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"}
                response = error_reply(error.status, str(error), later)
            except ClientDisconnect:
                response = error_reply(400, "the client disconnected before its request was complete")
            except Exception:
                logger.exception("%s has failed", path)
                response = error_reply(500, "internal error of this server; see its log")
            self._routes.answered(path, response.status_code, time.perf_counter() - began)
            return response

        return endpoint

    async def _with_body(self, request: Request, handler: Handler) -> Response:
        """Reads the body within the limits, and calls `handler`. The body counts until the handler returns."""
        encoding = request.headers.get("content-encoding", "").lower()
        unzip = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
        body, network = bytearray(), network_of(request.client and request.client.host)
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.stream():
                    if unzip is None:
                        self._extend(body, chunk, network)
                        continue
                    while True:  # not the whole chunk at once, which may grow a thousand times
                        piece = unzip.decompress(chunk, UNZIP_BYTES)
                        self._extend(body, piece, network)
                        if len(piece) < UNZIP_BYTES:
                            break
                        chunk = unzip.unconsumed_tail
                        await asyncio.sleep(0)
            if unzip and body and (not unzip.eof or unzip.unused_data):
                raise FeedError("the body is not one whole gzip stream", 400)
            return await handler(self._routes, request, body)
        except zlib.error:
            raise FeedError("the body is not gzip, although its Content-Encoding is", 400) from None
        except TimeoutError:
            raise FeedError(f"the body did not arrive within {self._limits.seconds:g} s", 408) from None
        finally:
            self._body_bytes[network] -= len(body)
            if not self._body_bytes[network]:
                del self._body_bytes[network]

    def _extend(self, body: bytearray, piece: bytes, network: str) -> None:
        limit = self._limits.body_bytes
        body += piece
        self._body_bytes[network] += len(piece)
        if len(body) > limit:
            raise FeedError(f"the body has more than {limit} bytes; send fewer groups at once", 413)
        # Of one address half: bodies that it does not complete must not keep those of others out.
        if self._body_bytes[network] > 2 * limit or self._body_bytes.total() > 4 * limit:
            raise FeedError("this server reads too many bodies at present; send the same again", 503, 1.0)


async def _no_such_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return error_reply(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)
