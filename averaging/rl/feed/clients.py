"""`BatchFeed` and `FeedEnvironment`, the clients of a trainer and of an environment, and the `Connection` of both."""

from __future__ import annotations

import gzip
import logging
import random
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import httpx
import msgspec
import torch.distributed as dist

from averaging.common import Backoff, chosen_proxy, ignored_proxies, is_loopback, proxy_for, shown_proxy
from averaging.errors import ConfigError, FeedError, SiteError, printable
from averaging.rl.feed.messages import (
    UNKNOWN,
    BatchReply,
    EnvStatus,
    Posted,
    Registered,
    RegisterEnv,
    Registration,
    ScoredData,
    decode,
    oldest_version,
)
from averaging.security import read_tls, read_tokens
from averaging.training import ControlGroup, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

logger = logging.getLogger(__name__)

COMPRESS_MIN_BYTES = 1024  # bodies of this size or more are compressed, as environments of atroposlib do
MAX_RETRY_AFTER = 60.0  # upper bound of the `Retry-After` that a client obeys, in seconds
MAX_MESSAGE = 2000  # characters of a server's message that an error quotes
SYNC_INTERVAL = 5.0  # after which rank 0 broadcasts without a batch, so that the ranks notice one that died
FAILED = b"!"  # what rank 0 broadcasts before its error. A batch is a JSON object, and nothing that there is none yet
REGISTER_INTERVAL = 1.0  # between two requests to register while no trainer has started


def retry_pauses() -> Backoff:
    return Backoff(0.1, 5.0, random.Random(), jitter=(0.5, 1.0))


class RetrySchedule:
    """Pauses that end after so many seconds without success."""

    def __init__(self, retry_timeout: float) -> None:
        self._retry_timeout, self._pauses = retry_timeout, retry_pauses()
        self._first_failure: float | None = None

    def succeeded(self) -> None:
        self._first_failure = None
        self._pauses.reset()

    def failed(self, error: FeedError, now: float) -> float:
        """Returns the seconds to wait before the next try. Raises `error` if it would fail again, or time is up."""
        if error.retry_after is None:
            raise error
        self._first_failure = now if self._first_failure is None else self._first_failure
        if now - self._first_failure >= self._retry_timeout:
            raise FeedError(f"gave up after {now - self._first_failure:.0f} s: {error}")
        return max(error.retry_after, self._pauses.next_delay())


