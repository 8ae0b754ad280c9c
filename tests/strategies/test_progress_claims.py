"""Which claims to be ahead are ignored, and for how long."""

from __future__ import annotations

from averaging.strategies.catch_up import FIRST_PAUSE, LAST_PAUSE, ProgressClaims


def test_the_pause_doubles_with_each_failure_and_has_an_end() -> None:
    claims, now, pauses = ProgressClaims(), 5.0, []
    assert claims.ignored(now) == frozenset()
    assert claims.may_wait(now)
    for _ in range(40):
        claims.failed(["a:1"], now, 0.0)
        pause = FIRST_PAUSE
        while claims.ignored(now + pause):
            pause *= 2
        assert claims.ignored(now + pause * 0.99) == {"a:1"}
        assert not claims.may_wait(now + pause * 0.99)
        assert claims.may_wait(now + pause)
        pauses.append(pause)
        now += pause
    assert pauses[:6] == [FIRST_PAUSE * 2**time for time in range(6)]
    assert pauses[-1] == LAST_PAUSE


def test_an_attempt_that_took_long_is_not_repeated_for_as_long() -> None:
    """Waiting for peers that do not deliver takes at most half of the time."""
    claims = ProgressClaims()
    claims.failed(["a:1"], 100.0, 60.0)
    assert claims.ignored(159.0) == {"a:1"}
    assert claims.ignored(160.0) == frozenset()


def test_failures_of_one_attempt_with_several_double_the_pause_once() -> None:
    claims = ProgressClaims()
    for name in ("a:1", "b:1", "c:1"):
        claims.failed([name], 10.0, 0.0)
    assert claims.ignored(10.0 + 0.99 * FIRST_PAUSE) == {"a:1", "b:1", "c:1"}
    assert claims.ignored(10.0 + FIRST_PAUSE) == frozenset()


def test_a_peer_that_was_not_asked_before_is_not_doubted() -> None:
    claims = ProgressClaims()
    claims.failed(["a:1", "b:1"], 5.0, 0.0)
    claims.failed(["c:1"], 5.0, 0.0)
    assert claims.ignored(5.0) == {"a:1", "b:1", "c:1"}


def test_only_the_latest_failures_are_remembered() -> None:
    """An attacker may use another name for each claim."""
    claims, now = ProgressClaims(), 0.0
    for number in range(1000):
        now += 2 * LAST_PAUSE
        claims.failed([f"{number}:1"], now, 0.1)
        assert claims.ignored(now) == {f"{number}:1"}


def test_success_ends_it() -> None:
    claims = ProgressClaims()
    claims.failed(["a:1"], 5.0, 0.0)
    claims.succeeded()
    assert claims.ignored(5.0) == frozenset()
    assert claims.may_wait(5.0)
