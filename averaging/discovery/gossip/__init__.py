"""Discovery by gossip between the peers themselves, on the port that they have anyway: no server and no daemon.

Every peer holds all records of its run. A new record is sent to all peers at once, down a tree. Every other second a
peer also compares its records with those of a random member, which brings whatever was missed.

Read the modules in this order:

1. `record`: what a record is, and how its owner writes and signs it.
2. `record_table`: how records merge, which one is read, and the table of one peer.
3. `membership`: all constants, which peers are in the run, and the tree over them.
4. `rumours`: how a new record reaches all peers, down the tree, and clients.
5. `anti_entropy`: how peers compare their records, and when; `clock_offsets`: warnings about clocks.
6. `bootstrap`: joining a run.
7. `gossip_discovery`: puts all of this together as the discovery of one peer, on `record_discovery`.

docs/design/decisions/discovery.md has the reasons and the costs.
"""

from averaging.discovery.gossip.bootstrap import Waiting as Waiting
from averaging.discovery.gossip.clock_offsets import ClockOffsets as ClockOffsets
from averaging.discovery.gossip.gossip_discovery import GossipDiscovery as GossipDiscovery, peers_key as peers_key
from averaging.discovery.gossip.membership import GossipSettings as GossipSettings
from averaging.discovery.gossip.record import (
    Author as Author,
    Identity as Identity,
    Reason as Reason,
    RecordLimits as RecordLimits,
    UnsignedIdentity as UnsignedIdentity,
)
from averaging.discovery.gossip.record_discovery import RecordDiscovery as RecordDiscovery
from averaging.discovery.gossip.record_table import (
    Change as Change,
    RecordStore as RecordStore,
    RecordTable as RecordTable,
)
