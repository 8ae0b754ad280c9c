"""`EngineServer`: the HTTP server, its routes, and what all requests must pass."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from averaging.common import loopback_here, spelled
from averaging.engine.engine import Engine, RunWeights, TextModel, Unfollowed, VersionLoaded
from averaging.engine.messages import (
    AnswerWriter,
    ChatRequest,
    CompletionRequest,
    GenerationJob,
    TextPiece,
    error_body,
    parse_request,
    version_name,
)
from averaging.errors import ConfigError, EngineError
from averaging.http_server import BodyReader, HttpServer, http_access, listening, network_of
from averaging.weights import FollowerOptions

logger = logging.getLogger("averaging.engine")

QUEUE = 256  # requests that may wait, of which one address may have half
BODY_BYTES = 4 << 20  # of a request
BODIES = 64  # largest bodies that all requests together may have that are not answered yet; one address half of them
SECONDS = 60.0  # for a request to arrive, and for a client to read its answer
CONNECTIONS = 1024
UNKNOWN_CONTEXT = 8192  # tokens of a sequence if the model's configuration names no limit


class EngineServer:
    """Serves a model with OpenAI's API while it is entered with `async with`.

    ```python
    model = load_model("base")
    async with EngineServer(model, name="base", follow=FollowerOptions(join=["a.example:4222"], run_id="")) as server:
        await server.wait()
    ```

    Args:
        model: the model; see `load_model`. Only this server generates with it from now on.
        name: its name in requests.
        follow: the run whose weights it takes; None to keep its own.
        listen: "HOST:PORT"; port 0 takes a free port.
        batch: sequences that are generated at once, and that one request may ask for.
        max_model_len: tokens that a sequence may have with its prompt; None for what the model's configuration says.
        on_event: receives each event that `averaging serve --json` prints of versions.
        access: `token_file` (tokens, one per line; each request except GET /health must carry one of them), `tls_ca`,
            `tls_cert`, `tls_key` (files for TLS; without `token_file` clients must show a certificate of `tls_ca`),
            `insecure` (whether other machines may connect without TLS) and `hosts` (DNS names of this server: without
            TLS and tokens, requests for other names with a dot are refused, because web pages can send those).

    Attributes:
        url: address of the server; empty before it is entered. OpenAI's base URL is this with /v1.

    Raises:
        ConfigError: an argument is invalid.
        ListenError: on entry, the address is taken or unknown.
    """

    def __init__(
        self,
        model: TextModel,
        *,
        name: str,
        follow: FollowerOptions | None = None,
        listen: str = "127.0.0.1:0",
        batch: int = 16,
        max_model_len: int | None = None,
        on_event: Callable[[VersionLoaded | Unfollowed], None] = lambda event: None,
        **access: Any,
    ) -> None:
        if not 0 < len(name) <= 200 or not name.isprintable():
            raise ConfigError(f"name must have 1 to 200 printable characters, not {name!r:.300}")
        if max_model_len is not None and 0 < model.context < max_model_len:
            text = f"{spelled('max_model_len', max_model_len)}: the model is made for {model.context} tokens"
            raise ConfigError(text)
        self.url, self._name, self._model, self._listen = "", name, model, loopback_here(listen)
        self._access = http_access(self._listen, **access)
        context = max_model_len or model.context or UNKNOWN_CONTEXT
        self._engine = Engine(model, batch=batch, context=context, queue=QUEUE, needs_version=follow is not None)
        self._weights = None if follow is None else RunWeights(follow, self._engine, on_event)
        self._bodies = BodyReader(BODY_BYTES, BODIES * BODY_BYTES, SECONDS, full=429)
        # Requests are decoded and turned into tokens beside the event loop, one after the other.
        self._reader = ThreadPoolExecutor(1, "averaging engine reader")
        self._following: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        routes = [
            Route("/v1/chat/completions", partial(self._answer, self._read_chat), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, self._read_completion), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/weight_info", self._weight_info),
            Route("/health", self._health),
        ]
        failures = dict.fromkeys((EngineError, HTTPException, ClientDisconnect), _failed)
        application = Starlette(routes=routes, exception_handlers=failures)
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening(self._listen))
            await stack.enter_async_context(self._engine)
            stack.callback(self._reader.shutdown, wait=False, cancel_futures=True)
            if self._weights is not None:
                self._following = [asyncio.create_task(self._weights.run())]
                stack.push_async_callback(_end, self._following[0])
            tls = self._access.tls
            self._server = HttpServer(application, listener, connections=CONNECTIONS, seconds=SECONDS, tls=tls)
            await stack.enter_async_context(self._server)
            self.url = self._server.url(self._listen)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails.

        Raises:
            AveragingError: before the first version: the publishers refuse this follower, or publish another model.
        """
        await self._server.wait(*self._following)

    def _read_chat(self, body: bytearray) -> GenerationJob:
        asked = parse_request(body, ChatRequest)
        messages = [message.for_template() for message in asked.messages]
        return self._job(asked, [self._model.encode_chat(messages, asked.chat_template_kwargs)])

    def _read_completion(self, body: bytearray) -> GenerationJob:
        asked = parse_request(body, CompletionRequest)
        prompts = asked.prompts(limit=self._engine.batch)
        return self._job(
            asked, [self._model.encode(each) if isinstance(each, str) else tuple(each) for each in prompts]
        )

    def _job(self, asked: ChatRequest | CompletionRequest, prompts: list[tuple[int, ...]]) -> GenerationJob:
        if asked.model != self._name:
            text = f"there is no model {asked.model!r} here; {self._name!r} is served"
            raise EngineError(text, 404, "model", code="model_not_found")
        if (sequences := asked.n * len(prompts)) > self._engine.batch:
            text = f"{sequences} sequences are more than {self._engine.batch}; start the server with a larger --batch"
            raise EngineError(text, 400, "n")
        if not all(prompts) or max(map(max, prompts)) >= self._model.vocabulary:
            text = f"a prompt needs at least one token, and only the model's {self._model.vocabulary} tokens"
            raise EngineError(text, 400, "prompt")
        longest, context = max(map(len, prompts)), self._engine.context
        if not 0 < (limit := asked.limit(context - longest)) <= context - longest:
            text = f"the prompt has {longest} of {context} tokens; shorten it, or ask for fewer tokens"
            raise EngineError(text, 400, "max_tokens", code="context_length_exceeded")
        return GenerationJob(asked=asked, prompts=prompts, max_tokens=limit)

    async def _answer(self, read: Callable[[bytearray], GenerationJob], request: Request) -> Response:
        self._admit(request)
        async with self._bodies.read(request) as body:
            job = await asyncio.get_running_loop().run_in_executor(self._reader, read, body)
            job.network = network_of(request.client and request.client.host)
            pieces = self._engine.submit(job)
            if not job.asked.stream:
                sequences = await _collect(request, job, pieces)
                return JSONResponse(AnswerWriter(job, self._name, self._model.decode).whole(sequences))
        events = self._events(job, pieces)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def _admit(self, request: Request, *, needs_token: bool = True) -> None:
        if (refusal := self._access.refusal(request.headers, needs_token=needs_token)) is not None:
            code = "invalid_api_key" if refusal.status == 401 else None
            raise EngineError(refusal.text, refusal.status, code=code)

    async def _events(self, job: GenerationJob, pieces: AsyncGenerator[TextPiece, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream. If it fails, the last one is the error, since the status has been sent."""
        answer, tokens = None, 0
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    answer = answer or AnswerWriter(job, self._name, self._model.decode)  # once the version is known
                    tokens += len(piece.tokens)
                    yield _event(answer.chunk(piece))
                if answer is not None and job.asked.stream_options.get("include_usage"):
                    yield _event(answer.usage_chunk(tokens))
                yield b"data: [DONE]\n\n"
            except Exception as error:
                yield _event(error_body(_known(error)))

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "averaging", "root": self._name}
        model |= {"max_model_len": self._engine.context, "weight_version": version_name(self._model.version)}
        return JSONResponse({"object": "list", "data": [model]})

    async def _weight_info(self, request: Request) -> Response:
        self._admit(request)
        version, weights = self._model.version, self._weights
        newest = version if weights is None else weights.newest
        loaded = None if weights is None else weights.loaded
        info = {
            "weight_version": version_name(version),
            "newest": version_name(newest),
            "versions_behind": 0 if newest is None else newest - (-1 if version is None else version),
            "connected": weights is not None and weights.connected,
            "digest": loaded.digest if loaded is not None and loaded.version == version else None,
        }
        return JSONResponse(info)

    async def _health(self, request: Request) -> Response:
        self._admit(request, needs_token=False)
        ready = self._engine.ready
        answer = {
            "status": "ok" if ready else "no version of the run has arrived yet",
            "weight_version": version_name(self._model.version),
            "running": len(self._engine.running),
            "waiting": len(self._engine.waiting),
        }
        return JSONResponse(answer, 200 if ready else 503)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _collect(
    request: Request, job: GenerationJob, pieces: AsyncGenerator[TextPiece, None]
) -> list[list[TextPiece]]:
    """The pieces of each sequence. The job ends if the client disconnects."""
    sequences: list[list[TextPiece]] = [[] for _ in range(job.sequences)]
    async with aclosing(pieces):
        async for piece in pieces:
            sequences[piece.index].append(piece)
            if await request.is_disconnected():
                raise ClientDisconnect
    return sequences


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def _known(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    logger.error("a request has failed", exc_info=error)
    return EngineError("internal error of this server; see its log")


async def _failed(request: Request, error: Exception) -> Response:
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):  # no such route, or a body that is refused
        headers = error.headers
        error = EngineError(f"{request.method} {request.url.path[:200]}: {error.detail}", error.status_code)
    elif isinstance(error, ClientDisconnect):
        error = EngineError("the client disconnected before its request was complete", 400)
    known = _known(error)
    if known.retry_after is not None:
        headers = {"Retry-After": f"{known.retry_after:.0f}"}
    return JSONResponse(error_body(known), known.status, headers=headers)
