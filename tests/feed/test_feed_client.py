"""The clients, with servers that fail or send invalid replies."""

import gzip
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from averaging.errors import ConfigError, FeedError
from averaging.rl.feed import BatchFeed, FeedEnvironment
from averaging.rl.feed.clients import Connection, RetrySchedule
from averaging.rl.feed.messages import BatchReply, Registered
from tests.feed.feeds import a_group, environment, registration

Answer = tuple[int, dict[str, str], bytes]
"""Status, headers, body."""


@contextmanager
def answering(*answers: Answer) -> Iterator[tuple[str, list[str]]]:
    """Runs a server that gives these answers in turn and then repeats the last. Yields its URL and the requests."""
    left, asked = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.rfile.read(length)
            asked.append(f"{self.command} {self.path} {self.headers.get('Idempotency-Key', '')}".strip())
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_pauses_double_up_to_a_maximum_until_the_timeout() -> None:
    schedule, busy = RetrySchedule(100.0), FeedError("full", 503, 0.0)
    pauses = [schedule.failed(busy, now) for now in range(10)]
    assert all(0.05 * 2**i <= pause <= 0.1 * 2**i for i, pause in enumerate(pauses[:6]))
    assert max(pauses) <= 5.0
    assert schedule.failed(FeedError("full", 503, 7.0), 99.0) == 7.0
    with pytest.raises(FeedError, match="gave up after 100 s: full"):
        schedule.failed(busy, 100.0)
    schedule.succeeded()
    assert schedule.failed(busy, 1000.0) <= 0.1, "the next failure is the first one again"
    for_hours = RetrySchedule(1e6)
    assert all(0.0 < for_hours.failed(busy, float(now)) <= 5.0 for now in range(2000))


@pytest.mark.parametrize(
    ("answer", "retry_after", "message"),
    [
        ((200, {}, b"<html>"), None, "answer cannot be used: .* is it a feed"),
        ((200, {}, b'{"batch": 3}'), None, "answer cannot be used"),
        ((422, {}, b'{"detail": "no"}'), None, "/batch answers 422: no"),
        ((404, {}, b"nothing"), None, "/batch answers 404: nothing"),
        ((422, {}, b'{"message": "\\u001b[2Jgone"}'), None, r"answers 422: [ -~]*gone"),
        ((302, {"Location": "http://127.0.0.1:9"}, b""), None, "/batch answers 302"),
        ((500, {}, b"Internal Server Error"), 0.0, "/batch answers 500: Internal"),
        ((429, {"Retry-After": "9"}, b"{}"), 9.0, "429"),
        ((200, {}, b" " * 2000), None, "answers with more than 1000 bytes"),
        ((200, {"Content-Encoding": "gzip"}, gzip.compress(b" " * 10**7)), None, "more than 1000 bytes"),
        ((200, {"Content-Encoding": "gzip"}, b"no gzip"), 0.0, "cannot be reached"),
    ],
)
def test_unusable_answers_raise(
    answer: tuple[int, dict[str, str], bytes], retry_after: float | None, message: str
) -> None:
    with answering(answer) as (url, _):
        connection = Connection(url, max_bytes=1000)
        with pytest.raises(FeedError, match=message) as caught:
            connection.request_once("GET", "/batch", BatchReply)
        assert caught.value.retry_after == retry_after
        connection.close()


def test_a_post_is_repeated_with_the_same_key() -> None:
    received: Answer = (200, {}, b'{"status": "received"}')
    cut: Answer = (200, {"Content-Length": "99"}, b"{")
    with answering((503, {"Retry-After": "0"}, b"{}"), cut, received) as (url, asked):
        env = FeedEnvironment(url, environment(), timeout=1.0)
        env.registered = Registered("success", 3)
        env.post(a_group(0), key="item 0")
        assert asked == ["POST /scored_data item 0"] * 3
        env.close()


