"""The routes of the server as a Starlette application."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import math
import time
import uuid
import zlib
from collections import Counter as Counts
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from averaging.common import is_loopback, parse_ip
from averaging.errors import ConfigError, FeedBusyError, FeedRefusedError, printable
from averaging.rl.feed.database import Database, DatabaseThread, Post
from averaging.rl.feed.messages import (
    EnvIdentifier,
    RegisterEnv,
    Registration,
    ScoredData,
    check_finite,
    decode,
    object_count,
)
from averaging.rl.feed.run_state import KEYED, NoTrainerError, RunState

logger = logging.getLogger(__name__)

COMPRESS_MIN_BYTES = 1000
"""Replies of this size or more are compressed if the client accepts gzip."""

MAX_KEY = 200
"""Characters of an Idempotency-Key."""

UNZIP_BYTES = 1 << 20
"""Bytes that the event loop decompresses before it serves other requests."""

THREAD_BYTES = 64 << 10
"""Bodies of this size or more are decoded in a thread, one after the other, so that their objects never add up."""

UNSAFE = frozenset({"/batch", "/reset_data"})
"""Paths whose GET changes the run, so that HEAD must not answer like it."""

NOTICES: Mapping[str, str] = {
    "silent": "environment %d (%s) posts nothing while all wait; others get its part of the batches until it does",
    "returned": "environment %d (%s) is back and has its part of each batch again",
}

EMPTY_EXAMPLE: Mapping[str, Sequence[object]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
        *("generation_params", "inference_logprobs", "messages", "images"),
    )
}

COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "requests_total": ("Requests answered.", ["route", "status"]),
    "received_groups_total": ("Groups accepted.", ()),
    "received_sequences_total": ("Sequences accepted.", ()),
    "repeated_posts_total": ("Posts recognized as repetitions by their Idempotency-Key.", ()),
    "delivered_batches_total": ("Batches delivered, repetitions included.", ()),
    "delivered_sequences_total": ("Sequences delivered, repetitions included.", ()),
}

GAUGES: Mapping[str, tuple[str, Callable[[RunState], float]]] = {
    "step": ("Step of the newest batch.", lambda state: state.step),
    "waiting_groups": ("Groups in the queue and in buffers.", lambda state: state.waiting_groups),
    "waiting_bytes": ("Bytes of these groups.", lambda state: state.waiting_bytes),
    "queued_sequences": ("Sequences in the queue.", lambda state: state.sequences.total()),
    "replay_batches": ("Batches kept for a trainer that resumes.", lambda state: len(state.batches)),
    "connected_environments": (
        "Environments that have registered and not disconnected.",
        lambda state: sum(env.connected for env in state.envs),
    ),
    "silent_environments": (
        "Environments that gave up their reservation, because they posted nothing.",
        lambda state: len(state.silent_environments()),
    ),
}

READS: Mapping[str, Callable[[RunState], object]] = {
    "/status": lambda state: {
        "current_step": state.step,
        "queue_size": len(state.queue),
        **({"warning": warning} if (warning := state.warning()) else {}),
        **({"silent_environments": silent} if (silent := state.silent_environments()) else {}),
    },
    "/info": lambda state: {
        "batch_size": state.registration.batch_size if state.registration else -1,
        "max_token_len": state.registration.max_token_len if state.registration else -1,
    },
    "/wandb_info": lambda state: {
        "group": state.registration and state.registration.wandb_group,
        "project": state.registration and state.registration.wandb_project,
    },
}

Event: TypeAlias = Mapping[str, Any]
Handler: TypeAlias = Callable[[Request, bytearray], Awaitable[Response]]
T = TypeVar("T")
Message = TypeVar("Message")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server.

    Attributes:
        body_bytes: body of a request, after decompression. All bodies at one time may have four times as many, and
            those of one address half of that.
        body_objects: numbers and texts in the body of a request. An entry of an object counts 8, and an array or object
            16, because they take so many times the memory; commas and brackets inside of texts count, too.
        queue_bytes, queue_groups: groups that wait; posts to a full queue are answered with status 503.
        replay_bytes: batches kept for a trainer that resumes; the oldest are forgotten first.
        seconds: time for the header of a request, for its body, and for a client that reads nothing of its reply.
        connections: connections at one time, of which one address may have half.
        env_timeout: seconds after which an environment for whose groups the run waits gives up its reservation.

    Raises:
        ConfigError: a limit is not above 0 and finite.
    """

    body_bytes: int = 64 << 20
    body_objects: int = 1 << 23
    queue_bytes: int = 4 << 30
    queue_groups: int = 50_000
    replay_bytes: int = 4 << 30
    seconds: float = 60.0
    connections: int = 1024
    env_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"the limit {name} must be above 0 and finite, not {getattr(self, name)}")


