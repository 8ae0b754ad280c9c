"""What a process tells of itself to Prometheus and to probes, and how it notices that it stands still.

Read in this order: `catalog` (the declared metrics), `exposition` (their values as Prometheus reads them), `watchdog`
(late event loops, and an interpreter that stands still), `listener` (HTTP), `tracing`
(rounds as spans of OpenTelemetry).
"""

from averaging.metrics.catalog import (
    CERTIFICATE_METRICS,
    PEER_METRICS,
    PROCESS_METRICS,
    Metric,
    MetricKind,
    counter,
    gauge,
)
from averaging.metrics.exposition import Distribution, PhaseDurations, Samples, certificate_samples
from averaging.metrics.listener import MetricsListener
from averaging.metrics.tracing import RoundTracer
from averaging.metrics.watchdog import WatchedLoop, watch_loop

__all__ = [
    "CERTIFICATE_METRICS",
    "PEER_METRICS",
    "PROCESS_METRICS",
    "Distribution",
    "Metric",
    "MetricKind",
    "MetricsListener",
    "PhaseDurations",
    "RoundTracer",
    "Samples",
    "WatchedLoop",
    "certificate_samples",
    "counter",
    "gauge",
    "watch_loop",
]
