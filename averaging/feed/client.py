"""One request at a time to a feed server: what came of it, how long to go on trying, and within which limits."""

from __future__ import annotations

import gzip
import random
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from averaging.errors import ConfigError, FeedBusyError, FeedError, FeedRefusedError, FeedUnreachableError
from averaging.feed.messages import decode
from averaging.security.credentials import read_tls, read_tokens

T = TypeVar("T")

COMPRESSED_FROM = 1024
"""Bytes of a body that is compressed, as environments of atroposlib do."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the first repetition, which double up to the longest."""


class Backoff:
    """How long to wait between tries, and when to give up. Pure but for `rng`.

    Args:
        patience: seconds without success after which it raises.
    """

    def __init__(self, patience: float, rng: random.Random) -> None:
        self._patience, self._rng = patience, rng
        self._since: float | None = None
        self._tries = 0

    def succeeded(self) -> None:
        """The next failure is the first one again."""
        self._since, self._tries = None, 0

    def failed(self, error: FeedBusyError, now: float) -> float:
        """Seconds until the next try.

        Raises:
            FeedUnreachableError: there was no success for too long.
        """
        self._since = now if self._since is None else self._since
        if now - self._since >= self._patience:
            raise FeedUnreachableError(f"gave up after {now - self._since:.0f} s: {error}")
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**self._tries)
        self._tries += 1
        return max(error.retry_after, pause * self._rng.uniform(0.5, 1.0))


class Connection:
    """A server at `url`.

    Args:
        url: "http://HOST:PORT" or "https://HOST:PORT".
        token_file: its first token is sent.
        tls_ca, tls_cert, tls_key: files for TLS, all of them or none. With none, https trusts the system's authorities.
        timeout: seconds for each step of a request.
        patience: seconds for which a server that does not answer, or is full, is tried again.
        max_bytes: of a reply, after decompression.

    Raises:
        ConfigError: an argument cannot work.
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
        patience: float = 300.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not the address of a feed; give http://HOST:PORT or https://HOST:PORT")
        tokens, tls = read_tokens(token_file), read_tls(tls_ca, tls_cert, tls_key, time.time)
        context = ssl.create_default_context(cadata=tls.ca_pem.decode() if tls else None)
        if tls and tls_cert and tls_key:
            context.load_cert_chain(tls_cert, tls_key)
        self.url, self.patience = url.rstrip("/"), patience
        self._max_bytes = max_bytes
        headers = {"Authorization": f"Bearer {tokens[0]}"} if tokens else {}
        self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, verify=context)

    def close(self) -> None:
        """Ends its connections."""
        self._client.close()

    def once(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        """The reply to one try, see `raw`."""
        return decode_reply(self.raw(method, path, **request), kind)

    def raw(
        self,
        method: str,
        path: str,
        *,
        told: object = None,
        params: Mapping[str, int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of the reply to one try.

        Raises:
            FeedRefusedError: the server refuses this request.
            FeedBusyError: another try may succeed.
        """
        sent, content = dict(headers or {}), None
        if told is not None:
            content = msgspec.json.encode(told)
            sent["Content-Type"] = "application/json"
            if len(content) >= COMPRESSED_FROM:
                content = gzip.compress(content, 1)
                sent["Content-Encoding"] = "gzip"
        body = bytearray()
        try:
            with self._client.stream(method, path, content=content, params=params, headers=sent) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise FeedError(f"{self.url}{path} answers with more than {self._max_bytes} bytes")
        except (httpx.HTTPError, httpx.StreamError) as error:
            reason = str(error) or type(error).__name__
            raise FeedBusyError(0, f"{self.url} cannot be reached ({reason}); check that the feed is up") from None
        if response.is_success:
            return bytes(body)
        message = f"{self.url}{path} answers {response.status_code}: {_message(bytes(body))}"
        if response.status_code >= 500 or response.status_code in (408, 429):
            raise FeedBusyError(response.status_code, message, _seconds(response.headers.get("retry-after", "")))
        raise FeedRefusedError(response.status_code, message)

    def retried(self, call: Callable[[], T]) -> T:
        """What `call` returns at last.

        Raises:
            FeedRefusedError: the server refuses it.
            FeedUnreachableError: it did not succeed within `patience`.
        """
        backoff = Backoff(self.patience, random.Random())
        while True:
            try:
                return call()
            except FeedBusyError as error:
                time.sleep(backoff.failed(error, time.monotonic()))


def decode_reply(body: bytes, kind: type[T]) -> T:
    """Reads what a server has answered.

    Raises:
        FeedError: it is not what this route answers.
    """
    try:
        return decode(body, kind)
    except FeedRefusedError as error:
        raise FeedError(f"the server's answer cannot be used: {error}; is it a feed?") from None


def _message(body: bytes) -> str:
    try:
        told: Any = msgspec.json.decode(body)
        return str(told.get("message") or told.get("detail"))
    except (msgspec.MsgspecError, AttributeError, RecursionError):
        return body[:200].decode(errors="replace")


def _seconds(told: str) -> float:
    return min(float(told), 60.0) if told.isascii() and told.isdecimal() else 0.0
