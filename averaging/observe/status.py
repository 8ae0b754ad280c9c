"""Who a peer is and what it is doing right now."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.deadlines.learned import Learned
from averaging.observe.receipts import Receipt


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A snapshot for the status service.

    Attributes:
        started: seconds since the epoch.
        declared_expiration: until when it has declared to wait for a group, seconds since the epoch; 0 = not declared.
        leader: whom it follows; empty if nobody.
        group_id: of the round in progress; empty outside one.
        members: of the round in progress.
        rounds: attempts that ended in an average.
        known_peers: that discovery names, this one included.
        deadlines: that were learned of the others, the latest first.
    """

    endpoint: str
    run_id: str
    mode: str
    software: str
    started: float
    schema_hash: bytes
    group_key: str
    looking: bool
    declared_expiration: float
    leader: str
    group_id: bytes
    members: tuple[str, ...]
    last_round: Receipt | None
    rounds: int
    state_version: int
    known_peers: int
    deadlines: tuple[Learned, ...] = ()
