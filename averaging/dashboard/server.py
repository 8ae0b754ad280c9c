"""`DashboardServer`: one collector asks the peers, and all open pages get what it finds as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from importlib.resources import files
from pathlib import Path
from typing import Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from averaging.common import loopback_here
from averaging.dashboard.access import PageGuard, check_https, page_access
from averaging.dashboard.history import Json, RunHistory
from averaging.http_server import HttpListener, HttpServer, listening

MAX_PAGES = 32
"""Pages that may be open at the same time; another one is refused with status 503."""

QUEUE = 5
"""Updates that wait for a slow page. It is then disconnected, connects again, and gets everything at once."""

CONNECTIONS, SECONDS = 4 * MAX_PAGES, 30.0
"""Limits of connections, see `HttpServer`."""

GRACE = 2
"""Seconds for unfinished requests when the server ends."""

FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the page by path, with their types."""

Views = Callable[[RunHistory], AsyncGenerator[Json, None]]
"""Yields what the page shows of the run now, every 2 s or so, and adds rates and receipts to the history."""


class OpenPages:
    """The open pages, each with a queue of updates in the format of server-sent events."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes]] = set()
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether no further page may open."""
        return len(self._queues) >= MAX_PAGES

    def __len__(self) -> int:
        return len(self._queues)

    def send(self, update: Json) -> None:
        """Sends an update to all pages."""
        if not self._queues:
            return
        event = encode(update)
        for queue in list(self._queues):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._end(queue)

    async def events(self, first: Json) -> AsyncGenerator[bytes, None]:
        """Yields `first`, and then each update until the page is disconnected."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUE)
        self._queues.add(queue)
        try:
            yield encode(first)
            while event := await queue.get():
                yield event
        finally:
            self._queues.discard(queue)

    def close(self) -> None:
        """Ends the events of all pages."""
        for queue in list(self._queues):
            self._end(queue)

    def _end(self, queue: asyncio.Queue[bytes]) -> None:
        self._queues.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(b"")


def encode(data: Json, event: str = "update") -> bytes:
    """Returns data as a server-sent event."""
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
        pages: the open pages.
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
        self._https = check_https(https_cert, https_key)
        self._files = {"ssl_certfile": https_cert, "ssl_keyfile": https_key} if self._https else {}
        self._access = page_access(
            listen, hosts=hosts, password_file=password_file, https=self._https, insecure=insecure
        )
        self._history = RunHistory()
        self._view: Json = {}
        self._ready = asyncio.Event()
        self.pages = OpenPages()
        self.readers = self._access.readers
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
        """Sends each view of the run to all pages."""
        async with aclosing(self._views(self._history)) as views:
            async for view in views:
                self._view = view
                self._ready.set()
                self.pages.send({"full": False, **view, **self._history.changes()})

    async def _end(self) -> None:
        self.pages.close()
        self._following.cancel()
        await asyncio.wait({self._following})

    def _http_server(self, listener: HttpListener) -> HttpServer:
        routes = [Route(path, _file(name, kind), methods=["GET"]) for path, (name, kind) in FILES.items()]
        routes += [
            Route("/events", self._events, methods=["GET"]),
            Route("/state", self._state, methods=["GET"]),
            Route("/rounds/{name}", self._round, methods=["GET"]),
        ]
        guarded = PageGuard(Starlette(routes=routes), self._access)
        return HttpServer(guarded, listener, connections=CONNECTIONS, seconds=SECONDS, grace=GRACE, tls=self._files)

    async def _events(self, _: Request) -> Response:
        events = self._too_many() if self.pages.full else self._new_page()
        return StreamingResponse(events, media_type="text/event-stream", headers=NOT_STORED)

    async def _new_page(self) -> AsyncGenerator[bytes, None]:
        await self._ready.wait()
        async for event in self.pages.events(self._everything()):
            yield event

    async def _too_many(self) -> AsyncGenerator[bytes, None]:
        yield encode({"reason": f"{MAX_PAGES} pages are open already; close some of them"}, "refused")

    async def _state(self, _: Request) -> Response:
        await self._ready.wait()
        return JSONResponse(self._everything(), headers=NOT_STORED)

    def _everything(self) -> Json:
        return {"full": True, **self._view, **self._history.everything()}

    async def _round(self, request: Request) -> Response:
        details = self._history.details(request.path_params["name"])
        if details is None:
            return JSONResponse({"error": "this round is not remembered any more"}, 404, headers=NOT_STORED)
        return JSONResponse(details, headers=NOT_STORED)


NOT_STORED = {"Cache-Control": "no-store"}


def _file(name: str, kind: str) -> Callable[[Request], Response]:
    """Returns the endpoint of one file of the page."""
    content = (files("averaging.dashboard") / "page" / name).read_bytes()

    def answer(_: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return answer
