"""What runs in the training thread: the inner optimizer, the state besides the tensors, the link to the peer.

Read in this order: `context` (what a strategy works with), `named_tensors`, `training_state` and `optimizer_state`
(what travels), `history` (how far a run is, and whose history counts), `site` (several
ranks that are one peer), `announcements` and `takeover` (what comes from other peers).
`parameter_copies` is about optimizers that hold further weights, `fingerprints` about drift.
"""

from averaging.training.announcements import DataRecords
from averaging.training.context import StrategyContext
from averaging.training.history import (
    History,
    Origin,
    Others,
    Own,
    Progress,
    Rank,
    Stage,
    any_advanced,
    coming_at,
    compare_progress,
    compare_terms,
    done_training,
    find_behind,
    find_late,
    find_together,
    look_for_greater_origin,
    rank_donors,
    read_progress,
    same_origin,
    still_training,
)
from averaging.training.layout import full_precision, local
from averaging.training.named_tensors import WITHOUT_MODEL, TrainedModel, digest_of, named_buffers, named_parameters
from averaging.training.open_averagers import (
    check_only_one,
    close_all,
    ending_process,
    leave_on_signals,
    note_closed,
    note_open,
)
from averaging.training.optimizer_state import GroupProgress, load_optimizer, pack_optimizer, restored_on_error
from averaging.training.optimizer_wrapper import OptimizerWrapper
from averaging.training.parameter_copies import NamedMasters, needs_closure
from averaging.training.site import (
    NO_GROUP,
    ControlGroup,
    LeaderStatus,
    LeaderStatusRelay,
    Site,
    check_alike,
    described,
    of_rank,
    ranks_of,
    site_of,
)
from averaging.training.takeover import BackgroundDownload, PendingRound
from averaging.training.training_state import (
    TrainingState,
    count_in,
    take_tensor,
    under_own_names,
)

__all__ = [
    "NO_GROUP",
    "WITHOUT_MODEL",
    "BackgroundDownload",
    "ControlGroup",
    "DataRecords",
    "GroupProgress",
    "History",
    "LeaderStatus",
    "LeaderStatusRelay",
    "NamedMasters",
    "OptimizerWrapper",
    "Origin",
    "Others",
    "Own",
    "PendingRound",
    "Progress",
    "Rank",
    "Site",
    "Stage",
    "StrategyContext",
    "TrainedModel",
    "TrainingState",
    "any_advanced",
    "check_alike",
    "check_only_one",
    "close_all",
    "coming_at",
    "compare_progress",
    "compare_terms",
    "count_in",
    "described",
    "digest_of",
    "done_training",
    "ending_process",
    "find_behind",
    "find_late",
    "find_together",
    "full_precision",
    "leave_on_signals",
    "load_optimizer",
    "local",
    "look_for_greater_origin",
    "named_buffers",
    "named_parameters",
    "needs_closure",
    "note_closed",
    "note_open",
    "of_rank",
    "pack_optimizer",
    "rank_donors",
    "ranks_of",
    "read_progress",
    "restored_on_error",
    "same_origin",
    "site_of",
    "still_training",
    "take_tensor",
    "under_own_names",
]
