"""The constants of gossip, in one place so that tests and simulations can vary them."""

from __future__ import annotations

from dataclasses import dataclass, field

from averaging.discovery.gossip.record import Limits
from averaging.errors import ProtocolViolationError, TransportError

CALL_FAILURES = (TransportError, ProtocolViolationError, TimeoutError)
"""The errors of a call that concern only the peer that was called."""


def why_failed(error: Exception) -> str:
    """The reason of one of `CALL_FAILURES`, without the peer's endpoint."""
    return error.reason if isinstance(error, TransportError) else str(error) or "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """Times in seconds, and numbers.

    Attributes:
        limits: which records to accept.
        peer_lifetime: lifetime of a presence record; for this long a dead peer still counts as a member.
        peer_refresh: between two renewals of the presence record. A renewal takes some ten exchanges to reach all of a
            thousand peers, and must do so before the previous record expires.
        fanout: number of branches into which a peer splits a range of the ring, see `broadcast_tree`.
        tick: rumours within this time are sent together.
        push_timeout: of one push; then the next peer of the branch is tried.
        rumour_timeout: after which a rumour is no longer sent; exchanges bring the record.
        exchange_interval: between two exchanges with a random member, on average.
        exchange_timeout: of one exchange.
        retry_interval: between two attempts to reach seeds and members that are not there, on average.
        retry_lost: for which an expired member is tried again.
        max_lost: number of expired members that are remembered.
        initial_backoff: before a failed seed is asked again, or a client looks for another peer to follow. It doubles
            each time.
        max_backoff: upper bound of that.
        leave_timeout: for sending the withdrawals when leaving.
        rumours_per_push: records in one push.
        records_per_reply: records in one message of an exchange.
        max_streams: number of clients that may follow one peer.
        stream_backlog: number of records that may wait for a client; the stream of a slower client ends.
    """

    limits: Limits = field(default_factory=Limits)
    peer_lifetime: float = 30.0
    peer_refresh: float = 10.0
    fanout: int = 4
    tick: float = 0.005
    push_timeout: float = 2.0
    rumour_timeout: float = 10.0
    exchange_interval: float = 2.0
    exchange_timeout: float = 10.0
    retry_interval: float = 10.0
    retry_lost: float = 600.0
    max_lost: int = 256
    initial_backoff: float = 0.1
    max_backoff: float = 2.0
    leave_timeout: float = 1.0
    rumours_per_push: int = 256
    records_per_reply: int = 128
    max_streams: int = 256
    stream_backlog: int = 1024
