"""The options of a quorum, the grace period, and the weight of what comes late."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from averaging import DiLoCo, LocalSGD, Strategy
from averaging.errors import ConfigError
from averaging.strategies.schedule import (
    FIRST_GRACE,
    LEAST_DISCOUNT,
    LEAST_GRACE,
    PATIENCE,
    TRANSITIONS,
    Attendance,
    QuorumOptions,
    RoundEvent,
    Standstill,
    Timeliness,
    quorum_options,
)
from averaging.training.history import History, Origin, Own, Progress, compare_progress
from tests.support.training import SGD, Start


@pytest.mark.parametrize("strategy", [partial(DiLoCo, 10), partial(LocalSGD, 10)])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"quorum": 1}, "quorum must be a whole number of peers, at least 2 with this one, or a share"),
        ({"quorum": 1.5}, "quorum must be"),
        ({"quorum": True}, "quorum must be"),
        ({"grace": "10s"}, "grace is an option of rounds with a quorum; set quorum too, or leave grace out"),
        ({"staleness_discount": 0.9}, "staleness_discount is an option of rounds with a quorum"),
        ({"quorum": 2, "grace": "10"}, "grace: '10' is no time"),
        ({"quorum": 2, "grace": "2h"}, "grace, the longest time for which a round waits"),
        ({"quorum": 2, "staleness_discount": 1.1}, "staleness_discount must be above 0 and at most 1, not 1.1"),
    ],
)
def test_options_that_are_refused(strategy: Callable[..., Strategy], options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        strategy(**options)


def test_local_sgd_with_a_quorum_averages_changes() -> None:
    assert repr(LocalSGD(10, quorum=2, overlap=False, statistics=False)) == repr(LocalSGD.of_changes(10, quorum=2))
    with pytest.raises(ConfigError, match=r"overlap does not go with LocalSGD.of_changes; use DiLoCo"):
        LocalSGD(10, quorum=2, overlap=True)


@pytest.mark.parametrize("strategy", [partial(DiLoCo, 10), partial(LocalSGD, 10)])
def test_a_quorum_for_which_a_group_has_no_room_is_an_error_at_the_start(
    start: Start, strategy: Callable[..., Strategy]
) -> None:
    with pytest.raises(ConfigError, match="quorum=5 is more than group_size=4, so no round could ever begin"):
        start().add(strategy(quorum=5), SGD, group_size=4)


@pytest.mark.parametrize(("training", "count"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3), (10, 5)])
def test_a_share_is_one_of_the_peers_that_are_training(training: int, count: int) -> None:
    options = quorum_options(0.5, None, None)
    assert options is not None
    assert options.count(training) == count


def test_the_weight_falls_with_the_age_and_never_vanishes() -> None:
    options = quorum_options(2, None, 0.9)
    assert options is not None
    factors = [options.weight_factor(age) for age in range(200)]
    assert factors[:3] == [1.0, 0.9, pytest.approx(0.81)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == LEAST_DISCOUNT


def test_the_grace_period_is_a_share_of_the_time_between_rounds_within_its_bounds() -> None:
    for interval, bound, grace in [(1.0, 10.0, LEAST_GRACE), (60.0, 10.0, 1.2), (3600.0, 10.0, 10.0), (60.0, 0.5, 0.5)]:
        options = QuorumOptions(2, bound)
        assert options.grace == min(bound, FIRST_GRACE)
        for number in (1, 2, 3, 5):  # one round has failed
            options.note(interval * number)
        assert options.interval == interval
        assert options.grace == pytest.approx(grace)


IN_TIME, LATE, REBASED = Timeliness.IN_TIME, Timeliness.LATE, Timeliness.REBASED

AFTER = {  # after an event: of a peer that was in time, late, rebased
    RoundEvent.MISSED: (LATE, LATE, REBASED),
    RoundEvent.LEVEL: (IN_TIME, IN_TIME, REBASED),
    RoundEvent.REBASED: (REBASED, REBASED, REBASED),
    RoundEvent.TOOK_OVER: (IN_TIME, IN_TIME, IN_TIME),
    RoundEvent.INCLUDED: (IN_TIME, LATE, LATE),
    RoundEvent.AVERAGED: (IN_TIME, IN_TIME, IN_TIME),
    RoundEvent.UNMET: (IN_TIME, LATE, IN_TIME),
}


@pytest.mark.parametrize("event", RoundEvent)
@pytest.mark.parametrize("before", Timeliness)
def test_the_timeliness_of_a_peer_after_each_event(before: Timeliness, event: RoundEvent) -> None:
    assert Attendance(before).after(event).timeliness is AFTER[event][list(Timeliness).index(before)]
    assert TRANSITIONS[event].get(before) is not before, "it stays without being listed"


def test_a_round_that_fails_is_repeated_once_and_then_with_the_next_that_is_due() -> None:
    first = Attendance().after_failure()
    assert first.owed
    begun = Attendance(repeats=first.repeats)
    assert not begun.after_failure().owed
    assert begun.after_failure().after_failure().owed
    assert begun.after(RoundEvent.AVERAGED).after_failure().owed
    assert Attendance(owed=True, repeats=True).after_failure().owed  # one of its own is due meanwhile


def test_a_standstill_is_long_after_two_rounds_of_steps_and_of_seconds() -> None:
    standstill = Standstill(7, 30, 100.0)
    for number in range(1, 50):
        assert standstill.is_long(30 + number, 100.0 + number, 10, 0.0) is (number > 10 * PATIENCE)
        assert standstill.is_long(30 + number, 100.0 + number, 0, 15.0) is (number > 15 * PATIENCE)


@pytest.mark.parametrize(("quorum", "ahead"), [(0, False), (2, True), (3, False)])
def test_the_step_of_a_quorum_is_followed_by_those_that_missed_it(quorum: int, ahead: bool) -> None:
    """Two of five make a step; the three others, which are more, do not stand against it."""
    before = History(origin=Origin(id="run")).after(b"first", 1.0)
    after = before.after(b"second", 1.0)
    seen = {name: Progress(after if name in "ab" else before).pack() for name in "abcd"}
    assert bool(compare_progress(Own(before, quorum=quorum), seen).ahead) is ahead


def test_a_history_of_another_branch_is_not_followed_because_of_a_quorum() -> None:
    first = History(origin=Origin(id="run")).after(b"first", 1.0)
    own = Own(first.after(b"second", 1.0), quorum=2)
    branch = first.after(b"other", 1.0).after(b"third", 1.0)
    seen = {name: Progress(branch if name in "ab" else own.history).pack() for name in "abcd"}
    assert not compare_progress(own, seen).ahead
