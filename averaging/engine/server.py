"""`EngineServer`: the HTTP server, its routes, and what all requests must pass."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from averaging.common import loopback_here, spelled
from averaging.config import FilePath
from averaging.engine.batching import Generated, GenerationRequest, TextPiece
from averaging.engine.engine import Engine, TextModel
from averaging.engine.messages import (
    AnswerForm,
    AnswerStyle,
    ChatForm,
    ChatRequest,
    CompletionForm,
    CompletionRequest,
    Json,
    RequestFields,
    RequestLimits,
    ServedName,
    check_length,
    error_body,
    generation_of,
    messages_of,
    parse_request,
    prompts_of,
    template_options,
)
from averaging.engine.run_weights import Event, RunWeights, WeightsStatus
from averaging.errors import ConfigError, EngineError
from averaging.http_server import HttpServer, http_access, listening, network_of
from averaging.weights import FollowerOptions, Staleness

logger = logging.getLogger("averaging.engine")

GRACE = 10
"""Seconds for unfinished requests when the server ends."""

BODIES = 64
"""Bodies of the largest size that all requests together may have."""

UNKNOWN_CONTEXT = 8192
"""Tokens of a sequence if the model's configuration names no limit."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of an `EngineServer`.

    Attributes:
        batch: sequences that are generated at once, and that one request may ask for.
        queue: requests that may wait, of which one address may have half; more get status 429.
        max_tokens: tokens that may be generated for a sequence.
        max_model_len: tokens that a sequence may have with its prompt; None for what the model's configuration says.
        body_bytes: size of a request. All that are not answered yet may have 64 times as many together, and those of
            one address half of that; more get status 429.
        seconds: time for a request to arrive, and for a client to read its answer.
        connections: open connections.
    """

    batch: int = 16
    queue: int = 256
    max_tokens: int = 4096
    max_model_len: int | None = None
    body_bytes: int = 4 << 20
    seconds: float = 60.0
    connections: int = 1024


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
        token_file: tokens, one per line; each request except GET /health must carry one of them.
        tls_ca: certificate of the authority. Without `token_file` clients must show a certificate of it.
        tls_cert: certificate of this server; None for no TLS.
        tls_key: its private key.
        insecure: whether other machines may connect without TLS.
        hosts: DNS names of this server. Without TLS and tokens, requests for other names with a dot are refused: web
            pages can send those.
        limits: limits of memory, time and connections.
        on_event: receives each event that `averaging serve --json` prints.

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
        token_file: FilePath | None = None,
        tls_ca: FilePath | None = None,
        tls_cert: FilePath | None = None,
        tls_key: FilePath | None = None,
        insecure: bool = False,
        hosts: Sequence[str] = (),
        limits: EngineLimits | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        if not 0 < len(name) <= 200 or not name.isprintable() or "@" in name:
            raise ConfigError(f"name must have 1 to 200 printable characters without @, not {name!r:.300}")
        self._listen, self._limits = loopback_here(listen), limits or EngineLimits()
        self._access = http_access(
            self._listen,
            token_file=token_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            hosts=hosts,
        )
        context = _context(self._limits.max_model_len, model.context)
        self._engine = Engine(
            model,
            batch=self._limits.batch,
            context=context,
            queue=self._limits.queue,
            needs_version=follow is not None,
        )
        self._weights = None if follow is None else RunWeights(follow, self._engine, on_event)
        self._name = ServedName(name)
        self._request_limits = RequestLimits(self._limits.batch, self._limits.max_tokens, context, model.vocabulary)
        self._body_bytes: Counter[str] = Counter()  # of requests that are not answered yet, by network
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening(self._listen))
            stack.callback(self._engine.__exit__, None, None, None)
            self._engine.__enter__()
            routes = EngineRoutes(self._engine, self._weights, self._name, self._request_limits)
            stack.callback(routes.close)
            self._following = [] if self._weights is None else [asyncio.create_task(self._weights.run())]
            stack.push_async_callback(self._end_following)
            application = Starlette(
                routes=[
                    Route(path, self._endpoint(path, handler), methods=[method])
                    for (method, path), handler in routes.handlers().items()
                ],
                exception_handlers={HTTPException: _no_such_route},
            )
            limits = self._limits
            server = HttpServer(
                application,
                listener,
                connections=limits.connections,
                seconds=limits.seconds,
                grace=GRACE,
                tls=self._access.tls,
            )
            self._server = await stack.enter_async_context(server)
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

    @property
    def version(self) -> int | None:
        """The version that is served; None if the weights have none."""
        return self._engine.version

    def describe(self) -> str:
        """What the server does, as a line for people."""
        version = self._engine.version
        served = (
            "no version yet" if not self._engine.ready else "the folder" if version is None else f"version {version}"
        )
        work = f"{self._engine.running} running, {self._engine.waiting} waiting"
        if self._weights is None:
            return f"serving {served}: {work}"
        state = self._weights.state()
        behind = f", {state.staleness.versions} behind" if state.staleness.versions else ""
        lost = "" if state.connected else f"; no publisher for {state.staleness.seconds:.0f} s"
        return f"serving {served}{behind}: {work}{lost}"

    async def _end_following(self) -> None:
        for task in self._following:
            task.cancel()
            await asyncio.wait({task})

    def _endpoint(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            body, network = bytearray(), _network(request)
            taken = [0]  # bytes that count for this request, also after its body was decoded
            try:
                if (refusal := self._access.refusal(request.headers, needs_token=path != "/health")) is not None:
                    code = "invalid_api_key" if refusal.status == 401 else None
                    raise EngineError(refusal.text, refusal.status, code=code)
                await self._read(request, body, taken, network)
                return await handler(request, body)
            except EngineError as error:
                return error_reply(error)
            except ClientDisconnect:
                return error_reply(EngineError("the client disconnected before its request was complete", 400))
            except Exception:
                logger.exception("%s has failed", path)
                return error_reply(EngineError("internal error of this server; see its log"))
            finally:
                self._body_bytes[network] -= taken[0]
                if not self._body_bytes[network]:
                    del self._body_bytes[network]

        return endpoint

    async def _read(self, request: Request, body: bytearray, taken: list[int], network: str) -> None:
        limit, all_bytes = self._limits.body_bytes, BODIES * self._limits.body_bytes
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > limit:
                        raise EngineError(f"the body has more than {limit} bytes", 413)
                    own = self._body_bytes[network] + len(chunk)
                    if own > all_bytes // 2 or self._body_bytes.total() + len(chunk) > all_bytes:
                        text = "the requests that are not answered yet have too many bytes; send it again later"
                        raise EngineError(text, 429, code="queue_full", retry_after=1.0)
                    self._body_bytes[network] = own
                    taken[0] += len(chunk)
                    body += chunk
        except TimeoutError:
            raise EngineError(f"the body did not arrive within {self._limits.seconds:g} s", 408) from None


Handler = Callable[[Request, bytearray], Awaitable[Response]]

Asked = tuple[RequestFields, int | None, Sequence[tuple[int, ...]]]
"""A request, of which the texts are not kept, the version that it names, and the token ids of its prompts."""


class EngineRoutes:
    """Answers requests whose body has been read.

    Args:
        engine: generates.
        weights: the run that the engine follows; None if it follows none.
        name: the name of the model.
        limits: what a request may ask for.
    """

    def __init__(self, engine: Engine, weights: RunWeights | None, name: ServedName, limits: RequestLimits) -> None:
        self._engine, self._weights, self._name, self._limits = engine, weights, name, limits
        self._created = int(time.time())
        # Requests are decoded and turned into tokens beside the event loop, one after the other.
        self._reader = ThreadPoolExecutor(1, "averaging engine reader")
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by network

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """The routes: method and path."""
        return {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{model:path}"): self._model,
            ("GET", "/weight_info"): self._weight_info,
            ("GET", "/health"): self._health,
        }

    def close(self) -> None:
        """Ends the thread."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _chat(self, request: Request, body: bytearray) -> Response:
        def read() -> Asked:
            asked = parse_request(body, ChatRequest)
            messages, asked.messages, options = messages_of(asked), [], template_options(asked)
            check_length(sum(len(message["content"]) for message in messages), self._limits, "messages")
            return asked, self._name.version_in(asked.model), [self._engine.model.encode_chat(messages, options)]

        return await self._answer(request, body, read, ChatForm)

    async def _completion(self, request: Request, body: bytearray) -> Response:
        def read() -> Asked:
            asked = parse_request(body, CompletionRequest)
            version = self._name.version_in(asked.model)

            def encode(text: str) -> tuple[int, ...]:
                check_length(len(text), self._limits, "prompt")
                return self._engine.model.encode(text, special=asked.add_special_tokens is not False)

            prompts, asked.prompt = prompts_of(asked, encode, self._limits.sequences), ""
            return asked, version, prompts

        return await self._answer(request, body, read, CompletionForm)

    async def _answer(
        self, request: Request, body: bytearray, read: Callable[[], Asked], form: type[AnswerForm]
    ) -> Response:
        # An address has one request at a time in the thread, so those of others do not wait for all of its requests.
        async with self._reading.setdefault(_network(request), asyncio.Lock()):
            asked, version, prompts = await asyncio.get_running_loop().run_in_executor(self._reader, read)
            body.clear()
        wanted = generation_of(asked, prompts, version, self._limits)
        running = RunningRequest(self._engine, wanted, _network(request))
        style = AnswerStyle(
            self._engine.model.decode, bool(asked.return_token_ids), bool(asked.return_tokens_as_token_ids)
        )

        def written() -> AnswerForm:
            """Once the request has begun, since its version is known only then."""
            return form(style, prompts, wanted.n, self._head(form, running.version))

        if not asked.stream:
            sequences = await running.whole(request)
            return JSONResponse(written().whole(sequences), headers=NOT_STORED)
        first, stream = await running.begin(request)  # so that an error has its status
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        chunks = _chunks(first, stream, written(), usage, wanted.top_logprobs is not None)
        return StreamingResponse(chunks, media_type="text/event-stream", headers=NOT_STORED)

    def _head(self, form: type[AnswerForm], version: int | None) -> Json:
        return {
            "id": f"{'chatcmpl' if form is ChatForm else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self._name.of(version),
            "weight_version": _spelled(version),
        }

    async def _models(self, request: Request, body: bytearray) -> Response:
        return JSONResponse({"object": "list", "data": self._served()})

    async def _model(self, request: Request, body: bytearray) -> Response:
        asked: str = request.path_params["model"]
        for model in self._served():
            if model["id"] == asked:
                return JSONResponse(model)
        raise EngineError(f"there is no model {asked!r} here", 404, "model", code="model_not_found")

    def _served(self) -> list[Json]:
        version = self._engine.version
        names = dict.fromkeys((self._name.of(None), self._name.of(version)))
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "averaging",
                "root": self._name.name,
                "max_model_len": self._limits.context,
                "weight_version": _spelled(version),
            }
            for name in names
        ]

    async def _weight_info(self, request: Request, body: bytearray) -> Response:
        version, digest = self._engine.served
        state = WeightsStatus(version, False, Staleness()) if self._weights is None else self._weights.state()
        return JSONResponse(
            {
                "weight_version": _spelled(version),
                "newest": _spelled(state.newest),
                "versions_behind": state.staleness.versions,
                "seconds_behind": round(state.staleness.seconds, 3),
                "connected": state.connected,
                "digest": None if digest is None else digest.hex(),
            }
        )

    async def _health(self, request: Request, body: bytearray) -> Response:
        ready = self._engine.ready
        answer = {
            "status": "ok" if ready else "no version of the run has arrived yet",
            "weight_version": _spelled(self._engine.version),
            "running": self._engine.running,
            "waiting": self._engine.waiting,
        }
        return JSONResponse(answer, 200 if ready else 503)


