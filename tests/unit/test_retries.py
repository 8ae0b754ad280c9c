"""When a download that failed is tried again."""

from __future__ import annotations

import pytest

from averaging.strategies.retries import FIRST_PAUSE, LAST_PAUSE, Retries


def test_the_pause_doubles_with_each_failure_and_has_an_end() -> None:
    retries, now, pauses = Retries(), 5.0, []
    assert retries.is_due(["a:1"], now)
    for _ in range(40):
        retries.failed(["a:1"], now)
        pause = FIRST_PAUSE
        while not retries.is_due(["a:1"], now + pause):
            pause *= 2
        assert not retries.is_due(["a:1"], now + pause * 0.99)
        pauses.append(pause)
        now += pause
    assert pauses[:6] == [FIRST_PAUSE * 2**time for time in range(6)]
    assert pauses[-1] == LAST_PAUSE


def test_a_donor_that_was_not_asked_before_is_asked_at_once() -> None:
    retries = Retries()
    retries.failed(["a:1", "b:1"], 5.0)
    assert not retries.is_due(["b:1"], 5.0)
    assert retries.is_due(["b:1", "c:1"], 5.0)
    retries.failed(["b:1", "c:1"], 5.0)
    assert not retries.is_due(["a:1"], 5.0)


@pytest.mark.parametrize("donors", [["a:1"], ["b:1"]])
def test_success_ends_it(donors: list[str]) -> None:
    retries = Retries()
    retries.failed(["a:1"], 5.0)
    retries.succeeded()
    assert retries.is_due(donors, 5.0)
