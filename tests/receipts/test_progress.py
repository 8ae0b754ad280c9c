"""How fast a training goes, as the status of its peer says it."""

from __future__ import annotations

import pytest

from averaging.receipts.progress import MARKS, TrainingPace


def test_nothing_is_known_before_the_first_step() -> None:
    pace = TrainingPace(100.0)
    assert pace.per_second(200.0) == (None, None)
    assert (pace.steps, pace.samples) == (0, 0.0)


def test_steps_and_samples_per_second() -> None:
    pace = TrainingPace(100.0)
    for step in range(10):
        pace.count(32, 100.0 + 2 * (step + 1))
    assert pace.per_second(120.0) == (0.5, 16.0)
    assert pace.per_second(123.0) == (0.5, 16.0)  # in the midst of the next step
    assert (pace.steps, pace.samples) == (10, 320.0)


def test_samples_that_are_not_counted_have_no_rate() -> None:
    pace = TrainingPace(0.0)
    pace.count(0, 1.0)
    assert pace.per_second(1.0) == (1.0, None)


def test_a_training_that_has_stopped_becomes_slower_and_slower() -> None:
    pace = TrainingPace(0.0)
    for step in range(10):
        pace.count(1, step + 1.0)
    assert pace.per_second(20.0) == (0.5, 0.5)
    assert pace.per_second(100.0) == (0.1, 0.1)


def test_only_the_last_steps_count_and_memory_is_bounded() -> None:
    pace = TrainingPace(0.0)
    for step in range(10_000):
        pace.count(1, 0.01 * (step + 1))
    for step in range(10_000):
        pace.count(1, 100 + 0.02 * (step + 1))
    steps, samples = pace.per_second(300.0)
    assert steps == samples == pytest.approx(50.0)
    assert len(pace._marks) == MARKS
