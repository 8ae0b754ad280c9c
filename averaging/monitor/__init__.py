"""A run as its peers describe it, for `averaging top` and for pages.

Read in this order: `snapshot` (a run at one moment, and the same as JSON), `history` (rates from successive answers of
a peer), `services` (a register and a feed), `collector` (asks the peers).
"""

from averaging.monitor.collector import INTERVAL, Collector
from averaging.monitor.services import NamedFeed, NamedRegister
from averaging.monitor.snapshot import PeerView, RunSnapshot, ServiceView, clean, matching, snapshot_json

__all__ = [
    "INTERVAL",
    "Collector",
    "NamedFeed",
    "NamedRegister",
    "PeerView",
    "RunSnapshot",
    "ServiceView",
    "clean",
    "matching",
    "snapshot_json",
]
