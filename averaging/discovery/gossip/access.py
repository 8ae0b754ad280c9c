"""What the parts of one peer's gossip share: the constants, in one place so that tests can vary them, and its calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from averaging.common import CLIENT_PREFIX, Backoff
from averaging.discovery.gossip.record import RecordLimits
from averaging.errors import AveragingError, PeerUnreachableError, ProtocolViolationError, TransportError
from averaging.transport import Transport

CALL_FAILURES = (TransportError, ProtocolViolationError, TimeoutError)
"""The errors of a call that concern only the peer that was called."""


def why_failed(error: Exception) -> str:
    return error.reason if isinstance(error, AveragingError) else str(error) or "no answer"


def is_refused(error: Exception) -> bool:
    return isinstance(error, PeerUnreachableError) and error.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """Times (in seconds) and sizes of gossip discovery."""

    limits: RecordLimits = field(default_factory=RecordLimits)
    join_timeout: float = 10.0  # within which a seed must answer; time in which this peer stood still does not count
    peer_lifetime: float = 30.0  # of a presence record, and so the time after which a dead peer is no longer a member
    peer_refresh: float = 10.0  # interval of its renewals, which reach all of a thousand peers after ten exchanges
    fanout: int = 4  # branches into which a peer splits a range of the ring, see `membership`
    tick: float = 0.005  # rumours within this time are sent together
    push_timeout: float = 2.0  # of one push; then the next peer of the branch is tried
    rumour_timeout: float = 10.0  # age from which a rumour is no longer sent; exchanges spread the record
    exchange_interval: float = 2.0  # mean time between exchanges with a random member, and calls to silent ones
    exchange_timeout: float = 10.0
    retry_interval: float = 10.0  # mean time between calls to seeds and members that are missing
    look_up_interval: float = 5.0  # mean time between look-ups of seeds while no other peer is known
    retry_lost: float = 600.0  # for which an expired member is tried again
    max_lost: int = 256  # expired members that are remembered
    initial_backoff: float = 0.1  # until a failed seed is called again, or a client looks for another peer to follow
    max_backoff: float = 2.0  # to which it doubles
    leave_timeout: float = 1.0  # for sending the withdrawals when leaving
    rumours_per_push: int = 256
    records_per_reply: int = 128  # in one message of an exchange
    max_streams: int = 256  # clients that may follow one peer
    stream_backlog: int = 1024  # records that may wait for a client; the stream of a slower client ends


@dataclass(frozen=True, slots=True)
class GossipAccess:
    run_id: str
    endpoint: str
    transport: Transport
    settings: GossipSettings
    clock: Callable[[], float]  # seconds since the epoch
    rng: random.Random  # picks members and intervals

    @property
    def is_client(self) -> bool:
        return self.endpoint.startswith(CLIENT_PREFIX)

    def around(self, seconds: float) -> float:
        return seconds * self.rng.uniform(0.5, 1.5)

    def backoff(self) -> Backoff:
        return Backoff(self.settings.initial_backoff, self.settings.max_backoff, self.rng)
