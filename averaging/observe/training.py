"""How far a peer that trains, and its run, are."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.observe.receipts import Receipt
from averaging.observe.status import PeerStatus


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """What `DecentralizedAverager.status` tells.

    Attributes:
        local_step: calls of `step`, those of the state that was downloaded or loaded included.
        global_step: steps that the run has made together; None with a strategy that has none.
        samples: gathered by this peer for the next global step, where the strategy counts them.
        peers: endpoints of the peers of the run that are known, this one included.
        alone: whether there is no other.
        last_receipt: of the last round; None before the first.
        peer: what the peer itself tells to anybody who asks.
    """

    local_step: int
    global_step: int | None
    samples: float
    peers: frozenset[str]
    alone: bool
    last_receipt: Receipt | None
    peer: PeerStatus
