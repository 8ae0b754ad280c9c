"""The checks of the soak test."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

from tests.soak import (
    CALIBRATION_ROUNDS,
    GROWTH_BYTES,
    MAX_QUIET_SECONDS,
    WARM_ROUNDS,
    Judge,
    OverdueError,
    Soak,
    SoakError,
    TooSlowError,
    is_sound,
    quiet_limit,
)

GATHERED = {"a:1": 0.0, "b:1": 2.0, "c:1": 10.0}


@pytest.mark.parametrize(
    ("values", "kept_local", "sound"),
    [
        ([4.0], 0, True),
        ([1.0, 4.0], 0, True),  # one member was lost
        ([3.0], 0, False),
        ([4.0, 3.0], 5, False),
        ([4.0, 7.0], 5, True),  # the own value, where the reducer was lost
        ([4.0, 7.0], 0, False),
    ],
)
def test_only_averages_of_members_are_sound(values: list[float], kept_local: int, sound: bool) -> None:
    assert is_sound(values, GATHERED, 7.0, kept_local) == sound


def report(**changes: Any) -> dict[str, Any]:
    event = {"outcome": "averaged", "group": "aa" * 8, "values": [4.0], "gathered": GATHERED, "kept_local": 0}
    return event | {"dropped": [], "digest": "12345678", "lanes": ["direct"], "rss": 100 << 20} | changes


def test_sound_rounds_are_counted() -> None:
    judge = Judge(0.0)
    judge.check("a:1", report(dropped=["b:1: silent"], values=[5.0]), 1.0)
    judge.check("c:1", report(), 2.0)
    judge.check("b:1", report(outcome="failed", values=[3.0]), 2.0)
    assert (judge.finished, judge.lost, judge.dropped) == (2, 1, 1)


def test_too_long_without_a_finished_round_fails() -> None:
    judge = Judge(0.0)
    judge.check("a:1", report(), 30.0)
    judge.check("a:1", report(outcome="no_group"), 60.0)
    judge.check_progress(30.0 + 44.0, 44.0)
    with pytest.raises(SoakError, match="no round was finished for 45 s, more than 44 s"):
        judge.check_progress(31.0 + 44.0, 44.0)


def test_the_bound_follows_from_the_usual_rounds_of_the_slowest_peer() -> None:
    judge = Judge(0.0)
    for number in range(1, 2 * CALIBRATION_ROUNDS + 1):
        judge.check("a:1", report(group=f"{number:040x}"), float(number))
        assert not judge.is_calibrated(2)
    for number in range(1, CALIBRATION_ROUNDS + 1):
        assert not judge.is_calibrated(2)
        judge.check("b:1", report(group=f"{number:040x}"), 10.0 + number)
    assert judge.is_calibrated(2)
    assert judge.usual_round(5.0, 15.0) == pytest.approx(10.0 / CALIBRATION_ROUNDS)
    assert (quiet_limit(0.5), quiet_limit(10.0)) == (44.0, MAX_QUIET_SECONDS)


@pytest.mark.parametrize(("before", "now", "is_too_slow"), [(2.0, 2.5, False), (2.0, 4.5, True), (9.0, 9.0, True)])
def test_who_is_late_on_a_slow_machine_proves_nothing(
    before: float, now: float, is_too_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower than at the beginning, or so slow that the peers could not have started."""
    seconds = iter([before, now])
    monkeypatch.setattr("tests.soak.start_seconds", lambda: next(seconds))
    with ExitStack() as stack:
        test = Soak(stack, 1, 8, spoil=False)
        with pytest.raises(TooSlowError) if is_too_slow else nullcontext():
            test.check_machine(OverdueError("no round was finished for 50 s"))


def test_a_wrong_value_fails() -> None:
    with pytest.raises(SoakError, match="a:1 holds a wrong value"):
        Judge(0.0).check("a:1", report(values=[4.0, 4.5]), 1.0)


def test_different_averages_in_a_group_fail() -> None:
    judge = Judge(0.0)
    judge.check("a:1", report(), 1.0)
    judge.check("b:1", report(digest=""), 1.0)  # it lost a reducer
    judge.check("b:1", report(group="bb" * 8, digest="87654321"), 2.0)
    with pytest.raises(SoakError, match="members of group aaaaaaaa hold different averages"):
        judge.check("c:1", report(digest="87654321"), 2.0)


def test_memory_that_grows_fails_once_a_peer_is_warm() -> None:
    judge = Judge(0.0)
    for number in range(WARM_ROUNDS - 1):
        judge.check("a:1", report(rss=number), 1.0)
    judge.check("a:1", report(rss=GROWTH_BYTES), 1.0)
    judge.check("b:1", report(rss=9 * GROWTH_BYTES), 1.0)
    judge.check("a:1", report(rss=2 * GROWTH_BYTES), 1.0)
    with pytest.raises(SoakError, match="a:1 grew from 200 to 401 MiB"):
        judge.check("a:1", report(rss=2 * GROWTH_BYTES + (1 << 20)), 1.0)
