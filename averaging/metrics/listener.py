"""Answers Prometheus and probes over HTTP, in threads of its own: `/metrics`, `/healthz` and `/readyz`.

The threads answer although the event loop stands still, and then say so. Nothing that they say is secret, and all of it
is for everyone who can connect: there is no TLS and no authentication.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from typing import TYPE_CHECKING, Any, Self

from averaging.common import HostQuota, member_of, parse_address, spelled
from averaging.errors import ListenError
from averaging.metrics.catalog import PROCESS_METRICS, Metric
from averaging.metrics.exposition import Samples, registry_of
from averaging.metrics.watchdog import WATCHDOG, WatchedLoop, watch_loop

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

logger = logging.getLogger("averaging.metrics")

UNHEALTHY_LAG = 5.0
"""Seconds without an answer of the event loop after which /healthz fails."""

SAMPLE_SECONDS = 1.0
"""Seconds within which the event loop must return its values; later the last ones are shown."""

PAGE_SECONDS = 1.0
"""Seconds for which a page of metrics is kept, so that many readers cost no more than one."""

MAX_PAGES = 4
"""Forms of the page that are kept, since a reader says which one it wants."""

REQUEST_SECONDS = 5.0
"""Seconds for a request and its answer."""

MAX_CONNECTIONS, CONNECTIONS_PER_HOST = 32, 8
"""Connections at a time, each with a thread."""

INDEX = "/metrics: for Prometheus\n/healthz: whether the event loop answers\n/readyz: whether it has joined its run\n"


class MetricsListener:
    """Watches the running event loop, and answers Prometheus and probes while it is entered.

    It is an async context manager, entered in the loop that it watches.

    Args:
        listen: `host:port` for HTTP; port 0 takes a free one. None only watches the loop.
        name: what runs in the loop, for the log.
        metrics: the metrics that `sample` may return.
        sample: returns their values; called in the loop.
        not_ready: returns why /readyz fails; an empty text if it does not. Called in any thread.

    Attributes:
        endpoint: `host:port` that it listens on; empty without `listen`.

    Raises:
        ListenError: on entering: it cannot listen there.
    """

    def __init__(
        self,
        listen: str | None,
        name: str,
        metrics: Sequence[Metric] = (),
        sample: Callable[[], Samples] = dict,
        not_ready: Callable[[], str] = str,
    ) -> None:
        self._listen, self._name = listen, name
        self._metrics, self._sample, self._not_ready = metrics, sample, not_ready
        self._stack = ExitStack()
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            watched = stack.enter_context(watch_loop(self._name))
            if self._listen is not None:
                self.endpoint = stack.enter_context(self._serving(self._listen, watched)).endpoint
                logger.info("metrics of %s at http://%s/metrics", self._name, self.endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stack.close()
        self.endpoint = ""

    def _serving(self, listen: str, watched: WatchedLoop) -> _HttpServer:
        sampler = _Sampler(asyncio.get_running_loop(), self._sample, watched)
        registry = registry_of([*PROCESS_METRICS, *self._metrics], sampler.sample)
        return _HttpServer(listen, _Answers(watched, self._not_ready, registry))


class _Sampler:
    """Takes values in an event loop for another thread. If the loop does not answer, they are the last ones."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sample: Callable[[], Samples], watched: WatchedLoop) -> None:
        self._loop, self._take, self._watched = loop, sample, watched
        self._last: Samples = {}
        self._failed = False

    def sample(self) -> Samples:
        """The values now, with those of the process."""
        taken: concurrent.futures.Future[Samples] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, taken)
            self._last = taken.result(SAMPLE_SECONDS)
        except (TimeoutError, RuntimeError):  # the loop stands still, or was closed
            pass
        watched = self._watched
        process: Samples = {
            "averaging_info": {(metadata.version("averaging"),): 1.0},
            "averaging_loop_lag_seconds": watched.longest_lag,
            "averaging_loop_stall_seconds_total": watched.stalled,
            "averaging_interpreter_stall_seconds_total": WATCHDOG.stalled,
        }
        return {**self._last, **process}

    def _answer(self, taken: concurrent.futures.Future[Samples]) -> None:
        try:
            taken.set_result(self._take())
        except Exception:  # what it measures is not worth ending it
            if not self._failed:
                self._failed = True
                logger.exception("metrics cannot be read; the last ones are shown")
            taken.set_result(self._last)


