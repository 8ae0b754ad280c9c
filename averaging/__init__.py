"""PyTorch training averaged between machines that nobody orchestrates.

There are four ways in: `DecentralizedAverager` around an optimizer, `SyncPeer` in a script, `Peer` in asyncio code, and
`averaging peer` on the command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from averaging.averager import DecentralizedAverager, close_all
    from averaging.checkpoint import DistributedCheckpoint
    from averaging.common.malloc import keep_freed_memory
    from averaging.config import Inspection, NonFinite, OnDrift, PeerConfig, TLSFiles
    from averaging.errors import (
        AveragingError,
        BusyError,
        CallRefusedError,
        ClosedError,
        ConfigError,
        DataLostError,
        DiscoveryError,
        DriftError,
        FeedBusyError,
        FeedError,
        FeedRefusedError,
        FeedUnreachableError,
        ForeignEndpointError,
        JoinRefusedError,
        ListenError,
        LyingLeaderError,
        MasterRefusedError,
        NonFiniteError,
        NoSeedAnsweredError,
        NotServedError,
        PeersMissingError,
        PeerUnreachableError,
        ProtocolViolationError,
        RoundError,
        SchemaMismatchError,
        SiteError,
        StateError,
        SyncTimeoutError,
        TensorError,
        TransportError,
        UnauthenticatedError,
        UnprovenViolationError,
        WeightGroupError,
        WorkerError,
        WorkerLostError,
        WrongRunError,
    )
    from averaging.observe.drift import Drift, DriftKind
    from averaging.observe.receipts import Account, DropCode, Dropped, LateArrival, Outcome, Receipt, Role, Straggler
    from averaging.observe.status import PeerStatus
    from averaging.observe.training_status import Finish, TrainingStatus
    from averaging.peer.peer import Peer
    from averaging.peer.topics import Adopt, Topic
    from averaging.protocol.group import Mode
    from averaging.protocol.messages import CompressionType
    from averaging.protocol.schema import ReplyForm
    from averaging.rpc import RpcChannel, RpcHandler, RpcMethod, RpcServer, RpcService
    from averaging.state.packing import State
    from averaging.state.snapshots import Extras
    from averaging.strategies import DiLoCo, GradientAveraging, LocalSGD, Strategy
    from averaging.sync_peer import SyncPeer
    from averaging.synchronizer.collective import WeightReceiver, WeightSender
    from averaging.synchronizer.coordination import RunningStatus
    from averaging.synchronizer.follower import Follower
    from averaging.synchronizer.follower_staleness import Staleness
    from averaging.synchronizer.options import SynchronizerConfig, SyncMethod
    from averaging.synchronizer.publisher import WeightPublisher
    from averaging.synchronizer.remote import RemoteSynchronizer
    from averaging.synchronizer.synchronizer import Synchronizer
    from averaging.training.training import Training

__all__ = [
    "Account",
    "Adopt",
    "AveragingError",
    "BusyError",
    "CallRefusedError",
    "ClosedError",
    "CompressionType",
    "ConfigError",
    "DataLostError",
    "DecentralizedAverager",
    "DiLoCo",
    "DiscoveryError",
    "DistributedCheckpoint",
    "Drift",
    "DriftError",
    "DriftKind",
    "DropCode",
    "Dropped",
    "Extras",
    "FeedBusyError",
    "FeedError",
    "FeedRefusedError",
    "FeedUnreachableError",
    "Finish",
    "Follower",
    "ForeignEndpointError",
    "GradientAveraging",
    "Inspection",
    "JoinRefusedError",
    "LateArrival",
    "ListenError",
    "LocalSGD",
    "LyingLeaderError",
    "MasterRefusedError",
    "Mode",
    "NoSeedAnsweredError",
    "NonFinite",
    "NonFiniteError",
    "NotServedError",
    "OnDrift",
    "Outcome",
    "Peer",
    "PeerConfig",
    "PeerStatus",
    "PeerUnreachableError",
    "PeersMissingError",
    "ProtocolViolationError",
    "Receipt",
    "RemoteSynchronizer",
    "ReplyForm",
    "Role",
    "RoundError",
    "RpcChannel",
    "RpcHandler",
    "RpcMethod",
    "RpcServer",
    "RpcService",
    "RunningStatus",
    "SchemaMismatchError",
    "SiteError",
    "Staleness",
    "State",
    "StateError",
    "Straggler",
    "Strategy",
    "SyncMethod",
    "SyncPeer",
    "SyncTimeoutError",
    "Synchronizer",
    "SynchronizerConfig",
    "TLSFiles",
    "TensorError",
    "Topic",
    "Training",
    "TrainingStatus",
    "TransportError",
    "UnauthenticatedError",
    "UnprovenViolationError",
    "WeightGroupError",
    "WeightPublisher",
    "WeightReceiver",
    "WeightSender",
    "WorkerError",
    "WorkerLostError",
    "WrongRunError",
    "__version__",
    "close_all",
    "keep_freed_memory",
]

_HOMES = {
    "Account": "observe.receipts",
    "Adopt": "peer.topics",
    "AveragingError": "errors",
    "BusyError": "errors",
    "CallRefusedError": "errors",
    "ClosedError": "errors",
    "CompressionType": "protocol.messages",
    "ConfigError": "errors",
    "DataLostError": "errors",
    "DecentralizedAverager": "averager",
    "DiLoCo": "strategies",
    "DistributedCheckpoint": "checkpoint",
    "DiscoveryError": "errors",
    "DropCode": "observe.receipts",
    "Drift": "observe.drift",
    "DriftError": "errors",
    "DriftKind": "observe.drift",
    "Dropped": "observe.receipts",
    "Extras": "state.snapshots",
    "FeedBusyError": "errors",
    "FeedError": "errors",
    "FeedRefusedError": "errors",
    "FeedUnreachableError": "errors",
    "Finish": "observe.training_status",
    "Follower": "synchronizer.follower",
    "ForeignEndpointError": "errors",
    "GradientAveraging": "strategies",
    "Inspection": "config",
    "JoinRefusedError": "errors",
    "LateArrival": "observe.receipts",
    "ListenError": "errors",
    "LocalSGD": "strategies",
    "LyingLeaderError": "errors",
    "MasterRefusedError": "errors",
    "Mode": "protocol.group",
    "NoSeedAnsweredError": "errors",
    "NonFinite": "config",
    "NonFiniteError": "errors",
    "NotServedError": "errors",
    "OnDrift": "config",
    "Outcome": "observe.receipts",
    "Peer": "peer.peer",
    "PeerConfig": "config",
    "PeerStatus": "observe.status",
    "PeerUnreachableError": "errors",
    "PeersMissingError": "errors",
    "ProtocolViolationError": "errors",
    "Receipt": "observe.receipts",
    "RemoteSynchronizer": "synchronizer.remote",
    "ReplyForm": "protocol.schema",
    "Role": "observe.receipts",
    "RoundError": "errors",
    "RpcChannel": "rpc",
    "RpcHandler": "rpc",
    "RpcMethod": "rpc",
    "RpcServer": "rpc",
    "RpcService": "rpc",
    "RunningStatus": "synchronizer.coordination",
    "SchemaMismatchError": "errors",
    "SiteError": "errors",
    "Staleness": "synchronizer.follower_staleness",
    "State": "state.packing",
    "StateError": "errors",
    "Straggler": "observe.receipts",
    "Strategy": "strategies",
    "SyncMethod": "synchronizer.options",
    "SyncPeer": "sync_peer",
    "SyncTimeoutError": "errors",
    "Synchronizer": "synchronizer.synchronizer",
    "SynchronizerConfig": "synchronizer.options",
    "TLSFiles": "config",
    "TensorError": "errors",
    "Topic": "peer.topics",
    "Training": "training.training",
    "TrainingStatus": "observe.training_status",
    "TransportError": "errors",
    "UnauthenticatedError": "errors",
    "UnprovenViolationError": "errors",
    "WeightGroupError": "errors",
    "WeightReceiver": "synchronizer.collective",
    "WeightSender": "synchronizer.collective",
    "WeightPublisher": "synchronizer.publisher",
    "WorkerError": "errors",
    "WorkerLostError": "errors",
    "WrongRunError": "errors",
    "close_all": "averager",
    "keep_freed_memory": "common.malloc",
}


def __getattr__(name: str) -> Any:
    # Names are imported on demand, so that `averaging --help` and the like need not wait for torch.
    if name == "__version__":
        from importlib.metadata import version

        return version("averaging")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
