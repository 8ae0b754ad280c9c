"""`FeedServer`: the socket, the database and the HTTP server; what all requests must pass, and what routes answer."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from averaging.common import is_count, loopback_here
from averaging.errors import ConfigError, FeedError, printable
from averaging.http_server import BodyReader, HttpAccess, HttpServer, http_access, listening
from averaging.rl.feed.database import WRITE_RETRY_SECONDS, Database
from averaging.rl.feed.messages import MAX_STEP, EnvIdentifier, Post, RegisterEnv, Registration, ScoredData, decode
from averaging.rl.feed.run_state import CommandEvent, NoTrainerError, RunState

logger = logging.getLogger(__name__)

BODY_BYTES = 64 << 20  # of a body after decompression. All may have four times as many, those of one address twice
SECONDS = 60.0  # for the header of a request, for its body, and for a client that reads nothing of its reply
CONNECTIONS = 1024
CHANGING = {"/batch", "/reset_data"}  # their GET changes the run, so HEAD, which Starlette answers likewise, is refused
COMPRESS_MIN_BYTES = 1000  # replies of this size or more are compressed if the client accepts gzip
MAX_KEY = 200  # characters of an Idempotency-Key
MAX_OBJECTS = 1 << 23  # limit of `object_count` of the body of a request

EXAMPLE_FIELDS = "tokens masks scores advantages ref_logprobs generation_params inference_logprobs messages images"
EMPTY_EXAMPLE: dict[str, list[Any]] = {name: [] for name in EXAMPLE_FIELDS.split()}

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
    "step": ("Step of the newest batch.", lambda state: state.run.step),
    "waiting_groups": ("Groups in the queue and in buffers.", lambda state: len([*state.waiting])),
    "waiting_bytes": ("Bytes of these groups.", lambda state: sum(group.nbytes for group in [*state.waiting])),
    "queued_sequences": ("Sequences in the queue.", lambda state: sum(group.size for group in state.queue)),
    "replay_batches": ("Batches kept for a trainer that resumes.", lambda state: len(state.batches)),
    "newest_version": (
        "The trainer's newest version of the weights; -1 before it reports one.",
        lambda state: -1 if state.run.version.newest is None else state.run.version.newest,
    ),
    "connected_environments": (
        "Environments that have registered and not disconnected.",
        lambda state: sum(env.connected for env in state.envs),
    ),
    "silent_environments": (
        "Environments that gave up their reservation, because they posted nothing.",
        lambda state: len(state.silent_environments()),
    ),
}

T = TypeVar("T")
Handler = Callable[[Request, bytearray], Awaitable[Response]]  # answers a request, given with its whole body


class Routes:
    """Answers the requests, which `Gate` has let in. The database is used in its thread only."""

    def __init__(
        self, database: Database, thread: ThreadPoolExecutor, on_event: Callable[[CommandEvent], None]
    ) -> None:
        self._database, self._thread, self._on_event = database, thread, on_event
        self._warned: list[str] = []
        self._metrics = CollectorRegistry()
        for name, (help_text, read) in GAUGES.items():
            gauge = Gauge(f"averaging_feed_{name}", help_text, registry=self._metrics)
            gauge.set_function(lambda read=read: read(database.state))  # type: ignore[misc]
        self._counters = {
            name: Counter(f"averaging_feed_{name}", help_text, labels, registry=self._metrics)
            for name, (help_text, labels) in COUNTERS.items()
        }
        name, help_text = "averaging_feed_request_duration_seconds", "Time to answer a request."
        self._seconds = Histogram(name, help_text, ["route"], registry=self._metrics)

    def table(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/", self._root),
            ("POST", "/register", self._register),
            ("GET", "/batch", self._batch),
            ("GET", "/info", self._info),
            ("GET", "/wandb_info", self._wandb_info),
            ("GET", "/status", self._status),
            ("POST", "/register-env", self._register_env),
            ("GET", "/status-env", self._status_env),
            ("POST", "/disconnect-env", self._disconnect_env),
            ("POST", "/scored_data", self._scored_data),
            ("POST", "/scored_data_list", self._scored_data_list),
            ("GET", "/latest_example", self._latest_example),
            ("GET", "/reset_data", self._reset_data),
            ("GET", "/metrics", self._get_metrics),
        ]

    def answered(self, path: str, status: int, seconds: float) -> None:
        self._counters["requests_total"].labels(path, status).inc()
        self._seconds.labels(path).observe(seconds)

    async def _run(self, job: Callable[[Database], T]) -> T:
        """Runs a job on the database in its thread, and says what else it changed."""

        def run() -> tuple[T, list[CommandEvent], str]:
            result, state = job(self._database), self._database.state
            events, state.events = state.events, []
            return result, events, state.warning()

        try:
            result, events, warning = await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except FeedError as error:
            if error.retry_after == WRITE_RETRY_SECONDS:
                self._warn_once(str(error))
            raise
        for event in events:
            self._emit(event)
        self._warn_once(warning)
        return result

    def _tell(self, name: str, text: str, /, **fields: Any) -> None:
        self._emit(CommandEvent(name, text, fields))

    def _emit(self, event: CommandEvent) -> None:
        if event.name == "stale":
            self._counters["stale_groups_total"].labels(event.fields["reason"]).inc(event.fields["groups"])
        elif event.name in ("silent", "returned"):
            logger.warning("%s", printable(event.text))
        try:
            self._on_event(event)
        except Exception:  # the user's; the request has succeeded, so its client gets the answer
            logger.exception("on_event has failed")

    def _warn_once(self, warning: str) -> None:
        if warning and warning not in self._warned:
            self._warned = [*self._warned[-9:], warning]
            logger.warning("%s", warning)

    async def _root(self, request: Request, body: bytearray) -> Response:
        return _json({"message": "AtroposLib API"})

    async def _status(self, request: Request, body: bytearray) -> Response:
        def status(database: Database) -> dict[str, Any]:
            state = database.state
            warning, silent, stale = state.warning(), state.silent_environments(), state.stale.total()
            found = {"warning": warning, "silent_environments": silent, "stale_groups": stale}
            told = {name: value for name, value in found.items() if value}
            return {"current_step": state.run.step, "queue_size": len(state.queue), **told, **_versions(state)}

        return _json(await self._run(status))

    async def _info(self, request: Request, body: bytearray) -> Response:
        run = await self._run(lambda database: database.state.run.registration)
        return _json({"batch_size": run.batch_size if run else -1, "max_token_len": run.max_token_len if run else -1})

    async def _wandb_info(self, request: Request, body: bytearray) -> Response:
        run = await self._run(lambda database: database.state.run.registration)
        return _json({"group": run and run.wandb_group, "project": run and run.wandb_project})

    async def _register(self, request: Request, body: bytearray) -> Response:
        registration = decode(body, Registration, MAX_OBJECTS)
        earlier = _number(request, "registration") or 0

        def register(database: Database) -> tuple[bool, int, str, str]:
            state = database.state
            resumed = "" if earlier else state.resume_warning(registration.starting_step)
            return database.register(registration, earlier), state.run.trainer, state.warning(), resumed

        is_new, trainer, warning, resumed = await self._run(register)
        if resumed:
            logger.warning("%s", resumed)
        size, start = registration.batch_size, registration.starting_step
        if is_new:
            fields = {"batch_size": size, "starting_step": start, "num_steps": registration.num_steps}
            self._tell("registered", f"a trainer has registered: batches of {size}, from step {start}", **fields)
        else:
            text = f"another trainer has registered, as number {trainer}; an earlier one that still runs gets an error"
            self._tell("trainer", text, registration=trainer)
        reply = {"uuid": uuid.uuid4().int, "registration": trainer}
        return _json(reply | ({"warning": warning} if warning else {}))

    async def _register_env(self, request: Request, body: bytearray) -> Response:
        config, now = decode(body, RegisterEnv, MAX_OBJECTS), time.time()
        secret = request.headers.get("environment-key", "").encode()
        key = blake2b(secret, digest_size=16).digest() if secret else b""

        def register(database: Database) -> dict[str, Any]:
            env_id, state = database.register_env(config, key, now), database.state
            if env_id < 0 or state.run.registration is None:
                return {"status": "wait for trainer to start"}
            return {
                "status": "success",
                "env_id": env_id,
                "wandb_name": state.envs[env_id].name,
                "checkpoint_dir": state.run.registration.checkpoint_dir,
                "starting_step": state.run.step,
                "checkpoint_interval": state.run.registration.save_checkpoint_interval,
                "num_steps": state.run.registration.num_steps,
                **({"warning": warning} if (warning := state.warning()) else {}),
            }

        reply = await self._run(register)
        if "env_id" in reply:
            env_id, name = reply["env_id"], reply["wandb_name"]
            self._tell("environment", f"environment {env_id} has registered: {name}", env_id=env_id, name=name)
        return _json(reply)

    async def _disconnect_env(self, request: Request, body: bytearray) -> Response:
        env_id = decode(body, EnvIdentifier, MAX_OBJECTS).env_id
        try:
            await self._run(lambda database: database.disconnect(env_id))
        except FeedError as error:
            if error.retry_after is not None:
                raise
            return _json({"status": "failure", "error": str(error)})
        return _json({"status": "success"})

    async def _status_env(self, request: Request, body: bytearray) -> Response:
        env_id, now = decode(body, EnvIdentifier, MAX_OBJECTS).env_id, time.time()

        def status(database: Database) -> dict[str, Any]:
            answer = database.state.status_env(env_id)
            database.state.envs[env_id].heard = now
            return answer

        return _json(await self._run(status))

    async def _scored_data(self, request: Request, body: bytearray) -> Response:
        _, buffered, versions = await self._post(request, lambda: [decode(body, ScoredData, MAX_OBJECTS)])
        status = {"status": "buffered", "buffer_size": buffered[0]} if buffered else {"status": "received"}
        return _json({**status, **versions})

    async def _scored_data_list(self, request: Request, body: bytearray) -> Response:
        count, buffered, versions = await self._post(request, lambda: decode(body, list[ScoredData], MAX_OBJECTS))
        waiting = {"buffered": len(buffered), "last_buffer_size": buffered[-1]} if buffered else {}
        return _json({"status": "received", "groups_processed": count, **waiting, **versions})

    async def _post(
        self, request: Request, read: Callable[[], list[ScoredData]]
    ) -> tuple[int, list[int], dict[str, int]]:
        """Returns the number of groups, the sizes of buffers, and what a sender of versions is told of them."""
        key, now = request.headers.get("idempotency-key", ""), time.time()
        if len(key) > MAX_KEY:
            raise FeedError(f"the Idempotency-Key has {len(key)} characters; the limit is {MAX_KEY}", 422)

        def add(database: Database) -> tuple[Post, list[int], bool, dict[str, int]]:
            # Decoded in this thread, one body after the other, so that the objects of large ones never add up.
            post = Post.of(read(), key)
            buffered, repeated = database.post(post, now)
            stale = sum(database.state.is_stale(version) for version in post.versions)
            versions = {**_versions(database.state), **({"stale": stale} if stale else {})}
            return post, buffered, repeated, versions if post.versions else {}

        post, buffered, repeated, versions = await self._run(add)
        if repeated:
            self._counters["repeated_posts_total"].inc()
        else:
            self._counters["received_groups_total"].inc(len(post.groups))
            self._counters["received_sequences_total"].inc(sum(size for _, size in post.groups))
        return len(post.groups), buffered, versions

    async def _batch(self, request: Request, body: bytearray) -> Response:
        step, saved, trainer, version = (
            _number(request, each) for each in ("step", "saved", "registration", "version")
        )
        if version is not None and version > MAX_STEP:
            raise FeedError(f"version must be at most {MAX_STEP}, not {version}", 422)
        now = time.time()

        def batch(database: Database) -> tuple[tuple[int, int, list[bytes]] | None, str, int | None]:
            delivered = database.batch(step, saved, now, trainer, version)
            return delivered, database.state.warning(), database.state.run.version.newest

        try:
            delivered, warning, newest = await self._run(batch)
        except NoTrainerError as error:
            return _json({"status": "error", "message": str(error), "batch": []})
        except FeedError as error:
            self._warn_once(f"a request for a batch is refused: {error}")
            raise
        if version is not None and newest is not None and version < newest:
            self._warn_once(f"the trainer reports version {version} after {newest}, which still counts")
        if delivered is None:
            return _json({"batch": None, **({"warning": warning} if warning else {})})
        delivered_step, sequences, contents = delivered
        self._counters["delivered_batches_total"].inc()
        self._counters["delivered_sequences_total"].inc(sequences)
        counts = {"step": delivered_step, "groups": len(contents), "sequences": sequences}
        text = f"step {delivered_step}: delivered {sequences} sequences in {len(contents)} groups"
        self._tell("batch", text, **counts)
        last = b"}" if newest is None else b',"newest_version":%d}' % newest
        return await _content(request, b'{"batch":[%b],"step":%d%b' % (b",".join(contents), delivered_step, last))

    async def _latest_example(self, request: Request, body: bytearray) -> Response:
        latest = await self._run(lambda database: database.latest)
        return await _content(request, latest or msgspec.json.encode(EMPTY_EXAMPLE))

    async def _reset_data(self, request: Request, body: bytearray) -> Response:
        await self._run(lambda database: database.reset())
        self._tell("reset", "GET /reset_data has dropped everything")
        return PlainTextResponse("Reset successful")

    async def _get_metrics(self, request: Request, body: bytearray) -> Response:
        metrics = await self._run(lambda _: generate_latest(self._metrics))  # in the thread that changes the state
        return Response(metrics, media_type="text/plain; version=0.0.4; charset=utf-8")


def _versions(state: RunState) -> dict[str, int]:
    """What is told of the trainer's version; nothing before the trainer reports one."""
    if state.run.version.newest is None:
        return {}
    limit = {} if state.max_staleness is None else {"max_staleness": state.max_staleness}
    return {"newest_version": state.run.version.newest, **limit}


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def error_reply(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"status": "error", "message": message}, status, headers)


