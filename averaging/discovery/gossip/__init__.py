"""Discovery by gossip between the peers themselves, on the port that they have anyway: no server and no daemon.

Every peer holds all records of its run. A new record is sent to all peers at once, down a tree. Every other second a
peer also compares its records with those of a random member, which brings whatever was missed.

Read the modules in this order:

1. `record` (with all constants), `identity`: what a record is, and how its owner writes and signs it.
2. `record_table`: how records merge, which one is read, and the table of one peer.
3. `membership`: which peers are in the run, as their records say.
4. `membership`, `rumours`: how a new record reaches all peers, down a tree, and clients.
5. `anti_entropy`: how peers compare their records, and when.
6. `bootstrap`: joining a run.
7. `clock_offsets`: warnings about clocks.
8. `gossip_discovery`: puts all of this together as the discovery of one peer.

docs/design/decisions/discovery.md has the reasons and the costs.
"""

from averaging.discovery.gossip.bootstrap import Waiting
from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery, peers_key
from averaging.discovery.gossip.identity import Author, Ed25519Identity, Identity, UnsignedIdentity
from averaging.discovery.gossip.record import Reason, RecordLimits
from averaging.discovery.gossip.record_table import Change, RecordStore, RecordTable

__all__ = [
    "Author",
    "Change",
    "ClockOffsets",
    "Ed25519Identity",
    "GossipDiscovery",
    "Identity",
    "Reason",
    "RecordLimits",
    "RecordStore",
    "RecordTable",
    "UnsignedIdentity",
    "Waiting",
    "peers_key",
]
