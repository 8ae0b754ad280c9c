"""The state that newcomers download, verified and resumable.

Read in this order: `manifest` (what a state consists of), `snapshots` (the donor's copy), `assembler`
(pieces in, state out), `downloads` (who has one, how long each may take, and the whole download).
"""

from averaging.state.assembler import StateAssembler, StateLimits, largest_state
from averaging.state.downloads import Donors, download, of_all_members
from averaging.state.manifest import State, pack
from averaging.state.snapshots import NO_EXTRA_STATE, ExtraState, Snapshots

__all__ = [
    "NO_EXTRA_STATE",
    "Donors",
    "ExtraState",
    "Snapshots",
    "State",
    "StateAssembler",
    "StateLimits",
    "download",
    "largest_state",
    "of_all_members",
    "pack",
]
