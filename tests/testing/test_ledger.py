"""The checks of runs under failures, in tests/support/ledger.py, find what they are for."""

from typing import Any

import pytest

from averaging.receipts import Account, Outcome, Receipt
from tests.support.ledger import Ledger, LedgerError, Step, check_recovery

A, B = "10.0.0.1:5001", "10.0.0.2:5001"


def receipt(number: int = 1, **changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "outcome": Outcome.AVERAGED,
        "group_id": b"g" * 20,
        "members": (A, B),
        "accounts": (Account(A, weight=4.0), Account(B, weight=8.0)),
        "gathered": {A: {"samples": 4}, B: {"samples": 8}},
        "digest": "d",
        "topic": "gradients/0-x",
        "state_version": number,
    }
    return Receipt(number, **values | changes)


def made(pending: float, step: int, version: str, *receipts: Receipt, batch: int = 4) -> Step:
    return Step(batch, pending, step, version, receipts)


def test_two_members_that_agree_are_sound() -> None:
    ledger = Ledger()
    for peer, batch in ((A, 4), (B, 8)):
        ledger.begins(peer, 1, 0, "0-x")
        ledger.step(peer, 1, made(0, 1, "1-y", receipt(), batch=batch))
        ledger.parameters("1-y", (1.0, 2.0), peer)
        ledger.average(receipt(), (1.0,), peer)
    ledger.ends([(A, 1), (B, 1)])
    assert (ledger.rounds, len(ledger.groups), ledger.samples.averaged, ledger.samples.trained) == (2, 1, 12, 12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "e"}, "average of group 67676767 is e at"),
        ({"members": (B, A)}, "members of group"),
        ({"state": "s"}, "state in group"),
        ({"accounts": (Account(A, weight=4.0, digest="1"),)}, "shard average of group 67676767 10.0.0.1:5001"),
        ({"accounts": (Account(B, weight=7.0),)}, "weight in group"),
        ({"gathered": {A: {"samples": 3}}}, "samples in group"),
        ({"group_id": b""}, "averaged in group"),
        ({"outcome": Outcome.FAILED}, "without a reason"),
    ],
)
def test_members_of_a_group_that_contradict_each_other_are_found(changes: dict[str, Any], words: str) -> None:
    ledger = Ledger()
    first = receipt(state="r", accounts=(Account(A, weight=4.0, digest="0"), Account(B, weight=8.0)))
    ledger.receipt(A, 1, first)
    with pytest.raises(LedgerError, match=words):
        ledger.receipt(B, 1, receipt(**changes))


def test_no_version_has_two_contents() -> None:
    ledger = Ledger()
    ledger.parameters("3-abc", (1.0,), A)
    ledger.parameters("4-def", (2.0,), A)
    with pytest.raises(LedgerError, match=r"parameters of version 3-abc is \(2.0,\) at .*, but \(1.0,\) at"):
        ledger.parameters("3-abc", (2.0,), B)
    ledger.content("weights", 7, "d1", "a follower")
    with pytest.raises(LedgerError, match="weights 7"):
        ledger.content("weights", 7, "d2", "another one")


def test_who_agrees_holds_the_same() -> None:
    ledger = Ledger()
    ledger.average(receipt(), (1.0,), A)
    ledger.average(receipt(kept_local=1), (3.0,), B)
    with pytest.raises(LedgerError, match="result of group"):
        ledger.average(receipt(), (3.0,), B)


def test_versions_and_rounds_never_go_back_in_one_life() -> None:
    ledger = Ledger()
    ledger.receipt(A, 1, receipt(5))
    ledger.receipt(A, 2, receipt(1))
    with pytest.raises(LedgerError, match="comes after round 5"):
        ledger.receipt(A, 1, receipt(5))
    with pytest.raises(LedgerError, match="state version of .* went back from 5 to 4"):
        ledger.receipt(A, 1, receipt(6, state_version=4))
    ledger.begins(B, 1, 6, "6-x")
    ledger.step(B, 1, made(0, 7, "7-x"))
    ledger.step(B, 1, made(0, 6, "6-y"))  # more members stand behind it
    with pytest.raises(LedgerError, match="went back from 6-y to 6-x, which it had left"):
        ledger.step(B, 1, made(0, 6, "6-x"))


def test_samples_that_are_lost_or_would_count_twice_are_found() -> None:
    ledger = Ledger()
    ledger.begins(A, 1, 0, "0-x")
    ledger.step(A, 1, made(4, 0, "0-x"))
    for lost in (0, 4, 12):
        with pytest.raises(LedgerError, match="samples in version 0-x after 8"):
            ledger.step(A, 1, made(lost, 0, "0-x"))
    with pytest.raises(LedgerError, match="they would count twice"):
        ledger.step(A, 1, made(8, 1, "1-y"))
    with pytest.raises(LedgerError, match="put 4 samples into its round, of 8 that it had gathered"):
        ledger.step(A, 1, made(0, 1, "1-y", receipt(1)))
    eight = {"gathered": {A: {"samples": 8}}}
    with pytest.raises(LedgerError, match="made no step"):
        ledger.step(A, 1, made(8, 0, "0-x", receipt(2, group_id=b"h" * 20, **eight)))
    with pytest.raises(LedgerError, match="in 2 rounds"):
        ledger.step(A, 1, made(0, 1, "1-z", *(receipt(n, group_id=bytes([n]), **eight) for n in (3, 4))))


def test_recovery_has_a_limit() -> None:
    check_recovery("a kill", 1.3, 0.15, 1.0)
    with pytest.raises(LedgerError, match="after a kill it took 1.31 s"):
        check_recovery("a kill", 1.31, 0.15, 1.0)
