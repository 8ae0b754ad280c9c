"""What a process tells of itself to Prometheus and to probes, and how it notices that it stands still.

Read in this order: `watchdog` (late event loops, and an interpreter that stands still), `listener` (the metrics, their
values for prometheus_client, and HTTP).
"""

from averaging.metrics.listener import (
    CERTIFICATE_METRICS as CERTIFICATE_METRICS,
    PEER_METRICS as PEER_METRICS,
    PROCESS_METRICS as PROCESS_METRICS,
    Distribution as Distribution,
    Metric as Metric,
    MetricKind as MetricKind,
    MetricsListener as MetricsListener,
    Samples as Samples,
    certificate_samples as certificate_samples,
    counter as counter,
    gauge as gauge,
)
