"""The answers of the server, above all to invalid requests. The server runs in the test's event loop."""

import asyncio
import gzip
import json
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from averaging.errors import ConfigError, ListenError
from averaging.rl.feed import FeedServer, server
from averaging.rl.feed.clients import Connection
from averaging.rl.feed.messages import Registration
from averaging.rl.feed.run_state import RunState
from tests.feed.feeds import environment, registration
from tests.support import certificates
from tests.support.certificates import OLD_TOKEN, TOKEN

REGISTRATION = {name: getattr(registration(), name) for name in Registration.__struct_fields__}
ENVIRONMENT = {
    name: getattr(environment(), name) for name in ("max_token_length", "desired_name", "weight", "group_size")
}
GROUP: dict[str, Any] = {"tokens": [[1, 2], [3]], "masks": [[-100, 2], [3]], "scores": [1, -0.5]}


@asynccontextmanager
async def serving(store: str | Path = ":memory:", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of a server, by default with its store in memory."""
    async with FeedServer(store, **options) as feed, httpx.AsyncClient(base_url=feed.url) as client:
        yield client


async def begin(client: httpx.AsyncClient) -> None:
    """Registers a trainer, requests its first batch, and registers an environment."""
    assert (await client.post("/register", json=REGISTRATION)).status_code == 200
    assert (await client.get("/batch")).json() == {"batch": None}
    assert (await client.post("/register-env", json=ENVIRONMENT)).json()["env_id"] == 0


async def test_a_run_route_by_route() -> None:
    async with serving() as client:
        assert (await client.get("/")).json() == {"message": "AtroposLib API"}
        assert (await client.get("/info")).json() == {"batch_size": -1, "max_token_len": -1}
        assert (await client.get("/wandb_info")).json() == {"group": None, "project": None}
        assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 0}
        assert (await client.get("/latest_example")).json()["tokens"] == []
        assert (await client.get("/batch")).json() == {
            "status": "error",
            "message": "Trainer not registered. Call /register first.",
            "batch": [],
        }
        reply = await client.post("/register", json=REGISTRATION)
        assert 0 <= reply.json()["uuid"] < 1 << 128
        assert (await client.get("/info")).json() == {"batch_size": 4, "max_token_len": 64}
        assert (await client.get("/wandb_info")).json() == {"group": "group", "project": "project"}
        reply = await client.post("/register-env", json=ENVIRONMENT)
        assert reply.json() == {"status": "wait for trainer to start"}
        assert (await client.get("/batch")).json() == {"batch": None}
        reply = await client.post("/register-env", json=ENVIRONMENT | {"min_batch_allocation": 0.5})
        assert reply.json() == {
            "status": "success",
            "env_id": 0,
            "wandb_name": "env_0",
            "checkpoint_dir": "checkpoints",
            "starting_step": 0,
            "checkpoint_interval": 1,
            "num_steps": 1000,
        }
        assert (await client.post("/scored_data", json=GROUP | {"env_id": 0})).json() == {"status": "received"}
        half = {"tokens": [[9]], "masks": [[9]], "scores": [True], "env_id": 0}
        assert (await client.post("/scored_data", json=half)).json() == {"status": "buffered", "buffer_size": 1}
        reply = await client.post("/scored_data_list", json=[half, GROUP, half])
        assert reply.json() == {"status": "received", "groups_processed": 3, "buffered": 2, "last_buffer_size": 1}
        assert (await client.get("/status")).json() == {"current_step": 0, "queue_size": 4}
        status = (await client.request("GET", "/status-env", json={"env_id": 0})).json()
        assert status == {
            "current_step": 0,
            "queue_size": 3,
            "unallocated_fraction": 0.5,
            "self_queue_size": 2,
            "max_group_size": 2,
            "env_weight": 1.0,
        }
        batch = (await client.get("/batch")).json()
        assert batch["step"] == 1
        assert [group["scores"] for group in batch["batch"]] == [[1.0, -0.5], [1.0], [1.0]]
        assert batch["batch"][0]["overrides"] is None, "trainers expect all fields"
        assert (await client.get("/status")).json() == {"current_step": 1, "queue_size": 1}
        assert (await client.get("/latest_example")).json()["tokens"] == [[1, 2], [3]]
        assert (await client.post("/disconnect-env", json={"env_id": 0})).json() == {"status": "success"}
        assert (await client.post("/disconnect-env", json={"env_id": 7})).json()["status"] == "failure"
        reply = await client.get("/reset_data")
        assert (reply.status_code, reply.text) == (200, "Reset successful")
        assert (await client.get("/batch")).json()["status"] == "error"
        assert (await client.get("/latest_example")).json()["tokens"] == []


BAD = [
    ("/register", {k: v for k, v in REGISTRATION.items() if k != "num_steps"}, "missing required field `num_steps`"),
    ("/register", REGISTRATION | {"batch_size": 0}, "Expected `int` >= 1 - at `$.batch_size`"),
    ("/register", REGISTRATION | {"starting_step": -1}, "Expected `int` >= 0 - at `$.starting_step`"),
    ("/register", REGISTRATION | {"starting_step": 2**63}, "`$.starting_step`"),
    ("/register", REGISTRATION | {"checkpoint_dir": "d" * 5000}, "length <= 4096 - at `$.checkpoint_dir`"),
    ("/register-env", ENVIRONMENT | {"weight": 1e300}, "`$.weight`"),
    ("/register-env", ENVIRONMENT | {"weight": "nan"}, "`$.weight`"),
    ("/scored_data", GROUP | {"tokens": [[1, 2], [-1]]}, "Expected `int` >= 0 - at `$.tokens[1][0]`"),
    ("/scored_data", GROUP | {"tokens": [[1, 2**31], [3]]}, "Expected `int` <= 2147483647 - at `$.tokens[0][1]`"),
    ("/scored_data", GROUP | {"masks": [[-101, 2], [3]]}, "Expected `int` >= -100 - at `$.masks[0][0]`"),
    ("/scored_data", GROUP | {"distill_token_ids": [[[2**40]]]}, "`$.distill_token_ids[0][0][0]`"),
    ("/scored_data", GROUP | {"advantages": [[1.0], ["nan"]]}, "`$.advantages[1][0]`"),
    ("/scored_data_list", [GROUP, GROUP | {"distill_logprobs": [[["-inf"]]]}], "`$[1].distill_logprobs[0][0][0]`"),
    ("/register-env", ENVIRONMENT | {"group_size": 5}, "group_size 5 is above the run's batch_size 4"),
    ("/register-env", ENVIRONMENT | {"min_batch_allocation": 1.5}, "`$.min_batch_allocation`"),
    ("/register-env", ENVIRONMENT | {"desired_name": "n" * 2000}, "length <= 1024 - at `$.desired_name`"),
    ("/scored_data", GROUP | {"masks": [[1, 2]]}, "2 sequences in tokens, 1 in masks and 2 scores"),
    ("/scored_data", GROUP | {"scores": [1]}, "2 sequences in tokens, 2 in masks and 1 scores"),
    ("/scored_data", GROUP | {"masks": [[1, 2], [3, 4]]}, "sequence 1 has 1 tokens and 2 masks"),
    ("/scored_data", {"tokens": [], "masks": [], "scores": []}, "at least one sequence"),
    ("/scored_data", {"tokens": [[1]] * 5, "masks": [[1]] * 5, "scores": [0] * 5}, "more than the run's batch_size, 4"),
    ("/scored_data", GROUP | {"env_id": 0, "tokens": [[1]] * 3, "masks": [[1]] * 3, "scores": [0] * 3}, "group_size"),
    ("/scored_data", GROUP | {"messages": [[{"role": "user"}], []]}, "lacks its role or its content"),
    ("/scored_data", GROUP | {"tokens": [["a", 2], [3]]}, "Expected `int`, got `str` - at `$.tokens[0][0]`"),
    ("/scored_data_list", [GROUP, GROUP | {"scores": [1]}], "1 scores"),
]


BAD_JSON = [
    (b'{"tokens": [[1]], "masks": [[1]], "scores": [NaN]}', "JSON has neither NaN nor Infinity"),
    (b'{"tokens": [[1]], "masks": [[1]], "scores": [-Infinity]}', "JSON has neither NaN nor Infinity"),
    (b'{"tokens": [[1]], "masks": [[1]], "scores": [1e999]}', "Number out of range - at `$.scores[0]`"),
    (b'{"tokens": [[' + b"9" * 5000 + b']], "masks": [[1]], "scores": [1]}', "out of range - at `$.tokens[0][0]`"),
    (b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "images": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "messages": [[{"role": "\xff"}]]}', "the body cannot be used"),
    (b"", "the body cannot be used"),
    (b"tokens=1", "malformed"),
]


async def test_what_cannot_be_used_is_refused_with_a_reason() -> None:
    async with serving() as client:
        await begin(client)
        for path, body, expected in BAD:
            reply = await client.post(path, json=body)
            assert (reply.status_code, reply.json()["status"]) == (422, "error"), (path, body, reply.text)
            assert expected in reply.json()["message"]
        for content, expected in BAD_JSON:
            reply = await client.post("/scored_data", content=content)
            assert (reply.status_code, expected in reply.json()["message"]) == (422, True), (content[:99], reply.text)
        assert (await client.get("/status")).json()["queue_size"] == 0, "nothing of a list was taken"
        reply = await client.post("/scored_data", json=GROUP | {"advantages": [[1e308, 1e308], [-1e308]]})
        assert reply.json() == {"status": "received"}, "large numbers are finite"


async def test_unknown_paths_and_methods_get_json_errors() -> None:
    async with serving() as client:
        for method, path, status in (("GET", "/nothing", 404), ("DELETE", "/batch", 405), ("GET", "/scored_data", 405)):
            reply = await client.request(method, path)
            assert (reply.status_code, reply.json()["status"]) == (status, "error")
        assert (await client.get("/batch?step=soon")).status_code == 422
        assert (await client.get("/batch?step=-1")).status_code == 422
        assert (await client.request("GET", "/status-env")).status_code == 422
        assert (await client.request("GET", "/status-env", json={"env_id": -1})).status_code == 404


async def test_gzip_both_ways() -> None:
    async with serving() as client:
        await begin(client)
        group = {"tokens": [list(range(500))] * 4, "masks": [list(range(500))] * 4, "scores": [0.0] * 4}
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        reply = await client.post("/scored_data", content=gzip.compress(json.dumps(group).encode()), headers=headers)
        assert reply.json() == {"status": "received"}
        latest = await client.get("/latest_example", headers={"Accept-Encoding": "identity"})
        assert "Content-Encoding" not in latest.headers
        batch = await client.get("/batch", headers={"Accept-Encoding": "gzip"})
        assert batch.headers["Content-Encoding"] == "gzip"
        assert batch.json()["batch"][0]["tokens"] == group["tokens"]
        assert "Content-Encoding" not in (await client.get("/info", headers={"Accept-Encoding": "gzip"})).headers


def bomb(nbytes: int) -> bytes:
    """Returns a group that is compressed to few bytes, and grows to `nbytes` of white space and more."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join((packer.compress(b" " * nbytes), packer.compress(json.dumps(GROUP).encode()), packer.flush()))


@pytest.mark.parametrize(
    ("content", "headers", "status", "expected"),
    [
        (b" " * 70_000, {}, 413, "more than 65536 bytes; send less at once"),
        (bomb(50_000_000), {"Content-Encoding": "gzip"}, 413, "more than 65536 bytes"),
        (bomb(100)[:-9], {"Content-Encoding": "gzip"}, 400, "not one whole gzip stream"),
        (bomb(100) + bomb(100), {"Content-Encoding": "gzip"}, 400, "not one whole gzip stream"),
        (b"{}" * 100, {"Content-Encoding": "gzip"}, 400, "the body is not gzip"),
        (b"{}", {"Idempotency-Key": "k" * 201}, 422, ""),
    ],
    ids=("large", "bomb", "cut", "two", "no gzip", "key"),
)
async def test_bodies_are_bounded(
    content: bytes, headers: dict[str, str], status: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_BYTES", 1 << 16)
    async with serving() as client:
        await begin(client)
        reply = await client.post("/scored_data", content=content, headers=headers)
        assert (reply.status_code, reply.json()["status"]) == (status, "error"), reply.text
        assert expected in reply.json()["message"]
        ok = await client.post(
            "/scored_data", content=bomb(60_000), headers={"Content-Encoding": "gzip", "Idempotency-Key": "k" * 200}
        )
        assert ok.json() == {"status": "received"}


@pytest.mark.parametrize(("addresses", "fit"), [(["127.0.0.2"], 2), (["127.0.0.2", "127.0.0.3"], 4)])
async def test_all_bodies_together_are_bounded_and_those_of_one_address(
    addresses: list[str], fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_BYTES", 1 << 16)
    async with FeedServer(":memory:") as feed:
        host, _, port = feed.url.removeprefix("http://").partition(":")
        head = b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 60001\r\n\r\n"
        connections = [
            await asyncio.open_connection(host, int(port), local_addr=(addresses[number % len(addresses)], 0))
            for number in range(fit + 1)
        ]
        for _, writer in connections:
            writer.write(head + b" " * 60_000)  # the last byte does not come
        async with asyncio.timeout(30):
            replies = [asyncio.create_task(reader.read(1000)) for reader, _ in connections]
            done, others = await asyncio.wait(replies, return_when=asyncio.FIRST_COMPLETED)
        (reply,) = [task.result() for task in done]
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in reply.lower()
        async with httpx.AsyncClient(base_url=feed.url) as client:
            busy = await client.post("/scored_data", content=b" " * 60_000)
            assert busy.status_code == (422 if fit == 2 else 503)
            for _, writer in connections:
                writer.close()
            await asyncio.wait(others)  # the closed connections do not count any more
            assert (await client.post("/scored_data", content=b" " * 60_000)).status_code == 422


async def test_a_request_has_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SECONDS", 0.2)
    async with FeedServer(":memory:") as feed:
        host, _, port = feed.url.removeprefix("http://").partition(":")
        head = b"POST /scored_data HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
        for sent, expected in ((head + b"\r\n{", b"408 "), (head, b""), (b"", b"")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(30):
                try:
                    received = await reader.read(100)
                except ConnectionError:
                    received = b""
            assert expected in received, sent
            assert bool(expected) == bool(received)
            writer.close()


def becomes_closed(port: int) -> bool:
    """Waits until this process has no connection to that port. Returns False if it still has one after 30 s."""
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        if not any(port in each.raddr for each in psutil.Process().net_connections("tcp")):
            return True
        time.sleep(0.01)
    return False


async def test_a_client_that_stops_reading_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path / "store") as client:
        await client.post("/register", json=REGISTRATION | {"batch_size": 1})
        tokens = [[2**31 - 1] * 600_000]
        await client.post("/scored_data", json={"tokens": tokens, "masks": tokens, "scores": [0.0]})
    monkeypatch.setattr(server, "SECONDS", 0.2)
    async with FeedServer(tmp_path / "store") as feed:
        host, _, port = feed.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"GET /batch HTTP/1.1\r\nHost: x\r\n\r\n")
            at = connection.getsockname()[1]
            assert await asyncio.to_thread(becomes_closed, at), "the connection is still open"


async def test_each_request_needs_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n{OLD_TOKEN}\n")
    file.chmod(0o600)
    async with serving(token_file=file) as client:
        assert (await client.get("/")).status_code == 200, "a health check needs no token"
        for path in ("/status", "/metrics", "/batch", "/reset_data"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong-token-0123456789"},
                {"Authorization": f"Basic {TOKEN}"},
            ):
                reply = await client.get(path, headers=headers)
                assert (reply.status_code, reply.json()["status"]) == (401, "error")
                assert "Authorization: Bearer TOKEN" in reply.json()["message"]
        assert (await client.post("/scored_data", content=b"x" * 100_000)).status_code == 401
        assert (await client.get("/status", auth=("any", TOKEN))).status_code == 200, "the password of a URL is a token"
        assert (await client.get("/status", auth=("any", TOKEN), headers={"Host": "feed.example"})).status_code == 200
        assert (await client.get("/status", auth=(TOKEN, "wrong"))).status_code == 401
        for token in (TOKEN, OLD_TOKEN):
            assert (await client.get("/status", headers={"Authorization": f"Bearer {token}"})).status_code == 200


async def test_without_tokens_tls_needs_a_certificate(tmp_path: Path) -> None:
    files: dict[str, Any] = dict(certificates.write(tmp_path, *certificates.HERE))
    stranger = ssl.create_default_context(cafile=files["tls_ca"])
    member = ssl.create_default_context(cafile=files["tls_ca"])
    member.load_cert_chain(files["tls_cert"], files["tls_key"])
    async with FeedServer(":memory:", **files) as feed:
        assert feed.url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=feed.url, verify=member) as client:
            assert (await client.get("/status")).status_code == 200
        async with httpx.AsyncClient(base_url=feed.url, verify=stranger) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/status")


async def test_metrics() -> None:
    async with serving() as client:
        await begin(client)
        for _ in range(2):
            await client.post("/scored_data", json=GROUP, headers={"Idempotency-Key": "k"})
        await client.post("/scored_data_list", json=[GROUP, GROUP])
        await client.get("/batch")
        await client.get("/nothing")
        reply = await client.get("/metrics")
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = reply.text.splitlines()
        for line in (
            'averaging_feed_requests_total{route="/scored_data",status="200"} 2.0',
            "averaging_feed_received_groups_total 3.0",
            "averaging_feed_received_sequences_total 6.0",
            "averaging_feed_repeated_posts_total 1.0",
            "averaging_feed_delivered_batches_total 1.0",
            "averaging_feed_delivered_sequences_total 4.0",
            "averaging_feed_step 1.0",
            "averaging_feed_waiting_groups 1.0",
            "averaging_feed_queued_sequences 2.0",
            "averaging_feed_connected_environments 1.0",
            'averaging_feed_request_duration_seconds_count{route="/batch"} 2.0',
        ):
            assert line in lines
        assert all(line.startswith(("#", "averaging_feed_")) for line in lines)


async def test_events() -> None:
    events: list[Any] = []
    async with serving(on_event=events.append) as client:
        await begin(client)
        await client.post("/register", json=REGISTRATION)
        await client.post("/scored_data_list", json=[GROUP, GROUP])
        await client.get("/batch")
        await client.get("/reset_data")
    assert [event.as_json() for event in events] == [
        {"event": "registered", "batch_size": 4, "starting_step": 0, "num_steps": 1000},
        {"event": "environment", "env_id": 0, "name": "env_0"},
        {"event": "trainer", "registration": 2},
        {"event": "batch", "step": 1, "groups": 2, "sequences": 4},
        {"event": "reset"},
    ]


async def test_errors_of_the_start_name_the_cause(tmp_path: Path) -> None:
    async with FeedServer(tmp_path / "store") as feed:
        address = feed.url.removeprefix("http://")
        with pytest.raises(ListenError, match=f"cannot listen on {address}: .*choose another port or port 0"):
            await FeedServer(":memory:", listen=address).__aenter__()
        with pytest.raises(ConfigError, match="another process uses it"):
            await FeedServer(tmp_path / "store").__aenter__()
    with pytest.raises(ListenError, match="cannot listen on unknown.invalid:0"):
        await FeedServer(":memory:", listen="unknown.invalid:0", insecure=True).__aenter__()
    with pytest.raises(ConfigError, match="queue_bytes and env_timeout must be above 0"):
        FeedServer(":memory:", env_timeout=0)
    with pytest.raises(ConfigError, match="other machines can reach 0.0.0.0:0, and without TLS"):
        FeedServer(":memory:", listen="0.0.0.0:0")
    async with FeedServer(tmp_path / "store", listen="0.0.0.0:0", insecure=True):
        pass  # the failed start has released the store


async def test_an_internal_error_is_answered_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RunState, env_id: int) -> None:
        raise ZeroDivisionError

    def tell(event: object) -> None:
        raise ValueError("no room for it")

    monkeypatch.setattr(RunState, "status_env", fail)
    async with serving(on_event=tell) as client:
        await begin(client)
        reply = await client.request("GET", "/status-env", json={"env_id": 0})
        assert (reply.status_code, reply.json()["message"]) == (500, "internal error of this server; see its log")
        assert (await client.get("/info")).json()["batch_size"] == 4, "the server goes on"
    assert "ZeroDivisionError" in caplog.text
    assert "on_event has failed" in caplog.text, "and its clients get their answers"


