"""What a peer's rounds add up to since it started, for metrics and for views of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from averaging.receipts.receipt import DropCode, Outcome, Receipt

K = TypeVar("K")
N = TypeVar("N", int, float)

UNKNOWN_LANE = "unknown"
"""The lane of bytes whose lane the receipt does not name: of members that reduce nothing, or outside of gRPC."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all rounds of a peer. None of them ever falls."""

    # number of rounds by outcome; outcomes that did not happen are missing, as in all mappings here
    rounds: Mapping[Outcome, int] = field(default_factory=dict)
    seconds: float = 0.0  # duration of all rounds
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # seconds by phase, see `Receipt.phases`
    # parts and averages sent, by lane (`direct`, `sealed`, `grpc` or `unknown`)
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    bytes_received: Mapping[str, int] = field(default_factory=dict)  # the same of those received
    waiting_seconds: float = 0.0  # seconds of the rounds in which this peer waited for other members, see `waited_in`
    dropped: Mapping[DropCode, int] = field(default_factory=dict)  # members dropped by this peer, by code
    kept_local: int = 0  # elements that kept their local values because their reducer was dropped

    def plus(self, receipt: Receipt) -> Totals:
        """The totals after one more round."""
        accounts = [(account.lane or UNKNOWN_LANE, account) for account in receipt.accounts]
        return Totals(
            rounds=_added(self.rounds, [(receipt.outcome, 1)]),
            seconds=self.seconds + receipt.seconds,
            phase_seconds=_added(self.phase_seconds, receipt.phases.items()),
            bytes_sent=_added(self.bytes_sent, ((lane, account.bytes_sent) for lane, account in accounts)),
            bytes_received=_added(self.bytes_received, ((lane, account.bytes_received) for lane, account in accounts)),
            waiting_seconds=self.waiting_seconds + waited_in(receipt),
            dropped=_added(self.dropped, ((dropped.code, 1) for dropped in receipt.dropped)),
            kept_local=self.kept_local + receipt.kept_local,
        )


def waited_in(receipt: Receipt) -> float:
    """Seconds of a round in which its peer waited for others: for a group, and for one member in the all-reduce."""
    straggler = 0.0 if receipt.straggler is None else receipt.straggler.seconds
    return min(receipt.seconds, receipt.phases.get("looking", 0.0) + straggler)


def _added(sums: Mapping[K, N], amounts: Iterable[tuple[K, N]]) -> dict[K, N]:
    """The sums with these amounts added; amounts of 0 make no new key."""
    result = dict(sums)
    for key, amount in amounts:
        if amount:
            result[key] = result[key] + amount if key in result else amount
    return result
