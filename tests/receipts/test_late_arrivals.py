"""What `averaging explain` says of members that arrive late, by the parts that carry the meaning."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from averaging.receipts.explanation import describe, describe_late, last_to_arrive, merge
from averaging.receipts.receipt import Account, LateArrival, Receipt
from tests.receipts.made import A, B, C, D, receipt

LATE = LateArrival(D, 9.0)


def told(*given: Receipt) -> list[str]:
    return list(describe_late([one.receipts for one in merge(given)]))


def a_round(
    number: int,
    *tellers: str,
    late: LateArrival | None = LATE,
    rates: Sequence[float | None] = (50.0, 52.0, 48.0, 5.0),
    **changes: Any,
) -> list[Receipt]:
    """Receipts of a round of 10 s, for 9 of which the others waited for D."""
    accounts = tuple(Account(name, step_rate=rate) for name, rate in zip((A, B, C, D), rates, strict=True))
    changes = {"seconds": 10.0, "accounts": accounts, "last_to_arrive": late, **changes}
    return [receipt(teller, number, **changes) for teller in tellers]


def test_a_single_late_arrival_is_reported_without_a_hint() -> None:
    assert [line.split(":")[0] for line in told(*a_round(1, A), *a_round(2, A, late=None))] == ["last to arrive"]
    assert [line.split(":")[0] for line in told(*a_round(1, A))] == ["last to arrive"]
    many = [*a_round(1, A), *a_round(2, A), *(one for n in range(3, 6) for one in a_round(n, A, late=None))]
    assert [line.split(":")[0] for line in told(*many)] == ["last to arrive"]


def test_most_of_the_receipts_decide_who_came_last() -> None:
    other = LateArrival(B, 99.0)
    tell = [replace(receipt(name), last_to_arrive=late) for name, late in ((A, LATE), (B, LATE), (C, other), (D, None))]
    assert last_to_arrive(tell) == LATE
    assert last_to_arrive([receipt()]) is None
    stranger = replace(receipt(), last_to_arrive=LateArrival("stranger:1", 9.0))
    assert last_to_arrive([stranger]) is None
    assert f"{D} arrived 42 ms after the others" in describe(merge([receipt(last_to_arrive=LateArrival(D, 0.0421))])[0])
