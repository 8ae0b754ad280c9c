"""What people read of receipts and of a status: short as text, all of it in repr."""

from dataclasses import replace
from typing import Any

from averaging.receipts.receipt import Dropped, LateArrival, Outcome, Receipt
from averaging.receipts.status import Finish, PeerStatus, TrainingStatus
from tests.receipts.made import A, D, receipt
from tests.support.grpc_fakes import STATUS

EVIL = "\x1b[2J<script>\n"


def status(**changes: Any) -> PeerStatus:
    idle: dict[str, Any] = {"members": (), "looking": False, "leader": "", "training": None, "last_round": None}
    of_run = {"endpoint": A, "run_id": "demo", "rounds": 17, "state_version": 18, "known_peers": 4}
    return replace(STATUS, **{**idle, **of_run, **changes})


def test_strangers_write_nothing_but_text() -> None:
    lost = receipt(outcome=Outcome.FAILED, reason=EVIL, dropped=(Dropped(D, EVIL),), run_id=EVIL)
    late = receipt(last_to_arrive=LateArrival(EVIL, 9.0))
    shown: list[Receipt | PeerStatus | TrainingStatus | Finish] = [
        lost,
        late,
        status(last_round=late),
        status(run_id=EVIL, leader=EVIL, looking=True),
        TrainingStatus(3, 1, 0.0, frozenset((A, EVIL)), False, lost, status()),
        Finish("ab", {EVIL: EVIL}, (EVIL,), lost),
    ]
    for one in shown:
        assert str(one).isprintable()
