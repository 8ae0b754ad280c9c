"""Faults are drawn by a seed; the checks find a violation that is planted, and none where there is none."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from averaging.receipts import Account, Dropped, Outcome, Receipt
from tests.endurance.ledgers import GroupLedger, MeanLedger, SampleLedger

LIFE = 1_000_000

NAMES = ("a:1", "b:1", "c:1")


def receipt_of(
    samples: Mapping[str, int], endpoint: str, *, group: int = 1, dropped: Iterable[str] = (), kept_local: int = 0
) -> Receipt:
    return Receipt(
        1,
        Outcome.AVERAGED,
        group_id=bytes([group]) * 20,
        members=tuple(samples),
        accounts=tuple(Account(name) for name in samples),
        dropped=tuple(Dropped(name, "it is gone") for name in dropped),
        gathered={name: {"samples": count} for name, count in samples.items()},
        endpoint=endpoint,
        kept_local=kept_local,
    )


class Steps:
    """A run of three trainers, whose averages are computed as they should be unless something is planted."""

    def __init__(self) -> None:
        self.ledger = SampleLedger()
        for slot, name in enumerate(NAMES):
            self.ledger.know(name, slot)
        self.found: list[str] = []

    def step(
        self,
        given: Mapping[str, tuple[int, int]],
        *,
        group: int = 1,
        before: str = "start",
        dropped: Sequence[str] = (),
        lacking: Sequence[str] = (),
        claimed: Mapping[str, tuple[int, int]] | None = None,
        body: float | None = None,
        reporters: Sequence[str] | None = None,
    ) -> None:
        """Notes a step, in which `lacking` are not averaged, and the averages are those of `given`."""
        counts = {name: last - first + 1 for name, (first, last) in given.items()}
        total = sum(count for name, count in counts.items() if name not in lacking)
        rows = [[0.0, 0.0] for _ in NAMES]
        factor = 0.0
        for name, (first, last) in given.items():
            if name not in lacking:
                slot = NAMES.index(name)
                rows[slot] = [counts[name] / total, sum(range(first, last + 1)) / total]
                factor += (slot + 1) * counts[name] / total
        claimed = claimed or given
        said = {name: last - first + 1 for name, (first, last) in claimed.items()}
        for name in reporters or given:
            first, last = claimed[name]
            report: dict[str, Any] = {"first": first, "last": last, "before": before, "after": f"state {group}"}
            report |= {"copies": [rows, rows], "body": [factor if body is None else body]}
            receipt = receipt_of(said, name, group=group, dropped=dropped)
            self.found += self.ledger.note(name, NAMES.index(name), report, receipt, 0.0)

    def end(self) -> list[str]:
        self.found += self.ledger.settle(math.inf)
        return self.found


GIVEN = {"a:1": (LIFE, LIFE + 7), "b:1": (LIFE, LIFE + 3), "c:1": (3 * LIFE, 3 * LIFE + 11)}
NEXT = {"a:1": (LIFE + 8, LIFE + 11), "b:1": (LIFE + 4, LIFE + 11), "c:1": (3 * LIFE + 12, 3 * LIFE + 15)}
AGAIN = NEXT | {"b:1": GIVEN["b:1"]}


def test_steps_in_which_each_sample_is_once_hold() -> None:
    run = Steps()
    run.step(GIVEN)
    run.step(NEXT, group=2, before="state 1")
    assert run.end() == []
    assert (run.ledger.steps, run.ledger.samples) == (2, 24 + 16)


def test_a_member_that_a_receipt_names_may_be_missing_also_one_of_a_round_that_failed() -> None:
    run = Steps()
    run.step(GIVEN, dropped=["c:1"], lacking=["c:1"])
    assert run.end() == []
    run = Steps()
    run.step(GIVEN, lacking=["c:1"], reporters=["a:1"])
    counts = {name: last - first + 1 for name, (first, last) in GIVEN.items()}
    run.ledger.note_round(receipt_of(counts, "b:1", dropped=["c:1"]), 0.0)
    assert run.end() == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ({"lacking": ["c:1"]}, "of c:1, which gave 12 samples"),
        ({"claimed": GIVEN | {"b:1": (LIFE + 4, LIFE + 7)}}, "of b:1, which gave 4 samples"),
        ({"body": 2.5}, "2.5 at a:1 is the average of no members"),
    ],
)
def test_samples_that_are_lost_or_not_those_given_are_found(planted: dict[str, Any], found: str) -> None:
    run = Steps()
    run.step(GIVEN, **planted)
    assert any(found in text for text in run.end())


@pytest.mark.parametrize("reporters", [None, ["a:1", "c:1"]])
def test_samples_in_two_steps_of_one_history_are_found(reporters: Sequence[str] | None) -> None:
    """Also those of a member that was killed before it reported."""
    run = Steps()
    run.step(GIVEN, reporters=reporters)
    run.step(AGAIN, group=2, before="state 1", reporters=reporters)
    assert any("of trainer 1 are in two steps" in text for text in run.end())


@pytest.mark.parametrize(
    ("held", "dropped", "kept_local", "holds"),
    [
        ([5.0], [], 0, True),
        ([5.0, 3.0], ["c:1"], 0, True),
        ([5.0, 1.0], [], 10, True),
        ([4.0], [], 0, False),
        ([5.0, 3.0], [], 0, False),
        ([5.0, 1.0], [], 0, False),
    ],
)
def test_what_is_no_mean_of_members_is_found(
    held: list[float], dropped: list[str], kept_local: int, holds: bool
) -> None:
    ledger = MeanLedger()
    values = {"a:1": 1.0, "b:1": 5.0, "c:1": 9.0}
    for name, value in values.items():
        ledger.before(name, value)
    samples = dict.fromkeys(values, 1)
    ledger.note_round(receipt_of(samples, "a:1", dropped=dropped, kept_local=kept_local))
    found = list(ledger.after("a:1", (bytes([1]) * 20).hex(), held, 0.0)) + list(ledger.settle(math.inf))
    assert found == [] if holds else "which is no average" in found[0]


def test_groups_are_trained_once() -> None:
    ledger = GroupLedger()
    ledger.acknowledged(1, 0.0)
    ledger.acknowledged(2, 1.0)
    assert list(ledger.batch(1, [1])) == []
    assert list(ledger.batch(1, [1])) == []  # the trainer was restarted before it had saved the step
    assert ledger.waiting(11.0) == [10.0]
    assert "is trained in step 1 and in step 2" in next(iter(ledger.batch(2, [1, 2])))
    assert "had [1] before" in next(iter(ledger.batch(1, [3])))
