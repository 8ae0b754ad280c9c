"""What people read of receipts and of a status: short as text, all of it in repr."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from averaging.common.safe_msgpack import duration
from averaging.receipts.receipt import Dropped, LateArrival, Outcome, Receipt
from averaging.receipts.status import Finish, PeerStatus, TrainingStatus
from tests.receipts.made import A, B, C, D, receipt
from tests.support.grpc_fakes import STATUS

EVIL = "\x1b[2J<script>\n"


def status(**changes: Any) -> PeerStatus:
    idle: dict[str, Any] = {"members": (), "looking": False, "leader": "", "training": None, "last_round": None}
    of_run = {"endpoint": A, "run_id": "demo", "rounds": 17, "state_version": 18, "known_peers": 4}
    return replace(STATUS, **{**idle, **of_run, **changes})


def test_units_fit_the_numbers() -> None:
    texts = {0.0: "0 ms", 0.00042: "0.4 ms", 0.0123: "12 ms", 0.534: "0.53 s", 12.14: "12.1 s", 840.0: "14 min"}
    assert {seconds: duration(seconds) for seconds in (*texts, 11600.0)} == texts | {11600.0: "3.2 h"}
    small = receipt(seconds=0.012, allreduce_seconds=0.004, bytes_sent=1, bytes_received=3 << 10)
    assert str(small) == "round 17: averaged with 3 others in 12 ms (all-reduce 4 ms, 1 byte out, 3.0 KiB in)"


def test_a_receipt_and_both_kinds_of_status_say_who_came_late() -> None:
    late = receipt(last_to_arrive=LateArrival(D, 0.912))
    told = f"{D} arrived 0.91 s after the others"
    assert str(late).endswith(told)
    assert f"{told} in round 17" in str(status(last_round=late))
    assert str(TrainingStatus(3, None, 0.0, frozenset((A, D)), False, late, status())).endswith(told)
    failed = replace(late, outcome=Outcome.FAILED, reason="all others were lost")
    assert "all others were lost" in str(failed)


def test_a_status_is_one_short_line() -> None:
    assert str(status()) == f"{A} of run demo: idle; 17 rounds averaged, state version 18, 3 other peers known"
    assert "averaging with 2 others" in str(status(members=(A, B, C)))
    assert f"looking for a group, following {B}" in str(status(looking=True, leader=B))
    trains = TrainingStatus(1200, 40, 12.0, frozenset((A, B)), False, receipt(), status())
    told = (
        "step 1200 (global step 40, 12 gathered for the next), with 1 other; round 17: averaged with 3 others in 2.50 s"
    )
    assert str(trains).startswith(told)
    assert str(TrainingStatus(3, None, 0.0, frozenset((A,)), True, None, status())) == "step 3, alone; no round yet"


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
