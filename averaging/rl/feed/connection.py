"""Requests to a feed server: one try, or tries until one succeeds, with limits of time and size."""

from __future__ import annotations

import gzip
import random
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from averaging.common import Backoff, chosen_proxy, ignored_proxies, is_loopback, proxy_for, shown_proxy
from averaging.errors import ConfigError, FeedError, printable
from averaging.rl.feed.messages import decode
from averaging.security import read_tls, read_tokens

T = TypeVar("T")

COMPRESS_MIN_BYTES = 1024  # bodies of this size or more are compressed, as environments of atroposlib do
MAX_RETRY_AFTER = 60.0  # upper bound of the `Retry-After` that a client obeys, in seconds
MAX_MESSAGE = 2000  # characters of a server's message that an error quotes


def retry_pauses() -> Backoff:
    return Backoff(0.1, 5.0, random.Random(), jitter=(0.5, 1.0))


class RetrySchedule:
    """Pauses that end after `retry_timeout` seconds without success."""

    def __init__(self, retry_timeout: float) -> None:
        self._retry_timeout, self._pauses = retry_timeout, retry_pauses()
        self._first_failure: float | None = None

    def succeeded(self) -> None:
        self._first_failure = None
        self._pauses.reset()

    def failed(self, error: FeedError, now: float) -> float:
        """Returns the seconds to wait before the next try. Raises `error` if it would fail again, or time is up."""
        if error.retry_after is None:
            raise error
        self._first_failure = now if self._first_failure is None else self._first_failure
        if now - self._first_failure >= self._retry_timeout:
            raise FeedError(f"gave up after {now - self._first_failure:.0f} s: {error}")
        return max(error.retry_after, self._pauses.next_delay())


class Connection:
    """Sends requests to the server at `url`.

    Args:
        url: "http://HOST:PORT" or "https://HOST:PORT". A token may be its password, "http://any:TOKEN@HOST:PORT". The
            proxy of AVERAGING_PROXY is used, except to loopback addresses and to hosts in NO_PROXY, and no other one.
        token_file: the first token in it is sent.
        tls_ca, tls_cert, tls_key: files for TLS, all of them or none. With none, https trusts the system's authorities.
        timeout: seconds to connect, and between two pieces of a request or reply.
        retry_timeout: seconds for which a request is repeated to a server that does not answer or is full.
        max_bytes: limit of a reply, after decompression.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeout: float = 30.0,
        retry_timeout: float = 300.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.url, user = split_url(url, "a feed")
        tokens, tls = read_tokens(token_file), read_tls(tls_ca, tls_cert, tls_key, time.time)
        context = ssl.create_default_context(cadata=tls.ca_pem.decode() if tls else None)
        if tls and tls_cert and tls_key:
            context.load_cert_chain(tls_cert, tls_key)
        self._retry_timeout, self._max_bytes = retry_timeout, max_bytes
        self._proxy = proxy_for(httpx.URL(self.url).host, chosen_proxy())
        headers = {"Authorization": f"Bearer {tokens[0]}"} if tokens else {}
        options: dict[str, Any] = {"headers": headers, "auth": None if tokens else user, "timeout": timeout}
        # With `trust_env` httpx would use the proxies of HTTP_PROXY and its like, also to this machine.
        self._client = httpx.Client(base_url=self.url, verify=context, trust_env=False, proxy=self._proxy, **options)

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        """Repeats a request until it succeeds. Returns the decoded reply; for the arguments see `send`.

        Raises:
            FeedError: the server refuses this request, or no try succeeded within `retry_timeout`.
        """
        schedule = RetrySchedule(self._retry_timeout)
        while True:
            try:
                return self.request_once(method, path, kind, **request)
            except FeedError as error:
                time.sleep(schedule.failed(error, time.monotonic()))

    def request_once(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        """Sends a request once. Returns the decoded reply; for arguments and errors see `send`."""
        return decode_reply(self.send(method, path, **request), kind)

    def send(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        params: Mapping[str, int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Sends a request once. Returns the body of the reply.

        Raises:
            FeedError: the server refuses this request, has no time for it now, or answers more than `max_bytes`.
        """
        sent_headers, content = dict(headers or {}), None
        if body is not None:
            content = msgspec.json.encode(body)
            sent_headers["Content-Type"] = "application/json"
            if len(content) >= COMPRESS_MIN_BYTES:
                content = gzip.compress(content, 1)
                sent_headers["Content-Encoding"] = "gzip"
        reply = bytearray()
        try:
            with self._client.stream(method, path, content=content, params=params, headers=sent_headers) as response:
                for chunk in response.iter_bytes():
                    reply += chunk
                    if len(reply) > self._max_bytes:
                        raise FeedError(f"{self.url}{path} answers with more than {self._max_bytes} bytes")
        except (httpx.HTTPError, httpx.StreamError) as error:
            reason = str(error) or type(error).__name__
            through = f" through the proxy {shown_proxy(self._proxy)}" if self._proxy else ""
            ignored = "" if is_loopback(httpx.URL(self.url).host) else ignored_proxies()
            remedy = "; ".join(filter(None, ("check that the feed is up", ignored)))
            raise FeedError(f"{self.url} cannot be reached{through} ({reason}); {remedy}", 0, 0.0) from None
        if response.is_success:
            return bytes(reply)
        status, later = response.status_code, response.headers.get("retry-after", "")
        retry_after = None  # what the server refuses, it would refuse again
        if status >= 500 or status in (408, 429):
            retry_after = min(float(later), MAX_RETRY_AFTER) if later.isascii() and later.isdecimal() else 0.0
        raise FeedError(f"{self.url}{path} answers {status}: {message_in(bytes(reply))}", status, retry_after)


def split_url(url: str, of: str) -> tuple[str, tuple[str, str] | None]:
    """Splits an HTTP address into one that errors may show, and the user and password in it; None if there are none.

    Raises:
        ConfigError: it is no address; `of` says whose it should be.
    """
    try:
        parsed = httpx.URL(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx.InvalidURL, TypeError):
        valid = False
    if not valid:
        shown = printable(url.rpartition("@")[2])
        raise ConfigError(f"{shown!r} is not the address of {of}; give http://HOST:PORT or https://HOST:PORT")
    user = (parsed.username, parsed.password) if parsed.userinfo else None
    return str(parsed.copy_with(userinfo=b"")).rstrip("/"), user


def decode_reply(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except FeedError as error:
        raise FeedError(f"the server's answer cannot be used: {error}; is it a feed?") from None


def message_in(body: bytes) -> str:
    """Returns the text of an error, in the shapes of feeds, FastAPI and OpenAI."""
    try:
        error: Any = msgspec.json.decode(body)
        error = error.get("error") or error
        return printable(str(error.get("message") or error.get("detail")), MAX_MESSAGE)
    except (msgspec.MsgspecError, AttributeError, RecursionError):
        return printable(body[:200].decode(errors="replace"))
