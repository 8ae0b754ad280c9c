"""The inference engine: requests that are held while it is away, and the version of the weights that answered each.

The environments' client asks the `EngineGateway`, a server on this machine's loopback, and the gateway the engine. So
an environment notices nothing when the engine is started again, whatever program its agent is.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Self, TypeVar

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from averaging.common import adapter_versions, chosen_proxy, proxy_for
from averaging.errors import ConfigError, RolloutError
from averaging.http_server import HttpServer, listening
from averaging.rl.feed import message_in, retry_pauses, split_url

# Statuses of an engine that is starting, full, or loading weights. The request is repeated until it is answered.
HELD = frozenset({408, 425, 429, 502, 503, 504})
MAX_FAULTS = 3  # how often a request that the engine answers with another status from 500 on is tried
MAX_REPLY = 64 << 20  # bytes of an answer, after decompression
MAX_ROLLOUTS = 1 << 16  # whose versions are remembered; those that verifiers gives up are never asked for
ADAPTER_POLL = 1.0  # seconds between two questions for an adapter that is not loaded yet
CONNECT_TIMEOUT, ENGINE_TIMEOUT = 10.0, 600.0  # seconds; a request that takes longer is repeated
# Headers of requests to the gateway: the rollout, as verifiers names it, and the gateway's secret.
SESSION_HEADER, SECRET_HEADER = "X-Session-ID", "Gateway-Secret"
# Parameters that are not handed on, or have a fixed value.
OWN_PARAMETERS = frozenset({"routed_experts_prompt_start", "logprobs", "extra_body"})

Answer = TypeVar("Answer")

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class EngineModel(msgspec.Struct, frozen=True):
    id: str  # its name in requests
    root: str | None = None  # the folder or name with which the engine was started
    max_model_len: int | None = None  # tokens that prompt and reply may have together


class _Models(msgspec.Struct, frozen=True):
    data: Annotated[list[EngineModel], msgspec.Meta(min_length=1)]


class _WeightInfo(msgspec.Struct, frozen=True):
    weight_version: str | int | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float]


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[Token]
    logprobs: _Logprobs
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """What an engine has written, with the version of the weights if it tells that with each answer."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1, max_length=1)]
    id: str = ""
    weight_version: str | int | None = None

    def __post_init__(self) -> None:
        if len(self.choices[0].token_ids) != len(self.choices[0].logprobs.token_logprobs):
            raise ValueError("it has not one log-probability for each token")


class EngineClient:
    """An OpenAI-compatible engine that also tells token ids: `averaging serve`, or vLLM.

    A request is repeated while the engine is away, starting or full, without a limit of time. `on_away` is called when
    that begins and when it ends, with the reason, empty if the engine is back. `tls_ca` is a file with the authority of
    an https engine; None trusts the system's.
    """

    def __init__(
        self, url: str, *, tls_ca: str | None = None, on_away: Callable[[str], None] = lambda reason: None
    ) -> None:
        shown, user = split_url(url, "an engine")
        self.url, token = shown.removesuffix("/v1"), user[1] if user else ""
        self._on_away = on_away
        self._away = ""
        self.version: int | None = None  # of the weights which it was last seen to serve; None if it is unknown
        self.has_route = True  # whether a route names its version. Without, only its answers may tell one
        self.adapter = ""  # whose newest version is asked, see `AdapterServer`; empty to ask the models themselves
        self._tells = False  # whether the last answer told its version
        self.lengths: dict[str, int | None] = {}  # tokens that prompt and reply of each model may have together
        try:
            context = ssl.create_default_context(cafile=tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{tls_ca} is no file of an authority: {error}") from None
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(ENGINE_TIMEOUT, connect=CONNECT_TIMEOUT),
            limits=httpx.Limits(max_connections=None),
            verify=context,
            trust_env=False,
            proxy=proxy_for(httpx.URL(self.url).host, chosen_proxy()),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self) -> list[EngineModel]:
        models = _decoded((await self._request("GET", "/v1/models")).content, _Models, self.url).data
        self.lengths = {model.id: model.max_model_len for model in models}
        return models

    async def ask_version(self) -> int | None:
        if self.adapter:
            names = [model.id for model in await self.models()]
            return self._seen(max(adapter_versions(self.adapter, names), default=None))
        try:
            reply = await self._request("GET", "/weight_info")
        except RolloutError as error:
            if error.status not in (404, 405):
                raise
            self.has_route = False
            return self._seen(None)
        self.has_route = True
        return self._seen(_decoded(reply.content, _WeightInfo, self.url).weight_version)

    async def complete(self, body: Mapping[str, Any]) -> tuple[Completion, list[int]]:
        """Asks for a completion. Returns it, and the versions that may have written it; none if one is unknown."""
        before: int | None = None

        async def look() -> None:  # before each attempt: the engine may have been started again after the last one
            nonlocal before
            before = None if self._tells else await self.ask_version()
            while self.adapter and before is None:  # it was started again
                self._note_away(f"/v1/completions: no version of the adapter {self.adapter} is loaded")
                await asyncio.sleep(ADAPTER_POLL)
                before = await self.ask_version()
            if self.adapter:
                asked["model"] = f"{self.adapter}-{before}"

        asked = dict(body)
        reply = await self._request("POST", "/v1/completions", asked, look)
        completion = _decoded(reply.content, Completion, self.url)
        if self.adapter:  # its name says which version it is
            return completion, [] if before is None else [before]
        self._tells = completion.weight_version is not None
        after = self._seen(completion.weight_version) if self._tells else await self.ask_version()
        before = after if self._tells else before
        return completion, [] if before is None or after is None else sorted({before, after})

    def _seen(self, told: str | int | None) -> int | None:
        """Reads a version. Names that are no number, such as "default", are none."""
        text = "" if told is None else str(told)
        self.version = int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
        return self.version

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        before_each: Callable[[], Awaitable[None]] | None = None,
    ) -> httpx.Response:
        """Sends a request until the engine answers it. `before_each` is awaited before each attempt."""
        pauses, faults = retry_pauses(), 0
        while True:
            if before_each is not None:
                await before_each()
            try:
                reply = await self._send(method, path, body)
            except httpx.TransportError as error:
                self._note_away(str(error) or type(error).__name__)
            else:
                reason = f"{path} answers {reply.status_code}: {message_in(reply.content)}"
                if reply.is_success:
                    if not self._away.startswith("/") or self._away.startswith(path):
                        self._note_away("")  # not if it refuses requests of another path: it is paused then
                    return reply
                is_held = reply.status_code in HELD
                faults += not is_held
                if not is_held and (reply.status_code < 500 or faults >= MAX_FAULTS):
                    raise RolloutError("engine", f"{self.url}{reason}", reply.status_code)
                self._note_away(reason)
            await asyncio.sleep(pauses.next_delay())

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        content = bytearray()
        async with self._client.stream(method, path, json=body) as reply:
            async for chunk in reply.aiter_bytes():
                content += chunk
                if len(content) > MAX_REPLY:
                    raise RolloutError("engine", f"{self.url}{path} answers with more than {MAX_REPLY} bytes")
        return httpx.Response(reply.status_code, content=bytes(content))

    def _note_away(self, reason: str) -> None:
        changed, self._away = bool(reason) != bool(self._away), reason
        if changed:
            self._on_away(reason)


