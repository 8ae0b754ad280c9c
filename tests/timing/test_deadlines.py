"""Learned deadlines: bounds, adaptation, robustness against outliers, and the fair clock."""

import statistics

import pytest
from hypothesis import given, strategies as st

from averaging.timing.deadlines import LIFETIME, MAX_WAITS, MIN_WAITS, Deadline, Deadlines, FairClock, Phase, size_class

waits = st.lists(st.floats(0, 1e4), min_size=MIN_WAITS, max_size=3 * MAX_WAITS)


def after(seen: list[float], lower: float = 1.0, upper: float = 10.0) -> Deadlines:
    learned = Deadlines(lower, upper)
    for number, wait in enumerate(seen):
        learned.record("a:1", Phase.PART, 3, wait, float(number))
    return learned


def of(learned: Deadlines, endpoint: str = "a:1", phase: Phase = Phase.PART, size: int = 3) -> Deadline:
    return learned.of(endpoint, phase, size, 100.0)


@given(waits, st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_deadline_is_within_bounds_and_leaves_room(seen: list[float], lower: float, upper: float) -> None:
    deadline = of(after(seen, lower, upper))
    assert min(lower, upper) <= deadline.seconds <= upper
    room = max(3 * statistics.median(seen[-MAX_WAITS:]), 2 * seen[-1])
    assert deadline.seconds >= min(room, upper)


@given(st.floats(0, 1e4), st.integers(0, 6))
def test_one_outlier_among_many_rounds_hardly_counts(odd: float, place: int) -> None:
    usual = [0.5] * 7
    usual[place] = odd
    allowed = 2.0 if place < 6 else max(2.0, 2 * odd)  # the latest may be a lasting change
    assert of(after(usual, 0.1, 1e5)).seconds == pytest.approx(allowed)


def test_without_known_waits_the_longest_deadline_applies() -> None:
    assert of(after([0.1] * 5)) == Deadline(1.0, "the least stall timeout, more than 4 × its median of 0.1 s")
    for unknown in (of(after([0.1] * 5), phase=Phase.OPENING), of(after([0.1] * (MIN_WAITS - 1)))):
        assert unknown == Deadline(10.0, "stall_timeout")


def test_an_unknown_peer_gets_twice_the_longest_deadline_of_the_others() -> None:
    learned = Deadlines(1.0, 10.0)
    assert of(learned, "new:1") == Deadline(10.0, "stall_timeout")
    for usual, expected in (
        (0.1, Deadline(2.0, "2 × the longest of 1 peer")),
        (0.5, Deadline(4.0, "2 × the longest of 2 peers")),
        (0.2, Deadline(4.0, "2 × the longest of 3 peers")),
    ):
        for number in range(MIN_WAITS):
            learned.record(f"{usual}:1", Phase.PART, 3, usual, float(number))
        assert of(learned, "new:1") == expected


@given(
    st.lists(waits, min_size=1, max_size=4),
    st.lists(st.floats(0, 1e4), max_size=MIN_WAITS - 1),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
)
def test_a_guess_is_generous_and_within_bounds(
    others: list[list[float]], own: list[float], lower: float, upper: float
) -> None:
    learned = Deadlines(lower, upper)
    for name, seen in [*((f"{number}:1", seen) for number, seen in enumerate(others)), ("new:1", own)]:
        for wait in seen:
            learned.record(name, Phase.PART, 3, wait, 50.0)
    longest = max(of(learned, f"{number}:1").seconds for number in range(len(others)))
    guess = of(learned, "new:1").seconds
    assert guess <= upper
    assert guess >= min(upper, 2 * longest)
    assert guess >= min(upper, 2 * own[-1] if own else 0.0)


def test_a_missed_guess_is_doubled_and_then_learned_from() -> None:
    learned = after([0.5] * 5)
    seconds = []
    for _ in range(3):
        seconds.append(of(learned, "new:1").seconds)
        learned.record_miss("new:1", Phase.PART, 3, 10.0)
    assert seconds == [4.0, 8.0, 10.0]
    learned.record("new:1", Phase.PART, 3, 3.0, 11.0)
    assert of(learned, "new:1") == Deadline(10.0, "stall_timeout")
    assert of(learned, "other:1") == Deadline(4.0, "2 × the longest of 1 peer")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, Deadline(4.0, "2 × the longest of 1 peer in larger rounds")),
        (4, Deadline(16.0, "8 × the longest of 1 peer in smaller rounds")),
        (5, Deadline(64.0, "32 × the longest of 1 peer in smaller rounds")),
        (60, Deadline(100.0, "stall_timeout")),
    ],
)
def test_waits_in_rounds_of_another_size_are_scaled(size: int, expected: Deadline) -> None:
    learned = after([0.5] * 5, upper=100.0)
    assert of(learned, size=size) == of(learned, "new:1", size=size) == expected
    for number in range(5):
        learned.record("slow:1", Phase.PART, size, 1.0, float(number))
    assert of(learned, size=size) == of(learned, "new:1", size=size) == Deadline(8.0, "2 × the longest of 1 peer")


