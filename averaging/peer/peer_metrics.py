"""What a peer tells Prometheus and probes of itself, see `averaging.metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from averaging.config import PeerConfig
from averaging.metrics import (
    CERTIFICATE_METRICS,
    PEER_METRICS,
    Distribution,
    MetricsListener,
    Samples,
    certificate_samples,
)
from averaging.receipts import Receipt, Totals
from averaging.security import Credentials

if TYPE_CHECKING:
    from averaging.peer.service import PeerService


class PeerMetrics:
    """Measures one peer; `not_ready` says why it is not ready, and is called in any thread."""

    def __init__(
        self, config: PeerConfig, credentials: Credentials, not_ready: Callable[[], str], clock: Callable[[], float]
    ) -> None:
        self.service: PeerService | None = None  # before the peer listens
        self._certificate, self._not_ready, self._clock = certificate_samples(credentials), not_ready, clock
        self._durations: dict[tuple[str, ...], Distribution] = {}  # of phases of rounds, by name
        self._last_average: float | None = None
        metrics = (*PEER_METRICS, *CERTIFICATE_METRICS)
        name = f"the peer of run {config.run_id!r}"
        self.listener = MetricsListener(config.metrics_listen, name, metrics, self.sample, not_ready)

    def note(self, receipt: Receipt) -> None:
        """Counts a round that has ended."""
        for phase, seconds in receipt.phases.items():
            self._durations[(phase,)] = self._durations.get((phase,), Distribution()).plus(seconds)
        if receipt.averaged:
            self._last_average = self._clock()

    def sample(self) -> Samples:
        """The present values."""
        samples: dict[str, float | None] = {
            "averaging_ready": float(not self._not_ready()),
            "averaging_last_average_timestamp_seconds": self._last_average,
        }
        if self.service is None:
            return {**known(samples), **self._certificate}
        status, discovery = self.service.get_status(), self.service.discovery
        if (training := status.training) is not None:
            samples |= {
                "averaging_local_steps_total": training.steps,
                "averaging_samples_total": training.samples,
                "averaging_global_step": training.global_step,
            }
        samples |= {
            "averaging_state_version": status.state_version,
            "averaging_peers": status.known_peers,
            "averaging_clock_offset_seconds": None if discovery is None else discovery.diagnose().clock_ahead,
        }
        durations: Samples = {"averaging_round_duration_seconds": dict(self._durations)}
        return {**known(samples), **self._certificate, **of_totals(self.service.book.totals), **durations}


def known(samples: dict[str, float | None]) -> Samples:
    return {name: value for name, value in samples.items() if value is not None}


def of_totals(totals: Totals) -> Samples:
    directions = {"sent": totals.bytes_sent, "received": totals.bytes_received}
    return {
        "averaging_rounds_total": {(outcome.value,): count for outcome, count in totals.rounds.items()},
        "averaging_bytes_total": {
            (direction, lane): nbytes for direction, lanes in directions.items() for lane, nbytes in lanes.items()
        },
        "averaging_waiting_seconds_total": totals.waiting_seconds,
        "averaging_dropped_members_total": {(code.value,): count for code, count in totals.dropped.items()},
    }