class Connection:
    """Sends requests to the server at `url`.

    Invalid arguments are a ConfigError.

    Args:
        url: "http://HOST:PORT" or "https://HOST:PORT". A token may be its password, "http://any:TOKEN@HOST:PORT". The
            proxy of AVERAGING_PROXY is used, except to loopback addresses and to hosts in NO_PROXY, and no other one.
        token_file: the first token in it is sent.
        tls_ca, tls_cert, tls_key: files for TLS, all of them or none. With none, https trusts the system's authorities.
        timeout: seconds to connect, and between two pieces of a request or reply.
        retry_timeout: seconds for which a request is repeated to a server that does not answer or is full.
        max_bytes: limit of a reply, after decompression.
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: str | Path | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        timeout: float = 30.0,
        retry_timeout: float = 300.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.url, user = split_url(url, "a feed")
        tokens, tls = read_tokens(token_file), read_tls(tls_ca, tls_cert, tls_key, time.time)
        context = ssl.create_default_context(cadata=tls.ca_pem.decode() if tls else None)
        if tls and tls_cert and tls_key:
            context.load_cert_chain(tls_cert, tls_key)
        self._retry_timeout, self._max_bytes = retry_timeout, max_bytes
        self._proxy = proxy_for(httpx.URL(self.url).host, chosen_proxy())
        headers = {"Authorization": f"Bearer {tokens[0]}"} if tokens else {}
        options: dict[str, Any] = {"headers": headers, "auth": None if tokens else user, "timeout": timeout}
        # With `trust_env` httpx would use the proxies of HTTP_PROXY and its like, also to this machine.
        self._client = httpx.Client(base_url=self.url, verify=context, trust_env=False, proxy=self._proxy, **options)

    def close(self) -> None:
        self._client.close()

    def request(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        """Repeats `request_once` until it succeeds, for at most `retry_timeout`."""
        schedule = RetrySchedule(self._retry_timeout)
        while True:
            try:
                return self.request_once(method, path, kind, **request)
            except FeedError as error:
                time.sleep(schedule.failed(error, time.monotonic()))

    def request_once(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        """Sends a request once. Returns the decoded reply; for arguments and errors see `send`."""
        return decode_reply(self.send(method, path, **request), kind)

    def send(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        params: Mapping[str, int] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Returns the body of the reply. A FeedError has `retry_after` if the same request may succeed later."""
        sent_headers, content = dict(headers or {}), None
        if body is not None:
            content = msgspec.json.encode(body)
            sent_headers["Content-Type"] = "application/json"
            if len(content) >= COMPRESS_MIN_BYTES:
                content = gzip.compress(content, 1)
                sent_headers["Content-Encoding"] = "gzip"
        reply = bytearray()
        try:
            with self._client.stream(method, path, content=content, params=params, headers=sent_headers) as response:
                for chunk in response.iter_bytes():
                    reply += chunk
                    if len(reply) > self._max_bytes:
                        raise FeedError(f"{self.url}{path} answers with more than {self._max_bytes} bytes")
        except (httpx.HTTPError, httpx.StreamError) as error:
            reason = str(error) or type(error).__name__
            through = f" through the proxy {shown_proxy(self._proxy)}" if self._proxy else ""
            ignored = "" if is_loopback(httpx.URL(self.url).host) else ignored_proxies()
            remedy = "; ".join(filter(None, ("check that the feed is up", ignored)))
            raise FeedError(f"{self.url} cannot be reached{through} ({reason}); {remedy}", 0, 0.0) from None
        if response.is_success:
            return bytes(reply)
        status, later = response.status_code, response.headers.get("retry-after", "")
        retry_after = None  # what the server refuses, it would refuse again
        if status >= 500 or status in (408, 429):
            retry_after = min(float(later), MAX_RETRY_AFTER) if later.isascii() and later.isdecimal() else 0.0
        raise FeedError(f"{self.url}{path} answers {status}: {message_in(bytes(reply))}", status, retry_after)


def split_url(url: str, of: str) -> tuple[str, tuple[str, str] | None]:
    """Splits an HTTP address `of` something into one that errors may show, and the user and password in it."""
    try:
        parsed = httpx.URL(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx.InvalidURL, TypeError):
        valid = False
    if not valid:
        shown = printable(url.rpartition("@")[2])
        raise ConfigError(f"{shown!r} is not the address of {of}; give http://HOST:PORT or https://HOST:PORT")
    user = (parsed.username, parsed.password) if parsed.userinfo else None
    return str(parsed.copy_with(userinfo=b"")).rstrip("/"), user


