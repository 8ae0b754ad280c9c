"""What a follower of weights tells Prometheus and probes of itself, see `averaging.metrics`."""

from __future__ import annotations

from averaging.metrics import CERTIFICATE_METRICS, Samples, certificate_samples, counter, gauge
from averaging.rpc import Credentials
from averaging.weights.receiver import ModelReceiver

FOLLOWER_METRICS = (
    gauge("follower_version", "Version in the model, file or engine; missing before the first, or if it is unknown."),
    gauge(
        "follower_partial_version", "Version of which a part may be in the engine, which is paused; missing if none is."
    ),
    gauge("follower_newest_version", "Newest version that a publisher has announced; missing before the first."),
    gauge(
        "follower_staleness_seconds",
        "Seconds since a newer version became known or the publisher was lost; 0 if neither.",
    ),
    gauge("follower_staleness_versions", "Newest known version minus that in the model or in the file."),
    gauge("follower_connected", "Whether a publisher is connected: 1 or 0."),
    counter(
        "follower_bytes",
        "Bytes of weights received, and handed on to other followers (sent).",
        "direction",
        known=(("sent",), ("received",)),
    ),
    *CERTIFICATE_METRICS,
)


def follower_samples(
    receiver: ModelReceiver, credentials: Credentials, version: int | None, versions_behind: int, seconds: float
) -> Samples:
    """The present values."""
    announced = receiver.announced
    return {
        **({} if version is None else {"averaging_follower_version": version}),
        **({} if announced is None else {"averaging_follower_newest_version": announced.version}),
        "averaging_follower_staleness_seconds": seconds,
        "averaging_follower_staleness_versions": versions_behind,
        "averaging_follower_connected": float(receiver.connected),
        "averaging_follower_bytes_total": {
            ("sent",): receiver.bytes_sent,
            ("received",): receiver.bytes_received,
        },
        **certificate_samples(credentials),
    }
