"""The state that newcomers download, verified and resumable.

Read in this order: `manifest` (what a state consists of, and the donor's copy), `assembler` (pieces in, state out),
`downloads` (who has one, how long each may take, and the whole download).
"""

from averaging.state.assembler import (
    StateAssembler as StateAssembler,
    StateLimits as StateLimits,
    largest_state as largest_state,
)
from averaging.state.downloads import Donors as Donors, download as download, of_all_members as of_all_members
from averaging.state.manifest import (
    NO_EXTRA_STATE as NO_EXTRA_STATE,
    ExtraState as ExtraState,
    Snapshots as Snapshots,
    State as State,
    pack as pack,
)
