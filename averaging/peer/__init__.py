"""One peer: its components while it runs, what it averages round by round, and what it serves to other peers.

Read in this order: `peer`, `topics` (what is averaged under which name), `rounds`.
"""

from averaging.peer.lifecycle import DiscoveryFactory as DiscoveryFactory, PeerContext as PeerContext
from averaging.peer.peer import FetchedState as FetchedState, Peer as Peer
from averaging.peer.topics import (
    Adopt as Adopt,
    ExpectedAtFirst as ExpectedAtFirst,
    ExpectedPeers as ExpectedPeers,
    RoundOptions as RoundOptions,
    SparseFeedback as SparseFeedback,
    StopSearch as StopSearch,
    Topic as Topic,
    TopicOptions as TopicOptions,
)
