"""Hands out the weights of a model to explorers: docs/how-to/follow.md is the guide.

Read in this order: `coordination` (statuses, versions and waits as pure decisions), `synchronizer` (the class),
`methods` (the table of its gRPC methods, and a state as messages), `service` and `remote` (their two ends), `groups`
(weights by collectives of torch.distributed).
"""

from averaging.rl.synchronizer.coordination import (
    RunningStatus as RunningStatus,
    SynchronizerConfig as SynchronizerConfig,
    SyncMethod as SyncMethod,
)
from averaging.rl.synchronizer.groups import WeightReceiver as WeightReceiver, WeightSender as WeightSender
from averaging.rl.synchronizer.remote import RemoteSynchronizer as RemoteSynchronizer
from averaging.rl.synchronizer.synchronizer import Synchronizer as Synchronizer
