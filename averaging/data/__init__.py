"""What a peer of a run trains: the samples of a dataset, dealt out among the peers that are there.

Read in this order: `dealing` (which peer trains which block; pure), `sampler` (the torch sampler), `shards` (for data
that is read shard by shard).
"""

from averaging.data.dealing import DataStatistics
from averaging.data.sampler import RunSampler
from averaging.data.shards import RunShards

__all__ = ["DataStatistics", "RunSampler", "RunShards"]
