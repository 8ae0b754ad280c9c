"""The sums over all rounds of a peer: what each receipt adds, and that nothing falls."""

from functools import reduce

import pytest
from hypothesis import given, strategies as st

from averaging.receipts import (
    UNKNOWN_LANE,
    Account,
    DropCode,
    Outcome,
    Receipt,
    ReceiptBook,
    Straggler,
    Totals,
    waited_in,
)
from tests.receipts.made import SILENT, A, B, receipt, receipts


def test_every_round_adds_to_the_totals_of_its_book() -> None:
    book = ReceiptBook()
    accounts = (
        Account(A),
        Account(B, lane="direct", bytes_sent=10, bytes_received=20),
        Account("c:1", lane="grpc", bytes_sent=1, bytes_received=2),
        Account("d:1", mode="client", bytes_received=5),
    )
    averaged = receipt(A, accounts=accounts, dropped=(SILENT,), seconds=3.0, phases={"looking": 1.0, "allreduce": 2.0})
    book.keep(averaged)
    book.keep(averaged)
    book.keep(Receipt(3, Outcome.NO_GROUP, seconds=4.0, phases={"looking": 4.0}))
    assert book.totals.rounds == {Outcome.AVERAGED: 2, Outcome.NO_GROUP: 1}
    assert book.totals.bytes_sent == {"direct": 20, "grpc": 2}
    assert book.totals.bytes_received == {"direct": 40, "grpc": 4, UNKNOWN_LANE: 10}
    assert book.totals.phase_seconds == {"looking": 6.0, "allreduce": 4.0}
    assert book.totals.dropped == {DropCode.SILENT: 2}
    assert book.totals.seconds == pytest.approx(10.0)


def test_waiting_is_the_search_and_the_straggler() -> None:
    straggler = Straggler(B, 0.5, "parts")
    assert waited_in(Receipt(1, Outcome.AVERAGED, seconds=3.0, phases={"looking": 1.0}, straggler=straggler)) == 1.5
    assert waited_in(Receipt(1, Outcome.AVERAGED, seconds=3.0, phases={"allreduce": 3.0})) == 0.0


@given(st.lists(receipts, max_size=5))
def test_nothing_falls(rounds: list[Receipt]) -> None:
    before = reduce(Totals.plus, rounds, Totals())
    for after in (before.plus(one) for one in rounds):
        assert sum(after.rounds.values()) == len(rounds) + 1
        for name in ("rounds", "bytes_sent", "bytes_received", "dropped"):
            old, new = getattr(before, name), getattr(after, name)
            assert all(new[key] >= value for key, value in old.items())