def decode_reply(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except FeedError as error:
        raise FeedError(f"the server's answer cannot be used: {error}; is it a feed?") from None


def message_in(body: bytes) -> str:
    """Returns the text of an error, in the shapes of feeds, FastAPI and OpenAI."""
    try:
        error: Any = msgspec.json.decode(body)
        error = error.get("error") or error
        return printable(str(error.get("message") or error.get("detail")), MAX_MESSAGE)
    except (msgspec.MsgspecError, AttributeError, RecursionError):
        return printable(body[:200].decode(errors="replace"))


class _Registered(msgspec.Struct, frozen=True):
    registration: int | None = None


class _Info(msgspec.Struct, frozen=True):
    batch_size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that are trained in one step, with all fields of `ScoredData`.

    Fields that were not posted are None, but `version` is missing then.
    """

    step: int  # the first one is `starting_step + 1`
    groups: list[dict[str, Any]]
    newest_version: int | None = None  # of the trainer's weights when the batch was fetched; None if it is unknown

    @property
    def sequences(self) -> int:
        """The number of sequences in all groups."""
        return sum(len(group["tokens"]) for group in self.groups)

    @property
    def versions(self) -> list[list[int]]:
        """For each group the versions of the weights that made it; empty if it was posted without."""
        posted = [group.get("version") for group in self.groups]
        return [[] if each is None else list(each) if isinstance(each, list) else [each] for each in posted]

    @property
    def ages(self) -> list[int | None]:
        """For each group how many versions its oldest weights are behind `newest_version`; None if unknown.

        0 for newer ones, which a trainer meets after it has resumed from a checkpoint.
        """
        oldest = [oldest_version(group.get("version", msgspec.UNSET)) for group in self.groups]
        newest = self.newest_version
        return [None if each is None or each == UNKNOWN or newest is None else max(0, newest - each) for each in oldest]


class VersionedWeights(Protocol):  # such as a `WeightFollower` or a `WeightPublisher`
    @property
    def version(self) -> int | None: ...


class BatchFeed:
    """Iterates over the batches of a feed, in one process or in all ranks of a process group.

    All ranks get the same batch for the same step: rank 0 registers and fetches it, and broadcasts it to the others.
    The iteration ends after step `registration.num_steps`.

    To resume a training, give the step of its checkpoint as `registration.starting_step`. A server of this library
    delivers the batches after that step again, so that each is trained exactly once. It keeps them until the checkpoint
    is saved. By default, the checkpoint of step n, a multiple of `registration.save_checkpoint_interval`, counts as
    saved when the batch of step n + 1 is requested. Call `saved` if you save at other times.

    Args:
        url: the server, "http://HOST:PORT" or "https://HOST:PORT".
        registration: registration of the run; the same on all ranks.
        process_group: None means torch's default group if torch.distributed is initialized, else this process alone.
        poll: seconds between two requests for a batch.
        rank_timeout: seconds for which a rank waits for another rank, which may still be training.
        retry_timeout: seconds without a usable answer after which the iteration raises. The wait for data has no limit.
        weights: the `WeightPublisher` of this training, or another object with a `version`, which is reported with each
            request for a batch; only that of rank 0 counts. After a resume it must be the version of the checkpoint
            from the first batch on.
        options: `token_file`, `tls_ca`, `tls_cert`, `tls_key`, `timeout` and `max_bytes`, see `Connection`.

    Attributes:
        step: step of the last batch; `registration.starting_step` before the first one.

    Raises:
        ConfigError: an argument is invalid, or the ranks were given different registrations.
        FeedError: the server refuses a request, for example for a forgotten batch, or because another trainer has
            registered since, or gave no usable answer for `retry_timeout`; or a rank has died, left or timed out.
    """

    def __init__(
        self,
        url: str,
        registration: Registration,
        process_group: ProcessGroup | None = None,
        *,
        poll: float = 0.5,
        rank_timeout: float = 1800.0,
        retry_timeout: float = 300.0,
        weights: VersionedWeights | None = None,
        **options: Any,
    ) -> None:
        if not poll > 0 or not rank_timeout > 0:
            raise ConfigError("poll and rank_timeout must be above 0 s")
        self._connection = Connection(url, retry_timeout=retry_timeout, **options)
        self._registration, self._poll = registration, poll
        self._group, self._rank_timeout = process_group, rank_timeout
        self._ranks: ControlGroup | None = None  # None before the first batch, and without other ranks
        self._retries = RetrySchedule(retry_timeout)
        self._joined = self._registered = self._closed = False
        self._saved: int | None = None
        self._weights = weights
        self._number: int | None = None  # of the registration; None at atroposlib's server
        self._warning = ""
        self.step = registration.starting_step

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if 0 <= self._registration.num_steps <= self.step:
            self.close()
            raise StopIteration
        if self._closed:
            raise FeedError("this BatchFeed is closed; create another one, with the last trained step as starting_step")
        try:
            batch = self._next()
        except BaseException:
            self.close()  # makes the other ranks raise, too
            raise
        self.step = batch.step
        return batch

    def saved(self, step: int) -> None:
        """Lets the server forget the batches up to `step`, whose checkpoint is saved. Only calls at rank 0 count."""
        self._saved = max(step, self._saved or 0)

    def close(self) -> None:
        """Ends the iteration at this rank. Ranks that wait for it raise. More calls have no effect."""
        self._closed = True
        self._connection.close()
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> Batch:
        if not self._joined:
            self._join()
        while True:
            content, error = b"", None
            if self._ranks is None or not self._ranks.rank:
                try:
                    content = self._fetch(time.monotonic() + SYNC_INTERVAL)
                except FeedError as failed:
                    content, error = FAILED + str(failed).encode(), failed
            if self._ranks is not None:
                with _naming_the_remedy():
                    content = self._ranks.broadcast(content)  # of rank 0
                    if content:
                        self._ranks.barrier()  # no rank trains a batch that another rank did not receive
            if content.startswith(FAILED):
                raise error or FeedError(f"rank 0 has failed: {content.removeprefix(FAILED).decode()}")
            if content:
                reply = decode_reply(content, BatchReply)
                return Batch(self.step + 1, reply.batch or [], reply.newest_version)

    def _join(self) -> None:
        self._joined = True
        if not (dist.is_available() and dist.is_initialized()):
            return
        ranks = ranks_of(self._group)
        if len(ranks) == 1:
            return
        with _naming_the_remedy():
            self._ranks = ControlGroup(ranks, self._rank_timeout)
            digest = blake2b(msgspec.json.encode(self._registration), digest_size=7).digest()
            if len(set(self._ranks.all_gather(digest))) > 1:
                raise ConfigError("the ranks were given different registrations; give all of them the same")

    def _fetch(self, until: float) -> bytes:
        """Returns the reply with the next batch; empty if there is none before `until`."""
        while True:
            pause = self._poll
            try:
                if not self._registered:
                    self._register()
                content = self._request_batch()
                self._retries.succeeded()
                if content:
                    return content
            except FeedError as error:
                pause = self._retries.failed(error, time.monotonic())
                # atroposlib's server answers 500 after a reset, until a trainer registers.
                self._registered = self._registered and (error.status != 500 or self._number is not None)
            left = until - time.monotonic()
            time.sleep(max(0.0, min(pause, left)))
            if pause >= left:
                return b""

    def _register(self) -> None:
        registration = msgspec.structs.replace(self._registration, starting_step=self.step)
        # With its earlier number, so that it does not take the run from a trainer that has registered since.
        earlier = None if self._number is None else {"registration": self._number}
        answer = self._connection.request_once("POST", "/register", _Registered, body=registration, params=earlier)
        self._number = answer.registration
        size, url = self._connection.request_once("GET", "/info", _Info).batch_size, self._connection.url
        if size == -1:
            reason = "received data before a trainer registered, and cannot begin a run"
            raise FeedError(f"{url} {reason}; drop that data with GET /reset_data")
        if size != registration.batch_size:
            remedy = "register the same size, start another server, or end the other run with GET /reset_data"
            raise FeedError(f"{url} serves a run with batch_size {size}, not {registration.batch_size}; {remedy}")
        self._registered = True

    def _request_batch(self) -> bytes:
        step = self.step + 1
        params = {"step": step, "saved": self._saved_step()}
        if self._number is not None:
            params["registration"] = self._number
        if self._weights is not None and self._weights.version is not None:
            params["version"] = self._weights.version
        content = self._connection.send("GET", "/batch", params=params)
        reply = decode_reply(content, BatchReply)
        if reply.warning and reply.warning != self._warning:
            logger.warning("%s says: %s", self._connection.url, printable(reply.warning))
        self._warning = reply.warning
        if reply.status == "error":  # the server was reset, or restarted without its state
            self._registered = False
            raise FeedError(f"{self._connection.url} answers: {reply.message}", 0, 0.0)
        if reply.batch and reply.step not in (None, step):
            raise FeedError(f"{self._connection.url} answers with step {reply.step} instead of {step}")
        return content if reply.batch else b""

    def _saved_step(self) -> int:
        if self._saved is not None:
            return self._saved
        interval = self._registration.save_checkpoint_interval
        return max(self._registration.starting_step, self.step // interval * interval if interval > 0 else self.step)


@contextmanager
def _naming_the_remedy() -> Iterator[None]:
    try:
        yield
    except SiteError as error:
        raise FeedError(f"{error}, from its checkpoint") from error


class FeedEnvironment:
    """Posts groups to a feed. The server takes each exactly once, even if it is restarted meanwhile.

    Several threads may use one object. In asyncio code call its methods with `asyncio.to_thread`.

    Args:
        url: the server, "http://HOST:PORT" or "https://HOST:PORT".
        config: the name, sizes and weight of this environment.
        start_timeout: seconds to wait until a trainer has started; None waits without limit.
        key: secret that identifies this environment. A process that is restarted with the same `config` and key takes
            its old place at once. None makes a new key; then it takes the place once the server finds it silent.
        weights: the `WeightFollower` of this environment, whose version posted groups without one get. If the weights
            may change during a rollout, give `post` the versions instead.
        options: `token_file`, `tls_ca`, `tls_cert`, `tls_key`, `timeout`, `retry_timeout`, `max_bytes` of `Connection`.

    Attributes:
        registered: the server's answer to the registration; None before it.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        url: str,
        config: RegisterEnv,
        *,
        start_timeout: float | None = None,
        key: str | None = None,
        weights: VersionedWeights | None = None,
        **options: Any,
    ) -> None:
        self._connection = Connection(url, **options)
        self._weights = weights
        self._config, self._start_timeout = config, start_timeout
        self._headers = {"Environment-Key": key or uuid.uuid4().hex}
        self.registered: Registered | None = None

    def register(self) -> Registered:
        """Registers as soon as a trainer has asked for its first batch. Returns the server's answer.

        Raises:
            FeedError: the server refuses this environment, gave no usable answer for `retry_timeout`, or no trainer has
                started within `start_timeout`.
        """
        began = time.monotonic()
        while True:
            send = self._connection.request
            reply = send("POST", "/register-env", Registered, body=self._config, headers=self._headers)
            if reply.status == "success":
                self.registered = reply
                if reply.warning:
                    logger.warning("%s says: %s", self._connection.url, printable(reply.warning))
                return reply
            if self._start_timeout is not None and time.monotonic() - began > self._start_timeout:
                seconds = f"{self._start_timeout:g} s"
                raise FeedError(f"{self._connection.url} has no trainer after {seconds}: {reply.status}")
            time.sleep(REGISTER_INTERVAL)

    def post(self, *groups: ScoredData, key: str | None = None, version: int | Sequence[int] | None = None) -> Posted:
        """Posts all of the groups or none, and registers first if needed. The server has stored them on return.

        A post is repeated until the server has acknowledged it, and while the queue is full.

        Args:
            groups: their `env_id` is filled in.
            key: identifies these groups for 24 hours. If this process may be restarted and repeat a post, give the same
                key each time.
            version: the version of the weights that made the groups, or all of them if they changed meanwhile; for
                groups that have none of their own.

        Raises:
            FeedError: the server refuses them and took none, or did not acknowledge them for `retry_timeout`; then post
                them again with the same `key`.
        """
        key = key or uuid.uuid4().hex
        registered = self.registered or self.register()
        groups = tuple(self._dated(group, version) for group in groups)
        try:
            return self._post(groups, registered, key)
        except FeedError as error:
            if error.status != 404:
                raise
            return self._post(groups, self.register(), key)  # the server was reset, and has forgotten this environment

    def status(self) -> EnvStatus:
        """Returns the step of the run and the sizes of the queue. Errors as `register`."""
        body = {"env_id": (self.registered or self.register()).env_id}
        return self._connection.request("GET", "/status-env", EnvStatus, body=body)

    def close(self) -> None:
        """Disconnects, which ends the reservation of this environment. The posted groups stay."""
        try:
            if self.registered is not None:
                body = {"env_id": self.registered.env_id}
                self._connection.send("POST", "/disconnect-env", body=body, headers=self._headers)
        except FeedError:
            pass  # a server that does not answer is not worth waiting for
        finally:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dated(self, group: ScoredData, version: int | Sequence[int] | None) -> ScoredData:
        if group.version is not msgspec.UNSET:
            return group
        if version is not None:
            numbers = version if isinstance(version, int) else sorted(set(version))
            return msgspec.structs.replace(group, version=numbers)
        if self._weights is None:
            return group
        return msgspec.structs.replace(group, version=self._weights.version)

    def _post(self, groups: tuple[ScoredData, ...], registered: Registered, key: str) -> Posted:
        filled = [msgspec.structs.replace(group, env_id=registered.env_id) for group in groups]
        path, body = ("/scored_data", filled[0]) if len(filled) == 1 else ("/scored_data_list", filled)
        return self._connection.request("POST", path, Posted, body=body, headers={"Idempotency-Key": key})
