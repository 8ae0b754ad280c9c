"""Calls between peers.

Read in this order: `base` (the contract), `rpc_methods` (methods of rooms above the core), `grpc/` (the
implementation), `direct/` (the same with a second lane for parts). `averaging.testing` has a network in memory.
"""

from averaging.transport.base import AveragingService, GossipService, Lane, Transport, is_alive
from averaging.transport.rpc_methods import (
    CALLER,
    Message,
    RpcCaller,
    RpcHandler,
    RpcMethod,
    RpcService,
    handlers_of,
    rpc_caller,
)

__all__ = [
    "CALLER",
    "AveragingService",
    "GossipService",
    "Lane",
    "Message",
    "RpcCaller",
    "RpcHandler",
    "RpcMethod",
    "RpcService",
    "Transport",
    "handlers_of",
    "is_alive",
    "rpc_caller",
]
