"""/metrics, /healthz and /readyz over HTTP: also while the event loop stands still, and to clients that misbehave."""

import asyncio
import http.client
import socket
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing

import pytest

from averaging.common import parse_address, spelling
from averaging.common.options import as_flag
from averaging.errors import ListenError
from averaging.metrics import PEER_METRICS, MetricsListener, Samples, listener
from tests.metrics.scraping import http_get, scrape


class Component:
    """Something that is observed."""

    def __init__(self) -> None:
        self.step, self.not_ready = 1, ""

    def sample(self) -> Samples:
        return {"averaging_global_step": self.step}

    @asynccontextmanager
    async def observed(self, listen: str = "127.0.0.1:0") -> AsyncGenerator[MetricsListener, None]:
        name = "a component"
        async with MetricsListener(listen, name, PEER_METRICS, self.sample, lambda: self.not_ready) as observed:
            yield observed


async def get(endpoint: str, path: str) -> tuple[int, str]:
    return await asyncio.to_thread(http_get, endpoint, path)


async def test_probes_and_metrics_are_answered() -> None:
    component = Component()
    async with component.observed() as observed:
        assert await get(observed.endpoint, "/healthz") == (200, "ok\n")
        assert await get(observed.endpoint, "/readyz") == (200, "ready\n")
        component.not_ready = "it takes over the state of its run"
        assert await get(observed.endpoint, "/readyz") == (503, "it takes over the state of its run\n")
        assert await get(observed.endpoint, "/healthz") == (200, "ok\n")
        page = await asyncio.to_thread(scrape, observed.endpoint)
        assert page["averaging_global_step"] == {(): 1.0}
        assert "process_resident_memory_bytes" in page
        assert (await get(observed.endpoint, "/secret"))[0] == 404
    with pytest.raises(OSError, match="refused"):
        await get(observed.endpoint or "127.0.0.1:1", "/healthz")


async def test_a_loop_that_stands_still_fails_its_probes_rather_than_letting_them_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "UNHEALTHY_LAG", 0.5)
    monkeypatch.setattr(listener, "SAMPLE_SECONDS", 0.1)
    component = Component()
    async with component.observed() as observed:
        await asyncio.to_thread(scrape, observed.endpoint)
        component.step = 2
        with ThreadPoolExecutor(1) as thread:
            status, text, page = thread.submit(_probe_until_unhealthy, observed.endpoint).result()  # the loop waits
        assert status == 503
        assert text.startswith("the event loop has not answered for")
        assert page["averaging_global_step"] == {(): 1.0}  # the last value before
        assert page["averaging_loop_lag_seconds"][()] >= 0.5
        async with asyncio.timeout(30):
            while (await get(observed.endpoint, "/healthz"))[0] != 200:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.01)
        assert (await asyncio.to_thread(scrape, observed.endpoint))["averaging_global_step"] == {(): 2.0}


def _probe_until_unhealthy(endpoint: str) -> tuple[int, str, dict[str, dict[tuple[str, ...], float]]]:
    end = time.monotonic() + 30
    while (answer := http_get(endpoint, "/healthz"))[0] == 200 and time.monotonic() < end:
        time.sleep(0.01)
    return *answer, scrape(endpoint)


async def test_a_component_that_cannot_be_measured_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Samples:
        raise RuntimeError("no such thing")

    async with MetricsListener("127.0.0.1:0", "a component", PEER_METRICS, fail) as observed:
        page = await asyncio.to_thread(scrape, observed.endpoint)
    assert "averaging_loop_lag_seconds" in page
    assert [record.getMessage() for record in caplog.records] == ["metrics cannot be read; the last ones are shown"]


async def test_a_taken_port_is_an_error_that_says_which_option() -> None:
    async with Component().observed() as observed:
        with spelling(as_flag), pytest.raises(ListenError, match="--metrics-listen.*a port that nobody uses"):
            await Component().observed(observed.endpoint).__aenter__()
        assert await get(observed.endpoint, "/healthz") == (200, "ok\n")
    with pytest.raises(ListenError, match=r"metrics_listen.*not known"):
        await Component().observed("host.invalid:0").__aenter__()


async def test_ipv6_and_all_addresses_of_the_machine() -> None:
    async with Component().observed("[::1]:0") as observed, Component().observed("[::]:0") as everywhere:
        assert observed.endpoint.startswith("[::1]:")
        port = parse_address(everywhere.endpoint)[1]
        for endpoint in (observed.endpoint, f"127.0.0.1:{port}"):
            assert await get(endpoint, "/healthz") == (200, "ok\n")


async def test_silent_clients_of_one_host_are_limited_and_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener._HttpExchange, "timeout", 1.0)
    async with Component().observed() as observed:
        address = parse_address(observed.endpoint)
        silent = [socket.create_connection(address) for _ in range(2 * listener.CONNECTIONS_PER_HOST)]
        for connection in silent:
            with closing(connection):
                connection.settimeout(30)
                assert await asyncio.to_thread(_ends, connection)
        async with asyncio.timeout(30):  # their places are free again
            while (await asyncio.to_thread(_status, observed.endpoint)) != 200:  # noqa: ASYNC110 - a thread changes it
                await asyncio.sleep(0.01)


def _ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def _status(endpoint: str) -> int:
    try:
        return http_get(endpoint, "/healthz")[0]
    except OSError:
        return 0


async def test_what_is_no_request_harms_nothing_and_only_reading_is_allowed() -> None:
    async with Component().observed() as observed:
        for sent in (b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\0" * 99, b"GET / HTTP/1.1\r\n" + b"A" * 70000):
            with socket.create_connection(parse_address(observed.endpoint)) as connection:
                connection.sendall(sent)
            assert await get(observed.endpoint, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(_request, observed.endpoint, "POST") == 501
        assert await asyncio.to_thread(_request, observed.endpoint, "HEAD") == 200


def _request(endpoint: str, method: str) -> int:
    connection = http.client.HTTPConnection(*parse_address(endpoint), timeout=30)
    connection.request(method, "/healthz")
    status = connection.getresponse().status
    connection.close()
    return status
