"""Calls between peers.

Read in this order: `base` (the contract), `rpc_methods` (what describes a gRPC method), `streams` (what both lanes of a
stream share), `grpc/` (the implementation), `direct/` (the same with a second lane for parts). `averaging.testing`
has a network in memory.
"""

from averaging.transport.base import (
    AveragingService,
    CompactedError,
    GossipService,
    KeyValueStore,
    Lane,
    LeaseEndedError,
    StoredChanges,
    StoredValue,
    StoredValues,
    Transport,
    is_alive,
)
from averaging.transport.rpc_methods import (
    CALLER,
    Message,
    MessageType,
    RpcCaller,
    RpcHandler,
    RpcMethod,
    RpcService,
    handlers_of,
    parse,
    rpc_caller,
)
from averaging.transport.streams import Upload, close, linger

__all__ = [
    "CALLER",
    "AveragingService",
    "CompactedError",
    "GossipService",
    "KeyValueStore",
    "Lane",
    "LeaseEndedError",
    "Message",
    "MessageType",
    "RpcCaller",
    "RpcHandler",
    "RpcMethod",
    "RpcService",
    "StoredChanges",
    "StoredValue",
    "StoredValues",
    "Transport",
    "Upload",
    "close",
    "handlers_of",
    "is_alive",
    "linger",
    "parse",
    "rpc_caller",
]
