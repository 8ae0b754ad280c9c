"""Answers Prometheus and probes over HTTP, in threads of its own: `/metrics`, `/healthz` and `/readyz`.

The threads answer although the event loop stands still, and then say so. Nothing that they say is secret, and all of it
is for everyone who can connect: there is no TLS and no authentication.

docs/reference/metrics.md is written from the declared metrics. All begin with `averaging_`, use base units (seconds,
bytes), and end in `_total` if they only grow. No label has the address of a peer, since a run may see thousands. A new
metric is declared here, or in the room that measures it. A component returns its values when it is asked, see
`Samples`: so counting costs a round nothing but an addition, and shares no lock between threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from averaging.common import HostQuota, format_address, member_of, parse_address, spelled
from averaging.errors import ListenError
from averaging.metrics.watchdog import WatchedLoop
from averaging.receipts import UNKNOWN_LANE, DropCode, Outcome
from averaging.security import Credentials

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


logger = logging.getLogger("averaging.metrics")

PREFIX = "averaging_"


class MetricKind(StrEnum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric."""

    name: str  # name in Prometheus, with the prefix and, of a counter, `_total`
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    # values of the labels that are always there, with 0 as long as nothing has happened, so that a rate can be
    # computed from the first event on
    known: tuple[tuple[str, ...], ...] = ()


def counter(name: str, help_text: str, *labels: str, known: tuple[tuple[str, ...], ...] = ()) -> Metric:
    """A count, or a sum of seconds or bytes, since the process started; `name` is without prefix and `_total`."""
    return Metric(f"{PREFIX}{name}_total", MetricKind.COUNTER, help_text, labels, known)


def gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"{PREFIX}{name}", MetricKind.GAUGE, help_text, labels)


PHASES = ("checking", "looking", "preparing", "allreduce", "adopting")  # the phases of a round, see `Receipt.phases`
LANES = ("direct", "sealed", "grpc", UNKNOWN_LANE)

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of durations, in seconds: from a small model on one machine to 1 GB on a slow link."""

PROCESS_METRICS = (
    gauge("info", "Always 1; its label has the version of the software.", "version"),
    gauge(
        "loop_lag_seconds",
        "Longest time in the last 30 s that work had to wait for the event loop, in seconds.",
    ),
    counter("loop_stall_seconds", "Seconds for which the event loop did not answer, of waits above 1 s."),
    counter(
        "interpreter_stall_seconds",
        "Seconds in which no Python thread ran, of times above 1 s: native code held the GIL, or the process was "
        "stopped.",
    ),
)
"""Of every observed process, besides the `process_…` metrics of Prometheus's own library."""

CERTIFICATE_METRICS = (
    gauge(
        "certificate_expiry_timestamp_seconds",
        "When the certificate that this process uses expires, in seconds since the epoch; missing without TLS.",
    ),
)

