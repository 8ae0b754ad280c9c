"""The values of metrics as Prometheus reads them.

A component returns its values when it is asked, see `Samples`. So counting costs a round nothing but an addition, and
no lock is shared between the thread that trains, the event loop, and the thread that answers Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from averaging.metrics.catalog import BUCKETS, Metric, MetricKind
from averaging.security import Credentials

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import CollectorRegistry


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has counted.

    Attributes:
        counts: observations by bucket: those up to each of `BUCKETS` and above the one before, and the larger ones.
        sum: sum of all observations.
    """

    counts: tuple[int, ...] = (0,) * (len(BUCKETS) + 1)
    sum: float = 0.0

    def plus(self, value: float) -> Distribution:
        """The distribution with one more observation."""
        place = bisect_left(BUCKETS, value)
        return Distribution((*self.counts[:place], self.counts[place] + 1, *self.counts[place + 1 :]), self.sum + value)


Value: TypeAlias = "float | Distribution"

Samples: TypeAlias = "Mapping[str, Value | Mapping[tuple[str, ...], Value]]"
"""Values by the full name of the metric; those of a metric with labels by the labels' values. Unknown ones are left
out."""


def certificate_samples(credentials: Credentials) -> Samples:
    """The samples of `CERTIFICATE_METRICS`."""
    tls = credentials.tls
    return {} if tls is None else {"averaging_certificate_expiry_timestamp_seconds": tls.expires}


class PhaseDurations:
    """The durations of phases of rounds."""

    def __init__(self) -> None:
        self._by_phase: dict[tuple[str, ...], Distribution] = {}

    def observe(self, phases: Mapping[str, float]) -> None:
        """Adds the phases of one round, in seconds."""
        for phase, seconds in phases.items():
            self._by_phase[(phase,)] = self._by_phase.get((phase,), Distribution()).plus(seconds)

    def samples(self) -> Mapping[tuple[str, ...], Distribution]:
        """The distributions by phase; a copy."""
        return dict(self._by_phase)


def registry_of(metrics: Sequence[Metric], sample: Callable[[], Samples]) -> CollectorRegistry:
    """A registry of these metrics and those of the process. `sample` is called for each page."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    class SampledMetrics:
        def collect(self) -> Iterator[Family]:
            return families(metrics, sample())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampledMetrics())
    ProcessCollector(registry=registry)
    return registry


def families(metrics: Sequence[Metric], samples: Samples) -> Iterator[Family]:
    """The metrics that have a value, in the form of Prometheus's library."""
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
        yield _family(metric, values)


def _family(metric: Metric, values: Mapping[tuple[str, ...], Value]) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    name, text, labels = metric.name.removesuffix("_total"), metric.help, list(metric.labels)
    if metric.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for key, value in values.items():
            if isinstance(value, Distribution):
                histogram.add_metric(list(key), _cumulative(value), value.sum)
        return histogram
    family = (CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily)(
        name, text, labels=labels
    )
    for key, value in values.items():
        if not isinstance(value, Distribution):
            family.add_metric(list(key), value)
    return family


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    """The counts up to each bound, as Prometheus has them."""
    buckets, total = [], 0
    for bound, count in zip([*map(str, BUCKETS), "+Inf"], distribution.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
