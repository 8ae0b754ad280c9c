"""The gateway between environments and an engine, over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from averaging.errors import ConfigError, RolloutError
from averaging.http_server import HttpServer, listening
from averaging.rl.rollouts.engine import SECRET_HEADER, SESSION_HEADER, EngineClient, EngineGateway
from tests.support.gossip_swarm import until

pytestmark = pytest.mark.asyncio

ANSWER = {
    "id": "7",
    "choices": [{"token_ids": [5, 6], "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, -1.5]}}],
    "weight_version": "12",
}
Asking = tuple[EngineClient, EngineGateway, httpx.AsyncClient]

ASK = {"model": "m", "token_ids": [1, 2], "sampling_params": {"temperature": 0.5, "logprobs": 1, "stop_token_ids": [6]}}


class Served:
    """An engine whose answers are chosen, and what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Callable[[], Response]] = []
        self.asked: list[dict[str, Any]] = []
        self.info: Any = {"weight_version": "3"}
        self.away: list[str] = []

    async def complete(self, request: Request) -> Response:
        self.asked.append({"body": json.loads(await request.body()), "token": request.headers.get("authorization")})
        return self.answers.pop(0)() if self.answers else JSONResponse(ANSWER)

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse(self.info) if self.info is not None else Response(status_code=404)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "max_model_len": 10}]})


@asynccontextmanager
async def asking(served: Served, **options: Any) -> AsyncIterator[Asking]:
    routes = [
        Route("/v1/completions", served.complete, methods=["POST"]),
        Route("/weight_info", served.weight_info),
        Route("/v1/models", served.models),
    ]
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1:0"))
        server = HttpServer(Starlette(routes=routes), listener, connections=20, seconds=60.0)
        await stack.enter_async_context(server)
        url = f"http://any:word@127.0.0.1:{listener.getsockname()[1]}/v1"
        engine = EngineClient(url, on_away=served.away.append, **options)
        stack.push_async_callback(engine.close)
        gateway = await stack.enter_async_context(EngineGateway(engine))
        headers = {SECRET_HEADER: gateway.secret, SESSION_HEADER: "rollout"}
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=gateway.url, headers=headers, trust_env=False)
        )
        yield engine, gateway, client


async def test_a_request_with_token_ids_is_a_completion_with_token_ids() -> None:
    served = Served()
    async with asking(served) as (engine, gateway, client):
        await client.get("/v1/models")
        reply = (await client.post("/inference/v1/generate", json=ASK)).json()
        assert gateway.take_versions("rollout") == [12]
        assert gateway.take_versions("rollout") == []
        assert engine.version == 12
    assert reply["choices"][0]["token_ids"] == [5, 6]
    assert reply["choices"][0]["logprobs"]["content"] == [
        {"token": "token_id:5", "logprob": -0.5},
        {"token": "token_id:6", "logprob": -1.5},
    ]
    assert served.asked == [
        {
            "body": {"model": "m", "prompt": [1, 2], "temperature": 0.5, "stop_token_ids": [6], "logprobs": 1,
                     "return_token_ids": True, "max_tokens": 8},
            "token": "Bearer word",
        }
    ]  # fmt: skip


async def test_an_engine_that_does_not_answer_with_its_version_is_asked_before_and_after() -> None:
    served = Served()

    def changed() -> Response:
        served.info = {"weight_version": 4}
        return JSONResponse({**ANSWER, "weight_version": None})

    served.answers = [changed, lambda: JSONResponse({**ANSWER, "weight_version": None})]
    async with asking(served) as (_, gateway, client):
        await client.post("/inference/v1/generate", json=ASK)
        assert gateway.take_versions("rollout") == [3, 4]
        served.info = {"weight_version": "default"}
        await client.post("/inference/v1/generate", json=ASK)
        assert gateway.take_versions("rollout") == []


@pytest.mark.parametrize(
    ("told", "versions"),
    [(12, [12]), ("13", [12, 13]), (0, [0, 12]), ("default", []), (None, []), ("", []), (-1, []), ("1e3", [])],
)
async def test_a_part_that_unknown_weights_may_have_written_makes_all_unknown(told: Any, versions: list[int]) -> None:
    served = Served()
    served.info = {"weight_version": "12"}

    def changed() -> Response:
        served.info = {"weight_version": told}
        return JSONResponse({**ANSWER, "weight_version": None})

    def changed_back() -> Response:
        served.info = {"weight_version": "12"}
        return JSONResponse({**ANSWER, "weight_version": "12"})

    served.answers = [changed, changed_back]
    async with asking(served) as (engine, gateway, client):
        await client.post("/inference/v1/generate", json=ASK)
        assert engine.version == (max(versions) if told != 0 else 0) if versions else engine.version is None
        await client.post("/inference/v1/generate", json=ASK)
        assert gateway.take_versions("rollout") == (versions or []), "also after a later answer with a version"
        await client.post("/inference/v1/generate", json=ASK)
        assert gateway.take_versions("rollout") == [12], "another rollout"


