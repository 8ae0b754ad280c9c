"""`FeedServer`: the socket, the database and the HTTP server, and what all requests must pass before their route."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from averaging.common import HostQuota, is_count, loopback_here
from averaging.errors import ConfigError, FeedError
from averaging.http_server import HttpAccess, HttpServer, http_access, listening, network_of
from averaging.rl.feed.database import Database
from averaging.rl.feed.routes import Handler, Routes, error_reply
from averaging.rl.feed.run_state import CommandEvent, RunState

logger = logging.getLogger(__name__)

BODY_BYTES = 64 << 20  # of a body after decompression. All may have four times as many, those of one address twice
SECONDS = 60.0  # for the header of a request, for its body, and for a client that reads nothing of its reply
CONNECTIONS = 1024
UNZIP_BYTES = 1 << 20  # that the event loop decompresses before it serves other requests
CHANGING = {"/batch", "/reset_data"}  # their GET changes the run, so HEAD, which Starlette answers likewise, is refused


class FeedServer:
    """Serves a feed while it is entered with `async with`.

    Args:
        store: the SQLite file of the run, created if needed. ":memory:" keeps everything in memory.
        listen: "HOST:PORT"; port 0 takes a free port.
        fsync: whether an acknowledged post also survives a power failure. It always survives the end of this process.
        max_staleness: how many versions of the weights a group may be behind the trainer's newest one; 0 means that it
            must be of the newest, None any. Others are dropped. Groups that name no version are not limited, and those
            whose version is null do not fit.
        queue_bytes: limit of the groups that wait, above which posts are answered with status 503. The batches that are
            kept for a trainer that resumes may have as many again; the oldest are forgotten first.
        env_timeout: seconds after which an environment for whose groups the run waits gives up its reservation.
        on_event: receives each event that `averaging feed` prints.
        access: `token_file` (tokens, one per line; each request except GET / must carry one of them), `tls_ca`,
            `tls_cert`, `tls_key` (files for TLS; without `token_file` clients must show a certificate of `tls_ca`),
            `insecure` (whether other machines may connect without TLS) and `hosts` (DNS names of this server: without
            TLS and tokens, requests for other names with a dot are refused, because web pages can send those).

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
        fsync: bool = False,
        max_staleness: int | None = None,
        queue_bytes: int = 4 << 30,
        env_timeout: float = 300.0,
        on_event: Callable[[CommandEvent], None] = lambda event: None,
        **access: Any,
    ) -> None:
        self._listen = loopback_here(listen)
        self._access = http_access(self._listen, **access)
        if max_staleness is not None and not is_count(max_staleness):
            raise ConfigError(f"max_staleness must be a number of versions, 0 or more, or None, not {max_staleness!r}")
        if not (queue_bytes > 0 and 0 < env_timeout < math.inf):
            raise ConfigError("queue_bytes and env_timeout must be above 0")
        new_state = partial(RunState, max_bytes=queue_bytes, env_timeout=env_timeout, max_staleness=max_staleness)
        self._open = partial(Database, store, fsync=fsync, new_state=new_state)
        self._on_event = on_event
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening(self._listen))
            database = await asyncio.to_thread(self._open)
            stack.callback(database.close)
            thread = ThreadPoolExecutor(1, "feed-database")
            stack.push_async_callback(asyncio.to_thread, thread.shutdown)
            gate = Gate(Routes(database, thread, self._on_event), self._access)
            self._server = HttpServer(
                gate.application(), listener, connections=CONNECTIONS, seconds=SECONDS, tls=self._access.tls
            )
            await stack.enter_async_context(self._server)
            self.url = self._server.url(self._listen)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await self._server.wait()


class Gate:
    """Lets requests in, within the limits and with a token, and gives their bodies to `routes`."""

    def __init__(self, routes: Routes, access: HttpAccess) -> None:
        self._routes, self._access = routes, access
        # One address may have half: bodies that it does not complete must not keep those of others out.
        self._bodies = HostQuota(4 * BODY_BYTES, 2 * BODY_BYTES)

    def application(self) -> Starlette:
        routes = [
            Route(path, partial(self._answer, path, handler), methods=[method])
            for method, path, handler in self._routes.table()
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})

    async def _answer(self, path: str, handler: Handler, request: Request) -> Response:
        began = time.perf_counter()
        try:
            if (refusal := self._access.refusal(request.headers, needs_token=path != "/")) is not None:
                raise FeedError(refusal.text, refusal.status)
            if request.method == "HEAD" and path in CHANGING:
                raise FeedError(f"HEAD {path}: this route has GET only", 405)
            response = await self._with_body(request, handler)
        except FeedError as error:
            later = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"}
            response = error_reply(error.status, str(error), later)
        except ClientDisconnect:
            response = error_reply(400, "the client disconnected before its request was complete")
        except Exception:  # a fault of this server, which goes on
            logger.exception("%s has failed", path)
            response = error_reply(500, "internal error of this server; see its log")
        self._routes.answered(path, response.status_code, time.perf_counter() - began)
        return response

    async def _with_body(self, request: Request, handler: Handler) -> Response:
        """Reads the body within the limits, and calls `handler`. The body counts until the handler returns."""
        encoding = request.headers.get("content-encoding", "").lower()
        unzip = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
        body, network = bytearray(), network_of(request.client and request.client.host)
        try:
            async with asyncio.timeout(SECONDS):
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
            return await handler(request, body)
        except zlib.error:
            raise FeedError("the body is not gzip, although its Content-Encoding is", 400) from None
        except TimeoutError:
            raise FeedError(f"the body did not arrive within {SECONDS:g} s", 408) from None
        finally:
            self._bodies.leave(network, len(body))

    def _extend(self, body: bytearray, piece: bytes, network: str) -> None:
        if len(body) + len(piece) > BODY_BYTES:
            raise FeedError(f"the body has more than {BODY_BYTES} bytes; send fewer groups at once", 413)
        if not self._bodies.take(network, len(piece)):
            raise FeedError("this server reads too many bodies at present; send the same again", 503, 1.0)
        body += piece


async def _no_such_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return error_reply(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)
