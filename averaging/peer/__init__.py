"""One peer: its components while it runs, what it averages round by round, and what it serves to other peers.

Read in this order: `peer`, `topics` (what is averaged under which name), `rounds`.
"""

from averaging.peer.lifecycle import DiscoveryFactory, PeerContext
from averaging.peer.peer import FetchedState, Peer
from averaging.peer.topics import (
    Adopt,
    ExpectedAtFirst,
    ExpectedPeers,
    RoundOptions,
    SparseFeedback,
    StopSearch,
    Topic,
    TopicOptions,
)

__all__ = [
    "Adopt",
    "DiscoveryFactory",
    "ExpectedAtFirst",
    "ExpectedPeers",
    "FetchedState",
    "Peer",
    "PeerContext",
    "RoundOptions",
    "SparseFeedback",
    "StopSearch",
    "Topic",
    "TopicOptions",
]