PEER_METRICS = (
    counter(
        "rounds", "Rounds by outcome; see Outcome.", "outcome", known=tuple((outcome.value,) for outcome in Outcome)
    ),
    Metric(
        f"{PREFIX}round_duration_seconds",
        MetricKind.HISTOGRAM,
        "Durations of the phases of rounds, in seconds. A phase that a round did not reach is not counted.",
        ("phase",),
        tuple((phase,) for phase in PHASES),
    ),
    counter(
        "bytes",
        "Bytes of tensors exchanged in rounds, as packed for the wire, by direction (sent or received) and lane "
        "(direct, sealed, grpc, or unknown for members that reduce nothing).",
        *("direction", "lane"),
        known=tuple((direction, lane) for direction in ("sent", "received") for lane in LANES),
    ),
    counter(
        "waiting_seconds",
        "Seconds of rounds in which this peer waited for others: for a group, and in the all-reduce for one member "
        "alone.",
    ),
    counter(
        "dropped_members",
        "Members that this peer dropped from rounds, by reason; see DropCode.",
        "code",
        known=tuple((code.value,) for code in DropCode),
    ),
    counter("local_steps", "Local steps that this process has made."),
    counter("samples", "Samples of these steps, as far as `step` is called with batch_size."),
    gauge("global_step", "Global step of the run as this peer knows it; missing with a strategy that has none."),
    gauge("state_version", "Version of the state that newcomers get from this peer; it grows with every average."),
    gauge("peers", "Peers of the run that this one knows, itself included."),
    gauge(
        "clock_offset_seconds",
        "Seconds by which this peer's clock is ahead of the median of the other peers' clocks; negative if it is "
        "behind, and missing as long as no peer has answered.",
    ),
    gauge("ready", "Whether this peer is ready, as /readyz tells: it has joined its run and holds the run's state."),
    gauge("last_average_timestamp_seconds", "When the last round that averaged ended, in seconds since the epoch."),
)
"""Of a peer, and of the averager that it belongs to."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has counted."""

    # observations by bucket: those up to each of `BUCKETS` and above the one before, and the larger ones
    counts: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)
    sum: float = 0.0  # sum of all observations

    def plus(self, value: float) -> Distribution:
        """The distribution with one more observation."""
        place = bisect_left(BUCKETS, value)
        counts = (count + (number == place) for number, count in enumerate(self.counts))
        return Distribution(tuple(counts), self.sum + value)


Value: TypeAlias = "float | Distribution"

Samples: TypeAlias = "Mapping[str, Value | Mapping[tuple[str, ...], Value]]"
"""Values by the full name of the metric; those of a metric with labels by the labels' values. Unknown ones are left
out."""


def certificate_samples(credentials: Credentials) -> Samples:
    """The samples of `CERTIFICATE_METRICS`."""
    tls = credentials.tls
    return {} if tls is None else {"averaging_certificate_expiry_timestamp_seconds": tls.expires}


def families(metrics: Sequence[Metric], samples: Samples) -> Iterator[Family]:
    """The metrics that have a value, in the form of prometheus_client."""
    from prometheus_client.core import Metric as Family

    for metric in metrics:
        value = samples.get(metric.name)
        if value is None and not metric.known:
            continue
        nothing: Value = Distribution() if metric.kind is MetricKind.HISTOGRAM else 0.0
        values = dict.fromkeys(metric.known, nothing)
        if isinstance(value, Mapping):
            values |= value
        elif value is not None:
            values[()] = value
        family = Family(metric.name.removesuffix("_total"), metric.help, metric.kind)
        for key, each in values.items():
            labels = dict(zip(metric.labels, key, strict=True))
            if isinstance(each, Distribution):
                counts = list(accumulate(each.counts))
                for bound, count in zip([*map(str, BUCKETS), "+Inf"], counts, strict=True):
                    family.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
                family.add_sample(f"{metric.name}_count", labels, counts[-1])
                family.add_sample(f"{metric.name}_sum", labels, each.sum)
            else:
                family.add_sample(metric.name, labels, each)
        yield family


UNHEALTHY_LAG = 5.0  # seconds without an answer of the event loop after which /healthz fails
SAMPLE_SECONDS = 1.0  # seconds within which the event loop must return its values; later the last ones are shown
REQUEST_SECONDS = 5.0  # seconds for which a thread waits for a client that sends or reads nothing
MAX_CONNECTIONS, CONNECTIONS_PER_HOST = 32, 8  # connections at a time, each with a thread
INDEX = b"/metrics: for Prometheus\n/healthz: whether the event loop answers\n/readyz: whether it has joined its run\n"


