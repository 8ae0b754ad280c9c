"""What a process tells of itself to Prometheus and to probes, and how it notices that it stands still.

Read in this order: `catalog` (the metrics, and their values for prometheus_client), `watchdog` (late event loops, and
an interpreter that stands still), `listener` (HTTP).
"""

from averaging.metrics.catalog import (
    CERTIFICATE_METRICS,
    PEER_METRICS,
    PROCESS_METRICS,
    Distribution,
    Metric,
    MetricKind,
    Samples,
    certificate_samples,
    counter,
    gauge,
)
from averaging.metrics.listener import MetricsListener

__all__ = [
    "CERTIFICATE_METRICS",
    "PEER_METRICS",
    "PROCESS_METRICS",
    "Distribution",
    "Metric",
    "MetricKind",
    "MetricsListener",
    "Samples",
    "certificate_samples",
    "counter",
    "gauge",
]
