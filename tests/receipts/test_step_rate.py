"""How fast a training goes: what its status says, what is measured of a peer's own work, what others are believed."""

import math
import struct
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import msgpack

from averaging.receipts.progress import TrainingPace
from averaging.receipts.status import INDEX, MAX_RATE, MIN_RATE, check_rate, rate_in
from averaging.training.counts import REMEMBERED, Pace
from averaging.training.history import History, Progress

NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, 0.0, -1.0, 2 * MAX_RATE, MIN_RATE / 2, 2**64 - 1, -(2**63)]
HOSTILE = [*NUMBERS, None, True, "50", b"50", [50.0], {}]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def step(pace: Pace, clock: Clock, script: float, waits: float = 0.0, units: int = 1) -> None:
    """A step of training, which begins now."""
    clock.now += script / 2
    with pace.measured():
        with pace.working():
            clock.now += script / 2
        pace.count(units)
        clock.now += waits


def test_a_pause_between_two_steps_changes_nothing_and_a_new_speed_does() -> None:
    clock = Clock()
    pace = Pace(clock)
    for script in (0.1, 0.1, 90.0, 0.1):
        step(pace, clock, script, waits=7.0)
    assert pace.per_second == 10.0
    for _ in range(REMEMBERED):
        step(pace, clock, script=1.0)
    assert pace.per_second == 1.0


@given(st.lists(st.tuples(st.floats(0, 1e12), st.integers(0, 10**9)), max_size=5))
def test_what_is_announced_is_believed(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    pace = Pace(clock)
    for script, units in steps:
        step(pace, clock, script, units=units)
    assert pace.per_second is None or check_rate(pace.per_second) == pace.per_second


@pytest.mark.parametrize("value", HOSTILE)
def test_a_rate_that_cannot_be_is_none_and_the_rest_of_the_record_counts(value: Any) -> None:
    items = msgpack.decode(Progress(History(), 5.0, rate=1.0).pack())
    items[INDEX] = value
    assert rate_in(msgpack.encode(items)) is None
    assert Progress.unpack(msgpack.encode(items)) == Progress(History(), 5.0)


def test_a_record_without_a_rate_is_read_and_what_comes_behind_it_is_passed_over() -> None:
    items = msgpack.decode(Progress(History(), 5.0, rate=2.5).pack())
    assert rate_in(msgpack.encode(items[:INDEX])) is None
    assert rate_in(msgpack.encode([*items, "more"])) == 2.5
    assert Progress.unpack(msgpack.encode([*items, "more"])) == Progress(History(), 5.0, rate=2.5)


@given(st.binary(max_size=1024))
def test_any_bytes_have_a_rate_or_none(packed: bytes) -> None:
    rate = rate_in(packed)
    assert rate is None or MIN_RATE <= rate <= MAX_RATE


def test_a_large_record_is_not_read() -> None:
    assert rate_in(b"\xdd" + struct.pack(">I", 2**31)) is None
    assert rate_in(msgpack.encode([[]] * 100)) is None


# The pace in the status of a peer.


def test_steps_and_samples_per_second() -> None:
    pace = TrainingPace(100.0)
    assert pace.per_second(200.0) == (None, None)
    for step in range(10):
        pace.count(32, 100.0 + 2 * (step + 1))
    assert pace.per_second(120.0) == (0.5, 16.0)
    assert pace.per_second(123.0) == (0.5, 16.0)  # in the midst of the next step
    assert (pace.steps, pace.samples) == (10, 320.0)


def test_a_training_that_has_stopped_becomes_slower_and_slower_and_samples_may_be_unknown() -> None:
    pace = TrainingPace(0.0)
    for step in range(10):
        pace.count(0, step + 1.0)
    assert pace.per_second(20.0) == (0.5, None)
    assert pace.per_second(100.0) == (0.1, None)
