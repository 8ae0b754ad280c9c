"""The server of the page over HTTP: what it serves, whom it refuses, and what open pages cost."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from averaging.dashboard import CurvePoint, DashboardServer, server as server_module
from averaging.errors import ConfigError
from tests.dashboard.dashboards import ENDPOINTS, NOW, FakeRun, peer, receipt, view
from tests.support import certificates
from tests.support.certificates import TOKEN
from tests.support.processes import DEADLINE

SECRET = "a-password-0123456789"


@asynccontextmanager
async def serving(run: FakeRun, **options: Any) -> AsyncIterator[tuple[DashboardServer, httpx.AsyncClient]]:
    """Yields the server of a run and a client without proxies."""
    async with (
        asyncio.timeout(DEADLINE),
        DashboardServer(run.views, **options) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as client,
    ):
        yield server, client


@asynccontextmanager
async def page(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Yields the events that an open page gets."""
    async with client.stream("GET", "/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield events_of(reply)


async def events_of(reply: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in reply.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def test_the_files_of_the_page_load_nothing_from_elsewhere() -> None:
    async with serving(FakeRun()) as (_, client):
        for path, kind in {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}.items():
            reply = await client.get(path)
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith(kind)
            assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in reply.text
            assert "innerHTML" not in reply.text
            policy = dict(rule.strip().split(" ", 1) for rule in reply.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == "'none'"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["cross-origin-resource-policy"] == "same-origin"


async def test_a_page_gets_everything_and_then_each_change() -> None:
    run = FakeRun()
    async with serving(run) as (_, client), page(client) as events:
        name, first = await anext(events)
        assert (name, first["full"], first["rounds"]) == ("update", True, [])
        assert [each["endpoint"] for each in first["peers"]] == [*ENDPOINTS]
        run.history.add_receipt(ENDPOINTS[0], receipt(), NOW)
        run.history.add_point(CurvePoint(NOW, 1.0, 2.0, {}))
        run.send(view(peer(ENDPOINTS[0], error="connection refused")))
        _, second = await anext(events)
        assert not second["full"]
        assert second["peers"][0]["error"] == "connection refused"
        assert len(second["rounds"]) == len(second["points"]) == 1
        found = (await client.get(f"/rounds/{second['rounds'][0]['id']}")).json()
        assert found["text"] == second["rounds"][0]["text"]
        assert (await client.get("/state")).json()["rounds"] == second["rounds"]
        missing = await client.get("/rounds/0000")
        assert (missing.status_code, missing.json()) == (404, {"error": "this round is not remembered any more"})


async def test_the_page_only_reads() -> None:
    async with serving(FakeRun()) as (_, client):
        for path in ("/", "/events", "/state", "/rounds/1"):
            for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                reply = await client.request(method, path)
                assert reply.status_code == 405
                assert not [name for name in reply.headers if name.startswith("access-control")]
        assert (await client.get("/../server.py")).status_code == 404
        assert (await client.get("/page/%2e%2e/server.py")).status_code == 404


async def test_many_open_pages_cost_the_peers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_PAGES", 3)
    run = FakeRun()
    async with serving(run) as (_, client):
        async with page(client) as first, page(client) as second, page(client) as third:
            for events in (first, second, third):
                assert (await anext(events))[1]["full"]
            async with page(client) as fourth:
                assert await anext(fourth) == ("refused", {"reason": "3 pages are open already; close some of them"})
            run.send(view(waiting_share=0.7))
            for events in (first, second, third):
                assert (await anext(events))[1]["waiting_share"] == 0.7
            assert run.followed == 1
        for _ in range(10):  # the server notices soon that the others are closed
            async with page(client) as again:
                name, content = await anext(again)
            if name == "update":
                break
        assert content["waiting_share"] == 0.7


async def test_a_page_that_reads_too_slowly_gets_everything_anew() -> None:
    updates = server_module.Updates(lambda: {"full": True})
    slow, quick = updates.events(), updates.events()
    updates.send({"number": 0})
    for page in (slow, quick):
        assert json.loads((await anext(page)).split(b"data: ")[1]) == {"full": True}
    for number in range(1, 10):
        updates.send({"number": number})
        assert json.loads((await anext(quick)).split(b"data: ")[1]) == {"number": number}
    assert json.loads((await anext(slow)).split(b"data: ")[1]) == {"full": True}
    updates.send({"number": 10})
    assert json.loads((await anext(slow)).split(b"data: ")[1]) == {"number": 10}
    updates.close()
    assert [each async for each in slow] == []
    assert [each async for each in quick] == []
    assert updates.pages == 0


FOREIGN = [
    {"Host": "evil.example"},  # DNS rebinding
    {"Host": "evil.example:8080"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "printer"},
    {"Host": "[::1"},
    {"Host": ""},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
]


async def test_pages_of_other_sites_are_refused() -> None:
    async with serving(FakeRun()) as (_, client):
        for headers, path in product(FOREIGN, ("/", "/state", "/events", "/rounds/1", "/page.js")):
            reply = await client.get(path, headers=headers)
            assert reply.status_code == 403, (headers, path)
            assert "run" not in reply.text.replace("another", "")
            assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_the_own_page_links_and_forwarded_ports_are_answered() -> None:
    async with serving(FakeRun(), hosts=("Runs.Example.org.",)) as (server, client):
        port = httpx.URL(server.url).port
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert (await client.get("/", headers=link)).status_code == 200
        assert (await client.get("/state", headers=link)).status_code == 403
        own = {"Sec-Fetch-Site": "same-origin", "Origin": f"http://127.0.0.1:{port}"}
        assert (await client.get("/state", headers=own)).status_code == 200
        for host in (
            "localhost:9000",
            "127.0.0.1",
            "[::1]:9000",
            "192.0.2.7",
            "runs.example.org:80",
            socket.gethostname(),
        ):
            assert (await client.get("/state", headers={"Host": host})).status_code == 200, host


async def test_a_password_is_needed_with_every_request(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(f"{SECRET}\n{TOKEN}\n")
    async with serving(FakeRun(), password_file=file) as (_, client):
        for path in ("/", "/state", "/events", "/page.js"):
            reply = await client.get(path)
            assert (reply.status_code, reply.headers["www-authenticate"][:5]) == (401, "Basic")
        for wrong in ("Basic !", "Basic", f"Digest {SECRET}", "Basic OnB3", "Basic " + 3 * "A"):
            assert (await client.get("/state", headers={"Authorization": wrong})).status_code == 401
        for secret in (SECRET, TOKEN):
            assert (await client.get("/state", auth=("any", secret))).status_code == 200
        assert (await client.get("/state", auth=("any", SECRET), headers={"Host": "evil.example"})).status_code == 403


async def test_other_machines_may_read_only_by_the_users_word(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch(mode=0o600)
    file.write_text(SECRET)
    files = certificates.write(tmp_path / "tls", *certificates.HERE)
    https = {"https_cert": files["tls_cert"], "https_key": files["tls_key"]}
    for listen in ("0.0.0.0:0", "[::]:0", "192.0.2.7:0"):
        for given in ({}, {"password_file": file}, https):
            with pytest.raises(ConfigError, match=r"other machines can reach.*insecure.*ssh -L"):
                DashboardServer(FakeRun().views, listen=listen, **given)  # type: ignore[arg-type]
    async with serving(FakeRun(), listen="0.0.0.0:0", insecure=True) as (server, client):
        port = httpx.URL(server.url).port
        assert (await client.get(f"http://127.0.0.1:{port}/state")).status_code == 200
    async with serving(FakeRun(), listen="0.0.0.0:0", password_file=file, **https) as (server, _):
        trusted = ssl.create_default_context(cafile=str(files["tls_ca"]))
        url = f"https://127.0.0.1:{httpx.URL(server.url).port}/state"
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
            assert (await client.get(url)).status_code == 401
            assert (await client.get(url, auth=("", SECRET))).json()["run_id"] == "run"


def test_wrong_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    files = certificates.write(tmp_path / "tls", *certificates.HERE)
    other = certificates.write(tmp_path / "other", *certificates.HERE, of="other")
    missing = tmp_path / "missing.pem"
    for cert, key, reason in (
        (files["tls_cert"], None, "belong together"),
        (files["tls_cert"], other["tls_key"], "no certificate with its key"),
        (missing, missing, "No such file"),
        (files["tls_key"], files["tls_key"], "no certificate with its key"),
    ):
        with pytest.raises(ConfigError, match=reason):
            DashboardServer(FakeRun().views, https_cert=cert, https_key=key)
    short = tmp_path / "short"
    short.touch(mode=0o600)
    short.write_text("abc")
    with pytest.raises(ConfigError, match="token 1 in password_file=.* must have 16"):
        DashboardServer(FakeRun().views, password_file=short)


async def test_invalid_requests_are_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeRun()) as (server, client):
        port = httpx.URL(server.url).port
        upgrade = b"GET /events HTTP/1.1\r\nHost: evil\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n"
        for junk in (b"\x16\x03\x01 not http\r\n\r\n", b"GET /" + 70_000 * b"A" + b" HTTP/1.1\r\n\r\n", upgrade):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            assert (await reader.readline()).split()[1] in (b"400", b"403")
            writer.close()
        assert (await client.get("/state")).status_code == 200
    assert caplog.records == []


async def test_the_server_ends_at_once_although_pages_are_open() -> None:
    async with serving(FakeRun()) as (server, client), page(client) as events:
        await anext(events)
        async with asyncio.timeout(server_module.GRACE):
            await server.__aexit__(None, None, None)
        assert [each async for each in events] == []


async def test_a_failure_of_the_collector_ends_the_server() -> None:
    async def broken(_: Any) -> AsyncGenerator[Any, None]:
        yield view()
        raise ZeroDivisionError

    async with asyncio.timeout(DEADLINE), DashboardServer(broken) as server:
        with pytest.raises(ZeroDivisionError):
            await server.wait()
