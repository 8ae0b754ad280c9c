"""The server with a model that counts: its routes, versions, limits and errors, over real sockets."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from averaging import WeightPublisher
from averaging.engine import EngineServer, GenerationJob, TextPiece, Unfollowed, server
from averaging.errors import ConfigError, TensorError
from averaging.rpc import RpcServer
from averaging.weights import FollowerOptions
from tests.engine.engines import CountingModel
from tests.support.ports import free_port

LIMIT = 30.0

ABC: dict[str, Any] = {"model": "m", "prompt": "ab", "max_tokens": 3}


@asynccontextmanager
async def serving(model: CountingModel, **options: Any) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with (
        EngineServer(model, name="m", **options) as server,
        httpx.AsyncClient(base_url=server.url, timeout=LIMIT, trust_env=False) as client,
    ):
        client.wait = server.wait  # type: ignore[attr-defined]
        yield client


async def until(condition: Callable[[], Any | Awaitable[Any]]) -> None:
    async with asyncio.timeout(LIMIT):
        while not (await found if isinstance(found := condition(), Awaitable) else found):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)


async def busy(client: httpx.AsyncClient, count: int) -> None:
    """Until so many requests run or wait."""

    async def asked() -> bool:
        health = (await client.get("/health")).json()
        return bool(health["running"] + health["waiting"] == count)

    await until(asked)


async def says(client: httpx.AsyncClient, **expected: object) -> None:
    """Until /weight_info says that."""

    async def asked() -> bool:
        return bool(expected.items() <= (await client.get("/weight_info")).json().items())

    await until(asked)


async def test_an_answer_has_text_tokens_logprobs_and_the_version() -> None:
    async with serving(CountingModel(7)) as client:
        asked = ABC | {"logprobs": 1, "return_token_ids": True, "n": 2}
        answer = (await client.post("/v1/completions", json=asked)).json()
        assert (answer["model"], answer["weight_version"], answer["object"]) == ("m", "7", "text_completion")
        for index, choice in enumerate(answer["choices"]):
            assert (choice["index"], choice["text"], choice["finish_reason"]) == (index, "cde", "length")
            assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [99, 100, 101])
            assert choice["logprobs"] == {"tokens": ["c", "d", "e"], "token_logprobs": [-0.5] * 3}
        assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
        chat = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "y"}]}]}
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answer["choices"][0]["message"]["content"] == "z{|}~"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "token_ids" not in answer["choices"][0]
        more = {"logprobs": True, "return_token_ids": True, "max_completion_tokens": 1, "max_tokens": None}
        answer = (await client.post("/v1/chat/completions", json=chat | more)).json()
        entry = {"token": "z", "logprob": -0.5, "bytes": [122], "top_logprobs": []}
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == ([121], [122])
        assert answer["choices"][0]["logprobs"]["content"] == [entry]


async def test_a_stream_has_all_of_the_answer() -> None:
    async with serving(CountingModel(7)) as client:
        asked = ABC | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, "n": 2}
        lines = [line for line in (await client.post("/v1/completions", json=asked)).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert {chunk["weight_version"] for chunk in chunks} == {"7"}
        assert chunks.pop()["usage"]["completion_tokens"] == 6
        for index in range(2):
            own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == "cde"
            assert [token for choice in own for token in choice["token_ids"]] == [99, 100, 101]
            assert own[0]["prompt_token_ids"] == [97, 98]
            assert [choice["finish_reason"] for choice in own] == [None, None, "length"]
        chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
        text = (await client.post("/v1/chat/completions", json=chat)).text
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.split("\n\n") if line[6:7] == "{"]
        assert deltas == [{"role": "assistant", "content": "b"}, {"content": "c"}]


async def test_versions_change_between_requests_and_answers_name_theirs() -> None:
    model, publisher = CountingModel(), WeightPublisher()
    events: list[Any] = []
    async with RpcServer("127.0.0.1:0", [publisher]) as publishing:
        follow = FollowerOptions(join=[publishing.endpoint], run_id="", listen=None)
        async with serving(model, follow=follow, on_event=events.append) as client:
            early = await client.post("/v1/completions", json=ABC)
            assert (early.status_code, early.headers["retry-after"]) == (503, "1")
            assert early.json()["error"]["code"] == "no_version"
            assert (await client.get("/health")).status_code == 503
            await publisher.publish({"w": torch.zeros(3), "b": torch.zeros(2)}, 4)
            await until(lambda: model.version == 4)
            model.go.clear()
            running = asyncio.create_task(client.post("/v1/completions", json=ABC))
            await until(model.begun.is_set)
            await publisher.publish({"w": torch.ones(3), "b": torch.zeros(2)}, 5)
            await says(client, weight_version="4", newest="5", versions_behind=1)
            model.go.set()
            assert (await running).json()["weight_version"] == "4"
            digest = publisher.digest.hex()  # type: ignore[union-attr]
            await says(client, weight_version="5", connected=True, versions_behind=0, digest=digest)
            [served] = (await client.get("/v1/models")).json()["data"]
            assert (served["id"], served["max_model_len"]) == ("m", 64)


async def test_a_publisher_that_is_away_costs_nothing() -> None:
    model, publisher, port = CountingModel(), WeightPublisher(), free_port()
    events: list[Any] = []
    follow = FollowerOptions(join=[f"127.0.0.1:{port}"], run_id="", listen=None, join_timeout=0.3)
    async with serving(model, follow=follow, on_event=events.append) as client:
        await until(lambda: events)
        assert "no publisher answered" in events[0].message
        await publisher.publish({"w": torch.zeros(3)}, 1)
        async with RpcServer(f"127.0.0.1:{port}", [publisher], grace=0.0):
            await until(lambda: model.version == 1)
        await says(client, connected=False)
        assert (await client.post("/v1/completions", json=ABC)).json()["weight_version"] == "1"
        await publisher.publish({"w": torch.ones(3)}, 2)
        async with RpcServer(f"127.0.0.1:{port}", [publisher], grace=0.0):
            await until(lambda: model.version == 2)


async def test_another_model_ends_the_server_only_before_the_first_version() -> None:
    publisher = WeightPublisher()
    await publisher.publish({"v": torch.zeros(3)}, 1)
    async with RpcServer("127.0.0.1:0", [publisher]) as publishing:
        follow = FollowerOptions(join=[publishing.endpoint], run_id="", listen=None)
        async with serving(CountingModel(), follow=follow) as client:
            with pytest.raises(TensorError, match="another model"):
                await asyncio.wait_for(client.wait(), LIMIT)  # type: ignore[attr-defined]
        events: list[Any] = []
        async with serving(CountingModel(0), follow=follow, on_event=events.append) as client:
            await until(lambda: events)
            assert (await client.post("/v1/completions", json=ABC)).json()["weight_version"] == "0"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("first", [True, False])
async def test_a_version_that_cannot_be_used_is_said_once_and_the_next_is_served(value: float, first: bool) -> None:
    model, publisher = CountingModel(), WeightPublisher()
    events: list[Any] = []
    async with RpcServer("127.0.0.1:0", [publisher]) as publishing:
        follow = FollowerOptions(join=[publishing.endpoint], run_id="", listen=None)
        async with serving(model, follow=follow, on_event=events.append) as client:
            if not first:
                await publisher.publish({"w": torch.zeros(3)}, 1)
                await until(lambda: model.version == 1)
            await publisher.publish({"w": torch.tensor([0.0, value, 0.0])}, 2)
            await until(lambda: any(isinstance(event, Unfollowed) for event in events))
            answer = await client.post("/v1/completions", json=ABC)
            assert answer.status_code == 503 if first else answer.json()["weight_version"] == "1"
            await publisher.publish({"w": torch.ones(3)}, 3)
            await until(lambda: model.version == 3)
            assert (await client.post("/v1/completions", json=ABC)).json()["weight_version"] == "3"
    said = [event.message for event in events if isinstance(event, Unfollowed)]
    assert said == ["'w' of version 2 has a value that is not finite"]


async def test_a_stream_that_fails_ends_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(CountingModel):
        def generate(self, batch: Sequence[GenerationJob]) -> None:
            batch[0].take(TextPiece(0, "c", (99,), (-0.5,)))
            batch[0].take(TextPiece(0, "d", (100,), (float("nan"),), "length"))

    async with serving(Failing()) as client:
        text = (await client.post("/v1/completions", json=ABC | {"stream": True, "logprobs": 1})).text
    lines = [line for line in text.splitlines() if line]
    assert "internal error" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in text


async def test_a_client_that_goes_away_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUEUE", 1)
    model = CountingModel()
    model.go.clear()
    async with serving(model) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=ABC))
        await until(model.begun.is_set)
        waiting = asyncio.create_task(client.post("/v1/completions", json=ABC | {"stream": True}))
        await busy(client, 2)
        full = await client.post("/v1/completions", json=ABC)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        waiting.cancel()
        await busy(client, 1)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        model.go.set()
        assert (await client.post("/v1/completions", json=ABC)).status_code == 200


def from_address(client: httpx.AsyncClient, address: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(local_address=address)
    return httpx.AsyncClient(base_url=client.base_url, timeout=LIMIT, transport=transport)


async def test_one_address_has_half_of_the_queue_and_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUEUE", 8)
    model = CountingModel()
    model.go.clear()
    async with serving(model) as client, from_address(client, "127.0.0.3") as other:
        asked = [asyncio.create_task(client.post("/v1/completions", json=ABC | {"seed": 1}))]
        await until(model.begun.is_set)
        for count in range(1, 5):
            asked.append(asyncio.create_task(client.post("/v1/completions", json=ABC | {"seed": 1})))
            await busy(client, 1 + count)
        refused = await client.post("/v1/completions", json=ABC | {"seed": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        asked.append(asyncio.create_task(other.post("/v1/completions", json=ABC | {"seed": 2})))
        await busy(client, 6)
        model.go.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        assert [batch[0].asked.seed for batch in model.batches] == [1, 2, 1, 1, 1, 1]


async def test_the_bytes_of_all_requests_are_bounded_and_come_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_BYTES", 1024)
    model = CountingModel()
    model.go.clear()
    filled = json.dumps(ABC | {"metadata": ""}).encode().replace(b'""', b'"%b"')
    filled = filled % (b"x" * (1022 - len(filled)))
    assert len(filled) == 1020  # 32 of them are within 32 times 1024, and 33 are not
    async with serving(model) as client, from_address(client, "127.0.0.3") as other:
        waiting = [asyncio.create_task(client.post("/v1/completions", content=filled)) for _ in range(32)]
        await until(model.begun.is_set)
        await busy(client, 32)
        refused = await client.post("/v1/completions", content=filled)
        assert (refused.status_code, "too many bytes" in refused.text) == (429, True)
        honest = asyncio.create_task(other.post("/v1/completions", json=ABC))
        await busy(client, 33)
        model.go.set()
        assert (await honest).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        assert (await client.post("/v1/completions", content=filled)).status_code == 200


async def test_requests_that_wait_at_the_end_get_an_error() -> None:
    model = CountingModel()
    model.go.clear()
    server = EngineServer(model, name="m")
    async with server, httpx.AsyncClient(base_url=server.url, timeout=LIMIT, trust_env=False) as client:
        running = asyncio.create_task(client.post("/v1/completions", json=ABC))
        await until(model.begun.is_set)
        ending = asyncio.create_task(server.__aexit__())
        await asyncio.sleep(0)
        model.go.set()
        assert (await running).status_code == 200
        await ending
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "n"}, 404, "model"),
    ({"max_tokens": 63}, 400, "max_tokens"),
    ({"n": 17}, 400, "n"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt"),
    ({"prompt": ["a"] * 17}, 400, "prompt"),
    ({"prompt": "a" * 64}, 400, "max_tokens"),
    ({"top_p": 0}, 400, None),
    ({"presence_penalty": 0.5}, 400, None),
    ({"surprise": 1}, 400, None),
    ({"seed": 1 << 70}, 400, None),
]


async def test_what_is_not_served_is_refused_in_the_form_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_BYTES", 8192)
    async with serving(CountingModel()) as client:
        for change, status, parameter in REFUSED:
            answer = await client.post("/v1/completions", json=ABC | change)
            assert answer.status_code == status, change
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", parameter), change
            assert error["message"]
        for body in (b"", b"[", b"[" * 4000, b'{"model": "m"}', b"\xff", b'{"model": "m", "prompt": "\\ud800"}'):
            assert (await client.post("/v1/completions", content=body)).status_code == 400, body
        deep = b'{"model": "m", "prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}"
        assert (await client.post("/v1/completions", content=deep)).status_code == 400
        chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        wrong: list[dict[str, Any]] = [
            {"messages": [{"content": "a"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            {"tools": [{"type": "function"}]},
            {"chat_template_kwargs": {"a": ["b"]}},
        ]
        for more in wrong:
            assert (await client.post("/v1/chat/completions", json=chat | more)).status_code == 400, more
        assert (await client.post("/v1/completions", content=b" " * 9000)).status_code == 413
        assert (await client.get("/v1/nothing")).json()["error"]["message"]
        assert (await client.get("/v1/completions")).status_code == 405
        neutral = {"presence_penalty": 0, "response_format": {"type": "text"}, "user": "me", "seed": None, "stop": None}
        assert (await client.post("/v1/completions", json=ABC | neutral)).status_code == 200
        answered = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None}
        assert (await client.post("/v1/chat/completions", json=chat | {"messages": [answered]})).status_code == 200


async def test_a_token_is_needed_but_for_health_and_web_pages_are_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-long-secret-token\n")
    async with serving(CountingModel(), token_file=tmp_path / "token") as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer a-long-secret-token"}
        assert (await client.get("/v1/models", headers=good)).status_code == 200
        assert (await client.get("/v1/models", headers=good | {"Origin": "http://evil.example"})).status_code == 403
    async with serving(CountingModel()) as client:
        assert (await client.get("/v1/models", headers={"Host": "evil.example"})).status_code == 403
    with pytest.raises(ConfigError, match="without TLS"):
        EngineServer(CountingModel(), name="m", listen="0.0.0.0:0")
    with pytest.raises(ConfigError, match="64 tokens"):
        EngineServer(CountingModel(), name="m", max_model_len=65)
