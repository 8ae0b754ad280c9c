"""What timestamps tell of the clocks of others."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.discovery.gossip.clock_offsets import (
    CLIENT,
    MOST_CLOCKS,
    MOST_WARNINGS,
    STALE_SECONDS,
    Clocks,
)

NOW = 1_700_000_000.0
LONGEST = 10.0


def clocks() -> Clocks:
    return Clocks(3.0, LONGEST)


@pytest.mark.parametrize("back", [0.0, 0.5, 1.0], ids="{:g} of the time was the way back".format)
@pytest.mark.parametrize("elapsed", [0.1, 5.0])
@pytest.mark.parametrize("ahead", [0.0, 2.9, -2.9, 3.2, -3.2, 40.0, -40.0])
def test_an_answer_shows_a_difference_that_its_delay_cannot_explain(ahead: float, elapsed: float, back: float) -> None:
    several = clocks()
    several.answered("a:1", NOW + ahead - back * elapsed, NOW, elapsed, 0.0)
    found = several.apart(0.0)
    if abs(ahead) < 3:
        assert found == {}
    elif abs(ahead) > 3 + elapsed:
        assert found == {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)}
    else:  # it depends on which way was the slow one
        assert found in ({}, {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)})


def test_a_call_shows_at_once_that_a_clock_is_ahead_and_later_that_it_is_behind() -> None:
    several = clocks()
    several.called("ahead:1", NOW + 40, NOW, 0.0)
    several.called("behind:1", NOW - 40, NOW, 0.0)
    several.called("a little:1", NOW - 9, NOW, 0.0)  # it may have been under way for so long
    assert several.apart(0.0) == {"ahead:1": 40.0}
    several.called("behind:1", NOW + 4 - 40.2, NOW + 4, 4.0)
    several.called("a little:1", NOW + 4 - 9, NOW + 4, 4.0)
    assert several.apart(4.0) == {"ahead:1": 40.0, "behind:1": -40.0}


def test_calls_that_waited_while_this_peer_stood_still_say_nothing() -> None:
    several = clocks()
    several.called("a:1", NOW, NOW + 0.1, 0.1)
    for sent in range(0, 60, 2):  # all of them are read at once, after a minute
        several.called("a:1", NOW + sent, NOW + 60, 60.0)
        assert several.apart(60.0) == {}
    for second in range(61, 70):
        several.called("a:1", NOW + second, NOW + second + 0.1, float(second))
        assert several.apart(float(second)) == {}


def test_a_clock_that_was_set_is_believed_at_once() -> None:
    several = clocks()
    several.answered("a:1", NOW + 40, NOW, 0.1, 0.0)
    several.answered("a:1", NOW + 2, NOW + 2, 0.1, 2.0)
    assert several.apart(2.0) == {}
    several.answered("a:1", NOW - 36, NOW + 4, 0.1, 4.0)
    assert several.apart(4.0) == {"a:1": pytest.approx(-40, abs=0.2)}
    assert several.apart(5.0 + STALE_SECONDS) == {}


@given(st.floats(), st.text())
def test_any_timestamp_and_any_name_can_be_read(theirs: float, name: str) -> None:
    several = clocks()
    several.called(name, theirs, NOW, 0.0)
    several.answered("a:1", theirs, NOW, 0.1, 0.0)
    for ahead in several.apart(0.0).values():
        assert math.isfinite(ahead)
        assert 3 < abs(ahead) < 1e13


def test_a_caller_without_a_name_is_a_client() -> None:
    several = clocks()
    several.called("", NOW + 40, NOW, 0.0)
    several.called("no endpoint", NOW + 40, NOW, 0.0)
    assert several.apart(0.0) == {CLIENT: 40.0}


def test_hostile_timestamps_flood_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    several = clocks()
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            several.called(f"a:{number + 1}", NOW + 1e9, NOW, number / 1000)
        for number in range(1000):
            several.called("b:1", NOW + number * 100, NOW, 10.0)
    assert len(caplog.records) == MOST_WARNINGS
    assert len(several.apart(10.0)) == MOST_CLOCKS
    assert max(map(len, caplog.messages)) < 300


def test_each_peer_is_named_once_with_the_seconds_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    several = clocks()
    for moment in range(0, 500, 2):
        several.answered("a:1", NOW + moment + 40.4, NOW + moment, 0.1, float(moment))
        several.answered("b:1", NOW + moment - 3.5, NOW + moment, 0.1, float(moment))
    first, second = caplog.messages
    assert first == (
        "groups with a:1 may fail: its clock is 40 s ahead of this peer's clock, and 3 s are allowed. Set the clocks "
        "of both machines, for example with NTP"
    )
    assert "b:1 may fail: its clock is 3.4 s behind this peer's clock" in second
