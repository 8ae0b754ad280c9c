"""Calls between peers.

Read in this order: `base` (the contract, and what both lanes of a stream share), `rpc_methods` (what describes a gRPC
method), `grpc/` (the implementation), `direct/` (the same with a second lane for parts). `averaging.testing` has a
network in memory.
"""

from averaging.transport.base import (
    AveragingService as AveragingService,
    CompactedError as CompactedError,
    GossipService as GossipService,
    KeyValueStore as KeyValueStore,
    Lane as Lane,
    LeaseEndedError as LeaseEndedError,
    StoredChanges as StoredChanges,
    StoredValue as StoredValue,
    StoredValues as StoredValues,
    Transport as Transport,
    Upload as Upload,
    close as close,
    is_alive as is_alive,
    linger as linger,
)
from averaging.transport.rpc_methods import (
    CALLER as CALLER,
    Message as Message,
    MessageType as MessageType,
    RpcCaller as RpcCaller,
    RpcHandler as RpcHandler,
    RpcMethod as RpcMethod,
    RpcService as RpcService,
    handlers_of as handlers_of,
    parse as parse,
    rpc_caller as rpc_caller,
)
