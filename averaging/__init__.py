"""PyTorch training averaged between machines that nobody orchestrates.

Three ways in: `DecentralizedAverager` around an optimizer, `Peer` in asyncio code, and `averaging peer` on the command
line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from averaging.config import NonFinite, PeerConfig
    from averaging.errors import AveragingError
    from averaging.group import Mode
    from averaging.messages import CompressionType
    from averaging.observe.receipts import Dropped, Outcome, Receipt
    from averaging.peer import Peer
    from averaging.schema import ReplyForm
    from averaging.snapshots import Extras
    from averaging.state import State

_HOME = {
    "AveragingError": "errors",
    "CompressionType": "messages",
    "Dropped": "observe.receipts",
    "Extras": "snapshots",
    "Mode": "group",
    "NonFinite": "config",
    "Outcome": "observe.receipts",
    "Peer": "peer",
    "PeerConfig": "config",
    "Receipt": "observe.receipts",
    "ReplyForm": "schema",
    "State": "state",
}

__all__ = [
    "AveragingError",
    "CompressionType",
    "Dropped",
    "Extras",
    "Mode",
    "NonFinite",
    "Outcome",
    "Peer",
    "PeerConfig",
    "Receipt",
    "ReplyForm",
    "State",
]


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used: torch takes seconds, and `averaging --help` needs none of it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
