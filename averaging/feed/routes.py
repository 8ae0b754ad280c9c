"""What the server answers on each route."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import math
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from averaging.errors import ConfigError, FeedBusyError, FeedRefusedError
from averaging.feed.book import NO_TRAINER, Book
from averaging.feed.ledger import Ledger, Post
from averaging.feed.messages import EnvIdentifier, RegisterEnv, Registration, ScoredData, decode
from averaging.feed.store import Store

logger = logging.getLogger(__name__)

COMPRESSED_FROM = 1000
"""Bytes of a reply that is compressed if the client takes that."""

MAX_KEY = 200

EMPTY_EXAMPLE: Mapping[str, Sequence[object]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
        *("generation_params", "inference_logprobs", "messages", "images"),
    )
}

COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "requests_total": ("Requests answered.", ["route", "status"]),
    "received_groups_total": ("Groups taken in.", ()),
    "received_sequences_total": ("Sequences taken in.", ()),
    "repeated_posts_total": ("Posts recognized as repetitions by their Idempotency-Key.", ()),
    "delivered_batches_total": ("Batches handed out, repetitions included.", ()),
    "delivered_sequences_total": ("Sequences handed out, repetitions included.", ()),
}

GAUGES: Mapping[str, tuple[str, Callable[[Book], float]]] = {
    "step": ("Step of the newest batch.", lambda book: book.step),
    "waiting_groups": ("Groups that wait.", lambda book: book.count),
    "waiting_bytes": ("Bytes of the groups that wait.", lambda book: book.nbytes),
    "queued_sequences": ("Sequences in the queue.", lambda book: book.sequences.total()),
    "replay_batches": ("Batches kept for a trainer that resumes.", lambda book: len(book.batches)),
    "connected_environments": ("Environments.", lambda book: sum(env.connected for env in book.envs)),
}

READS: Mapping[str, Callable[[Book], object]] = {
    "/status": lambda book: {"current_step": book.step, "queue_size": len(book.queue)},
    "/info": lambda book: {
        "batch_size": book.registration.batch_size if book.registration else -1,
        "max_token_len": book.registration.max_token_len if book.registration else -1,
    },
    "/wandb_info": lambda book: {
        "group": book.registration and book.registration.wandb_group,
        "project": book.registration and book.registration.wandb_project,
    },
}

Event: TypeAlias = Mapping[str, Any]
Handler: TypeAlias = Callable[[Request, bytes], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes.

    Attributes:
        body_bytes: of a request, after decompression.
        queue_bytes, queue_groups: of the groups that wait; a full queue is answered with status 503.
        replay_bytes: of the batches kept for a trainer that resumes; the oldest are forgotten first.
        seconds: for the head of a request, for its body, and between two steps forward of a reader.
        connections: at once.

    Raises:
        ConfigError: a limit cannot work.
    """

    body_bytes: int = 64 << 20
    queue_bytes: int = 4 << 30
    queue_groups: int = 50_000
    replay_bytes: int = 4 << 30
    seconds: float = 60.0
    connections: int = 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"the limit {name} must be above 0 and finite, not {getattr(self, name)}")