@pytest.mark.parametrize("tells", [False, True])
async def test_an_engine_that_is_started_again_between_two_attempts_has_no_version(tells: bool) -> None:
    served = Served()
    plain = {**ANSWER, "weight_version": None}

    def killed() -> Response:
        served.info = {"weight_version": "default"}
        return Response(status_code=502)

    def answered_and_updated() -> Response:
        served.info = {"weight_version": "3"}
        return JSONResponse(plain)

    served.answers = [lambda: JSONResponse({**plain, "weight_version": "3"} if tells else plain)]
    async with asking(served) as (_, gateway, client):
        await client.post("/inference/v1/generate", json=ASK)
        assert gateway.take_versions("rollout") == [3]
        served.answers = [killed, answered_and_updated]
        await client.post("/inference/v1/generate", json=ASK)
        assert gateway.take_versions("rollout") == []
        assert not served.answers


async def test_an_engine_that_gets_the_route_later_is_asked_again() -> None:
    served = Served()
    served.info = None
    async with asking(served) as (engine, _, _):
        assert await engine.ask_version() is None
        assert not engine.has_route
        served.info = {"weight_version": "3"}
        assert await engine.ask_version() == 3
        assert engine.has_route


async def test_a_request_waits_for_an_engine_that_is_starting_or_full() -> None:
    served = Served()
    refusals = [JSONResponse({"error": {"message": "loading"}}, status_code=status) for status in (503, 429)]
    served.answers = [lambda: refusals[0], lambda: refusals[1]]
    async with asking(served) as (_, _, client):
        reply = await client.post("/inference/v1/generate", json=ASK)
        assert reply.status_code == 200
    assert len(served.asked) == 3
    assert served.away == ["/v1/completions answers 503: loading", ""]


async def test_an_engine_with_a_fault_is_asked_three_times_and_one_that_refuses_once() -> None:
    served = Served()
    refusal = JSONResponse({"error": {"message": "max_tokens is too large"}}, status_code=400)
    served.answers = [*[lambda: JSONResponse({"detail": "a fault"}, status_code=500)] * 3, lambda: refusal]
    async with asking(served) as (_, _, client):
        assert (await client.post("/inference/v1/generate", json=ASK)).status_code == 500
        assert len(served.asked) == 3
        reply = await client.post("/inference/v1/generate", json=ASK)
    assert (reply.status_code, len(served.asked)) == (400, 4)
    assert "max_tokens is too large" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": []}}]},
        {"choices": [{"token_ids": [-1], "logprobs": {"token_logprobs": [0.0]}}]},
        {"choices": [{"text": "an engine without token ids"}]},
        [],
    ],
)
async def test_an_answer_that_cannot_be_used_names_engines_whose_answers_can(answer: Any) -> None:
    served = Served()
    served.answers = [lambda: JSONResponse(answer)]
    async with asking(served) as (_, _, client):
        reply = await client.post("/inference/v1/generate", json=ASK)
    assert reply.status_code == 502
    assert "averaging serve or vLLM" in reply.json()["error"]["message"]


async def test_the_gateway_answers_only_who_has_its_secret() -> None:
    served = Served()
    async with asking(served) as (_, _, client):
        for headers in ({SECRET_HEADER: ""}, {SECRET_HEADER: "wrong"}):
            assert (await client.post("/inference/v1/generate", json=ASK, headers=headers)).status_code == 401
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        assert (await client.post("/inference/v1/generate", content=b"{")).status_code == 400
        assert (await client.post("/inference/v1/generate", json={**ASK, "features": {}})).status_code == 400
    assert not served.asked


async def test_the_end_does_not_wait_for_an_engine_that_is_away() -> None:
    served = Served()
    served.answers = [lambda: Response(status_code=503)] * 1000
    async with asking(served) as (_, gateway, client):
        request = asyncio.create_task(client.post("/inference/v1/generate", json=ASK))
        await until(lambda: bool(served.away), within=60)
        await gateway.__aexit__()
        reply = await request  # a server that waited would give the request up after its grace, without an answer
    assert reply.status_code == 503
    assert "is ending" in reply.json()["error"]["message"]


async def test_a_wrong_address_is_an_error() -> None:
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://any:word@"):
        with pytest.raises(ConfigError, match="is not the address of an engine") as wrong:
            EngineClient(url)
        assert "word" not in str(wrong.value)
    with pytest.raises(ConfigError, match="is no file of an authority"):
        EngineClient("https://a", tls_ca="/nowhere/ca.pem")


async def test_models_of_something_else_are_an_error() -> None:
    served = Served()
    async with asking(served) as (engine, _, _):
        assert (await engine.models())[0].max_model_len == 10
        served.info = [1]
        with pytest.raises(RolloutError, match="cannot be used"):
            await engine.ask_version()
