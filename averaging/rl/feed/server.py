"""`FeedServer`: the socket, the database and the HTTP server, and what all requests must pass before their route."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import socket
import ssl
import time
import zlib
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Self
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from averaging.common import is_count, is_loopback, loopback_here, parse_address, parse_ip
from averaging.errors import ConfigError, FeedError
from averaging.http_server import HttpServer, listening, network_of
from averaging.rl.feed.database import Database, DatabaseThread
from averaging.rl.feed.routes import CHANGING, ROUTES, Event, Handler, Routes, ServerLimits, error_reply
from averaging.rl.feed.run_state import RunState
from averaging.rl.feed.versions import StaleMode
from averaging.security import read_tls, read_tokens

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
            must be of the newest, None any. Groups without a version are not limited.
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
        self._tokens = read_tokens(token_file)
        self._tls = read_tls(tls_ca, tls_cert, tls_key, time.time)
        self._tls_files = {"ssl_ca_certs": tls_ca, "ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
        host, _ = parse_address(self._listen)
        self._hosts = None if self._tls or self._tokens else [*(name.lower() for name in hosts), host, gethostname()]
        if not (self._tls or insecure or is_loopback(host)):
            raise ConfigError(
                f"other machines can reach {listen}, and without TLS anybody in between can read and change requests; "
                "give tls_ca, tls_cert and tls_key (`averaging ca` makes them), or insecure=True in a trusted network"
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
            gate = Gate(routes, self._tokens, self._hosts, self._limits)
            self._server = await stack.enter_async_context(self._http_server(gate, listener))
            host = parse_address(self._listen)[0]
            self.url = f"{'https' if self._tls else 'http'}://{host}:{listener.getsockname()[1]}"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await self._server.wait()

    def _http_server(self, gate: Gate, listener: socket.socket) -> HttpServer:
        tls: dict[str, Any] = {}
        if self._tls:
            tls = self._tls_files | {"ssl_cert_reqs": ssl.CERT_NONE if self._tokens else ssl.CERT_REQUIRED}
        connections, seconds = self._limits.connections, self._limits.seconds
        return HttpServer(gate.application(), listener, connections=connections, seconds=seconds, grace=GRACE, tls=tls)


class Gate:
    """The application: lets requests in, within the limits and with a token, and gives their bodies to `routes`.

    Args:
        routes: answers the requests.
        tokens: each request except GET / must carry one of them; if empty, no token is required.
        hosts: names of this server, which the Host header must have if it is neither an address nor without a dot; None
            allows any.
        limits: limits of the bodies.
    """

    def __init__(
        self, routes: Routes, tokens: Sequence[str], hosts: Sequence[str] | None, limits: ServerLimits
    ) -> None:
        self._routes, self._limits = routes, limits
        self._tokens, self._hosts = [token.encode() for token in tokens], hosts
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
                self._check_page(request)
                if path != "/":
                    self._check_token(request)
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

    def _check_page(self, request: Request) -> None:
        """Refuses requests of web pages. Otherwise any page in a browser on this machine could drop the run.

        A page whose name its owner lets point to this machine has the same origin as the server (DNS rebinding). Only
        the Host header then has a name that is not the server's.
        """
        headers = request.headers
        host = headers.get("host", "")
        if self._hosts is not None and host and not _is_name_of_server(host, self._hosts):
            raise FeedError(
                f"{host[:100]!r} is no known name of this server; use its address, start it with --allow-host NAME, or "
                "require a token",
                403,
            )
        sent_by = [headers[name].lower() for name in ("origin", "referer") if name in headers]
        own_page = all(page.split("/")[2:3] == [host.lower()] for page in sent_by)
        if not own_page or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise FeedError("requests of web pages are refused; use another HTTP client", 403)

    def _check_token(self, request: Request) -> None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        given = value.strip().encode()
        if scheme.lower() == "basic":  # clients without an option for a token send the password of their URL
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                given = b""
        # All are compared, so that the time taken reveals nothing.
        matches = sum([hmac.compare_digest(given, token) for token in self._tokens])
        if self._tokens and not (matches and scheme.lower() in ("basic", "bearer")):
            raise FeedError("this server requires a token; send 'Authorization: Bearer TOKEN'", 401)

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


def _is_name_of_server(host_header: str, hosts: Sequence[str]) -> bool:
    """Whether a request for that host can reach only this server: nobody else can let such a name point to it."""
    try:
        host = (urlsplit(f"//{host_header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return "." not in host or parse_ip(host) is not None or is_loopback(host) or host in hosts
