"""Whether a donor delivers fast enough, and how long one can be read that always does just that."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.state.donors import MIN_BYTES_PER_SECOND, MIN_RATE, SLOW_FACTOR, Rate, Throughput, expected_rate
from averaging.timing.learned_deadlines import LIFETIME, SLOW_LINK, Rates

MIB = 1 << 20


def flow(left: int = 1000, rate: float = 10.0, window: float = 30.0, now: float = 0.0) -> Throughput:
    return Throughput(Rate(rate, "so"), window, left, now)


def test_in_each_window_a_donor_delivers_what_is_expected() -> None:
    one = flow(now=5.0)
    assert one.limit == 1000 / 10 + 30
    assert one.time_left(5.0) == 30.0
    one.update(800, 10.0)
    assert one.time_left(10.0) == 25.0
    one.update(700, 20.0)  # 300 in 30 s
    assert one.time_left(20.0) == math.inf
    one.update(699, 36.0)  # of the second window
    assert one.time_left(36.0) == 29.0
    one.update(401, 64.0)
    assert one.time_left(64.0) == 1.0
    assert str(one) == "delivered 299 bytes in 30 s, expected at least 300: so"
    assert (one.delivered, one.seconds(64.0)) == (599, 59.0)
    one.update(400, 64.5)
    assert one.time_left(64.5) == math.inf
    assert one.limit == 130.0


def test_a_burst_is_no_credit_for_the_next_window() -> None:
    one = flow(10_000)
    one.update(1000, 1.0)
    one.update(999, 31.0)
    assert one.time_left(31.0) == 29.0


def test_of_the_last_bytes_only_these_are_expected() -> None:
    one = flow(299)
    one.update(1, 29.0)
    assert one.time_left(29.0) == 1.0
    assert str(one) == "delivered 298 bytes in 30 s, expected at least 299, all that was left: so"
    one.update(0, 29.5)
    assert one.time_left(29.5) == math.inf
    assert flow(0).time_left(0.0) == math.inf


def test_what_comes_late_but_before_the_donor_was_given_up_is_in_time() -> None:
    one = flow()
    one.update(700, 30.2)
    assert one.time_left(30.2) == pytest.approx(29.8)
    late = flow()
    late.update(701, 30.2)
    assert late.time_left(30.2) == 0.0


@given(
    st.integers(0, 5000),
    st.floats(1.0, 100.0),
    st.floats(0.5, 60.0),
    st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(1, 900)), min_size=1),
)
def test_nobody_is_read_for_longer_than_the_limit(
    left: int, rate: float, window: float, steps: list[tuple[float, int]]
) -> None:
    one, now = flow(left, rate, window), 0.0
    limit = one.limit
    while left:
        for pause, delivered in steps:
            if pause >= min(one.time_left(now), window):  # too slow, or silent for too long
                return
            now += pause
            left = max(0, left - delivered)
            one.update(left, now)
            assert one.limit == pytest.approx(limit)
            if not left:
                break
    assert now <= limit + 1e-6


def test_less_is_expected_each_time_down_to_the_least() -> None:
    assert expected_rate(None, 0) == Rate(SLOW_LINK / SLOW_FACTOR, "1/8 of the 10 Mbit/s assumed for slow links")
    assert expected_rate(None, 1) == Rate(MIN_BYTES_PER_SECOND, "16 KiB/s, the minimum for every donor and reader")
    assert expected_rate(1e9, 0, alone=True) == MIN_RATE
    assert expected_rate(1e9, 1) == Rate(1e9 / 64, "1/64 of the 1000.0 MB/s of the best donor")
    for best in (None, 0.0, 1.0, 1e5, 1e9, 1e12):
        rates = [expected_rate(best, times) for times in range(12)]
        assert rates[-1].is_minimum
        assert min(rate.bytes_per_second for rate in rates) == MIN_BYTES_PER_SECOND
        asked_for_more = [rate.bytes_per_second for rate in rates if not rate.is_minimum]
        assert len(asked_for_more) < 9
        assert all(later <= before / SLOW_FACTOR for before, later in pairwise(asked_for_more))


def test_the_best_rate_of_the_last_hour_is_known() -> None:
    rates = Rates()
    assert rates.best(0.0) is None
    rates.record(10 * MIB, 2.0, 10.0)
    assert rates.best(10.0) == 5 * MIB
    rates.record(MIB, 2.0, 20.0)  # slower
    assert rates.best(20.0) == 5 * MIB
    rates.record(12 * MIB, 2.0, 30.0)
    assert rates.best(30.0 + LIFETIME) == 6 * MIB
    assert rates.best(31.0 + LIFETIME) is None
    rates.record(MIB, 2.0, 40.0 + LIFETIME)
    assert rates.best(40.0 + LIFETIME) == MIB / 2


def test_of_what_came_within_a_second_only_the_size_counts() -> None:
    rates = Rates()
    rates.record(30 * MIB, 0.001, 0.0)
    assert rates.best(0.0) == 30 * MIB
    rates = Rates()
    rates.record(1000, 0.001, 0.0)  # the last bytes of a state, say
    assert rates.best(0.0) is None