@pytest.mark.parametrize(("seen", "first"), [([1.0] * 5, 4.0), ([0.001] * 5, 1.0), ([], 1.0), ([30.0] * 5, 20.0)])
def test_after_misses_the_longest_deadline_is_given_ever_more_rarely(seen: list[float], first: float) -> None:
    learned = after(seen, upper=20.0, lower=1.0)
    seconds = []
    for _ in range(100):
        seconds.append(of(learned).seconds)
        learned.record_miss("a:1", Phase.PART, 3, 10.0)
    doubled = seconds[: seconds.index(20.0)]
    beyond = seconds[seconds.index(20.0) :]
    assert doubled == [first * 2**number for number in range(len(doubled))]
    assert [number for number, one in enumerate(beyond) if one == 20.0][:6] == (
        [0, 1, 2, 4, 8, 16] if first < 20.0 else [0, 1, 2, 3, 4, 5]
    )
    assert set(beyond) == {first, 20.0}
    learned.record("a:1", Phase.PART, 3, 7.0, 11.0)
    learned.record("a:1", Phase.PART, 3, 7.0, 11.0)
    learned.record("a:1", Phase.PART, 3, 7.0, 11.0)
    assert of(learned).seconds >= 14.0


def test_the_least_recently_used_peer_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.timing.deadlines.MAX_KNOWN", 2)
    learned = after([0.1] * 5)
    for number in range(9):
        learned.record_miss(f"new:{number}", Phase.PART, 3, 10.0)
        learned.record("a:1", Phase.PART, 3, 0.1, 10.0)
    assert of(learned).seconds == 1.0
    assert len(learned) == 2


def test_unused_waits_expire() -> None:
    learned = after([0.1] * 5)
    learned.record_miss("b:1", Phase.PART, 3, 4.0 + LIFETIME)
    assert len(learned) == 2
    assert learned.of("a:1", Phase.PART, 3, 4.1 + LIFETIME) == Deadline(10.0, "stall_timeout")
    assert len(learned) == 1


@given(st.integers(1, 1 << 50), st.integers(2, 1000))
def test_a_size_class_spans_less_than_a_factor_of_four(nbytes: int, members: int) -> None:
    assert size_class(4 * nbytes, members) > size_class(nbytes, members)
    assert size_class(nbytes + 1, members) >= size_class(nbytes, members)


steps = st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=30)


@given(steps)
def test_the_fair_clock_never_runs_backwards_or_faster_than_time(taken: list[tuple[float, bool]]) -> None:
    clock, now, fair = FairClock(0.25, 10.0), 10.0, 0.0
    for seconds, isolated in taken:
        now += seconds
        ahead = clock.at(now)
        after_tick = clock.tick(now, isolated=isolated)
        counted = min(seconds, 0.25) / (2 if isolated else 1)
        assert after_tick == pytest.approx(fair + counted, abs=1e-6)
        assert ahead >= after_tick
        fair = after_tick
