"""Exclusions of peers that broke the protocol, with the time passed in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from averaging.matchmaking.conduct import (
    EXCLUSION_SECONDS,
    FORGET_SECONDS,
    MAX_ONE_WAY_SECONDS,
    MAX_REMEMBERED,
    MAX_SECONDS,
    ONE_WAY_SECONDS,
    Exclusions,
)
from averaging.receipts.receipt import DropCode, Dropped

VIOLATION, NON_FINITE = DropCode.PROTOCOL_VIOLATION, DropCode.NON_FINITE


def test_each_further_exclusion_is_longer() -> None:
    exclusions, now = Exclusions(), 1e9
    for time in range(12):
        exclusions.note("a:1", VIOLATION, now)
        seconds = min(EXCLUSION_SECONDS * 2**time, MAX_SECONDS)
        assert exclusions.excluded(now) == {"a:1": now + seconds}
        assert exclusions.excludes("a:1", now + seconds - 1)
        assert not exclusions.excludes("a:1", now + seconds)
        assert not exclusions.excludes("b:1", now)
        now += seconds


@given(st.floats(1.0, 1e8), st.floats(0.0, 200.0))
def test_a_clock_that_is_set_back_lengthens_no_exclusion(back: float, before: float) -> None:
    exclusions, now = Exclusions(), 1e9
    exclusions.note("a:1", VIOLATION, now)
    assert exclusions.excludes("a:1", now + before)
    now += before - back
    [left] = [until - now for until in exclusions.excluded(now).values()]
    assert abs(left - (EXCLUSION_SECONDS - before)) < 0.001
    assert exclusions.excludes("a:1", now + EXCLUSION_SECONDS - before - 1)
    assert not exclusions.excludes("a:1", now + EXCLUSION_SECONDS - before + 1)


def test_entries_made_after_the_clock_was_set_back_are_not_moved() -> None:
    exclusions = Exclusions()
    exclusions.note("a:1", VIOLATION, 1e9)
    now = 1e9 - 3600.0
    exclusions.note("b:1", VIOLATION, now)
    assert exclusions.excluded(now) == {"a:1": now + EXCLUSION_SECONDS, "b:1": now + EXCLUSION_SECONDS}


def test_a_clock_that_is_set_back_and_forth_loses_no_entry() -> None:
    exclusions = Exclusions()
    for now in (1e9, 1e9 - 3600.0, 1e9):
        exclusions.note("a:1", NON_FINITE, now)
    assert exclusions.counts == {"a:1": {NON_FINITE: 3}}


def test_nan_is_counted_and_does_not_exclude() -> None:
    exclusions = Exclusions()
    exclusions.note("a:1", NON_FINITE, 5.0)
    exclusions.note("a:1", NON_FINITE, 6.0)
    assert exclusions.counts == {"a:1": {NON_FINITE: 2}}
    assert exclusions.excluded(6.0) == {}


@given(st.sampled_from([code for code in DropCode if code not in (VIOLATION, NON_FINITE)]))
def test_other_reasons_for_being_dropped_are_no_offence(code: DropCode) -> None:
    exclusions = Exclusions()
    exclusions.note_dropped([Dropped("a:1", "gone", code)], 5.0)
    assert exclusions.counts == {}


def test_old_offences_are_forgotten() -> None:
    exclusions = Exclusions()
    exclusions.note("a:1", VIOLATION, 0.0)
    later = EXCLUSION_SECONDS + FORGET_SECONDS
    exclusions.note("b:1", NON_FINITE, later - 1)
    assert set(exclusions.counts) == {"a:1", "b:1"}
    exclusions.note("a:1", VIOLATION, later)
    assert exclusions.excluded(later) == {"a:1": later + EXCLUSION_SECONDS}


def test_old_offences_are_forgotten_although_the_clock_was_set_back() -> None:
    exclusions, now = Exclusions(), 1e9
    exclusions.note("a:1", NON_FINITE, now)
    now -= 30 * FORGET_SECONDS
    exclusions.note("b:1", NON_FINITE, now)
    exclusions.note("b:1", NON_FINITE, now + FORGET_SECONDS)
    assert exclusions.counts == {"b:1": {NON_FINITE: 1}}


def test_the_number_of_remembered_peers_is_limited() -> None:
    exclusions = Exclusions()
    for number in range(MAX_REMEMBERED + 10):
        exclusions.note(f"client::{number}", VIOLATION, float(number) / 1000)
    assert len(exclusions.counts) == MAX_REMEMBERED
    assert "client::9" not in exclusions.counts
    assert f"client::{MAX_REMEMBERED + 9}" in exclusions.counts


def test_who_cannot_be_called_is_no_follower_for_a_time_that_grows_until_it_answers() -> None:
    exclusions, now = Exclusions(), 1e9
    exclusions.note_reach(["a:1"], ["b:1"], now)
    assert not exclusions.is_one_way("a:1", now)
    for time in range(6):
        exclusions.note_reach(["a:1"], ["b:1"], now)
        seconds = min(ONE_WAY_SECONDS * 2**time, MAX_ONE_WAY_SECONDS)
        assert exclusions.is_one_way("a:1", now + seconds - 1)
        assert not exclusions.is_one_way("a:1", now + seconds)
        assert not exclusions.is_one_way("b:1", now)
        now += seconds
    exclusions.note_reach([], ["a:1"], now)
    for _ in range(2):
        exclusions.note_reach(["a:1"], [], now)
    assert exclusions.is_one_way("a:1", now + ONE_WAY_SECONDS - 1)
    now += ONE_WAY_SECONDS - 1
    assert exclusions.is_one_way("a:1", now - 3600.0), "a clock that is set back"
    assert not exclusions.is_one_way("a:1", now - 3600.0 + 1)
    assert exclusions.excluded(now) == {}
    for number in range(2 * MAX_REMEMBERED):
        exclusions.note_reach([f"c:{number}"], [], now)
    assert len(exclusions._one_way) == MAX_REMEMBERED
