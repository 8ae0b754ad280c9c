"""When it is a peer's turn."""

from __future__ import annotations

from averaging.strategies.averaging_schedule import AveragingSchedule
from averaging.strategies.model_fragment import cut


def steps(turns: AveragingSchedule, count: int, seconds: float, now: float = 0.0) -> float:
    for _ in range(count):
        now += seconds
        turns.count(now)
    return now


def test_a_turn_comes_every_so_many_steps() -> None:
    turns = AveragingSchedule(3)
    due = []
    for step in range(1, 10):
        turns.count(float(step))
        due.append(turns.is_due(float(step), None))
        if due[-1]:
            turns.taken()
    assert due == [False, False, True] * 3


def test_a_peer_comes_early_if_the_others_would_be_gone() -> None:
    turns = AveragingSchedule(10)
    now = steps(turns, 4, 1.0)  # six more take six seconds, and then it looks for a group
    assert turns.is_due(now, now + 5.0)
    assert not turns.is_due(now, now + 10.0)
    assert not turns.is_due(now, None)
    assert not turns.is_due(now, now - 1.0)  # they are gone already


def test_steps_that_become_slower_count_as_slower() -> None:
    turns = AveragingSchedule(10)
    now = steps(turns, 2, 3.0, steps(turns, 4, 1.0))
    assert turns.is_due(now, now + 8.0)
    assert not turns.is_due(now, now + 9.0)


def test_a_peer_that_has_made_no_step_has_nothing_to_bring() -> None:
    turns = AveragingSchedule(10)
    steps(turns, 5, 1.0)
    turns.taken()
    assert not turns.is_due(6.0, 7.0)


def test_the_time_of_a_round_is_no_steps_time() -> None:
    turns = AveragingSchedule(10)
    now = steps(turns, 5, 1.0)
    turns.taken()
    now = steps(turns, 5, 1.0, now + 1000.0)
    assert not turns.is_due(now, now + 10.0)


def test_fragments_are_about_equal_and_none_is_empty() -> None:
    assert cut({"a": 10, "b": 10, "c": 10, "d": 10}, 2) == [["a", "b"], ["c", "d"]]
    assert cut({"a": 1, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert cut({"a": 100, "b": 1, "c": 1}, 3) == [["a"], ["b"], ["c"]]
    assert cut({"a": 1, "b": 1, "c": 100}, 2) == [["a", "b", "c"][:2], ["c"]]
    assert cut({"a": 5}, 1) == [["a"]]