def test_a_batch_ends_a_series_of_failures() -> None:
    """Failures long before and long after a batch do not add up to the time-out."""
    answers: list[Answer] = [
        (200, {}, b'{"uuid": 1}'),
        (200, {}, b'{"batch_size": 4}'),
        (200, {}, b'{"batch": [{}], "step": 1}'),
    ]
    busy = FeedError("full", 503, 0.0)
    with answering(*answers) as (url, _), BatchFeed(url, registration(), retry_timeout=10.0) as batches:
        batches._retries.failed(busy, time.monotonic())
        assert batches._fetch(math.inf)
        assert batches._retries.failed(busy, time.monotonic() + 100.0) < 1.0


def test_a_batch_of_another_step_is_an_error() -> None:
    answers: list[Answer] = [
        (200, {}, b'{"uuid": 1}'),
        (200, {}, b'{"batch_size": 4}'),
        (200, {}, b'{"batch": [{}], "step": 9}'),
    ]
    with (
        answering(*answers) as (url, asked),
        BatchFeed(url, registration(starting_step=6, save_checkpoint_interval=4)) as batches,
        pytest.raises(FeedError, match="answers with step 9 instead of 7"),
    ):
        next(batches)
    assert asked == ["POST /register", "GET /info", "GET /batch?step=7&saved=6"]


@pytest.mark.parametrize(
    ("step", "interval", "call", "saved"),
    [(11, 5, None, 10), (11, 5, 3, 3), (11, 0, None, 11), (11, -1, None, 11), (11, 100, None, 2), (11, 1, None, 11)],
)
def test_which_batches_count_as_saved(step: int, interval: int, call: int | None, saved: int) -> None:
    with BatchFeed("http://127.0.0.1:9", registration(starting_step=2, save_checkpoint_interval=interval)) as batches:
        batches.step = step
        if call is not None:
            batches.saved(call)
            batches.saved(call - 1)
        assert batches._saved_step() == saved


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ConfigError, match="must be above 0 s"):
        BatchFeed("http://127.0.0.1:9", registration(), None, poll=0.0)
    for url in ("127.0.0.1:8000", "ftp://a", ""):
        with pytest.raises(ConfigError, match="give http://HOST:PORT or https://HOST:PORT"):
            BatchFeed(url, registration())


SECRET = "token-that-nobody-may-see"


def test_the_token_of_an_address_is_sent_and_never_shown() -> None:
    with answering((200, {}, b"{}")) as (url, _):
        address = url.replace("://", f"://any:{SECRET}@")
        connection = Connection(address)
        assert connection.send("GET", "/batch") == b"{}"
        assert connection._client.auth is not None
        connection.close()
    for failing in (
        lambda: next(BatchFeed(address, registration(), retry_timeout=0.01)),
        lambda: FeedEnvironment(address, environment(), retry_timeout=0.01).register(),
        lambda: Connection(address.replace("http:", "ftp:")),
        lambda: Connection(address.replace("http:", "http:/")),
    ):
        with pytest.raises((FeedError, ConfigError)) as caught:
            failing()
        assert SECRET not in str(caught.value)


PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy", "AVERAGING_PROXY")


def test_the_proxy_that_was_asked_for_is_used_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@127.0.0.1:9")

    def ask(url: str) -> None:
        connection = Connection(url, retry_timeout=0.0)
        try:
            assert connection.request("GET", "/batch", dict) == {}
        finally:
            connection.close()

    with answering((200, {}, b"{}")) as (url, _):
        ask(url)
        with pytest.raises(FeedError, match="HTTP_PROXY is set and not used; AVERAGING_PROXY") as caught:
            ask("http://feed.invalid")
        assert "secret" not in str(caught.value)
        monkeypatch.setenv("AVERAGING_PROXY", url.replace("://", "://user:secret@"))
        ask("http://feed.invalid")  # which only the proxy finds
        monkeypatch.setenv("AVERAGING_PROXY", "http://user:secret@127.0.0.1:9")
        ask(url)  # on this machine
    with pytest.raises(FeedError, match=r"through the proxy 127\.0\.0\.1:9") as caught:
        ask("http://feed.invalid")
    assert "secret" not in str(caught.value)