async def test_head_changes_nothing() -> None:
    async with serving() as client:
        await begin(client)
        await client.post("/scored_data_list", json=[GROUP, GROUP])
        for path in ("/reset_data", "/batch"):
            assert (await client.head(path)).status_code == 405
        assert (await client.head("/status")).status_code == 200
        assert (await client.get("/batch")).json()["step"] == 1, "the run is still there"


@pytest.mark.parametrize("inner", [b"[],", b"{},", b'"a":1,', b"7,"])
async def test_the_objects_of_a_body_are_bounded(inner: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 KiB of gzip may hold 20 million lists, which take gigabytes."""
    brackets = (b"{", b"}") if b":" in inner else (b"[", b"]")
    images = brackets[0] + inner * 2_000_000 + b'"b"'
    images += (b":1" if b":" in inner else b"") + brackets[1]
    body = json.dumps(GROUP).encode()[:-1] + b',"images":' + images + b"}"
    monkeypatch.setattr(server, "MAX_OBJECTS", 1 << 20)
    async with serving() as client:
        await begin(client)
        before = psutil.Process().memory_info().rss
        packed = await asyncio.to_thread(gzip.compress, body, 1)
        reply = await client.post("/scored_data", content=packed, headers={"Content-Encoding": "gzip"})
        assert (reply.status_code, reply.json()["status"]) == (413, "error"), reply.text
        assert "more than 1048576 objects; send fewer groups at once" in reply.json()["message"]
        assert psutil.Process().memory_info().rss - before < 4 * len(body)


async def test_a_key_stands_for_all_fields_but_the_environment() -> None:
    key = {"Idempotency-Key": "k"}
    async with serving() as client:
        await begin(client)
        await client.post("/register-env", json=ENVIRONMENT)
        for env_id in (0, 1):  # an environment that is restarted may have another env_id
            reply = await client.post("/scored_data", json=GROUP | {"env_id": env_id}, headers=key)
            assert reply.json() == {"status": "received"}
        for name, value in (
            *(("scores", [1, 2]), ("advantages", [[1.0, 2.0], [3.0]]), ("images", "other"), ("overrides", [{}, {}])),
            *(("messages", [[{"role": "user", "content": "x"}], []]), ("generation_params", {"top_k": 3})),
        ):
            reply = await client.post("/scored_data", json=GROUP | {name: value}, headers=key)
            assert (reply.status_code, "used for other data" in reply.json()["message"]) == (422, True), name
        assert (await client.get("/status")).json()["queue_size"] == 1


async def test_an_environment_that_posts_nothing_does_not_stop_the_run(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Any] = []
    async with serving(env_timeout=0.05, on_event=events.append) as client:
        await begin(client)
        reserved = ENVIRONMENT | {"desired_name": "a\x1bb", "min_batch_allocation": 0.5}
        # The other one has posted, so the time of this one begins as it registers.
        await client.post("/scored_data_list", json=[GROUP | {"env_id": 0}] * 4)
        assert (await client.post("/register-env", json=reserved)).json()["env_id"] == 1
        async with asyncio.timeout(30):
            while (await client.get("/batch")).json()["batch"] is None:
                pass
        assert (await client.get("/status")).json()["silent_environments"] == ["a\x1bb_0"]
        assert (await client.post("/register-env", json=reserved)).json()["env_id"] == 1, "its old place"
        await client.post("/scored_data", json=GROUP | {"env_id": 1})
        assert "silent_environments" not in (await client.get("/status")).json()
    assert {"silent", "returned"} <= {event.name for event in events}
    lines = [record.getMessage() for record in caplog.records if "environment 1" in record.getMessage()]
    assert ["posts nothing" in lines[0], "is back" in lines[1]] == [True, True]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("listen", ["[::1]:0", "localhost:0"])
async def test_a_feed_at_an_address_of_ipv6_or_a_name(listen: str) -> None:
    async with FeedServer(":memory:", listen=listen) as feed:
        connection = Connection(feed.url)
        assert (await asyncio.to_thread(connection.send, "GET", "/info")).startswith(b"{")
        connection.close()


async def test_a_trainer_that_resumes_at_another_step_than_it_saved_is_named(caplog: pytest.LogCaptureFixture) -> None:
    other = ", and not at step 2, up to which batches were saved"
    again = "; the batches up to step 4 come again"
    async with serving() as client:
        number = (await client.post("/register", json=REGISTRATION)).json()["registration"]
        for step in range(1, 5):
            await client.post("/scored_data_list", json=[GROUP, GROUP])
            reply = await client.get("/batch", params={"step": step, "saved": min(step - 1, 2), "registration": number})
            assert reply.json()["step"] == step
        await client.post("/register", json=REGISTRATION | {"starting_step": 4}, params={"registration": number})
        assert "resumes" not in caplog.text, "it has only lost its connection"
        for start, named in (
            (2, again),
            (3, other + again),
            (4, f"{other}. If"),
            (1, f"{other}. If"),
            (9, f"{other}. If"),
        ):
            await client.post("/register", json=REGISTRATION | {"starting_step": start})
            assert caplog.text.count(f"resumes at step {start}{named}") == 1
