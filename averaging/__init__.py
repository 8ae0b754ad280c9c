"""PyTorch training averaged between machines that nobody orchestrates.

Three ways in: `DecentralizedAverager` around an optimizer, `Peer` in asyncio code, and `averaging peer` on the command
line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from averaging.averager import DecentralizedAverager
    from averaging.common.malloc import keep_freed_memory
    from averaging.config import NonFinite, PeerConfig
    from averaging.errors import AveragingError, ConfigError, TensorError
    from averaging.observe.receipts import Account, DropCode, Dropped, LateArrival, Outcome, Receipt, Role, Straggler
    from averaging.observe.training_status import Finish
    from averaging.peer.peer import Peer
    from averaging.peer.topics import Adopt, Topic
    from averaging.protocol.group import Mode
    from averaging.protocol.messages import CompressionType
    from averaging.protocol.schema import ReplyForm
    from averaging.state.packing import State
    from averaging.state.snapshots import Extras
    from averaging.strategies import DiLoCo, GradientAveraging, LocalSGD, Strategy
    from averaging.training.training import Training

__all__ = [
    "Account",
    "Adopt",
    "AveragingError",
    "CompressionType",
    "ConfigError",
    "DecentralizedAverager",
    "DiLoCo",
    "DropCode",
    "Dropped",
    "Extras",
    "Finish",
    "GradientAveraging",
    "LateArrival",
    "LocalSGD",
    "Mode",
    "NonFinite",
    "Outcome",
    "Peer",
    "PeerConfig",
    "Receipt",
    "ReplyForm",
    "Role",
    "State",
    "Straggler",
    "Strategy",
    "TensorError",
    "Topic",
    "Training",
    "keep_freed_memory",
]

_HOMES = {
    "Account": "observe.receipts",
    "Adopt": "peer.topics",
    "AveragingError": "errors",
    "CompressionType": "protocol.messages",
    "ConfigError": "errors",
    "DecentralizedAverager": "averager",
    "DiLoCo": "strategies",
    "DropCode": "observe.receipts",
    "Dropped": "observe.receipts",
    "Extras": "state.snapshots",
    "Finish": "observe.training_status",
    "GradientAveraging": "strategies",
    "LateArrival": "observe.receipts",
    "LocalSGD": "strategies",
    "Mode": "protocol.group",
    "NonFinite": "config",
    "Outcome": "observe.receipts",
    "Peer": "peer.peer",
    "PeerConfig": "config",
    "Receipt": "observe.receipts",
    "ReplyForm": "protocol.schema",
    "Role": "observe.receipts",
    "State": "state.packing",
    "Straggler": "observe.receipts",
    "Strategy": "strategies",
    "TensorError": "errors",
    "Topic": "peer.topics",
    "Training": "training.training",
    "keep_freed_memory": "common.malloc",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that parts which need no torch, such as `averaging --help`, do not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
