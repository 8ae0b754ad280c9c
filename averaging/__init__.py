"""PyTorch training averaged between machines that nobody orchestrates.

There are four ways in: `DecentralizedAverager` around an optimizer, `BlockingPeer` in a script, `Peer` in asyncio code,
and `averaging peer` on the command line.

The names of special parts are in their modules: `averaging.errors`, `averaging.config` and `averaging.tensors` (values
of options), `averaging.receipts`, `averaging.peer`, `averaging.state`, `averaging.training` (strategies of your own),
`averaging.weights`, `averaging.rpc`, `averaging.rl.feed`, `averaging.rl.synchronizer`, `averaging.rl.workers`,
`averaging.integrations` and `averaging.testing`.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from averaging.averager import DecentralizedAverager
    from averaging.blocking_peer import BlockingPeer
    from averaging.checkpoint import DistributedCheckpoint
    from averaging.config import PeerConfig, TLSFiles
    from averaging.errors import AveragingError, ClosedError, ConfigError, StateError, TensorError, TransportError
    from averaging.peer import Peer
    from averaging.protocol import CompressionType, Mode
    from averaging.receipts import Outcome, Receipt, TrainingStatus
    from averaging.strategies import DiLoCo, GradientAveraging, LocalSGD, Strategy
    from averaging.training import close_all
    from averaging.weights import WeightFollower, WeightPublisher

_ROOMS = {
    "averager": ["DecentralizedAverager"],
    "blocking_peer": ["BlockingPeer"],
    "checkpoint": ["DistributedCheckpoint"],
    "config": ["PeerConfig", "TLSFiles"],
    "errors": ["AveragingError", "ClosedError", "ConfigError", "StateError", "TensorError", "TransportError"],
    "peer": ["Peer"],
    "protocol": ["CompressionType", "Mode"],
    "receipts": ["Outcome", "Receipt", "TrainingStatus"],
    "strategies": ["DiLoCo", "GradientAveraging", "LocalSGD", "Strategy"],
    "training": ["close_all"],
    "weights": ["WeightFollower", "WeightPublisher"],
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AveragingError",
    "BlockingPeer",
    "ClosedError",
    "CompressionType",
    "ConfigError",
    "DecentralizedAverager",
    "DiLoCo",
    "DistributedCheckpoint",
    "GradientAveraging",
    "LocalSGD",
    "Mode",
    "Outcome",
    "Peer",
    "PeerConfig",
    "Receipt",
    "StateError",
    "Strategy",
    "TLSFiles",
    "TensorError",
    "TrainingStatus",
    "TransportError",
    "WeightFollower",
    "WeightPublisher",
    "__version__",
    "close_all",
]


def __getattr__(name: str) -> Any:
    # Names are imported on demand, so that `averaging --help` and the like need not wait for torch.
    if name == "__version__":
        from importlib.metadata import version

        return version("averaging")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not hasattr(signal, "SIGHUP"):
        from averaging.errors import SUPPORTED_SYSTEMS

        raise ImportError(f"averaging does not run on this operating system ({sys.platform}); {SUPPORTED_SYSTEMS}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
