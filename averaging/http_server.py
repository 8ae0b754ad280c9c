"""An HTTP server for rooms above the core: uvicorn with limits, on a socket that is bound before. Needs uvicorn.

```python
with listening("127.0.0.1:8000") as listener:
    async with HttpServer(application, listener, connections=100, seconds=60.0) as server:
        await server.wait()
```
"""

from __future__ import annotations

import asyncio
import base64
import errno
import hmac
import logging
import math
import socket
import ssl
import sys
import time
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from socket import gethostname
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from averaging.common import HostQuota, is_loopback, loopback_here, parse_address, parse_ip, spelled
from averaging.config import FilePath
from averaging.errors import ConfigError, ListenError, printable
from averaging.security import read_tls, read_tokens

KEEP_ALIVE = 30  # seconds for which a connection without a request is kept open
SAY_SECONDS = 60.0  # seconds between two lines about refused connections

_failures = logging.getLogger(__name__)
"""Failures of applications. Invalid requests are not logged, because strangers can send any number."""

_failures.setLevel(logging.ERROR)

_logger = logging.getLogger("averaging.http")

_TOO_MANY = b'{"status":"error","message":"this address has too many connections to the server; close some first"}'

TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n%b" % (len(_TOO_MANY), _TOO_MANY)
)
"""The answer to a connection above the share of its address."""


