"""PyTorch training averaged between machines that nobody orchestrates.

Three ways in: `DecentralizedAverager` around an optimizer, `Peer` in asyncio code, and `averaging peer` on the command
line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from averaging.averager import DecentralizedAverager
    from averaging.config import NonFinite, PeerConfig
    from averaging.errors import AveragingError
    from averaging.group import Mode
    from averaging.memory import keep_freed_memory
    from averaging.messages import CompressionType
    from averaging.observe.receipts import Account, DropCode, Dropped, LateArrival, Outcome, Receipt, Role, Straggler
    from averaging.observe.training import Finish
    from averaging.peer.peer import Peer
    from averaging.peer.topics import Adopt, Topic
    from averaging.schema import ReplyForm
    from averaging.state.packing import State
    from averaging.state.snapshots import Extras
    from averaging.strategies import DiLoCo, GradientAveraging, LocalSGD, Strategy
    from averaging.training.training import Training

__all__ = [
    "Account",
    "Adopt",
    "AveragingError",
    "CompressionType",
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
    "Topic",
    "Training",
    "keep_freed_memory",
]

_HOMES = {
    "Account": "observe.receipts",
    "Adopt": "peer.topics",
    "AveragingError": "errors",
    "CompressionType": "messages",
    "DecentralizedAverager": "averager",
    "DiLoCo": "strategies",
    "DropCode": "observe.receipts",
    "Dropped": "observe.receipts",
    "Extras": "state.snapshots",
    "Finish": "observe.training",
    "GradientAveraging": "strategies",
    "LateArrival": "observe.receipts",
    "LocalSGD": "strategies",
    "Mode": "group",
    "NonFinite": "config",
    "Outcome": "observe.receipts",
    "Peer": "peer.peer",
    "PeerConfig": "config",
    "Receipt": "observe.receipts",
    "ReplyForm": "schema",
    "Role": "observe.receipts",
    "State": "state.packing",
    "Straggler": "observe.receipts",
    "Strategy": "strategies",
    "Topic": "peer.topics",
    "Training": "training.training",
    "keep_freed_memory": "memory",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that parts which need no torch, such as `averaging --help`, do not wait for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
