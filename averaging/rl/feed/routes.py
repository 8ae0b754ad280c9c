"""What the server answers: each route is a method of `Routes` with its path above it."""

from __future__ import annotations

import asyncio
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

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from averaging.errors import ConfigError, FeedError, printable
from averaging.rl.feed.database import Database, DatabaseThread
from averaging.rl.feed.messages import (
    MAX_STEP,
    EnvIdentifier,
    Post,
    RegisterEnv,
    Registration,
    ScoredData,
    decode,
    object_count,
)
from averaging.rl.feed.run_state import KEYED, NoTrainerError, RunState
from averaging.rl.feed.versions import Fit

logger = logging.getLogger(__name__)

COMPRESS_MIN_BYTES = 1000
"""Replies of this size or more are compressed if the client accepts gzip."""

MAX_KEY = 200
"""Characters of an Idempotency-Key."""

THREAD_BYTES = 64 << 10
"""Bodies of this size or more are decoded in a thread, one after the other, so that their objects never add up."""

NOTICES: Mapping[str, str] = {
    "silent": "environment %d (%s) posts nothing while all wait; others get its part of the batches until it does",
    "returned": "environment %d (%s) is back and has its part of each batch again",
}

REASONS: Mapping[Fit, str] = {Fit.OLD: "old", Fit.FOREIGN: "foreign", Fit.UNKNOWN: "unknown"}
"""The names of the reasons for which a group does not fit the trainer's version."""

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
    "stale_groups_total": (
        "Groups that did not fit the trainer's version: old, foreign (above every version of the trainer), or unknown.",
        ["reason"],
    ),
    "delivered_batches_total": ("Batches delivered, repetitions included.", ()),
    "delivered_sequences_total": ("Sequences delivered, repetitions included.", ()),
}

GAUGES: Mapping[str, tuple[str, Callable[[RunState], float]]] = {
    "step": ("Step of the newest batch.", lambda state: state.step),
    "waiting_groups": ("Groups in the queue and in buffers.", lambda state: state.waiting_groups),
    "waiting_bytes": ("Bytes of these groups.", lambda state: state.waiting_bytes),
    "queued_sequences": ("Sequences in the queue.", lambda state: state.sequences.total()),
    "replay_batches": ("Batches kept for a trainer that resumes.", lambda state: len(state.batches)),
    "newest_version": (
        "The trainer's newest version of the weights; -1 before it reports one.",
        lambda state: -1 if state.version.newest is None else state.version.newest,
    ),
    "early_groups": ("Groups that wait because they are ahead of the trainer.", lambda state: len(state.early)),
    "set_aside_groups": ("Groups set aside because they do not fit.", lambda state: len(state.aside)),
    "connected_environments": (
        "Environments that have registered and not disconnected.",
        lambda state: sum(env.connected for env in state.envs),
    ),
    "silent_environments": (
        "Environments that gave up their reservation, because they posted nothing.",
        lambda state: len(state.silent_environments()),
    ),
}

Event: TypeAlias = Mapping[str, Any]
T = TypeVar("T")
Message = TypeVar("Message")
Handler = Callable[["Routes", Request, bytearray], Awaitable[Response]]

ROUTES: dict[str, Handler] = {}
"""The handlers by method and path, such as `GET /batch`. Each is given the request and its whole body."""

CHANGING = {"/batch", "/reset_data"}
"""Paths whose GET changes the run, so that HEAD must not answer like it."""


