"""`DashboardServer`: one collector asks the peers, and all open pages get what it finds as server-sent events.

A page of another site runs in a browser that reaches this server. It must not read the run: neither through a name that
its owner lets point here (DNS rebinding), nor with the password that the browser remembers, nor in a frame.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from importlib.resources import files
from pathlib import Path
from socket import gethostname
from typing import Self

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from averaging.common import is_loopback, loopback_here, parse_address, spelled
from averaging.dashboard.history import RunHistory
from averaging.errors import ConfigError
from averaging.http_server import HttpAccess, HttpListener, HttpServer, listening
from averaging.monitor import Collector, Json, snapshot_json
from averaging.security import read_tokens

RECEIPTS = 64  # receipts of each peer that are asked for at first; a peer keeps as many
MAX_PAGES = 32  # pages that may be open at the same time; another one is refused with status 503
CONNECTIONS, SECONDS, GRACE = 4 * MAX_PAGES, 30.0, 2  # limits of `HttpServer`

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the page by path, with their types."""

Views = Callable[[RunHistory], AsyncGenerator[Json, None]]
"""Yields what the page shows of the run now, every 2 s or so, and adds rates and receipts to the history."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer: nothing from elsewhere runs in the page, and no other page shows or embeds it."""

LOGIN = {"WWW-Authenticate": 'Basic realm="averaging dashboard", charset="UTF-8"'}


def views_of(collector: Collector) -> Views:
    """Returns the views of a run for a `DashboardServer`; the collector is entered and asks for `RECEIPTS`."""

    async def views(history: RunHistory) -> AsyncGenerator[Json, None]:
        async with aclosing(collector.snapshots()) as snapshots:
            async for snapshot in snapshots:
                history.add_snapshot(snapshot)
                yield snapshot_json(snapshot, receipts=False)

    return views


