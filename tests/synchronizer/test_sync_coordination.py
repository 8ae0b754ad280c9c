"""Statuses, versions and waits of a synchronizer: what each call does, and what holds after any sequence of calls."""

import random

import pytest

from averaging.errors import ConfigError
from averaging.rl.synchronizer.coordination import MAX_STEP, Coordination, End, RunningStatus, SyncGroup, Wait

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus

T, E, F = "trainer", "explorer", "other explorer"


def running(*explorers: str, version: int = 0) -> Coordination:
    """A trainer and explorers that run."""
    state = Coordination(version)
    state.set_trainer_status(RUNNING, T)
    for explorer in explorers:
        state.set_explorer_status(RUNNING, None, explorer)
    return state


def counts(state: Coordination) -> tuple[int, int, int]:
    """RUNNING, REQUIRE_SYNC, STOPPED."""
    return tuple(state.explorer_status_counts.values())  # type: ignore[return-value]


def answer(wait: Wait) -> int | None:
    assert wait.end is End.ANSWERED
    return wait.version


def test_a_newer_version_is_given_at_once_and_else_when_it_comes() -> None:
    state = running(E)
    assert state.publish(3, T) == 3
    assert answer(state.wait_new_state(0, E, 10.0)) == 3
    wait = state.wait_new_state(3, E, 10.0)
    assert wait.end is None
    assert counts(state) == (0, 1, 0)
    state.publish(4, T)
    assert answer(wait) == 4
    assert counts(state) == (1, 0, 0)


@pytest.mark.parametrize("event", ["trainer stopped", "trainer died", "explorer stopped", "nothing new"])
def test_other_events_give_the_old_version_back(event: str) -> None:
    state = running(E, F, version=7)
    wait = state.wait_new_state(7, E, 10.0)
    match event:
        case "trainer stopped":
            state.set_trainer_status(STOPPED, T)
        case "trainer died":
            state.leave(T)
        case "explorer stopped":
            state.set_explorer_status(STOPPED, RUNNING, F)
        case _:
            state.no_new_state()
    assert answer(wait) == 7
    assert state.explorer_status_counts[REQUIRE_SYNC] == 0


def test_other_explorers_and_trainers_end_no_wait() -> None:
    state = running(E, F)
    state.set_trainer_status(RUNNING, "second")
    wait = state.wait_new_state(0, E, 10.0)
    state.leave(F)
    state.set_trainer_status(STOPPED, T)
    assert wait.end is None
    assert counts(state) == (0, 1, 0)
    state.leave("second")
    assert answer(wait) == 0


def test_explorers_wait_for_the_first_trainer_and_not_after_the_last() -> None:
    state = Coordination(2)
    for explorer in (E, F):
        state.set_explorer_status(RUNNING, None, explorer)
    waiting, receiving = state.wait_new_state(2, E, 10.0), state.explorer_ready(F, 10.0)
    state.leave("another explorer")
    assert not state.trainers_stopped
    assert waiting.end is receiving.end is None
    state.set_trainer_status(RUNNING, T)
    assert waiting.end is receiving.end is None
    state.leave(T)
    assert state.trainers_stopped
    assert answer(waiting) == 2
    assert answer(receiving) is None
    assert answer(state.wait_new_state(2, E, 10.0)) == 2
    assert answer(state.explorer_ready(F, 10.0)) is None


