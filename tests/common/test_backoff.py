"""Exponential backoff, compared with repeated doubling."""

import random

import pytest

from averaging.common import Backoff, backoff_delay


@pytest.mark.parametrize(("first", "longest"), [(0.1, 2.0), (0.25, 8.0), (300.0, 21600.0), (5.0, 1.0)])
def test_delays_double_up_to_the_longest_and_begin_anew_after_a_reset(first: float, longest: float) -> None:
    backoff = Backoff(first, longest)
    for _ in range(2):
        delay = min(first, longest)
        for failures in range(20):
            assert backoff.next_delay() == delay
            assert backoff_delay(first, longest, failures) == delay
            delay = min(2 * delay, longest)
        backoff.reset()


def test_each_delay_takes_one_random_factor_from_the_given_source() -> None:
    backoff, reference = Backoff(1.0, 4.0, random.Random(7), jitter=(0.5, 1.0)), random.Random(7)
    for delay in (1.0, 2.0, 4.0, 4.0):
        assert backoff.next_delay() == delay * reference.uniform(0.5, 1.0)
