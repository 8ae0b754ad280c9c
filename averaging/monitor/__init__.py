"""A run as its peers describe it, for `averaging top` and for pages.

Read in this order: `snapshot` (a run at one moment, and the same as JSON), `collector` (asks the peers,
and keeps rates of successive answers), `table` (a snapshot as text), `screen` (the same in a terminal, with Textual).
"""

from averaging.monitor.collector import Collector as Collector
from averaging.monitor.screen import TopApp as TopApp
from averaging.monitor.snapshot import (
    Json as Json,
    PeerView as PeerView,
    RunSnapshot as RunSnapshot,
    clean as clean,
    snapshot_json as snapshot_json,
)
from averaging.monitor.table import as_text as as_text
