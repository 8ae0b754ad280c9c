"""Estimates of other peers' clocks from timestamps."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.discovery.gossip.clock_offsets import (
    CLIENT,
    MAX_CLOCKS,
    MAX_WARNINGS,
    STALE_SECONDS,
    ClockOffsets,
)

NOW = 1_700_000_000.0
CALL_TIMEOUT = 10.0


def clock_offsets() -> ClockOffsets:
    return ClockOffsets(3.0, CALL_TIMEOUT)


@pytest.mark.parametrize("back", [0.0, 0.5, 1.0], ids="{:g} of the time after the answer".format)
@pytest.mark.parametrize("elapsed", [0.1, 5.0])
@pytest.mark.parametrize("ahead", [0.0, 2.9, -2.9, 3.2, -3.2, 40.0, -40.0])
def test_an_answer_shows_an_offset_that_its_delay_cannot_explain(ahead: float, elapsed: float, back: float) -> None:
    offsets = clock_offsets()
    offsets.note_answer("a:1", NOW + ahead - back * elapsed, NOW, elapsed, 0.0)
    found = offsets.excessive(0.0)
    if abs(ahead) < 3:
        assert found == {}
    elif abs(ahead) > 3 + elapsed:
        assert found == {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)}
    else:  # it depends on which direction was slow
        assert found in ({}, {"a:1": pytest.approx(ahead, abs=elapsed + 0.001)})


def test_a_call_shows_at_once_that_a_clock_is_ahead_and_later_that_it_is_behind() -> None:
    offsets = clock_offsets()
    offsets.note_call("ahead:1", NOW + 40, NOW, 0.0)
    offsets.note_call("behind:1", NOW - 40, NOW, 0.0)
    offsets.note_call("a little:1", NOW - 9, NOW, 0.0)  # the call may have taken that long
    assert offsets.excessive(0.0) == {"ahead:1": 40.0}
    offsets.note_call("behind:1", NOW + 4 - 40.2, NOW + 4, 4.0)
    offsets.note_call("a little:1", NOW + 4 - 9, NOW + 4, 4.0)
    assert offsets.excessive(4.0) == {"ahead:1": 40.0, "behind:1": -40.0}


def test_calls_that_waited_while_this_peer_stood_still_show_no_offset() -> None:
    offsets = clock_offsets()
    offsets.note_call("a:1", NOW, NOW + 0.1, 0.1)
    for sent in range(0, 60, 2):  # all of them are read together, after a minute
        offsets.note_call("a:1", NOW + sent, NOW + 60, 60.0)
        assert offsets.excessive(60.0) == {}
    for second in range(61, 70):
        offsets.note_call("a:1", NOW + second, NOW + second + 0.1, float(second))
        assert offsets.excessive(float(second)) == {}


def test_a_clock_that_was_set_is_used_at_once() -> None:
    offsets = clock_offsets()
    offsets.note_answer("a:1", NOW + 40, NOW, 0.1, 0.0)
    offsets.note_answer("a:1", NOW + 2, NOW + 2, 0.1, 2.0)
    assert offsets.excessive(2.0) == {}
    offsets.note_answer("a:1", NOW - 36, NOW + 4, 0.1, 4.0)
    assert offsets.excessive(4.0) == {"a:1": pytest.approx(-40, abs=0.2)}
    assert offsets.excessive(5.0 + STALE_SECONDS) == {}


@given(st.floats(), st.text())
def test_any_timestamp_and_any_name_can_be_read(theirs: float, name: str) -> None:
    offsets = clock_offsets()
    offsets.note_call(name, theirs, NOW, 0.0)
    offsets.note_answer("a:1", theirs, NOW, 0.1, 0.0)
    for ahead in offsets.excessive(0.0).values():
        assert math.isfinite(ahead)
        assert 3 < abs(ahead) < 1e13


def test_a_caller_without_an_endpoint_is_a_client() -> None:
    offsets = clock_offsets()
    offsets.note_call("", NOW + 40, NOW, 0.0)
    offsets.note_call("no endpoint", NOW + 40, NOW, 0.0)
    assert offsets.excessive(0.0) == {CLIENT: 40.0}


def test_hostile_timestamps_fill_neither_the_log_nor_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    offsets = clock_offsets()
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            offsets.note_call(f"a:{number + 1}", NOW + 1e9, NOW, number / 1000)
        for number in range(1000):
            offsets.note_call("b:1", NOW + number * 100, NOW, 10.0)
    assert len(caplog.records) == MAX_WARNINGS
    assert len(offsets.excessive(10.0)) == MAX_CLOCKS
    assert max(map(len, caplog.messages)) < 300


def test_each_peer_is_logged_once_with_the_seconds_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    offsets = clock_offsets()
    for moment in range(0, 500, 2):
        offsets.note_answer("a:1", NOW + moment + 40.4, NOW + moment, 0.1, float(moment))
        offsets.note_answer("b:1", NOW + moment - 3.5, NOW + moment, 0.1, float(moment))
    first, second = caplog.messages
    assert first == (
        "groups with a:1 may fail: its clock is 40 s ahead of this peer's clock, and 3 s are allowed. Set the clocks "
        "of both machines, for example with NTP"
    )
    assert "b:1 may fail: its clock is 3.4 s behind this peer's clock" in second
