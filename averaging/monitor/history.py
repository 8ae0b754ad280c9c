"""What successive answers of a peer say of its rates. Pure: the caller passes the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from averaging.monitor.snapshot import PeerView
from averaging.receipts import Outcome, PeerStatus, Receipt, Totals

# Seconds over which rates are measured, once a peer was watched for LEAST_WINDOW. Before, since it started.
WINDOW = 60.0
LEAST_WINDOW = 10.0  # seconds of two answers from which rates are computed
KEPT_RECEIPTS = 64  # receipts of each peer that are kept for display
CLIENT = "a client, which accepts no calls"


class CounterSample(NamedTuple):
    """When an answer came, in seconds since the epoch, and the sums over all rounds of the peer until then."""

    time: float
    totals: Totals


class PeerHistory:
    """The answers of one peer: the last one, why there is none, and its last receipts, the oldest first."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.status: PeerStatus | None = None
        self.error = ""
        self.receipts: deque[Receipt] = deque(maxlen=KEPT_RECEIPTS)
        self._new: list[Receipt] = []
        self._answers: deque[CounterSample] = deque()
        self._answered = 0.0
        self._round_trip = 0.0

    @property
    def last_round(self) -> int:
        return self.receipts[-1].round if self.receipts else 0

    def answered(self, status: PeerStatus, now: float, round_trip: float) -> None:
        if self.status is not None and status.started != self.status.started:  # it was restarted
            self._answers.clear()
            self.receipts.clear()
        self.status, self.error = status, ""
        self._answered, self._round_trip = now, round_trip
        for receipt in status.receipts:
            if receipt.round > self.last_round:
                self.receipts.append(receipt)
                self._new.append(receipt)
        del self._new[:-KEPT_RECEIPTS]
        if not self._answers:
            self._answers.append(CounterSample(min(status.started, now), Totals()))
        self._answers.append(CounterSample(now, status.totals or Totals()))
        # The oldest answer in the window is the first of those from which rates are computed.
        if now - self._answers[1].time >= LEAST_WINDOW and self._answers[0].time < now - WINDOW:
            self._answers.popleft()

    def failed(self, reason: str) -> None:
        self.error = reason.removeprefix(f"{self.endpoint}: ") or "no answer"

    def view(self, now: float) -> PeerView:
        """The peer as it is shown now. Each receipt is in one view only."""
        new, self._new = tuple(self._new), []
        silent = None if self.status is None else max(0.0, now - self._answered)
        view = PeerView(self.endpoint, self.error, silent, self.status, self._round_trip, receipts=new)
        return _with_rates(view, self._answers[0], self._answers[-1]) if len(self._answers) > 1 else view


def _with_rates(view: PeerView, first: CounterSample, last: CounterSample) -> PeerView:
    seconds = last.time - first.time
    if not seconds > 0:  # also if the peer says that it started at NaN
        return view
    then, now = first.totals, last.totals

    def per_second(after: Mapping[str, int], before: Mapping[str, int]) -> float:
        return max(0.0, (sum(after.values()) - sum(before.values())) / seconds)

    averaged = now.rounds.get(Outcome.AVERAGED, 0) - then.rounds.get(Outcome.AVERAGED, 0)
    rounds = sum(now.rounds.values()) - sum(then.rounds.values())
    phases = {name: total - then.phase_seconds.get(name, 0.0) for name, total in now.phase_seconds.items()}
    return replace(
        view,
        window_seconds=seconds,
        rounds_per_minute=max(0.0, 60 * averaged / seconds),
        bytes_sent_per_second=per_second(now.bytes_sent, then.bytes_sent),
        bytes_received_per_second=per_second(now.bytes_received, then.bytes_received),
        waiting_share=min(1.0, max(0.0, (now.waiting_seconds - then.waiting_seconds) / seconds)),
        phase_seconds={name: max(0.0, total) / rounds for name, total in phases.items()} if rounds > 0 else {},
    )