class _Answers:
    """What is answered to a path."""

    def __init__(self, watched: WatchedLoop, not_ready: Callable[[], str], registry: CollectorRegistry) -> None:
        self._watched, self._not_ready, self._registry = watched, not_ready, registry
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[float, bytes]] = {}  # by content type

    def answer(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body."""
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, *self._page(accept)
            case "/healthz":
                return _verdict(self._unhealthy())
            case "/readyz":
                return _verdict(self._unhealthy() or self._not_ready(), "ready")
            case "/":
                return HTTPStatus.OK, "text/plain; charset=utf-8", INDEX.encode()
        return HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", INDEX.encode()

    def _unhealthy(self) -> str:
        lag = self._watched.lag
        return f"the event loop has not answered for {lag:.1f} s" if lag >= UNHEALTHY_LAG else ""

    def _page(self, accept: str) -> tuple[str, bytes]:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accept)
        with self._lock:
            made, page = self._pages.get(kind, (0.0, b""))
            if not page or time.monotonic() - made >= PAGE_SECONDS:
                page = encode(self._registry)
                others = self._pages if len(self._pages) < MAX_PAGES else {}
                self._pages = {**others, kind: (time.monotonic(), page)}
        return kind, page


def _verdict(reason: str, good: str = "ok") -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return status, "text/plain; charset=utf-8", f"{reason or good}\n".encode()


class _HttpExchange(BaseHTTPRequestHandler):
    """One connection, with one request."""

    server: _HttpServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answers a request."""
        status, kind, body = self.server.answers.answer(self.path, self.headers.get("Accept", ""))
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def version_string(self) -> str:
        return "averaging"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: probes come every few seconds."""


class _HttpServer(ThreadingHTTPServer):
    """The sockets and threads, as a context manager."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, listen: str, answers: _Answers) -> None:
        self.answers = answers
        self._open: dict[socket.socket, float] = {}  # with the time at which each began
        self._quota, self._quota_lock = HostQuota(MAX_CONNECTIONS, CONNECTIONS_PER_HOST), threading.Lock()
        host, port = parse_address(listen)
        self.address_family, where = _resolved(listen, host.strip("[]"), port)
        try:
            super().__init__(where, _HttpExchange)
        except OSError as error:
            raise ListenError(
                f"cannot listen on {listen} ({spelled('metrics_listen')}): {error.strerror or error}; choose another "
                "port, or port 0 for a free one"
            ) from None
        self.endpoint = f"{host}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Binds without asking for this machine's name, which may take long."""
        if self.address_family == socket.AF_INET6:  # `[::]` means IPv4 too
            with suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._quota_lock:
            taken = self._quota.take(_network(client_address[0]))
            if taken:
                self._open[request] = time.monotonic()
            return taken

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._quota_lock:
                del self._open[request]
                self._quota.leave(_network(client_address[0]))

    def service_actions(self) -> None:
        """Ends requests that take too long, as those of a client that sends a byte now and then."""
        end = time.monotonic() - REQUEST_SECONDS
        with self._quota_lock:
            late = [request for request, began in self._open.items() if began < end]
            for request in late:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that hang up."""
        logger.debug("a request for metrics failed", exc_info=True)


def _network(host: str) -> str:
    """What counts as one host: an address, or 64 bits of an IPv6 address."""
    return member_of(f"[{host}]:1" if ":" in host else f"{host}:1", "")


def _resolved(listen: str, host: str, port: int) -> tuple[int, Any]:
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ListenError(
            f"cannot listen on {listen} ({spelled('metrics_listen')}): {host} is unknown ({error}); give one of this "
            "machine's addresses"
        ) from None
    return family, where
