"""What `averaging explain` says of members that arrive late, by the parts that carry the meaning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

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


def rounds(count: int, *tellers: str, **changes: Any) -> list[Receipt]:
    return [one for number in range(count) for one in a_round(number, *tellers, **changes)]


def test_a_member_that_is_regularly_last_is_named_with_what_that_costs_and_its_step_rate() -> None:
    first, second, third = told(*rounds(4, A, B, C))
    assert first.startswith(f"last to arrive: {D} in 4 of 4 rounds")
    assert "9.00 s after the others" in first
    assert "total 36.0 s" in first
    assert second.startswith("step rate: ")
    assert f"{D} 5 steps/s" in second
    assert "others 50 steps/s" in second
    assert third.startswith("hint: ")
    assert D in third


def remedy(strategy: str, **changes: Any) -> str:
    return told(*rounds(3, A, strategy=strategy, **changes))[-1]


def test_the_remedy_fits_the_strategy() -> None:
    local, diloco, gradients, own = map(remedy, ("LocalSGD", "DiLoCo", "GradientAveraging", ""))
    for text in (local, diloco, own):
        assert "fewer local steps" in text
        assert "GradientAveraging" in text
    assert "group_size" in local
    assert "group_size" not in diloco  # who is in another group has no part in a step
    assert "target_batch_size" in gradients
    assert "sync_every" not in gradients
    assert "samples/s" in told(*rounds(3, A, strategy="GradientAveraging"))[1]


def test_whoever_steps_as_fast_as_the_others_is_late_for_another_reason() -> None:
    text = remedy("", rates=(50.0, 52.0, 48.0, 47.0))
    assert "as fast as" in text
    assert "fewer local steps" not in text


LAST, HINT = "last to arrive", "hint"


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (a_round(1, A), [LAST]),
        ([*a_round(1, A), *a_round(2, A, late=None)], [LAST]),
        ([*rounds(2, A), *(one for n in range(3, 6) for one in a_round(n, A, late=None))], [LAST]),
        (rounds(3, A, rates=(None,) * 4), [LAST, HINT]),
        (rounds(3, A, rates=(50.0, 50.0, 50.0, None)), [LAST, HINT]),
        (rounds(3, A, rates=(None, None, None, 5.0)), [LAST, HINT]),
    ],
)
def test_a_remedy_is_for_who_is_late_regularly_also_without_step_rates(given: list[Receipt], lines: list[str]) -> None:
    assert [line.split(":")[0] for line in told(*given)] == lines


def test_rounds_without_that_member_do_not_count() -> None:
    without = [receipt(A, number, members=(A, B, C)) for number in range(10, 30)]
    lines = told(*rounds(3, A), *without)
    assert f"{D} in 3 of 3 rounds" in lines[0]
    assert lines[-1].startswith("hint: ")


def test_nobody_stands_out() -> None:
    assert told(*rounds(3, A, B, C, D, late=None, rates=(50.0, 50.0, 50.0, 50.0))) == [
        "last to arrive: no peer regularly"
    ]
    assert told() == ["last to arrive: no peer regularly"]


def test_most_of_the_receipts_decide_who_came_last() -> None:
    other = LateArrival(B, 99.0)
    tell = [replace(receipt(name), last_to_arrive=late) for name, late in ((A, LATE), (B, LATE), (C, other), (D, None))]
    assert last_to_arrive(tell) == LATE
    assert last_to_arrive([receipt()]) is None
    stranger = replace(receipt(), last_to_arrive=LateArrival("stranger:1", 9.0))
    assert last_to_arrive([stranger]) is None
    assert f"{D} arrived 42 ms after the others" in describe(merge([receipt(last_to_arrive=LateArrival(D, 0.0421))])[0])
