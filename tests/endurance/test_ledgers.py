"""The checks find a violation that is planted, and none where there is none."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from averaging.receipts import Account, Dropped, Outcome, Receipt
from tests.endurance.judge import Judge, Recovery
from tests.endurance.ledgers import GroupLedger, Growth, MeanLedger, SampleLedger, fit, interval_of
from tests.endurance.plan import FaultKind, Strike
from tests.endurance.trainer import LIFE

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


def test_steps_in_which_each_sample_is_once_hold() -> None:
    run = Steps()
    run.step(GIVEN)
    run.step(NEXT, group=2, before="state 1")
    assert run.end() == []
    assert run.ledger.steps == 2
    assert run.ledger.samples == 24 + 16


def test_a_member_that_a_receipt_names_may_be_missing() -> None:
    run = Steps()
    run.step(GIVEN, dropped=["c:1"], lacking=["c:1"])
    assert run.end() == []


def test_a_member_may_be_named_by_a_receipt_of_a_round_that_failed() -> None:
    run = Steps()
    run.step(GIVEN, lacking=["c:1"], reporters=["a:1"])
    counts = {name: last - first + 1 for name, (first, last) in GIVEN.items()}
    run.ledger.note_round(receipt_of(counts, "b:1", dropped=["c:1"]), 0.0)
    assert run.end() == []


def test_samples_that_are_lost_are_found() -> None:
    run = Steps()
    run.step(GIVEN, lacking=["c:1"])
    assert any("of c:1, which gave 12 samples" in text for text in run.end())


def test_other_samples_than_those_given_are_found() -> None:
    run = Steps()
    run.step(GIVEN, claimed=GIVEN | {"b:1": (LIFE + 4, LIFE + 7)})
    assert any("of b:1, which gave 4 samples" in text for text in run.end())


def test_a_part_that_is_no_average_is_found() -> None:
    run = Steps()
    run.step(GIVEN, body=2.5)
    assert any("2.5 at a:1 is the average of no members" in text for text in run.end())


def test_samples_in_two_steps_of_one_history_are_found() -> None:
    run = Steps()
    run.step(GIVEN)
    run.step(NEXT | {"b:1": GIVEN["b:1"]}, group=2, before="state 1")
    assert any("of trainer 1 are in two steps" in text for text in run.end())


def test_samples_of_a_member_that_was_killed_before_it_reported_count_as_well() -> None:
    run = Steps()
    run.step(GIVEN, reporters=["a:1", "c:1"])
    run.step(NEXT | {"b:1": GIVEN["b:1"]}, group=2, before="state 1", reporters=["a:1", "c:1"])
    assert any("of trainer 1 are in two steps" in text for text in run.end())


def test_samples_in_two_histories_are_no_violation() -> None:
    """The peer was in a group that others did not follow, and trained them again in the history that counts."""
    run = Steps()
    run.step(GIVEN)
    run.step(NEXT | {"b:1": GIVEN["b:1"]}, group=2)
    assert run.end() == []


def test_a_step_made_alone_holds_the_own_samples() -> None:
    run = Steps()
    report = {"first": 10, "last": 13, "before": "start", "after": "alone"}
    rows = [[1.0, 11.5], [0.0, 0.0], [0.0, 0.0]]
    assert list(run.ledger.note("a:1", 0, report | {"copies": [rows]}, None, 0.0)) == []
    wrong = list(run.ledger.note("a:1", 0, report | {"copies": [rows[::-1]], "after": "again"}, None, 0.0))
    assert "made a step alone" in wrong[0]


def test_samples_are_read_from_an_average() -> None:
    numbers = range(LIFE + 40, LIFE + 44)
    assert interval_of([4 / 24, sum(numbers) / 24], 4, [12, 24], None) == (LIFE + 40, LIFE + 43)
    assert interval_of([4 / 24, sum(numbers) / 24], 8, [24], None) is None


def means(held: Sequence[float], *, dropped: Sequence[str] = (), kept_local: int = 0) -> list[str]:
    ledger = MeanLedger()
    values = {"a:1": 1.0, "b:1": 5.0, "c:1": 9.0}
    for name, value in values.items():
        ledger.before(name, value)
    samples = dict.fromkeys(values, 1)
    ledger.note_round(receipt_of(samples, "a:1", dropped=dropped, kept_local=kept_local))
    found = list(ledger.after("a:1", (bytes([1]) * 20).hex(), held, 0.0))
    return found + list(ledger.settle(math.inf))


def test_means_of_members_hold() -> None:
    assert means([5.0]) == []
    assert means([5.0, 3.0], dropped=["c:1"]) == []
    assert means([5.0, 1.0], kept_local=10) == []


def test_what_is_no_mean_is_found() -> None:
    assert "which is no average" in means([4.0])[0]
    assert "which is no average" in means([5.0, 3.0])[0]
    assert "which is no average" in means([5.0, 1.0])[0]


def test_groups_are_trained_once() -> None:
    ledger = GroupLedger()
    ledger.acknowledged(1, 0.0)
    ledger.acknowledged(2, 1.0)
    assert list(ledger.batch(1, [1])) == []
    assert list(ledger.batch(1, [1])) == []  # the trainer was restarted before it had saved the step
    assert ledger.waiting(11.0) == [10.0]
    assert "is trained in step 1 and in step 2" in next(iter(ledger.batch(2, [1, 2])))
    assert "had [1] before" in next(iter(ledger.batch(1, [3])))


def test_what_grows_is_found_and_what_swings_is_not() -> None:
    rng = random.Random(1)
    growth, level = Growth(), Growth()
    found: list[str] = []
    swinging: list[str] = []
    for age in range(0, 1800, 5):
        noise = rng.gauss(0, 5 << 20)
        found += growth.note("p", age, {"memory": (200 << 20) + noise + age * 40_000, "descriptors": 30.0})
        swinging += level.note("p", age, {"memory": (200 << 20) + noise, "descriptors": 30.0 + age % 7})
    assert len(found) == 1
    assert "the memory of p grew" in found[0]
    assert swinging == []
    assert set(level.fits["p"]) == {"memory", "descriptors"}


def test_a_line_is_fitted() -> None:
    line = fit([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
    assert (line.slope, line.grown, line.level) == (2.0, 4.0, 3.0)
    assert line.error == pytest.approx(0.0)


def recovered(seconds: float, *, second: float | None = None) -> Recovery:
    recovery = Recovery(lambda _: 2.0)
    for moment in range(5):
        for peer in ("a", "b"):
            recovery.round("run", peer, 0.5, float(moment))
    recovery.strike(Strike(1, 4.5, FaultKind.KILL, "c"), "run", {"a", "b"}, 4.5)
    recovery.round("run", "a", 1.0, 5.0)  # it had begun before the fault
    if second is not None:
        recovery.strike(Strike(2, second, FaultKind.KILL, "d"), "run", {"a", "b"}, second)
    for peer in ("a", "b"):
        recovery.round("run", peer, 0.1, 4.5 + seconds)
    return recovery


def test_a_recovery_within_two_usual_rounds_and_a_deadline_holds() -> None:
    recovery = recovered(3.9)
    assert list(recovery.tick(20.0, 0.0)) == []
    assert [round(one.seconds, 3) for one in recovery.done] == [3.9]
    assert [round(one.bound, 3) for one in recovery.done] == [4.0]


def test_a_recovery_that_takes_longer_is_found_unless_another_fault_came() -> None:
    assert "needed 4.2 s" in next(iter(recovered(4.2).tick(20.0, 0.0)))
    assert list(recovered(4.2).tick(20.0, late=0.5)) == []  # the machine itself stood still for so long
    assert list(recovered(4.2, second=5.0).tick(20.0, 0.0)) == []


def test_the_end_of_a_fault_is_a_fault_of_its_own() -> None:
    recovery = Recovery(lambda _: 2.0)
    first, second, third = (Strike(number, 0.0, FaultKind.ADDRESS, "c", 5.0) for number in range(3))
    recovery.strike(first, "run", {"a"}, 0.0)
    recovery.round("run", "a", 0.1, 1.0)
    assert list(recovery.tick(1.0, 0.0)) == []
    recovery.heal(first, "run", 5.0)
    recovery.strike(second, "run", {"a"}, 6.0)  # not judged
    recovery.round("run", "a", 0.1, 12.0)
    assert list(recovery.tick(12.0, 0.0)) == []
    recovery.strike(third, "run", {"a"}, 12.5)
    recovery.heal(third, "run", 17.5)
    recovery.round("run", "a", 0.1, 18.0)
    assert "needed 5.5 s" in next(iter(recovery.tick(18.0, 0.0)))
    assert [one.mixed for one in recovery.done] == [False, True, False]


def test_a_peer_that_never_averages_again_is_found() -> None:
    recovery = Recovery(lambda _: 2.0)
    recovery.strike(Strike(1, 0.0, FaultKind.KILL, "c"), "run", {"a", "b"}, 0.0)
    recovery.round("run", "a", 0.1, 1.0)
    assert list(recovery.tick(100.0, 0.0)) == []
    assert "b of run have no fault and have finished no round" in next(iter(recovery.tick(200.0, 0.0)))


def test_versions_with_two_contents_and_versions_that_go_back_are_found() -> None:
    judge = Judge(Recovery(lambda _: 2.0))
    for who, version, digest in (("f0", 4, "x"), ("f1", 4, "x"), ("f0", 5, "y"), ("f1", 5, "z"), ("f0", 3, "w")):
        event = {"event": "version", "version": version, "digest": digest}
        judge.take("weights", who, 0, 1, 0, event, 0.0)
    assert len(judge.violations) == 2
    assert "weights 5 is z at f1, but y at f0" in judge.violations[0]
    assert "went back from 5 to 3" in judge.violations[1]