async def _content(request: Request, content: bytes) -> Response:
    """Returns a reply that may be large, compressed if the client accepts gzip."""
    headers = {"Vary": "Accept-Encoding"}
    if len(content) >= COMPRESS_MIN_BYTES and "gzip" in request.headers.get("accept-encoding", "").lower():
        content = await asyncio.to_thread(zlib.compress, content, 1, 31)
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type="application/json")


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise FeedError(f"{name} must be a number of at most 18 digits, not {text[:20]!r}", 422)
    return int(text)


class FeedServer:
    """Serves a feed while it is entered with `async with`.

    Args:
        store: the SQLite file of the run, created if needed. ":memory:" keeps everything in memory.
        listen: "HOST:PORT"; port 0 takes a free port.
        fsync: whether an acknowledged post also survives a power failure. It always survives the end of this process.
        max_staleness: how many versions of the weights a group may be behind the trainer's newest one; None any. Others
            are dropped. Groups that name no version are not limited, and those whose version is null do not fit.
        queue_bytes: limit of the groups that wait, above which posts are answered with status 503. The batches that are
            kept for a trainer that resumes may have as many again; the oldest are forgotten first.
        env_timeout: seconds after which an environment for whose groups the run waits gives up its reservation.
        on_event: receives each event that `averaging feed` prints.
        access: `token_file` (tokens, one per line; each request except GET / must carry one of them), `tls_ca`,
            `tls_cert`, `tls_key` (files for TLS; without `token_file` clients must show a certificate of `tls_ca`),
            `insecure` (whether other machines may connect without TLS) and `hosts` (DNS names of this server: without
            TLS and tokens, requests for other names with a dot are refused, because web pages can send those).

    Attributes:
        url: address of the server; empty before it is entered.

    Raises:
        ConfigError: an argument is invalid; on entry, the store cannot be used.
        ListenError: on entry, the address is taken or unknown.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        listen: str = "127.0.0.1:0",
        fsync: bool = False,
        max_staleness: int | None = None,
        queue_bytes: int = 4 << 30,
        env_timeout: float = 300.0,
        on_event: Callable[[CommandEvent], None] = lambda event: None,
        **access: Any,
    ) -> None:
        self._listen = loopback_here(listen)
        self._access = http_access(self._listen, **access)
        if max_staleness is not None and not is_count(max_staleness):
            raise ConfigError(f"max_staleness must be a number of versions, 0 or more, or None, not {max_staleness!r}")
        if not (queue_bytes > 0 and 0 < env_timeout < math.inf):
            raise ConfigError("queue_bytes and env_timeout must be above 0")
        new_state = partial(RunState, max_bytes=queue_bytes, env_timeout=env_timeout, max_staleness=max_staleness)
        self._open = partial(Database, store, fsync=fsync, new_state=new_state)
        self._on_event = on_event
        self.url = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening(self._listen))
            database = await asyncio.to_thread(self._open)
            stack.callback(database.close)
            thread = ThreadPoolExecutor(1, "feed-database")
            stack.push_async_callback(asyncio.to_thread, thread.shutdown)
            gate = Gate(Routes(database, thread, self._on_event), self._access)
            self._server = HttpServer(
                gate.application(), listener, connections=CONNECTIONS, seconds=SECONDS, tls=self._access.tls
            )
            await stack.enter_async_context(self._server)
            self.url = self._server.url(self._listen)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Waits until the server ends. It ends only if it fails."""
        await self._server.wait()