def _route(name: str) -> Callable[[Handler], Handler]:
    """Adds a handler to `ROUTES`."""

    def add(handler: Handler) -> Handler:
        ROUTES[name] = handler
        return handler

    return add


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
        connections: connections at one time, of which one address may have half, the next a quarter, and so on.
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
    """Answers the requests, which `Gate` has let in.

    Args:
        database: an entered `DatabaseThread`.
        body_objects: see `ServerLimits`.
        on_event: receives each event.
    """

    def __init__(self, database: DatabaseThread, body_objects: int, on_event: Callable[[Event], None]) -> None:
        self._database, self._body_objects, self._on_event = database, body_objects, on_event
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

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Counts a request in the metrics."""
        self._counters["requests_total"].labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)

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
            return result, events + _stale_events(state), state.warning()

        result, events, warning = await self._database.run(run, drains=drains)
        for event in events:
            self._emit(event)
            if event["event"] == "stale":
                self._counters["stale_groups_total"].labels(event["reason"]).inc(event["groups"])
            else:
                logger.warning(NOTICES[event["event"]], event["env_id"], printable(event["name"]))
        self._warn_once(warning)
        return result

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned = [*self._warned[-9:], warning]
            logger.warning("%s", warning)

    async def _read(self, read: Callable[[RunState], object]) -> Response:
        return _json(await self._run(lambda database: read(database.state)))

    async def _decode(self, body: bytearray, kind: type[Message], then: Callable[[Message], T]) -> T:
        """Decodes a body that may be large, and calls `then` with the result, in a thread if it is large."""
        if len(body) < THREAD_BYTES:
            return then(self._decode_bounded(body, kind))
        async with self._decoding:
            return await asyncio.to_thread(lambda: then(self._decode_bounded(body, kind)))

    def _decode_bounded(self, body: bytearray, kind: type[Message]) -> Message:
        limit = self._body_objects
        if object_count(body) > limit:
            raise FeedError(f"the body has more than {limit} objects; send fewer groups at once", 413)
        return decode(body, kind)

    @_route("GET /")
    async def _root(self, request: Request, body: bytearray) -> Response:
        return _json({"message": "AtroposLib API"})

    @_route("GET /status")
    async def _status(self, request: Request, body: bytearray) -> Response:
        return await self._read(
            lambda state: {
                "current_step": state.step,
                "queue_size": len(state.queue) + len(state.early),
                **({"warning": warning} if (warning := state.warning()) else {}),
                **({"silent_environments": silent} if (silent := state.silent_environments()) else {}),
                **_version_status(state),
                **({"stale_groups": state.stale_groups} if state.stale_groups else {}),
                **({"set_aside_groups": len(state.aside)} if state.aside else {}),
                **({"stale_environments": stale} if (stale := state.stale_environments()) else {}),
            }
        )

    @_route("GET /info")
    async def _info(self, request: Request, body: bytearray) -> Response:
        return await self._read(
            lambda state: {
                "batch_size": state.registration.batch_size if state.registration else -1,
                "max_token_len": state.registration.max_token_len if state.registration else -1,
            }
        )

    @_route("GET /wandb_info")
    async def _wandb_info(self, request: Request, body: bytearray) -> Response:
        return await self._read(
            lambda state: {
                "group": state.registration and state.registration.wandb_group,
                "project": state.registration and state.registration.wandb_project,
            }
        )

    @_route("POST /register")
    async def _register(self, request: Request, body: bytearray) -> Response:
        registration = self._decode_bounded(body, Registration)
        earlier = _number(request, "registration") or 0

        def register(database: Database) -> tuple[bool, int, str, str]:
            resumed = "" if earlier else database.state.resume_warning(registration.starting_step)
            return database.register(registration, earlier), database.state.trainer, database.state.warning(), resumed

        is_new, trainer, warning, resumed = await self._run(register)
        if resumed:
            logger.warning("%s", resumed)
        if is_new:
            fields = {name: getattr(registration, name) for name in ("batch_size", "starting_step", "num_steps")}
            self._emit({"event": "registered", **fields})
        else:
            self._emit({"event": "trainer", "registration": trainer})
        reply = {"uuid": uuid.uuid4().int, "registration": trainer}
        return _json(reply | ({"warning": warning} if warning else {}))

    @_route("POST /register-env")
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

    @_route("POST /disconnect-env")
    async def _disconnect_env(self, request: Request, body: bytearray) -> Response:
        env_id = self._decode_bounded(body, EnvIdentifier).env_id
        owners = _owners(request)
        try:
            await self._run(lambda database: database.disconnect(env_id, owners))
        except FeedError as error:
            if error.retry_after is not None:
                raise
            return _json({"status": "failure", "error": str(error)})
        return _json({"status": "success"})

    @_route("POST /scored_data")
    async def _scored_data(self, request: Request, body: bytearray) -> Response:
        key = _key(request)
        post = await self._decode(body, ScoredData, lambda group: Post.of([group], key))
        buffered, versions = await self._post(post)
        status = {"status": "buffered", "buffer_size": buffered[0]} if buffered else {"status": "received"}
        return _json({**status, **versions})

    @_route("POST /scored_data_list")
    async def _scored_data_list(self, request: Request, body: bytearray) -> Response:
        key = _key(request)
        post = await self._decode(body, list[ScoredData], lambda groups: Post.of(groups, key))
        buffered, versions = await self._post(post)
        waiting = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return _json({"status": "received", "groups_processed": len(post.groups), **waiting, **versions})

    async def _post(self, post: Post) -> tuple[list[int], dict[str, int]]:
        """Returns the sizes of buffers, and what the environment is told of versions if it has sent some."""
        now = time.time()

        def add(database: Database) -> tuple[list[int], bool, dict[str, int]]:
            buffered, repeated = database.post(post, now)
            stale = sum(database.state.is_stale(version) for version in post.versions)
            told = {**_version_status(database.state), **({"stale": stale} if stale else {})}
            return buffered, repeated, told if post.versions else {}

        buffered, repeated, versions = await self._run(add, drains=False)
        if repeated:
            self._counters["repeated_posts_total"].inc()
        else:
            self._counters["received_groups_total"].inc(len(post.groups))
            self._counters["received_sequences_total"].inc(sum(size for _, size in post.groups))
        return buffered, versions

    @_route("GET /batch")
    async def _batch(self, request: Request, body: bytearray) -> Response:
        step, saved, trainer, version = (
            _number(request, name) for name in ("step", "saved", "registration", "version")
        )
        if version is not None and version > MAX_STEP:
            raise FeedError(f"version must be at most {MAX_STEP}, not {version}", 422)
        now = time.time()

        def batch(database: Database) -> tuple[tuple[int, int, list[bytes]] | None, str, int | None]:
            delivered = database.batch(step, saved, now, trainer, version)
            return delivered, database.state.warning(), database.state.version.newest

        try:
            delivered, warning, newest = await self._run(batch)
        except NoTrainerError as error:
            return _json({"status": "error", "message": str(error), "batch": []})
        except FeedError as error:
            if error.retry_after is None:
                self._warn_once(f"a request for a batch is refused: {error}")
            raise
        if version is not None and newest is not None and version < newest:
            self._warn_once(f"the trainer reports version {version} after {newest}, which still counts")
        if delivered is None:
            return _json({"batch": None, **({"warning": warning} if warning else {})})
        delivered_step, sequences, contents = delivered
        self._counters["delivered_batches_total"].inc()
        self._counters["delivered_sequences_total"].inc(sequences)
        self._emit({"event": "batch", "step": delivered_step, "groups": len(contents), "sequences": sequences})
        last = b"}" if newest is None else b',"newest_version":%d}' % newest
        return await _content(request, b'{"batch":[%b],"step":%d%b' % (b",".join(contents), delivered_step, last))

    @_route("GET /latest_example")
    async def _latest_example(self, request: Request, body: bytearray) -> Response:
        latest = await self._run(lambda database: database.latest)
        return await _content(request, latest or msgspec.json.encode(EMPTY_EXAMPLE))

    @_route("GET /status-env")
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

    @_route("GET /reset_data")
    async def _reset_data(self, request: Request, body: bytearray) -> Response:
        await self._run(lambda database: database.reset(), drains=False)
        self._emit({"event": "reset"})
        return PlainTextResponse("Reset successful")

    @_route("GET /metrics")
    async def _get_metrics(self, request: Request, body: bytearray) -> Response:
        return Response(generate_latest(self._metrics), media_type="text/plain; version=0.0.4; charset=utf-8")


def _version_status(state: RunState) -> dict[str, int]:
    """What is told of the trainer's version; nothing before the trainer reports one."""
    if state.version.newest is None:
        return {}
    limit = {} if state.max_staleness is None else {"max_staleness": state.max_staleness}
    return {"newest_version": state.version.newest, **limit}


