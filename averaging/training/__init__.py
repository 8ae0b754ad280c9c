"""What runs in the training thread: the inner optimizer, the state besides the tensors, the link to the peer.

Read in this order: `optimizer_wrapper`, `layout` (the tensors by name), `training_state` and `optimizer_state` (what
travels), `history` (how far a run is), `context` (what a strategy works with), `pending_round`, `control_group`, `site`
and `site_state` (several ranks that are one peer).
"""

from averaging.training.context import Training
from averaging.training.control_group import ControlGroup, ranks_of
from averaging.training.fetch import BackgroundDownload
from averaging.training.group_progress import GroupProgress
from averaging.training.history import (
    TRAIL,
    History,
    Origin,
    Progress,
    Rank,
    Stage,
    done_training,
    read_progress,
    same_origin,
    still_training,
)
from averaging.training.layout import full_precision, is_divided, local
from averaging.training.named_tensors import named_buffers, named_parameters
from averaging.training.optimizer_state import load_optimizer, pack_optimizer, restored_on_error
from averaging.training.optimizer_wrapper import OptimizerWrapper, needs_closure
from averaging.training.pending_round import PendingRound
from averaging.training.sigterm import leave_on_sigterm, stay_on_sigterm
from averaging.training.site import ProcessGroupSite, Site, check_alike, described, of_rank
from averaging.training.standing import (
    HistoryStanding,
    Others,
    Own,
    compare_progress,
    find_together,
    look_for_greater_origin,
    rank_donors,
)
from averaging.training.trained_model import TrainedModel
from averaging.training.training_state import (
    SchedulerDriver,
    TrainingState,
    count_in,
    make_scheduler,
    take_tensor,
    under_own_names,
)

__all__ = [
    "TRAIL",
    "BackgroundDownload",
    "ControlGroup",
    "GroupProgress",
    "History",
    "HistoryStanding",
    "OptimizerWrapper",
    "Origin",
    "Others",
    "Own",
    "PendingRound",
    "ProcessGroupSite",
    "Progress",
    "Rank",
    "SchedulerDriver",
    "Site",
    "Stage",
    "TrainedModel",
    "Training",
    "TrainingState",
    "check_alike",
    "compare_progress",
    "count_in",
    "described",
    "done_training",
    "find_together",
    "full_precision",
    "is_divided",
    "leave_on_sigterm",
    "load_optimizer",
    "local",
    "look_for_greater_origin",
    "make_scheduler",
    "named_buffers",
    "named_parameters",
    "needs_closure",
    "of_rank",
    "pack_optimizer",
    "rank_donors",
    "ranks_of",
    "read_progress",
    "restored_on_error",
    "same_origin",
    "stay_on_sigterm",
    "still_training",
    "take_tensor",
    "under_own_names",
]