class Gate:
    """Lets requests in, within the limits and with a token, and gives their bodies to `routes`."""

    def __init__(self, routes: Routes, access: HttpAccess) -> None:
        self._routes, self._access = routes, access
        self._bodies = BodyReader(BODY_BYTES, 4 * BODY_BYTES, SECONDS, full=503)

    def application(self) -> Starlette:
        routes = [
            Route(path, partial(self._answer, path, handler), methods=[method])
            for method, path, handler in self._routes.table()
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})

    async def _answer(self, path: str, handler: Handler, request: Request) -> Response:
        began = time.perf_counter()
        try:
            if (refusal := self._access.refusal(request.headers, needs_token=path != "/")) is not None:
                raise FeedError(refusal.text, refusal.status)
            if request.method == "HEAD" and path in CHANGING:
                raise FeedError(f"HEAD {path}: this route has GET only", 405)
            async with self._bodies.read(request) as body:
                response = await handler(request, body)
        except FeedError as error:
            later = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"}
            response = error_reply(error.status, str(error), later)
        except HTTPException as error:
            response = error_reply(error.status_code, error.detail, error.headers)
        except ClientDisconnect:
            response = error_reply(400, "the client disconnected before its request was complete")
        except Exception:  # a fault of this server, which goes on
            logger.exception("%s has failed", path)
            response = error_reply(500, "internal error of this server; see its log")
        self._routes.answered(path, response.status_code, time.perf_counter() - began)
        return response


async def _no_such_route(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return error_reply(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)