def _stale_events(state: RunState) -> list[Event]:
    """Takes out what was dropped or set aside, as events."""
    stale, state.stale = state.stale, Counts()
    return [
        {
            "event": "stale",
            "env_id": env_id,
            "name": "" if env_id is None else state.envs[env_id].name,
            "groups": groups,
            "reason": REASONS[reason],
            "newest_version": state.version.newest,
        }
        for (reason, env_id), groups in stale.items()
    ]


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_reply(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns the reply to a request that is refused or has failed."""
    return _json({"status": "error", "message": message}, status, headers)


async def _content(request: Request, content: bytes) -> Response:
    """Returns a reply that may be large, compressed if the client accepts gzip."""
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= COMPRESS_MIN_BYTES and "gzip" in request.headers.get("accept-encoding", "").lower():
        content = await asyncio.to_thread(zlib.compress, content, 1, 31)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


def _owners(request: Request) -> list[bytes]:
    """Returns what may identify the caller: its address, and its secret key if it sends one."""
    address = b"at " + (request.client.host if request.client else "").encode()
    key = request.headers.get("environment-key", "")
    return [address, KEYED + blake2b(key.encode(), digest_size=16).digest()] if key else [address]


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_KEY:
        raise FeedError(f"the Idempotency-Key has {len(key)} characters; the limit is {MAX_KEY}", 422)
    return key


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise FeedError(f"{name} must be a number of at most 18 digits, not {text[:20]!r}", 422)
    return int(text)