def test_a_late_a_cancelled_and_an_uncounted_wait_leave_no_status_behind() -> None:
    state = running(E)
    wait = state.wait_new_state(0, E, 10.0)
    state.expire(9.9)
    assert wait.end is None
    state.expire(10.0)
    assert wait.end is End.TIMED_OUT
    assert counts(state) == (1, 0, 0)
    state.cancel(state.wait_new_state(0, E, 10.0))
    assert counts(state) == (1, 0, 0)
    wait = state.wait_new_state(0, "", 10.0, counted=False)
    assert counts(state) == (1, 0, 0)
    state.publish(1, T)
    assert answer(wait) == 1
    assert counts(state) == (1, 0, 0)


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    state = running(E)
    for change in (
        lambda: state.set_explorer_status(RUNNING, RUNNING, E),
        lambda: state.set_explorer_status(RUNNING, STOPPED, E),
        lambda: state.set_explorer_status(STOPPED, RUNNING, "a stranger"),  # not its own explorer
        lambda: state.wait_new_state(1, E, 10.0),
        lambda: state.wait_new_state(0, "a stranger", 10.0),
        lambda: state.explorer_ready("a stranger", 10.0),
        lambda: state.publish(-1, T),
        lambda: state.publish(MAX_STEP + 1, T),
        lambda: state.trainer_ready(-1, T, 10.0),
    ):
        with pytest.raises(ConfigError):
            change()
    assert counts(state) == (1, 0, 0)
    assert state.trainer_status is RUNNING
    assert state.version == 0


def test_the_version_is_the_step_and_never_goes_back() -> None:
    state = running(E)
    assert state.publish(100, T) == 100
    assert state.publish(100, T) == 100, "a repetition"
    assert [state.publish(step, T) for step in (81, 82, 150)] == [101, 102, 150], "restarted from a checkpoint"
    assert state.step == 150
    versions = [state.publish(step, trainer) for step in range(1, 6) for trainer in (T, "second")]
    assert versions == sorted(set(versions)), "each has one of its own"
    assert running(version=100).publish(100, T) == 100, "the trainer publishes its checkpoint again"
    assert running(version=100).publish(81, T) == 101


@pytest.mark.parametrize("first", ["trainer", "explorer"])
def test_both_are_ready(first: str) -> None:
    state = running(E)
    if first == "trainer":
        sending = state.trainer_ready(5, T, 10.0)
        assert state.trainer_status is REQUIRE_SYNC
        assert state.version == 0, "nothing is transferred yet"
        receiving = state.explorer_ready(E, 10.0)
    else:
        receiving = state.explorer_ready(E, 10.0)
        assert receiving.end is None
        sending = state.trainer_ready(5, T, 10.0)
    assert answer(sending) == answer(receiving) == state.version == 5
    assert state.trainer_status is RUNNING
    assert counts(state) == (1, 0, 0)


@pytest.mark.parametrize("event", ["timeout", "stopped", "died", "cancelled"])
@pytest.mark.parametrize("side", [T, E])
def test_a_side_whose_other_side_does_not_come(side: str, event: str) -> None:
    state = running(E)
    wait = state.trainer_ready(5, T, 10.0) if side == T else state.explorer_ready(E, 10.0)
    match event:
        case "timeout":
            state.expire(10.0)
        case "stopped" if side == T:
            state.set_explorer_status(STOPPED, RUNNING, E)
        case "stopped":
            state.set_trainer_status(STOPPED, T)
        case "died":
            state.leave(E if side == T else T)
        case _:
            state.cancel(wait)
    assert wait.end is not None
    assert wait.version is None
    assert state.trainer_status is not REQUIRE_SYNC
    assert counts(state)[1] == 0
    assert state.version == 0, "a failure raises no version"


def test_a_trainer_waits_for_all_explorers_and_not_for_the_dead() -> None:
    state = running(E, F, "third")
    waits = [state.explorer_ready(E, 10.0), state.trainer_ready(5, T, 10.0), state.explorer_ready(F, 10.0)]
    assert [wait.end for wait in waits] == [None] * 3
    state.leave("third")
    assert [answer(wait) for wait in waits] == [5] * 3
    assert counts(state) == (2, 0, 0)


def test_two_groups_are_independent() -> None:
    state = running(E, F)
    state.set_trainer_status(RUNNING, "second")
    state.set_groups([SyncGroup(frozenset([T]), frozenset([E])), SyncGroup(frozenset(["second"]), frozenset([F]))])
    first, second = state.trainer_ready(5, T, 10.0), state.trainer_ready(5, "second", 10.0)
    assert answer(state.explorer_ready(E, 10.0)) == answer(first) == 5
    assert second.end is None
    assert answer(state.explorer_ready(F, 10.0)) == answer(second) == 6, "other weights, another version"


