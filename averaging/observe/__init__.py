"""What happened, for people and programs.

Read in this order: `receipts` (the account of one round), `receipt_log` (the receipts that a peer keeps, in memory and
in a file), `explanation` (the causes in words), `status` (of a peer and its training), `step_rate`.
"""

from averaging.observe.drift import Drift, DriftCheck, DriftKind, HyperparameterLog
from averaging.observe.explanation import Round, describe, explain
from averaging.observe.receipt_log import ReceiptBook, ReceiptLog, Recorded, Watched, dumps, read
from averaging.observe.receipts import Account, DropCode, Dropped, LateArrival, Outcome, Receipt, Role, Straggler
from averaging.observe.status import Finish, PeerStatus, TrainingStatus
from averaging.observe.step_rate import MAX_ITEMS, StepRate, check_rate, rate_in

__all__ = [
    "MAX_ITEMS",
    "Account",
    "Drift",
    "DriftCheck",
    "DriftKind",
    "DropCode",
    "Dropped",
    "Finish",
    "HyperparameterLog",
    "LateArrival",
    "Outcome",
    "PeerStatus",
    "Receipt",
    "ReceiptBook",
    "ReceiptLog",
    "Recorded",
    "Role",
    "Round",
    "StepRate",
    "Straggler",
    "TrainingStatus",
    "Watched",
    "check_rate",
    "describe",
    "dumps",
    "explain",
    "rate_in",
    "read",
]
