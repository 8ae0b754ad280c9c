"""What happened in a round, for people and programs.

Read in this order: `receipt` (of one round), `totals` (sums over all rounds of a peer), `receipt_log` (the receipts
that a peer keeps, in memory and in a file), `explanation` (the causes in words), `progress` (of a training), `status`
(of a peer and its training), `drift` (members that differ although they should not).
"""

from averaging.receipts.drift import Drift, DriftCheck, DriftKind
from averaging.receipts.explanation import Round, describe, explain
from averaging.receipts.progress import TrainingPace, TrainingProgress
from averaging.receipts.receipt import (
    Account,
    DropCode,
    Dropped,
    LateArrival,
    Outcome,
    Receipt,
    Role,
    Straggler,
)
from averaging.receipts.receipt_log import ReceiptBook, ReceiptLog, Recorded, Watched, dumps, read, to_json
from averaging.receipts.status import (
    MAX_READERS,
    UNSAVED,
    Finish,
    PeerStatus,
    ReadByService,
    TrainingStatus,
    WeightReader,
    check_rate,
    rate_in,
)
from averaging.receipts.totals import UNKNOWN_LANE, Totals, waited_in

__all__ = [
    "MAX_READERS",
    "UNKNOWN_LANE",
    "UNSAVED",
    "Account",
    "Drift",
    "DriftCheck",
    "DriftKind",
    "DropCode",
    "Dropped",
    "Finish",
    "LateArrival",
    "Outcome",
    "PeerStatus",
    "ReadByService",
    "Receipt",
    "ReceiptBook",
    "ReceiptLog",
    "Recorded",
    "Role",
    "Round",
    "Straggler",
    "Totals",
    "TrainingPace",
    "TrainingProgress",
    "TrainingStatus",
    "Watched",
    "WeightReader",
    "check_rate",
    "describe",
    "dumps",
    "explain",
    "rate_in",
    "read",
    "to_json",
    "waited_in",
]