@pytest.mark.parametrize("lost", [T, E, F])
def test_a_group_that_has_lost_a_member_is_not_ready_until_it_is_set_up_again(lost: str) -> None:
    state = running(E, F)
    state.set_groups([SyncGroup(frozenset([T]), frozenset([E, F]))])
    waits = {T: state.trainer_ready(5, T, 10.0), E: state.explorer_ready(E, 10.0)}
    state.leave(lost)
    for member, wait in waits.items():
        assert wait.version is None
        assert wait.end is (End.LEFT if member == lost else End.ANSWERED)
    if lost != T:
        assert answer(state.trainer_ready(5, T, 10.0)) is None, "the others of the collective would hang"
        left = {E, F} - {lost}
        state.set_groups([SyncGroup(frozenset([T]), frozenset(left))])
        sending = state.trainer_ready(5, T, 10.0)
        assert answer(state.explorer_ready(left.pop(), 10.0)) == answer(sending) == 5


def test_members_outside_the_groups_are_never_ready() -> None:
    state = running(E, F)
    state.set_groups([SyncGroup(frozenset([T]), frozenset([E]))])
    state.set_trainer_status(RUNNING, "second")
    assert answer(state.explorer_ready(F, 10.0)) is None
    assert answer(state.trainer_ready(5, "second", 10.0)) is None
    assert counts(state) == (2, 0, 0)


def test_the_end_ends_all_waits() -> None:
    state = running(E, F)
    waits = [state.wait_new_state(0, E, 10.0), state.explorer_ready(F, 10.0), state.trainer_ready(5, T, 10.0)]
    assert [wait.end for wait in waits] == [None] * 3
    state.end()
    assert {wait.end for wait in waits} == {End.LEFT}
    assert state.wait_new_state(0, E, 10.0).end is End.LEFT


def test_what_holds_after_any_sequence() -> None:
    """The version never goes back, no count is negative or left over, and every wait ends."""
    for seed in range(300):
        check_a_sequence(seed)


def check_a_sequence(seed: int) -> None:
    rng = random.Random(seed)
    state = Coordination()
    trainers, explorers = ["t1", "t2"][: rng.randint(1, 2)], ["e1", "e2", "e3"][: rng.randint(1, 3)]
    waiting: dict[str, Wait] = {}
    alive: set[str] = set()
    now, version, high = 0.0, 0, 0
    for _ in range(200):
        now += rng.random()
        state.expire(now)
        waiting = {member: wait for member, wait in waiting.items() if wait.end is None}
        member = rng.choice(trainers + explorers)
        deadline = now + rng.uniform(0.0, 5.0)
        if member not in alive:
            alive.add(member)
            if member in trainers:
                state.set_trainer_status(RUNNING, member)
            else:
                state.set_explorer_status(RUNNING, None, member)
        elif rng.random() < 0.1:
            state.leave(member)
            alive.discard(member)
        elif member in waiting:
            if rng.random() < 0.2:
                state.cancel(waiting[member])
        elif member in trainers:
            match rng.randrange(4):
                case 0:
                    state.set_trainer_status(rng.choice([RUNNING, STOPPED]), member)
                case 1 | 2:
                    step = rng.randrange(max(0, version - 5), version + 5)
                    version = state.publish(step, member)
                case _:
                    waiting[member] = state.trainer_ready(rng.randrange(version + 5), member, deadline)
        elif rng.random() < 0.6:
            waiting[member] = state.wait_new_state(state.version, member, deadline)
        else:
            waiting[member] = state.explorer_ready(member, deadline)
        if rng.random() < 0.1:
            groups = [SyncGroup(frozenset(trainers[:1]), frozenset(explorers[:1]))]
            state.set_groups(rng.choice([None, groups, []]))
        assert state.version >= high
        high = version = state.version
        assert all(count >= 0 for count in counts(state))
        assert sum(counts(state)) == len(alive & set(explorers))
    state.expire(now + 10.0)
    assert all(wait.end is not None for wait in waiting.values())
    for member in alive:
        state.leave(member)
    assert counts(state) == (0, 0, 0)
    assert state.trainer_status is STOPPED
