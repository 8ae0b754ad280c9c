"""What happened in a round, for people and programs.

Read in this order: `receipt` (of one round, and sums over all rounds of a peer), `receipt_log` (the receipts that a
peer keeps, in memory and in a file), `explanation` (the causes in words), `progress` (of a training), `status` (of a
peer and its training), `drift` (members that differ although they should not).
"""

from averaging.receipts.drift import Drift as Drift, DriftCheck as DriftCheck, DriftKind as DriftKind
from averaging.receipts.explanation import Round as Round, describe as describe, explain as explain
from averaging.receipts.progress import TrainingPace as TrainingPace, TrainingProgress as TrainingProgress
from averaging.receipts.receipt import (
    UNKNOWN_LANE as UNKNOWN_LANE,
    Account as Account,
    DropCode as DropCode,
    Dropped as Dropped,
    LateArrival as LateArrival,
    Outcome as Outcome,
    Receipt as Receipt,
    Role as Role,
    Straggler as Straggler,
    Totals as Totals,
    waited_in as waited_in,
)
from averaging.receipts.receipt_log import (
    ReceiptBook as ReceiptBook,
    ReceiptLog as ReceiptLog,
    Recorded as Recorded,
    Watched as Watched,
    dumps as dumps,
    read as read,
    to_json as to_json,
)
from averaging.receipts.status import (
    MAX_READERS as MAX_READERS,
    UNSAVED as UNSAVED,
    Finish as Finish,
    PeerStatus as PeerStatus,
    ReadByService as ReadByService,
    TrainingStatus as TrainingStatus,
    WeightReader as WeightReader,
    check_rate as check_rate,
    rate_in as rate_in,
)
