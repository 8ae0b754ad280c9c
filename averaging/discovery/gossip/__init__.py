"""Discovery by gossip between the peers themselves.

Read the modules in this order: `gossip_discovery` (the discovery of one peer), `bootstrap` (joining a run),
`anti_entropy` and `rumours` (how records spread), `record_table` (how they merge).
"""

from averaging.discovery.gossip.gossip_discovery import GossipDiscovery

__all__ = ["GossipDiscovery"]