class _GenerateRequest(msgspec.Struct, frozen=True):  # as verifiers' training client sends it to vLLM
    model: str
    token_ids: list[Token]
    sampling_params: dict[str, Any]
    features: Any = None
    content_parts: Any = None


class EngineGateway:
    """Answers verifiers' training client on loopback, from an engine's /v1/completions with token ids."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._versions: dict[str, set[int] | None] = {}  # None if an answer had no version
        self._running: set[asyncio.Task[tuple[Completion, list[int]]]] = set()
        self._stack = AsyncExitStack()
        self.secret = secrets.token_hex(16)
        self.url = ""

    async def __aenter__(self) -> Self:
        routes = [
            Route("/v1/models", partial(self._answer, self._models)),
            Route("/inference/v1/generate", partial(self._answer, self._generate), methods=["POST"]),
        ]
        listener = self._stack.enter_context(listening("127.0.0.1:0"))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # One program has all connections, of which the server grants it half.
        server = HttpServer(Starlette(routes=routes), listener, connections=1 << 16, seconds=3600.0)
        await self._stack.enter_async_context(server)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await self._stack.aclose()

    def take_versions(self, rollout: str) -> list[int]:
        return sorted(self._versions.pop(rollout, None) or ())

    async def _answer(self, handler: Callable[[Request], Awaitable[dict[str, Any]]], request: Request) -> Response:
        try:
            secret = request.headers.get(SECRET_HEADER, "").encode()
            if not secrets.compare_digest(secret, self.secret.encode()):
                raise RolloutError("request", "this is the gateway of a process of averaging rollouts", 401)
            return JSONResponse(await handler(request))
        except RolloutError as error:
            status = error.status or 502
            failure = {"message": str(error), "type": "engine", "code": status}
            return JSONResponse({"error": failure}, status_code=status)

    async def _models(self, request: Request) -> dict[str, Any]:
        return {"object": "list", "data": msgspec.to_builtins(await self.engine.models())}

    async def _generate(self, request: Request) -> dict[str, Any]:
        try:
            asked = msgspec.json.decode(await request.body(), type=_GenerateRequest)
        except msgspec.MsgspecError as error:
            raise RolloutError("request", f"the request cannot be used: {error}", 400) from None
        if asked.features is not None or asked.content_parts is not None:
            raise RolloutError("request", "images are not supported; use an environment of text", 400)
        task = asyncio.create_task(self.engine.complete(self._completion_request(asked)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.wait({task})
        if task.cancelled():  # by the end of this gateway, which would wait for the engine otherwise
            raise RolloutError("engine", "averaging rollouts is ending", 503)
        completion, versions = task.result()
        rollout = request.headers.get(SESSION_HEADER, "")
        others = self._versions.get(rollout, set())
        self._versions[rollout] = others | set(versions) if versions and others is not None else None
        if len(self._versions) > MAX_ROLLOUTS:
            del self._versions[next(iter(self._versions))]
        return _generate_reply(completion)

    def _completion_request(self, asked: _GenerateRequest) -> dict[str, Any]:
        parameters = {name: value for name, value in asked.sampling_params.items() if name not in OWN_PARAMETERS}
        if parameters.get("max_tokens") is None and (length := self.engine.lengths.get(asked.model)) is not None:
            parameters["max_tokens"] = max(1, length - len(asked.token_ids))
        fixed = {"model": asked.model, "prompt": asked.token_ids, "logprobs": 1, "return_token_ids": True}
        return parameters | fixed


def _generate_reply(completion: Completion) -> dict[str, Any]:
    choice = completion.choices[0]
    pairs = zip(choice.token_ids, choice.logprobs.token_logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    answered = {"index": 0, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason}
    return {"request_id": completion.id, "choices": [{**answered, "logprobs": {"content": content}}]}


def _decoded(body: bytes, kind: type[Answer], url: str) -> Answer:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        remedy = "the engine must be averaging serve or vLLM, which tell token ids and log-probabilities"
        raise RolloutError("engine", f"the answer of {url} cannot be used ({error}); {remedy}") from None