class Updates:
    """What open pages get as server-sent events. One that reads too slowly to get each update gets everything anew."""

    def __init__(self, everything: Callable[[], Json]) -> None:
        self._everything = everything
        self._number, self._last = 0, b""
        self._changed = asyncio.Event()
        self._closed = False
        self.pages = 0

    def send(self, update: Json) -> None:
        self._number, self._last = self._number + 1, encode(update)
        self._wake()

    async def ready(self) -> None:
        if not self._number:
            await self._changed.wait()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields everything, and then each update, until the page is disconnected."""
        self.pages += 1
        try:
            shown = 0
            while not self._closed:
                if shown == self._number:
                    await self._changed.wait()
                    continue
                has_missed_none, shown = 0 < shown == self._number - 1, self._number
                yield self._last if has_missed_none else encode(self._everything())
        finally:
            self.pages -= 1

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def encode(data: Json, event: str = "update") -> bytes:
    return f"event: {event}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()


class DashboardServer:
    """Serves the page of a run while it is entered with `async with`. Open pages cost the peers nothing.

    Args:
        views: function that returns what to show, see `Views`. It is called once.
        listen: "HOST:PORT"; port 0 takes a free port.
        hosts: DNS names of this server; requests for other names are refused, but for localhost and IP addresses.
        password_file: passwords, one per line; each request must carry one of them, as Basic authentication does.
        https_cert, https_key: files in PEM with which the page is served with TLS.
        insecure: whether other machines may connect without TLS or without a password.

    Attributes:
        url: address of the page; empty before it is entered.
        readers: who can read the page, as text.

    Raises:
        ConfigError: an argument is invalid, or other machines could read the page without the user's word.
        ListenError: on entry, the address is taken or unknown.
    """

    def __init__(
        self,
        views: Views,
        *,
        listen: str = "127.0.0.1:0",
        hosts: tuple[str, ...] = (),
        password_file: str | Path | None = None,
        https_cert: str | Path | None = None,
        https_key: str | Path | None = None,
        insecure: bool = False,
    ) -> None:
        self._views, self._listen = views, loopback_here(listen)
        tls = check_https(https_cert, https_key)
        passwords = read_tokens(password_file, "password_file")
        host, _ = parse_address(listen)
        if not (is_loopback(host) or insecure or (tls and passwords)):
            raise _too_open(listen, https=bool(tls), password=bool(passwords))
        names = {host.lower(), gethostname().lower(), *(name.lower().rstrip(".") for name in hosts)}
        self._access = HttpAccess(passwords, tuple(names), tls, has_page=True)
        who = "users of this machine" if is_loopback(host) else "all who reach this address"
        self.readers = f"for {who}{' with the password' if passwords else ', without a password'}"
        self._history = RunHistory()
        self._view: Json = {}
        self._updates = Updates(self._everything)
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening(self._listen))
            self._server = await stack.enter_async_context(self._http_server(listener))
            self._following = asyncio.create_task(self._follow())
            stack.push_async_callback(self._end)
            self.url = f"{self._server.url(self._listen)}/"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await self._server.wait(self._following)

    async def _follow(self) -> None:
        async with aclosing(self._views(self._history)) as views:
            async for view in views:
                self._view = view
                self._updates.send({"full": False, **view, **self._history.changes()})

    async def _end(self) -> None:
        self._updates.close()
        self._following.cancel()
        await asyncio.wait({self._following})

    def _http_server(self, listener: HttpListener) -> HttpServer:
        routes = [Route(path, _file(name, kind), methods=["GET"]) for path, (name, kind) in FILES.items()]
        routes += [
            Route("/events", self._events, methods=["GET"]),
            Route("/state", self._state, methods=["GET"]),
            Route("/rounds/{name}", self._round, methods=["GET"]),
        ]
        guarded = _guarded(Starlette(routes=routes), self._access)
        return HttpServer(
            guarded, listener, connections=CONNECTIONS, seconds=SECONDS, grace=GRACE, tls=self._access.tls
        )

    async def _events(self, _: Request) -> Response:
        events = self._updates.events() if self._updates.pages < MAX_PAGES else self._too_many()
        return StreamingResponse(events, media_type="text/event-stream", headers=NOT_STORED)

    async def _too_many(self) -> AsyncGenerator[bytes, None]:
        yield encode({"reason": f"{MAX_PAGES} pages are open already; close some of them"}, "refused")

    async def _state(self, _: Request) -> Response:
        await self._updates.ready()
        return JSONResponse(self._everything(), headers=NOT_STORED)

    def _everything(self) -> Json:
        return {"full": True, **self._view, **self._history.everything()}

    async def _round(self, request: Request) -> Response:
        details = self._history.details(request.path_params["name"])
        if details is None:
            return JSONResponse({"error": "this round is not remembered any more"}, 404, headers=NOT_STORED)
        return JSONResponse(details, headers=NOT_STORED)


def check_https(cert: str | Path | None, key: str | Path | None) -> dict[str, str | Path]:
    """The files for TLS as `HttpServer` takes them; none without TLS.

    Raises:
        ConfigError: one file is missing, or they are not a certificate and its key in PEM.
    """
    if cert is None and key is None:
        return {}
    if cert is None or key is None:
        raise ConfigError(f"{spelled('https_cert')} and {spelled('https_key')} belong together; give both")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:  # such as ssl.SSLError
        names = f"{spelled('https_cert', cert)} and {spelled('https_key', key)}"
        raise ConfigError(f"{names} are no certificate with its key: {error.strerror or error}") from None
    return {"ssl_certfile": cert, "ssl_keyfile": key}


def _too_open(listen: str, *, https: bool, password: bool) -> ConfigError:
    both = f"{spelled('https_cert')} and {spelled('https_key')}"
    missing = [text for text, given in ((both, https), (spelled("password_file"), password)) if not given]
    return ConfigError(
        f"other machines can reach {listen}, and could read the run or the traffic: give {' and '.join(missing)}; "
        f"or {spelled('insecure', True)}, if everybody in that network may; or listen on 127.0.0.1 and let ssh "
        "forward the port (ssh -L 8080:127.0.0.1:8080 this-machine)"
    )


def _guarded(application: ASGIApp, access: HttpAccess) -> ASGIApp:
    """The application without the requests that `access` refuses, and with `HEADERS` in every answer."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer, refusal = application, access.refusal(Headers(scope=scope), scope["path"])
        if refusal is not None:
            answer = PlainTextResponse(refusal.text, refusal.status, LOGIN if refusal.status == 401 else {})
        await answer(scope, receive, send_with_headers)

    return guarded


NOT_STORED = {"Cache-Control": "no-store"}


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    content = (files("averaging.dashboard") / "page" / name).read_bytes()

    def answer(_: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return answer