class Routes:
    """Answers the requests.

    Args:
        database: an entered `DatabaseThread`.
        tokens: each request except GET / must carry one of them; if empty, no token is required.
        hosts: names of this server, which the Host header must have if it is neither an address nor without a dot; None
            allows any.
        on_event: called with each event.
    """

    def __init__(
        self,
        database: DatabaseThread,
        tokens: Sequence[str],
        hosts: Sequence[str] | None,
        limits: ServerLimits,
        on_event: Callable[[Event], None],
    ) -> None:
        self._database, self._limits, self._on_event = database, limits, on_event
        self._tokens, self._hosts = [token.encode() for token in tokens], hosts
        self._body_bytes: Counts[str] = Counts()  # by network
        self._decoding = asyncio.Lock()
        self._warned: list[str] = []
        self._metrics = CollectorRegistry()
        for name, (help_text, read) in GAUGES.items():
            gauge = Gauge(f"averaging_feed_{name}", help_text, registry=self._metrics)
            gauge.set_function(lambda read=read: read(database.state))  # type: ignore[misc]
        self._counters = {
            name: Counter(f"averaging_feed_{name}", help_text, labels, registry=self._metrics)
            for name, (help_text, labels) in COUNTERS.items()
        }
        self._seconds = Histogram(
            "averaging_feed_request_duration_seconds",
            "Time to answer a request.",
            ["route"],
            registry=self._metrics,
        )
        handlers: dict[str, Handler] = {
            "GET /": self._root,
            "GET /batch": self._batch,
            "GET /latest_example": self._latest_example,
            "GET /status-env": self._status_env,
            "GET /reset_data": self._reset_data,
            "GET /metrics": self._get_metrics,
            "POST /register": self._register,
            "POST /register-env": self._register_env,
            "POST /disconnect-env": self._disconnect_env,
            "POST /scored_data": self._scored_data,
            "POST /scored_data_list": self._scored_data_list,
            **{f"GET {path}": self._reader(read) for path, read in READS.items()},
        }
        self.application = Starlette(
            routes=[self._route(name, handler) for name, handler in handlers.items()],
            exception_handlers={HTTPException: _no_such_route},
        )

    def _route(self, name: str, handler: Handler) -> Route:
        method, _, path = name.partition(" ")
        route = Route(path, self._endpoint(path, handler), methods=[method])
        if path in UNSAFE and route.methods:
            route.methods.discard("HEAD")  # Starlette adds it to GET
        return route

    def _emit(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:  # the request has succeeded, so its client gets the answer
            logger.exception("on_event has failed")

    async def _run(self, job: Callable[[Database], T], *, drains: bool = True) -> T:
        """Runs a job on the database, and says what else it changed. See `DatabaseThread.run`."""

        def run(database: Database) -> tuple[T, list[Event], str]:
            result, state = job(database), database.state
            notices, state.notices = state.notices, []
            events: list[Event] = [
                {"event": event, "env_id": env_id, "name": state.envs[env_id].name} for event, env_id in notices
            ]
            return result, events, state.warning()

        result, events, warning = await self._database.run(run, drains=drains)
        for event in events:
            self._emit(event)
            logger.warning(NOTICES[event["event"]], event["env_id"], printable(event["name"]))
        self._warn_once(warning)
        return result

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned = [*self._warned[-9:], warning]
            logger.warning("%s", warning)

    def _reader(self, read: Callable[[RunState], object]) -> Handler:
        async def handler(request: Request, body: bytearray) -> Response:
            return _json(await self._run(lambda database: read(database.state)))

        return handler

    def _endpoint(self, path: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                self._check_page(request)
                if path != "/":
                    self._check_token(request)
                response = await self._with_body(request, handler)
            except FeedRefusedError as error:
                response = _error(error.status, str(error))
            except FeedBusyError as error:
                response = _error(error.status, str(error), {"Retry-After": f"{error.retry_after:.0f}"})
            except ClientDisconnect:
                response = _error(400, "the client disconnected before its request was complete")
            except Exception:
                logger.exception("%s has failed", path)
                response = _error(500, "internal error of this server; see its log")
            self._counters["requests_total"].labels(path, response.status_code).inc()
            self._seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return endpoint

    def _check_page(self, request: Request) -> None:
        """Refuses requests of web pages. Otherwise any page in a browser on this machine could drop the run.

        A page whose name its owner lets point to this machine has the same origin as the server (DNS rebinding). Only
        the Host header then has a name that is not the server's.
        """
        headers = request.headers
        host = headers.get("host", "")
        if self._hosts is not None and host and not _is_name_of_server(host, self._hosts):
            raise FeedRefusedError(
                403,
                f"{host[:100]!r} is no known name of this server; use its address, start it with --allow-host NAME, or "
                "require a token",
            )
        sent_by = [headers[name].lower() for name in ("origin", "referer") if name in headers]
        own_page = all(page.split("/")[2:3] == [host.lower()] for page in sent_by)
        if not own_page or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise FeedRefusedError(403, "requests of web pages are refused; use another HTTP client")

    def _check_token(self, request: Request) -> None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        given = value.strip().encode()
        if scheme.lower() == "basic":  # clients without an option for a token send the password of their URL
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                given = b""
        # All are compared, so that the time taken reveals nothing.
        matches = sum([hmac.compare_digest(given, token) for token in self._tokens])
        if self._tokens and not (matches and scheme.lower() in ("basic", "bearer")):
            raise FeedRefusedError(401, "this server requires a token; send 'Authorization: Bearer TOKEN'")

    async def _with_body(self, request: Request, handler: Handler) -> Response:
        """Reads the body within the limits, and calls `handler`. The body counts until the handler returns."""
        encoding = request.headers.get("content-encoding", "").lower()
        unzip = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
        body, network = bytearray(), network_of(request.client and request.client.host)
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.stream():
                    if unzip is None:
                        self._extend(body, chunk, network)
                        continue
                    while True:  # not the whole chunk at once, which may grow a thousand times
                        piece = unzip.decompress(chunk, UNZIP_BYTES)
                        self._extend(body, piece, network)
                        if len(piece) < UNZIP_BYTES:
                            break
                        chunk = unzip.unconsumed_tail
                        await asyncio.sleep(0)
            if unzip and body and (not unzip.eof or unzip.unused_data):
                raise FeedRefusedError(400, "the body is not one whole gzip stream")
            return await handler(request, body)
        except zlib.error:
            raise FeedRefusedError(400, "the body is not gzip, although its Content-Encoding is") from None
        except TimeoutError:
            raise FeedRefusedError(408, f"the body did not arrive within {self._limits.seconds:g} s") from None
        finally:
            self._body_bytes[network] -= len(body)
            if not self._body_bytes[network]:
                del self._body_bytes[network]

    def _extend(self, body: bytearray, piece: bytes, network: str) -> None:
        limit = self._limits.body_bytes
        body += piece
        self._body_bytes[network] += len(piece)
        if len(body) > limit:
            raise FeedRefusedError(413, f"the body has more than {limit} bytes; send fewer groups at once")
        # Of one address half: bodies that it does not complete must not keep those of others out.
        if self._body_bytes[network] > 2 * limit or self._body_bytes.total() > 4 * limit:
            raise FeedBusyError(503, "this server reads too many bodies at present; send the same again", 1.0)

    async def _decode(self, body: bytearray, kind: type[Message], then: Callable[[Message], T]) -> T:
        """Decodes a body that may be large, and calls `then` with the result, in a thread if it is large."""
        if len(body) < THREAD_BYTES:
            return then(self._decode_bounded(body, kind))
        async with self._decoding:
            return await asyncio.to_thread(lambda: then(self._decode_bounded(body, kind)))

    def _decode_bounded(self, body: bytearray, kind: type[Message]) -> Message:
        limit = self._limits.body_objects
        if object_count(body) > limit:
            raise FeedRefusedError(413, f"the body has more than {limit} objects; send fewer groups at once")
        return decode(body, kind)

    async def _root(self, request: Request, body: bytearray) -> Response:
        return _json({"message": "AtroposLib API"})

    async def _register(self, request: Request, body: bytearray) -> Response:
        registration = self._decode_bounded(body, Registration)
        earlier = _number(request, "registration") or 0

        def register(database: Database) -> tuple[bool, int, str]:
            began = database.register(registration, earlier)
            return began, database.state.trainer, database.state.warning()

        began, trainer, warning = await self._run(register)
        if began:
            fields = {name: getattr(registration, name) for name in ("batch_size", "starting_step", "num_steps")}
            self._emit({"event": "registered", **fields})
        else:
            self._emit({"event": "trainer", "registration": trainer})
        reply = {"uuid": uuid.uuid4().int, "registration": trainer}
        return _json(reply | ({"warning": warning} if warning else {}))

    async def _register_env(self, request: Request, body: bytearray) -> Response:
        config = self._decode_bounded(body, RegisterEnv)
        owner, now = _owners(request)[-1], time.time()

        def register(database: Database) -> dict[str, Any]:
            env_id, run = database.register_env(config, owner, now), database.state.registration
            if env_id < 0 or run is None:
                return {"status": "wait for trainer to start"}
            return {
                "status": "success",
                "env_id": env_id,
                "wandb_name": database.state.envs[env_id].name,
                "checkpoint_dir": run.checkpoint_dir,
                "starting_step": database.state.step,
                "checkpoint_interval": run.save_checkpoint_interval,
                "num_steps": run.num_steps,
                **({"warning": warning} if (warning := database.state.warning()) else {}),
            }

        reply = await self._run(register)
        if "env_id" in reply:
            self._emit({"event": "environment", "env_id": reply["env_id"], "name": reply["wandb_name"]})
        return _json(reply)

    async def _disconnect_env(self, request: Request, body: bytearray) -> Response:
        env_id = self._decode_bounded(body, EnvIdentifier).env_id
        owners = _owners(request)
        try:
            await self._run(lambda database: database.disconnect(env_id, owners))
        except FeedRefusedError as error:
            return _json({"status": "failure", "error": str(error)})
        return _json({"status": "success"})

    async def _scored_data(self, request: Request, body: bytearray) -> Response:
        key = _key(request)
        post = await self._decode(body, ScoredData, lambda group: _post_of([group], key))
        buffered = await self._post(post)
        return _json({"status": "buffered", "buffer_size": buffered[0]} if buffered else {"status": "received"})

    async def _scored_data_list(self, request: Request, body: bytearray) -> Response:
        key = _key(request)
        post = await self._decode(body, list[ScoredData], lambda groups: _post_of(groups, key))
        buffered = await self._post(post)
        waiting = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return _json({"status": "received", "groups_processed": len(post.groups), **waiting})

    async def _post(self, post: Post) -> list[int]:
        now = time.time()
        buffered, repeated = await self._run(lambda database: database.post(post, now), drains=False)
        if repeated:
            self._counters["repeated_posts_total"].inc()
        else:
            self._counters["received_groups_total"].inc(len(post.groups))
            self._counters["received_sequences_total"].inc(sum(size for _, size in post.groups))
        return buffered

    async def _batch(self, request: Request, body: bytearray) -> Response:
        step, saved, trainer = (_number(request, name) for name in ("step", "saved", "registration"))
        now = time.time()

        def batch(database: Database) -> tuple[tuple[int, int, list[bytes]] | None, str]:
            return database.batch(step, saved, now, trainer), database.state.warning()

        try:
            found, warning = await self._run(batch)
        except NoTrainerError as error:
            return _json({"status": "error", "message": str(error), "batch": []})
        except FeedRefusedError as error:
            self._warn_once(f"a request for a batch is refused: {error}")
            raise
        if found is None:
            return _json({"batch": None, **({"warning": warning} if warning else {})})
        found_step, sequences, contents = found
        self._counters["delivered_batches_total"].inc()
        self._counters["delivered_sequences_total"].inc(sequences)
        self._emit({"event": "batch", "step": found_step, "groups": len(contents), "sequences": sequences})
        return await _content(request, b'{"batch":[%b],"step":%d}' % (b",".join(contents), found_step))

    async def _latest_example(self, request: Request, body: bytearray) -> Response:
        latest = await self._run(lambda database: database.latest)
        return await _content(request, latest or msgspec.json.encode(EMPTY_EXAMPLE))

    async def _status_env(self, request: Request, body: bytearray) -> Response:
        env_id = None if body else _number(request, "env_id")
        if env_id is None:
            env_id = self._decode_bounded(body, EnvIdentifier).env_id
        now = time.time()

        def status(database: Database) -> dict[str, Any]:
            answer = database.state.status_env(env_id)
            database.state.envs[env_id].heard = now
            return answer

        return _json(await self._run(status))

    async def _reset_data(self, request: Request, body: bytearray) -> Response:
        await self._run(lambda database: database.reset(), drains=False)
        self._emit({"event": "reset"})
        return PlainTextResponse("Reset successful")

    async def _get_metrics(self, request: Request, body: bytearray) -> Response:
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
    """Returns a reply that may be large, compressed if the client accepts gzip."""
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= COMPRESS_MIN_BYTES and "gzip" in request.headers.get("accept-encoding", "").lower():
        content = await asyncio.to_thread(zlib.compress, content, 1, 31)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


def _is_name_of_server(host_header: str, hosts: Sequence[str]) -> bool:
    """Whether a request for that host can reach only this server: nobody else can let such a name point to it."""
    try:
        host = (urlsplit(f"//{host_header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return "." not in host or parse_ip(host) is not None or is_loopback(host) or host in hosts


def network_of(host: str | None) -> str:
    """Returns what one client can have many addresses of: the first half of an IPv6 address, or an IPv4 address."""
    host = host or ""
    address = parse_ip(host.partition("%")[0])
    if address is None or address.version == 4 or address.ipv4_mapped:
        return host
    return address.exploded[:19]


def _owners(request: Request) -> list[bytes]:
    """Returns what may identify the caller: its address, and its secret key if it sends one."""
    address = b"at " + (request.client.host if request.client else "").encode()
    key = request.headers.get("environment-key", "")
    return [address, KEYED + blake2b(key.encode(), digest_size=16).digest()] if key else [address]


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_KEY:
        raise FeedRefusedError(422, f"the Idempotency-Key has {len(key)} characters; the limit is {MAX_KEY}")
    return key


def _post_of(groups: Sequence[ScoredData], key: str) -> Post:
    digest = blake2b(digest_size=16)
    contents = []
    for group in groups:
        check_finite(group)
        contents.append(msgspec.json.encode(group))
        if key:  # without env_id: an environment that was restarted may have a new one
            digest.update(msgspec.json.encode(msgspec.structs.replace(group, env_id=None)))
    return Post([(group.env_id, len(group.tokens)) for group in groups], contents, key, digest.digest())


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise FeedRefusedError(422, f"{name} must be a number of at most 18 digits, not {text[:20]!r}")
    return int(text)
