"""What a process tells of itself to Prometheus and to probes, and how it notices that it stands still.

Read in this order: `catalog` (the metrics, and their values for prometheus_client), `watchdog` (late event loops, and
an interpreter that stands still), `listener` (HTTP).
"""

from averaging.metrics.catalog import (
    CERTIFICATE_METRICS as CERTIFICATE_METRICS,
    PEER_METRICS as PEER_METRICS,
    PROCESS_METRICS as PROCESS_METRICS,
    Distribution as Distribution,
    Metric as Metric,
    MetricKind as MetricKind,
    Samples as Samples,
    certificate_samples as certificate_samples,
    counter as counter,
    gauge as gauge,
)
from averaging.metrics.listener import MetricsListener as MetricsListener