class MetricsListener:
    """Watches the running event loop, and answers Prometheus and probes while it is entered.

    It is an async context manager, entered in the loop that it watches.

    Args:
        listen: `host:port` for HTTP; port 0 takes a free one. None only watches the loop.
        name: what runs in the loop, for the log.
        metrics: the metrics that `sample` may return.
        sample: returns their values; called in the loop.
        not_ready: returns why /readyz fails; an empty text if it does not. Called in any thread.

    Attributes:
        endpoint: `host:port` that it listens on; empty without `listen`.

    Raises:
        ListenError: on entering: it cannot listen there.
    """

    def __init__(
        self,
        listen: str | None,
        name: str,
        metrics: Sequence[Metric] = (),
        sample: Callable[[], Samples] = dict,
        not_ready: Callable[[], str] = str,
    ) -> None:
        self._listen, self._name = listen, name
        self._metrics, self._sample, self._not_ready = metrics, sample, not_ready
        self._stack = ExitStack()
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            watched = stack.enter_context(WatchedLoop(self._name))
            if self._listen is not None:
                values = _LoopValues(self._metrics, self._sample, watched)
                self.endpoint = stack.enter_context(_HttpServer(self._listen, values, self._not_ready)).endpoint
                logger.info("metrics of %s at http://%s/metrics", self._name, self.endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stack.close()
        self.endpoint = ""


class _LoopValues:
    """A collector of prometheus_client that takes values in an event loop. If the loop does not answer, the last ones.

    It is made in that loop, and asked in other threads.
    """

    def __init__(self, metrics: Sequence[Metric], sample: Callable[[], Samples], watched: WatchedLoop) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._metrics, self._sample = [*PROCESS_METRICS, *metrics], sample
        self._loop, self.watched = asyncio.get_running_loop(), watched
        self._last: Samples = {}
        self._failed = False
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Family]:
        taken: concurrent.futures.Future[Samples] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._take, taken)
            self._last = taken.result(SAMPLE_SECONDS)
        except (TimeoutError, RuntimeError):  # the loop stands still, or was closed
            pass
        process: Samples = {
            "averaging_info": {(metadata.version("averaging"),): 1.0},
            "averaging_loop_lag_seconds": self.watched.longest_lag,
            "averaging_loop_stall_seconds_total": self.watched.stalled,
            "averaging_interpreter_stall_seconds_total": self.watched.interpreter_stalled,
        }
        return families(self._metrics, {**self._last, **process})

    def _take(self, taken: concurrent.futures.Future[Samples]) -> None:
        try:
            taken.set_result(self._sample())
        except Exception:  # what it measures is not worth ending it
            if not self._failed:
                self._failed = True
                logger.exception("metrics cannot be read; the last ones are shown")
            taken.set_result(self._last)


class _HttpExchange(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                from prometheus_client.exposition import choose_encoder

                encode, kind = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, encode(self.server.values.registry), kind)
            case "/healthz":
                self._verdict(self._unhealthy(), "ok")
            case "/readyz":
                self._verdict(self._unhealthy() or self.server.not_ready(), "ready")
            case path:
                self._answer(200 if path == "/" else 404, INDEX)

    do_HEAD = do_GET  # noqa: N815

    def _unhealthy(self) -> str:
        lag = self.server.values.watched.lag
        return f"the event loop has not answered for {lag:.1f} s" if lag >= UNHEALTHY_LAG else ""

    def _verdict(self, reason: str, good: str) -> None:
        self._answer(503 if reason else 200, f"{reason or good}\n".encode())

    def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "averaging"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: probes come every few seconds."""


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, listen: str, values: _LoopValues, not_ready: Callable[[], str]) -> None:
        self.values, self.not_ready = values, not_ready
        self._quota, self._quota_lock = HostQuota(MAX_CONNECTIONS, CONNECTIONS_PER_HOST), threading.Lock()
        host, port = parse_address(listen)
        name = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in name else socket.AF_INET
        try:
            super().__init__((name, port), _HttpExchange)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ListenError(
                f"cannot listen on {listen} ({spelled('metrics_listen')}): {reason}; give an address of this machine "
                "and a port that nobody uses, or port 0 for a free one"
            ) from None
        self.endpoint = f"{host}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Binds without asking for this machine's name, which may take long; `[::]` means IPv4 too."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._quota_lock:
            return self._quota.take(_network(client_address[0]))

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._quota_lock:
                self._quota.leave(_network(client_address[0]))

    def handle_error(self, request: Any, client_address: Any) -> None:  # such as a client that hangs up
        logger.debug("a request for metrics failed", exc_info=True)


def _network(host: str) -> str:
    return member_of(format_address(host, 1))
