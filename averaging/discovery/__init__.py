"""How the peers of a run find each other: a replicated table of small records that expire.

Read in this order: `base` (the contract; everything outside this room uses only this and the constructors),
`gossip/` (the default implementation between peers on a network), `shard_of_run` (a discovery for each part of a
divided model). `averaging.testing` has the smallest complete implementation.
"""

from averaging.discovery.base import (
    MAX_LIFETIME as MAX_LIFETIME,
    MAX_VALUE_BYTES as MAX_VALUE_BYTES,
    Diagnosis as Diagnosis,
    Discovery as Discovery,
    Entry as Entry,
    KnownPeer as KnownPeer,
    PublishedRecord as PublishedRecord,
    Watchers as Watchers,
    clock_difference as clock_difference,
)
from averaging.discovery.shard_of_run import (
    LIFETIME as LIFETIME,
    REFRESH as REFRESH,
    ShardOfRun as ShardOfRun,
    shards_key as shards_key,
)
