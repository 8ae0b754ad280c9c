"""How the peers of a run find each other: a replicated table of small records that expire.

Read in this order: `base` (the contract; everything outside this room uses only this and the constructors),
`gossip/` (the default implementation between peers on a network), `shard_of_run` (a discovery for each part of a
divided model). `averaging.testing` has the smallest complete implementation.
"""

from averaging.discovery.base import (
    MAX_LIFETIME,
    MAX_VALUE_BYTES,
    Diagnosis,
    Discovery,
    Entry,
    KnownPeer,
    PublishedRecord,
    Watchers,
    clock_difference,
)
from averaging.discovery.shard_of_run import LIFETIME, REFRESH, ShardOfRun, shards_key

__all__ = [
    "LIFETIME",
    "MAX_LIFETIME",
    "MAX_VALUE_BYTES",
    "REFRESH",
    "Diagnosis",
    "Discovery",
    "Entry",
    "KnownPeer",
    "PublishedRecord",
    "ShardOfRun",
    "Watchers",
    "clock_difference",
    "shards_key",
]
