"""Who is ahead of whom, and who steps together."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import StateError
from averaging.strategies.history import History, Progress, look_around
from averaging.strategies.together import MAX_SAMPLES, _check_history, gathered_samples

A, B = History(3, 12.0, "aa"), History(3, 12.0, "bb")

histories = st.builds(
    History, st.integers(0, 50), st.floats(0, 1e9), st.text("0123456789abcdef", min_size=0, max_size=16)
)


def told(**peers: tuple[History, float]) -> dict[str, bytes]:
    return {name: Progress(history, samples, samples / 2).pack() for name, (history, samples) in peers.items()}


@given(histories, st.floats(0, 1e9))
def test_progress_comes_back_as_it_was(history: History, samples: float) -> None:
    assert Progress.unpack(Progress(history, samples).pack()) == Progress(history, samples)
    assert History.unpack(history.pack()) == history


@given(st.binary(max_size=64))
def test_what_is_no_progress_is_nothing(packed: bytes) -> None:
    found = Progress.unpack(packed)
    assert found is None or Progress.unpack(found.pack()) == found


@pytest.mark.parametrize(
    "packed",
    [
        [-1, 1.0, "", 1.0, 1.0],
        [2**64 - 1, 1.0, "", 1.0, 1.0],  # the next step could be told to nobody
        [1, float("nan"), "", 1.0, 1.0],
        [1, 1.0, "x" * 65, 1.0, 1.0],
        [1, 1.0, "", -1.0, 1.0],
        [1, 1.0, "", None, 1.0],
        [1, 1.0, "", 1.0, float("inf")],
        [1, 1.0, "", 1.0],
        [],
    ],
)
def test_numbers_that_make_no_sense_are_nothing(packed: list[object]) -> None:
    assert Progress.unpack(msgpack.packb(packed)) is None


def test_a_history_that_is_none_is_an_error() -> None:
    with pytest.raises(StateError, match="not the history of a run"):
        History.unpack(None)


def test_members_of_one_group_have_one_history_and_others_another() -> None:
    start = History()
    assert start.after(b"x" * 20, 8) == start.after(b"x" * 20, 8)
    assert start.after(b"x" * 20, 8) != start.after(b"y" * 20, 8)
    assert start.after(b"x" * 20, 8).step == 1
    assert start.after(b"x", 8).after(b"y", 8).lineage != start.after(b"y", 8).after(b"x", 8).lineage


def test_those_with_the_same_history_step_together() -> None:
    peers = told(x=(A, 5.0), y=(A, 7.0), z=(B, 100.0), w=(History(2), 50.0)) | {"odd": b"\xc1"}
    others = look_around(A, peers)
    assert others.samples == 12.0
    assert others.coming == 6.0
    assert others.together == ("x", "y")
    assert others.ahead == ("z",)
    assert others.best == B


def test_a_partner_whose_word_is_old_is_waited_for_and_a_stranger_is_not() -> None:
    late = told(partner=(History(1, 3.0, "cc"), 9.0), stranger=(History(1, 3.0, "cc"), 9.0))
    others = look_around(A, late, {"partner"})
    assert others.together == ("partner",)
    assert (others.samples, others.coming) == (0.0, 0.0)  # those it tells were for an earlier step
    assert others.ahead == ()
    gone_on = look_around(A, told(partner=(History(4, 3.0, "cc"), 9.0)), {"partner"})
    assert (gone_on.together, gone_on.ahead) == ((), ("partner",))


def test_more_steps_count_more_than_more_samples() -> None:
    assert look_around(History(3, 99.0, "aa"), told(x=(History(4, 1.0, "bb"), 0.0))).ahead == ("x",)
    assert look_around(History(4, 1.0, "bb"), told(x=(History(3, 99.0, "aa"), 0.0))).ahead == ()


@given(histories, histories)
def test_of_two_different_histories_exactly_one_gives_way(one: History, other: History) -> None:
    ahead = [bool(look_around(mine, told(x=(yours, 0.0))).ahead) for mine, yours in [(one, other), (other, one)]]
    assert sum(ahead) == (one != other)


def test_nobody_catches_up_with_a_client_and_a_client_gives_way() -> None:
    client = told(**{"client::1": (B, 0.0)})
    assert look_around(A, client).ahead == ()
    node = told(**{"192.0.2.1:1": (A, 0.0)})
    assert look_around(B, node, is_client=True).ahead == ("192.0.2.1:1",)
    assert look_around(B, node).ahead == ()
    assert look_around(A, node, is_client=True).ahead == ()  # it has what they have
    # The nodes may be about to finish the same step.
    assert look_around(B, told(**{"192.0.2.1:1": (History(2), 0.0)}), is_client=True).ahead == ()


@pytest.mark.parametrize("told", [float("inf"), 1e308, float("nan"), -1.0, -0.5, 2**64 - 1, True, "7", None])
def test_no_member_can_make_a_history_that_nobody_reads(told: object) -> None:
    samples = sum(gathered_samples(user) for user in ({"samples": told}, {"samples": told}, {"samples": 5}))
    progress = Progress(History(3, 10.0, "aa").after(b"x" * 20, samples))
    assert progress.history.samples == 5.0
    assert Progress.unpack(progress.pack()) == progress


@pytest.mark.parametrize("samples", [1, 0.5, 32, MAX_SAMPLES])
def test_what_a_member_tells_is_counted(samples: float) -> None:
    assert gathered_samples({"samples": samples}) == samples
    assert gathered_samples({"samples": 0}) == gathered_samples({}) == gathered_samples(b"?") == 0.0


def test_a_state_is_taken_only_if_it_is_as_far_as_its_donor_told() -> None:
    for history in (B, B.after(b"x" * 20, 1.0)):
        _check_history({"history": history.pack()}, B)
    for user in ({"history": A.pack()}, {"history": History().pack()}, {}):
        with pytest.raises(StateError):
            _check_history(user, B)
