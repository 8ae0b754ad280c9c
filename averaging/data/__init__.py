"""What a peer of a run trains: the samples of a dataset, dealt out among the peers that are there.

Read in this order: `dealing` (which peer trains which block; pure), `sampler` (the torch sampler).
"""

from averaging.data.dealing import DataStatistics as DataStatistics
from averaging.data.sampler import RunSampler as RunSampler
