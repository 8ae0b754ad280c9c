"""Estimates of other peers' clocks from timestamps."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.discovery.gossip.clock_offsets import MAX_CLOCKS, MAX_WARNINGS, STALE_SECONDS, ClockOffsets

NOW = 1_700_000_000.0


@pytest.mark.parametrize("back", [0.0, 0.5, 1.0], ids="{:g} of the time after the answer".format)
@pytest.mark.parametrize("elapsed", [0.1, 5.0])
@pytest.mark.parametrize("ahead", [0.0, 2.9, -2.9, 3.2, -3.2, 40.0, -40.0])
def test_an_answer_shows_an_offset_that_its_delay_cannot_explain(ahead: float, elapsed: float, back: float) -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", NOW + ahead - back * elapsed, NOW, elapsed, 0.0)
    found = offsets.excessive(0.0)
    if abs(ahead) < 3:
        assert found == {}
    elif abs(ahead) > 3 + elapsed:
        assert found == {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)}
    else:  # it depends on which direction was slow
        assert found in ({}, {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)})


def test_several_answers_narrow_it_down_and_the_median_corrects_this_clock() -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", NOW + 4, NOW, 6.0, 0.0)  # between 4 and 10 s ahead
    offsets.note("a:1", NOW + 1, NOW, 4.0, 1.0)  # between 1 and 5 s
    offsets.note("b:1", NOW + 2, NOW, 0.0, 1.0)
    assert offsets.excessive(1.0) == {"a:1": 4.0}
    assert offsets.own_offset(1.0) == -(4.5 + 2) / 2
    assert offsets.correction(1.0) == 2.0
    offsets.note("c:1", NOW + 9, NOW, math.inf, 1.0)  # how long it was on its way is unknown
    assert offsets.excessive(1.0) == {"a:1": 4.0, "c:1": 9.0}


def test_a_clock_that_was_set_is_used_at_once() -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", NOW + 40, NOW, 0.1, 0.0)
    offsets.note("a:1", NOW + 2, NOW + 2, 0.1, 2.0)
    assert offsets.excessive(2.0) == {}
    offsets.note("a:1", NOW - 36, NOW + 4, 0.1, 4.0)
    assert offsets.excessive(4.0) == {"a:1": pytest.approx(-40, abs=0.2)}
    assert offsets.excessive(5.0 + STALE_SECONDS) == {}


@given(st.floats())
def test_any_timestamp_can_be_read(theirs: float) -> None:
    offsets = ClockOffsets(3.0)
    offsets.note("a:1", theirs, NOW, 0.1, 0.0)
    for ahead in offsets.excessive(0.0).values():
        assert math.isfinite(ahead)
        assert 3 < abs(ahead) < 1e13


def test_a_peer_whose_own_clock_is_wrong_fills_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    offsets = ClockOffsets(3.0)
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            offsets.note(f"a:{number + 1}", NOW + 40, NOW, 0.1, number / 1000)
    assert len(caplog.records) == MAX_WARNINGS
    assert len(offsets.excessive(10.0)) == MAX_CLOCKS