class RunningRequest:
    """A request in the engine, whose pieces come into the event loop."""

    def __init__(self, engine: Engine, request: GenerationRequest, network: str) -> None:
        self._engine, self._left = engine, request.sequences
        self._queue: asyncio.Queue[TextPiece | EngineError | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def take(piece: TextPiece | EngineError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._queue.put_nowait, piece)

        self._generated = Generated(request, take, network=network)

    @property
    def version(self) -> int | None:
        """The version that generates it, after the first piece."""
        return self._generated.version

    async def pieces(self) -> AsyncGenerator[TextPiece, None]:
        """Yields all pieces. If it is closed before, the request ends.

        Raises:
            EngineError: it failed.
        """
        self._engine.submit(self._generated)
        try:
            while self._left:
                piece = await self._queue.get()
                if piece is None:
                    raise ClientDisconnect
                if isinstance(piece, EngineError):
                    raise piece
                self._left -= piece.finish_reason is not None
                yield piece
        finally:
            self._engine.withdraw(self._generated)

    async def begin(self, request: Request) -> tuple[TextPiece, AsyncGenerator[TextPiece, None]]:
        """Returns the first piece, and the generator of the others. If the client disconnects before, the request ends.

        Raises:
            EngineError: it failed.
            ClientDisconnect: nobody waits for it any more.
        """
        stream = self.pieces()
        try:
            async with self._watched(request):
                return await anext(stream), stream
        except BaseException:
            await stream.aclose()
            raise

    async def whole(self, request: Request) -> list[list[TextPiece]]:
        """Returns the pieces of each sequence. If the client disconnects, the request ends.

        Raises:
            EngineError: it failed.
            ClientDisconnect: nobody waits for it any more.
        """
        sequences: list[list[TextPiece]] = [[] for _ in range(self._left)]
        async with self._watched(request), aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                sequences[piece.index].append(piece)
        return sequences

    @asynccontextmanager
    async def _watched(self, request: Request) -> AsyncGenerator[None, None]:
        """Inside, the request ends when the client disconnects."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._queue.put_nowait(None)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})


async def _chunks(
    first: TextPiece, rest: AsyncGenerator[TextPiece, None], form: AnswerForm, usage: bool, logprobs: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a stream."""
    tokens = 0
    async with aclosing(rest):
        for chunk in form.first_chunks():
            yield _event(chunk)
        try:
            piece: TextPiece | None = first
            while piece is not None:
                tokens += len(piece.tokens)
                yield _event(form.chunk(piece, logprobs))
                piece = await anext(rest, None)
            if usage:
                yield _event(form.last_chunk(tokens))
        except Exception as error:  # the status has been sent
            if not isinstance(error, EngineError):
                logger.exception("a stream has failed")
                error = EngineError("internal error of this server; see its log")
            yield _event(error_body(error))
            return
    yield b"data: [DONE]\n\n"


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


NOT_STORED = {"Cache-Control": "no-store"}


def error_reply(error: EngineError) -> Response:
    """Returns the answer to a request that failed."""
    later = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"}
    return JSONResponse(error_body(error), error.status, headers=later)


async def _no_such_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_reply(EngineError(text, error.status_code))


def _network(request: Request) -> str:
    return network_of(request.client and request.client.host)


def _spelled(version: int | None) -> str | None:
    """A version as vLLM writes it."""
    return None if version is None else str(version)


def _context(wanted: int | None, of_model: int) -> int:
    """Tokens that a sequence may have."""
    if wanted is not None and 0 < of_model < wanted:
        raise ConfigError(f"{spelled('max_model_len', wanted)}: the model is made for {of_model} tokens")
    return wanted or of_model or UNKNOWN_CONTEXT