class HttpServer:
    """Serves an ASGI application while it is entered with `async with`."""

    def __init__(
        self,
        application: Any,
        listener: HttpListener,
        *,
        connections: int,
        seconds: float,
        grace: int = 10,
        tls: Mapping[str, Any] | None = None,
    ) -> None:
        listener.limit(_with_descriptors(connections), b"" if tls else TOO_MANY)
        self._listener = listener
        self._config = uvicorn.Config(
            application,
            http=partial(_HttpConnection, seconds=seconds),  # type: ignore[arg-type] # uvicorn only calls it
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
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

    async def wait(self, *beside: asyncio.Task[None]) -> None:
        """Waits until the server ends, or one of the tasks that it needs. They end only if they fail."""
        done, _ = await asyncio.wait({self._serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def url(self, listen: str) -> str:
        """The address of the server, given that at which it was told to listen."""
        scheme = "https" if self._config.is_ssl else "http"
        return f"{scheme}://{parse_address(listen)[0]}:{self._listener.getsockname()[1]}"

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


UNZIP_BYTES = 1 << 20  # bytes that the event loop decompresses before it serves other requests


class BodyReader:
    """Reads bodies of requests, with gzip or without, of at most `most` bytes and within `seconds` each.

    Those of requests that are not answered yet may have `together` bytes, and of one network half of them, so that
    bodies that it does not complete keep no others out. Further ones get the status `full`.
    """

    def __init__(self, most: int, together: int, seconds: float, full: int) -> None:
        self._most, self._seconds, self._full = most, seconds, full
        self._quota = HostQuota(together, together // 2)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytearray, None]:
        """Yields the body, which counts until the end of the block, or raises HTTPException."""
        body, network = bytearray(), network_of(request.client and request.client.host)
        try:
            await self._fill(body, request, network)
            yield body
        finally:
            self._quota.leave(network, len(body))

    async def _fill(self, body: bytearray, request: Request, network: str) -> None:
        is_gzip = "gzip" in request.headers.get("content-encoding", "").lower()
        unzip = zlib.decompressobj(wbits=31) if is_gzip else None
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in request.stream():
                    while True:  # not the whole chunk at once, which may grow a thousand times
                        piece = unzip.decompress(chunk, UNZIP_BYTES) if unzip else chunk
                        if len(body) + len(piece) > self._most:
                            raise HTTPException(413, f"the body has more than {self._most} bytes; send less at once")
                        if not self._quota.take(network, len(piece)):
                            text = "too many bytes of requests are not answered yet; send the same again"
                            raise HTTPException(self._full, text, {"Retry-After": "1"})
                        body += piece
                        if unzip is None or len(piece) < UNZIP_BYTES:
                            break
                        chunk = unzip.unconsumed_tail
                        await asyncio.sleep(0)
        except zlib.error:
            raise HTTPException(400, "the body is not gzip, although its Content-Encoding is") from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._seconds:g} s") from None
        if unzip and body and (not unzip.eof or unzip.unused_data):
            raise HTTPException(400, "the body is not one whole gzip stream")


class _HttpConnection(H11Protocol):
    """Aborts a connection without progress for `seconds`: no request arrives, or the client does not read its reply."""

    _timer: asyncio.TimerHandle
    _last: tuple[object, int] = (None, 0)

    def __init__(self, *, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.logger = _failures
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._seconds, self._check_progress)

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
        self._timer = self.loop.call_later(self._seconds, self._check_progress)


class HttpListener(socket.socket):
    """A listening socket that refuses connections above its limits as it accepts them.

    A refused connection has no descriptor afterwards, also with TLS, where a server is told of a connection only after
    the handshake. asyncio takes a refusal for an empty queue and accepts further connections in its next iteration.
    """

    _most, _refusal, _said = sys.maxsize, b"", -math.inf

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._open: dict[socket.socket, str] = {}  # with the network of each
        self._spare = socket.socket()  # given up for a moment to refuse a connection without a free descriptor

    def limit(self, connections: int, refusal: bytes) -> None:
        """Accepts at most that many connections, and of an address no more than are left for the others.

        So one address may have half, and however few addresses have many connections, others find room.
        """
        self._most, self._refusal = connections, refusal

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection."""
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # asyncio would try and log it 2,048 times before the next iteration of its loop.
            self._spare.close()
            with suppress(OSError):
                super().accept()[0].close()
                self._spare = socket.socket()
            raise self._refused("this process may open no more files; raise its limit (ulimit -n)") from None
        self._open = {each: network for each, network in self._open.items() if each.fileno() >= 0}
        network = network_of(address[0])
        if [*self._open.values()].count(network) < self._most - len(self._open):
            self._open[connection] = network
            return connection, address
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(self._refusal)
        raise self._refused(f"{network} has as many connections as are left for others ({len(self._open)} are open)")

    def _refused(self, why: str) -> BlockingIOError:
        if time.monotonic() - self._said >= SAY_SECONDS:
            self._said = time.monotonic()
            _logger.warning("the HTTP server refuses connections: %s", why)
        return BlockingIOError(errno.EAGAIN, why)

    def close(self) -> None:
        """Ends listening; accepted connections stay open."""
        self._spare.close()
        super().close()


def _with_descriptors(connections: int) -> int:
    """How many of these connections this process can have beside its other files; raises its soft limit for them."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections
    wanted = 2 * connections if hard == resource.RLIM_INFINITY else min(2 * connections, hard)
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, min(connections, soft * 3 // 4))


def listening(address: str) -> HttpListener:
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
        listener = HttpListener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


class HttpRefusal(NamedTuple):
    """Why a request is refused: the HTTP status, and a text with the remedy."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Who may use a server, which a page of another site in a browser on this machine reaches, too."""

    tokens: tuple[str, ...] = ()  # requests must carry one of them; if empty, no token is required
    # names of this server, which the Host header must have if it is no address; None allows any
    hosts: tuple[str, ...] | None = None
    tls: Mapping[str, Any] = field(default_factory=dict)  # what `HttpServer` needs for TLS; empty without it
    # whether it serves a page for browsers, to whose `/` other pages may link. Without one it serves programs, which
    # need no Host header, and may leave out the domain in it.
    has_page: bool = False

    def refusal(self, headers: Mapping[str, str], path: str = "", *, needs_token: bool = True) -> HttpRefusal | None:
        """Why a request with these headers, by name in lower case, is refused; None if it is answered."""
        host = headers.get("host", "")
        if not self._is_known(host):
            return HttpRefusal(
                403,
                f"{printable(host, 100)!r} is no known name of this server; use its address, or start it with "
                "--allow-host NAME",
            )
        if self._is_of_another_page(headers, host, path):
            return HttpRefusal(403, "requests of web pages are refused; use another HTTP client")
        if needs_token and self.tokens and not carries_secret(headers, self.tokens):
            need = "a password, with any user name" if self.has_page else "a token; send 'Authorization: Bearer TOKEN'"
            return HttpRefusal(401, f"this server requires {need}")
        return None

    def _is_known(self, host: str) -> bool:
        """Whether nobody else can let the name in a Host header point to this server.

        A page whose name its owner lets point to this machine has the same origin as the server (DNS rebinding). Only
        the Host header then has a name that is not the server's.
        """
        name = host_in(host)
        if self.hosts is None or (not self.has_page and (not host or (name is not None and "." not in name))):
            return True
        return name is not None and (parse_ip(name) is not None or is_loopback(name) or name in self.hosts)

    def _is_of_another_page(self, headers: Mapping[str, str], host: str, path: str) -> bool:
        if self.has_page and path == "/" and headers.get("sec-fetch-mode") == "navigate":
            return headers.get("sec-fetch-dest") != "document"  # a link to the page is none, a frame with it is
        sent_by = [headers[name].lower() for name in ("origin", "referer") if name in headers]
        own_page = all(page.split("/")[2:3] == [host.lower()] for page in sent_by)
        return not own_page or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def carries_secret(headers: Mapping[str, str], secrets: Sequence[str]) -> bool:
    """Whether the Authorization header has one of the secrets, with Basic as the password of any user."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    given = value.strip().encode()
    if scheme.lower() == "basic":  # clients without an option for a token send the password of their URL
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except ValueError:
            given = b""
    # All are compared, so that the time taken reveals nothing.
    matches = sum([hmac.compare_digest(given, secret.encode()) for secret in secrets])
    return bool(matches) and scheme.lower() in ("basic", "bearer")


def http_access(
    listen: str,
    *,
    token_file: FilePath | None = None,
    tls_ca: FilePath | None = None,
    tls_cert: FilePath | None = None,
    tls_key: FilePath | None = None,
    insecure: bool = False,
    hosts: Sequence[str] = (),
) -> HttpAccess:
    """Reads the files that say who may use a server."""
    tokens, tls = read_tokens(token_file), read_tls(tls_ca, tls_cert, tls_key, time.time)
    host, _ = parse_address(listen)
    if not (tls or insecure or is_loopback(host)):
        raise ConfigError(
            f"other machines can reach {listen}, and without TLS anybody in between can read and change requests; "
            f"give {spelled('tls_ca')}, {spelled('tls_cert')} and {spelled('tls_key')} (`averaging ca` makes them), or "
            f"{spelled('insecure', True)} in a trusted network"
        )
    files: dict[str, Any] = {}
    if tls:
        files = {"ssl_ca_certs": tls_ca, "ssl_certfile": tls_cert, "ssl_keyfile": tls_key}
        files["ssl_cert_reqs"] = ssl.CERT_NONE if tokens else ssl.CERT_REQUIRED
    own = None if tls or tokens else (*(name.lower() for name in hosts), host, gethostname())
    return HttpAccess(tuple(tokens), own, files)


def host_in(header: str) -> str | None:
    """The host of a Host header in lower case, without a dot at its end; None if it is malformed."""
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return None