class Routes:
    """The application.

    Args:
        store: is open.
        tokens: one of them must come with each request but GET /; none are wanted if it is empty.
        on_event: is told what happens.
    """

    def __init__(self, store: Store, tokens: Sequence[str], limits: Limits, on_event: Callable[[Event], None]) -> None:
        self._store, self._limits, self._listener = store, limits, on_event
        self._tokens = [token.encode() for token in tokens]
        self._body_bytes = 0
        self._metrics = CollectorRegistry()
        for name, (told, read) in GAUGES.items():
            gauge = Gauge(f"averaging_feed_{name}", told, registry=self._metrics)
            gauge.set_function(lambda read=read: read(store.book))  # type: ignore[misc]
        self._counters = {
            name: Counter(f"averaging_feed_{name}", told, labels, registry=self._metrics)
            for name, (told, labels) in COUNTERS.items()
        }
        told = "Time to answer a request."
        self._seconds = Histogram("averaging_feed_request_duration_seconds", told, ["route"], registry=self._metrics)
        doors: dict[str, Handler] = {
            "GET /": self._root,
            "GET /batch": self._batch,
            "GET /latest_example": self._latest_example,
            "GET /status-env": self._status_env,
            "GET /reset_data": self._reset_data,
            "GET /metrics": self._tell_metrics,
            "POST /register": self._register,
            "POST /register-env": self._register_env,
            "POST /disconnect-env": self._disconnect_env,
            "POST /scored_data": self._scored_data,
            "POST /scored_data_list": self._scored_data_list,
            **{f"GET {path}": self._reader(read) for path, read in READS.items()},
        }
        self.application = Starlette(
            routes=[
                Route(path, self._door(path, handler), methods=[method])
                for (method, _, path), handler in ((door.partition(" "), doors[door]) for door in doors)
            ],
            exception_handlers={HTTPException: _no_such_route},
        )

    def _on_event(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # what it is told of is done, and its client must be answered
            logger.exception("on_event has failed")

    def _reader(self, read: Callable[[Book], object]) -> Handler:
        async def tell(request: Request, body: bytes) -> Response:
            return _json(await self._store.run(lambda ledger: read(ledger.book)))

        return tell

    def _door(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            try:
                if path != "/":
                    self._check_caller(request)
                response = await self._with_body(request, handler)
            except FeedRefusedError as error:
                response = _error(error.status, str(error))
            except FeedBusyError as error:
                response = _error(error.status, str(error), {"Retry-After": f"{error.retry_after:.0f}"})
            except ClientDisconnect:
                response = _error(400, "the request broke off")
            except Exception:
                logger.exception("%s has failed", path)
                response = _error(500, "this server has a fault; its log tells more")
            self._counters["requests_total"].labels(path, response.status_code).inc()
            self._seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return answer

    def _check_caller(self, request: Request) -> None:
        # Any page that a browser on this machine shows could otherwise drop the run.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise FeedRefusedError(403, "pages of other sites may not use this server")
        scheme, _, told = request.headers.get("authorization", "").partition(" ")
        given = told.strip().encode()
        if scheme.lower() == "basic":  # of clients that know no tokens, but take a URL with a password in it
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                given = b""
        # All are compared, so that the time tells nothing.
        known = sum([hmac.compare_digest(given, token) for token in self._tokens])
        if self._tokens and not (known and scheme.lower() in ("basic", "bearer")):
            raise FeedRefusedError(401, "this server wants one of its tokens, sent as 'Authorization: Bearer TOKEN'")

    async def _with_body(self, request: Request, handler: Handler) -> Response:
        """Reads the body, within limits, and has it answered; bodies count until then."""
        limit, counted = self._limits.body_bytes, 0
        encoding = request.headers.get("content-encoding", "").lower()
        unzip = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.stream():
                    body += unzip.decompress(chunk, limit + 1 - len(body)) if unzip else chunk
                    if len(body) > limit:
                        raise FeedRefusedError(413, f"the body has more than {limit} bytes; send fewer groups at once")
                    self._body_bytes += len(body) - counted
                    counted = len(body)
                    if self._body_bytes > 4 * limit:
                        raise FeedBusyError(503, "this server reads too many bodies now; send it again", 1.0)
            if unzip and body and (not unzip.eof or unzip.unused_data):
                raise FeedRefusedError(400, "the body is not one whole gzip stream")
            return await handler(request, bytes(body))
        except zlib.error:
            raise FeedRefusedError(400, "the body is not gzip, as its Content-Encoding says") from None
        except TimeoutError:
            raise FeedRefusedError(408, f"the body did not come within {self._limits.seconds:g} s") from None
        finally:
            self._body_bytes -= counted

    async def _root(self, request: Request, body: bytes) -> Response:
        return _json({"message": "AtroposLib API"})

    async def _register(self, request: Request, body: bytes) -> Response:
        registration = decode(body, Registration)
        if await self._store.run(lambda ledger: ledger.register(registration)):
            told = {name: getattr(registration, name) for name in ("batch_size", "starting_step", "num_steps")}
            self._on_event({"event": "registered", **told})
        return _json({"uuid": uuid.uuid4().int})

    async def _register_env(self, request: Request, body: bytes) -> Response:
        told = decode(body, RegisterEnv)

        def register(ledger: Ledger) -> dict[str, Any]:
            env_id, run = ledger.register_env(told), ledger.book.registration
            if env_id < 0 or run is None:
                return {"status": "wait for trainer to start"}
            return {
                "status": "success",
                "env_id": env_id,
                "wandb_name": ledger.book.envs[env_id].name,
                "checkpoint_dir": run.checkpoint_dir,
                "starting_step": ledger.book.step,
                "checkpoint_interval": run.save_checkpoint_interval,
                "num_steps": run.num_steps,
            }

        reply = await self._store.run(register)
        if "env_id" in reply:
            self._on_event({"event": "environment", "env_id": reply["env_id"], "name": reply["wandb_name"]})
        return _json(reply)

    async def _disconnect_env(self, request: Request, body: bytes) -> Response:
        env_id = decode(body, EnvIdentifier).env_id
        try:
            await self._store.run(lambda ledger: ledger.disconnect(env_id))
        except FeedRefusedError as error:
            return _json({"status": "failure", "error": str(error)})
        return _json({"status": "success"})

    async def _scored_data(self, request: Request, body: bytes) -> Response:
        buffered = await self._post(request, [decode(body, ScoredData)])
        return _json({"status": "buffered", "buffer_size": buffered[0]} if buffered else {"status": "received"})

    async def _scored_data_list(self, request: Request, body: bytes) -> Response:
        groups = decode(body, list[ScoredData])
        buffered = await self._post(request, groups)
        told = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return _json({"status": "received", "groups_processed": len(groups), **told})

    async def _post(self, request: Request, groups: Sequence[ScoredData]) -> list[int]:
        key, now = request.headers.get("idempotency-key", ""), time.time()
        if len(key) > MAX_KEY:
            raise FeedRefusedError(422, f"an Idempotency-Key may have {MAX_KEY} characters")
        told = [(group.env_id, len(group.tokens)) for group in groups]
        # Without the environment, which may have registered again since.
        same = [(group.tokens, group.masks, group.scores) for group in groups] if key else []
        digest = blake2b(msgspec.json.encode(same), digest_size=16).digest()
        post = Post(told, [msgspec.json.encode(group) for group in groups], key, digest)
        buffered, repeated = await self._store.run(lambda ledger: ledger.post(post, now))
        if repeated:
            self._counters["repeated_posts_total"].inc()
        else:
            self._counters["received_groups_total"].inc(len(groups))
            self._counters["received_sequences_total"].inc(sum(size for _, size in told))
        return buffered

    async def _batch(self, request: Request, body: bytes) -> Response:
        step, saved = (_number(request, name) for name in ("step", "saved"))
        try:
            found = await self._store.run(lambda ledger: ledger.batch(step, saved))
        except FeedRefusedError as error:
            if str(error) != NO_TRAINER:
                raise
            return _json({"status": "error", "message": NO_TRAINER, "batch": []})
        if found is None:
            return _json({"batch": None})
        given, sequences, contents = found
        self._counters["delivered_batches_total"].inc()
        self._counters["delivered_sequences_total"].inc(sequences)
        self._on_event({"event": "batch", "step": given, "groups": len(contents), "sequences": sequences})
        return await _content(request, b'{"batch":[%b],"step":%d}' % (b",".join(contents), given))

    async def _latest_example(self, request: Request, body: bytes) -> Response:
        latest = await self._store.run(lambda ledger: ledger.latest)
        return await _content(request, latest or msgspec.json.encode(EMPTY_EXAMPLE))

    async def _status_env(self, request: Request, body: bytes) -> Response:
        env_id = decode(body, EnvIdentifier).env_id
        return _json(await self._store.run(lambda ledger: ledger.book.status_env(env_id)))

    async def _reset_data(self, request: Request, body: bytes) -> Response:
        await self._store.run(lambda ledger: ledger.reset())
        self._on_event({"event": "reset"})
        return PlainTextResponse("Reset successful")

    async def _tell_metrics(self, request: Request, body: bytes) -> Response:
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _no_such_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"status": "error", "message": message}, status, headers)


async def _content(request: Request, content: bytes) -> Response:
    """A reply that may be large, compressed if the client takes that."""
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= COMPRESSED_FROM and "gzip" in request.headers.get("accept-encoding", "").lower():
        content = await asyncio.to_thread(zlib.compress, content, 1, 31)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


def _number(request: Request, name: str) -> int | None:
    told = request.query_params.get(name)
    if told is None:
        return None
    if not (told.isascii() and told.isdecimal() and len(told) <= 18):
        raise FeedRefusedError(422, f"{name} must be a step, not {told[:20]!r}")
    return int(told)
