"""What is remembered of members that broke the protocol, with the time given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from averaging.matchmaking.exclusions import FIRST_SECONDS, FORGOTTEN_AFTER, LAST_SECONDS, MAX_REMEMBERED, Exclusions
from averaging.observe.receipts import DropCode, Dropped

VIOLATION, NON_FINITE = DropCode.PROTOCOL_VIOLATION, DropCode.NON_FINITE


def test_who_broke_the_protocol_is_excluded_and_each_time_for_longer() -> None:
    conduct, now = Exclusions(), 1e9
    for time in range(12):
        conduct.note("a:1", VIOLATION, now)
        seconds = min(FIRST_SECONDS * 2**time, LAST_SECONDS)
        assert conduct.excluded(now) == {"a:1": now + seconds}
        assert conduct.excludes("a:1", now + seconds - 1)
        assert not conduct.excludes("a:1", now + seconds)
        assert not conduct.excludes("b:1", now)
        now += seconds


@given(st.floats(1.0, 1e8), st.floats(0.0, 200.0))
def test_a_clock_that_is_set_back_lengthens_no_exclusion(back: float, before: float) -> None:
    """By no more than what has passed since the clock was looked at last."""
    conduct, now = Exclusions(), 1e9
    conduct.note("a:1", VIOLATION, now)
    assert conduct.excludes("a:1", now + before)
    now += before - back
    [left] = [until - now for until in conduct.excluded(now).values()]
    assert abs(left - (FIRST_SECONDS - before)) < 0.001
    assert conduct.excludes("a:1", now + FIRST_SECONDS - before - 1)
    assert not conduct.excludes("a:1", now + FIRST_SECONDS - before + 1)


def test_what_is_remembered_after_the_clock_was_set_back_is_not_moved_with_the_rest() -> None:
    conduct = Exclusions()
    conduct.note("a:1", VIOLATION, 1e9)
    now = 1e9 - 3600.0
    conduct.note("b:1", VIOLATION, now)
    assert conduct.excluded(now) == {"a:1": now + FIRST_SECONDS, "b:1": now + FIRST_SECONDS}


def test_a_clock_that_is_set_back_and_forth_forgets_nothing_early() -> None:
    conduct = Exclusions()
    for now in (1e9, 1e9 - 3600.0, 1e9):
        conduct.note("a:1", NON_FINITE, now)
    assert conduct.counts == {"a:1": {NON_FINITE: 3}}


def test_nan_is_counted_and_excludes_from_nothing_further() -> None:
    conduct = Exclusions()
    conduct.note("a:1", NON_FINITE, 5.0)
    conduct.note("a:1", NON_FINITE, 6.0)
    assert conduct.counts == {"a:1": {NON_FINITE: 2}}
    assert conduct.excluded(6.0) == {}


@given(st.sampled_from([code for code in DropCode if code not in (VIOLATION, NON_FINITE)]))
def test_to_be_lost_is_no_offence(code: DropCode) -> None:
    conduct = Exclusions()
    conduct.note_dropped([Dropped("a:1", "gone", code)], 5.0)
    assert conduct.counts == {}


def test_old_offences_are_forgotten() -> None:
    conduct = Exclusions()
    conduct.note("a:1", VIOLATION, 0.0)
    later = FIRST_SECONDS + FORGOTTEN_AFTER
    conduct.note("b:1", NON_FINITE, later - 1)
    assert set(conduct.counts) == {"a:1", "b:1"}
    conduct.note("a:1", VIOLATION, later)
    assert conduct.excluded(later) == {"a:1": later + FIRST_SECONDS}


def test_what_is_remembered_is_forgotten_in_time_after_the_clock_was_set_back() -> None:
    conduct, now = Exclusions(), 1e9
    conduct.note("a:1", NON_FINITE, now)
    now -= 30 * FORGOTTEN_AFTER
    conduct.note("b:1", NON_FINITE, now)
    conduct.note("b:1", NON_FINITE, now + FORGOTTEN_AFTER)
    assert conduct.counts == {"b:1": {NON_FINITE: 1}}


def test_so_many_are_remembered_and_no_more() -> None:
    conduct = Exclusions()
    for number in range(MAX_REMEMBERED + 10):
        conduct.note(f"client::{number}", VIOLATION, float(number) / 1000)
    assert len(conduct.counts) == MAX_REMEMBERED
    assert "client::9" not in conduct.counts
    assert f"client::{MAX_REMEMBERED + 9}" in conduct.counts
