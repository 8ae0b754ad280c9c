"""The declared metrics, from which docs/reference/metrics.md is written too, and their values for prometheus_client.

All begin with `averaging_`, use base units (seconds, bytes), and end in `_total` if they only grow. No label has the
address of a peer, since a run may see thousands of them. A new metric is declared here, or in the room that measures
it. A component returns its values when it is asked, see `Samples`: so counting costs a round nothing but an addition,
and shares no lock between the thread that trains, the event loop, and the threads that answer Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from averaging.receipts import UNKNOWN_LANE, DropCode, Outcome
from averaging.security import Credentials

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

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
