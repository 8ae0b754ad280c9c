"""The constants of gossip, in one place so that tests and simulations can vary them."""

from __future__ import annotations

from dataclasses import dataclass, field

from averaging.discovery.gossip.record import Limits
from averaging.errors import ProtocolViolationError, TransportError

CALL_FAILURES = (TransportError, ProtocolViolationError, TimeoutError)
"""What a call to another peer may end in; it concerns that peer alone."""


def why_failed(error: Exception) -> str:
    """The reason of one of `CALL_FAILURES`, without the peer's name."""
    return error.reason if isinstance(error, TransportError) else str(error) or "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """How often, how long, how many. Seconds unless said otherwise.

    Attributes:
        limits: what records to accept.
        peer_lifetime: after its last sign of life, so long a dead peer is still taken for a member.
        peer_refresh: between two signs of life. They take some ten exchanges to reach all of a thousand peers, and must
            do so before the one before expires.
        fanout: into how many ranges a peer cuts those it has to tell.
        tick: rumours that come within it go out together.
        push_timeout: for one push; then the next peer of the range is tried.
        rumour_patience: after which a rumour is left to the exchanges.
        exchange_interval: between two exchanges with a random member, on average.
        exchange_timeout: for one exchange.
        retry_interval: between two attempts to reach seeds and members that are not there, on average.
        retry_lost: for so long a member that vanished is tried again.
        most_lost: how many such members are remembered.
        first_backoff: before a failed seed is asked again, or a client looks for another peer to follow; doubled ...
        last_backoff: ... until it is this.
        leave_timeout: for telling others of leaving.
        rumours_per_push: records in one push.
        records_per_reply: records in one message of an exchange.
        most_followers: clients that may hold a stream to one peer.
        follower_backlog: records that may wait for a client; one that is slower is cut off.
    """

    limits: Limits = field(default_factory=Limits)
    peer_lifetime: float = 30.0
    peer_refresh: float = 10.0
    fanout: int = 4
    tick: float = 0.005
    push_timeout: float = 2.0
    rumour_patience: float = 10.0
    exchange_interval: float = 2.0
    exchange_timeout: float = 10.0
    retry_interval: float = 10.0
    retry_lost: float = 600.0
    most_lost: int = 256
    first_backoff: float = 0.1
    last_backoff: float = 2.0
    leave_timeout: float = 1.0
    rumours_per_push: int = 256
    records_per_reply: int = 128
    most_followers: int = 256
    follower_backlog: int = 1024
