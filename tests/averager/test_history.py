"""Which peers are ahead, and which step together."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import msgpack

from averaging.errors import StateError
from averaging.protocol.group import Statement
from averaging.strategies.catch_up import check_history
from averaging.training.history import (
    History,
    HistoryStanding,
    Origin,
    Others,
    Own,
    Progress,
    Rank,
    Stage,
    compare_progress,
    done_training,
    look_for_greater_origin,
    rank_donors,
    same_origin,
    still_training,
    takes_over,
)

HERE = Origin(Rank.APPOINTED, -1000.0, "here")
A, B = History(3, 12.0, "aa", HERE), History(3, 12.0, "bb", HERE)

origins = st.builds(Origin, st.sampled_from(Rank), st.floats(-2e9, 0), st.text("0123456789abcdef", max_size=16))
histories = st.builds(
    History, st.integers(0, 50), st.floats(0, 1e9), st.text("0123456789abcdef", min_size=0, max_size=16), origins
)


def compare(own: History, peers: dict[str, bytes], partners: Collection[str] = (), **options: Any) -> Others:
    return compare_progress(Own(own, donates=options.pop("donates", True)), peers, partners, **options)


def at(step: int, samples: float = 0.0, lineage: str = "") -> History:
    return History(step, samples, lineage, HERE)


def announced(**peers: tuple[History, float]) -> dict[str, bytes]:
    return {name: Progress(history, samples, samples / 2).pack() for name, (history, samples) in peers.items()}


@given(st.binary(max_size=64))
def test_what_is_no_progress_is_nothing(packed: bytes) -> None:
    found = Progress.unpack(packed)
    assert found is None or Progress.unpack(found.pack()) == found


ORIGIN = HERE.pack()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *[
            (0, history)
            for history in (
                [-1, 1.0, "", ORIGIN],
                [2**64 - 1, 1.0, "", ORIGIN],  # the next step could not be packed
                [1, float("nan"), "", ORIGIN],
                [1, 1.0, "x" * 65, ORIGIN],
                [1, 1.0, "", [3, 0.0, ""]],
                [1, 1.0, "", [1, float("inf"), ""]],
                [1, 1.0, "", [1, 0.0, "x" * 65]],
                [1, 1.0, ""],
                1,
            )
        ],
        *[(1, -1.0), (1, None), (2, float("inf")), (3, 1), (4, 5), (4, None), (5, "x" * 65)],
        *[(9, ["a"]), (9, {1: "a"}), (10, -1.0), (11, 5), (11, "steps"), (12, -1)],
    ],
)
def test_numbers_that_make_no_sense_are_nothing(place: int, value: object) -> None:
    items = msgpack.decode(Progress(A).pack())
    assert Progress.unpack(msgpack.encode([*items[:place], value, *items[place + 1 :]])) is None
    assert Progress.unpack(msgpack.encode(items[:place])) is None


def test_members_of_one_group_have_one_history_and_others_another() -> None:
    start = History()
    assert start.after(b"x" * 20, 8) == start.after(b"x" * 20, 8)
    assert start.after(b"x" * 20, 8) != start.after(b"y" * 20, 8)
    assert start.after(b"x" * 20, 8).step == 1
    assert start.after(b"x", 8).after(b"y", 8).lineage != start.after(b"y", 8).after(b"x", 8).lineage


def test_those_with_the_same_history_step_together() -> None:
    peers = announced(x=(A, 5.0), y=(A, 7.0), z=(B, 100.0), w=(at(2), 50.0)) | {"odd": b"\xc1"}
    others = compare(A, peers)
    assert others.samples == 12.0
    assert others.computing == 6.0
    assert others.together == ("x", "y")
    assert not others.ahead
    assert compare(A, peers | announced(x=(B, 5.0), y=(B, 7.0))).ahead == {"x": B, "y": B, "z": B}


def test_a_partner_with_an_old_announcement_is_together_and_a_stranger_is_not() -> None:
    late = announced(partner=(at(1, 3.0, "cc"), 9.0), stranger=(at(1, 3.0, "cc"), 9.0))
    own = replace(A, trail=("cc", "dd"))
    others = compare(own, late, {"partner"})
    assert others.together == ("partner",)
    assert (others.samples, others.computing) == (0.0, 0.0)  # its samples are for an earlier step
    assert not others.ahead
    gone_on = compare(A, announced(partner=(at(4, 3.0, "cc"), 9.0)), {"partner"})
    assert (gone_on.together, list(gone_on.ahead)) == ((), ["partner"])


def test_more_steps_count_more_than_more_samples() -> None:
    assert compare(at(3, 99.0, "aa"), announced(x=(at(4, 1.0, "bb"), 0.0))).ahead.keys() == {"x"}
    assert not compare(at(4, 1.0, "bb"), announced(x=(at(3, 99.0, "aa"), 0.0))).ahead


@given(histories, histories)
def test_of_two_different_histories_exactly_one_gives_way(one: History, other: History) -> None:
    ahead = [bool(compare(mine, announced(x=(yours, 0.0))).ahead) for mine, yours in [(one, other), (other, one)]]
    assert sum(ahead) == (one != other)


def test_nobody_catches_up_with_a_peer_whose_state_cannot_be_downloaded_and_it_gives_way() -> None:
    client = announced(**{"client::1": (B, 0.0)})
    assert not compare(A, client).ahead
    unshared = {"192.0.2.1:1": Progress(B, donates=False).pack()}
    assert not compare(A, unshared).ahead
    node = announced(**{"192.0.2.1:1": (A, 0.0)})
    assert compare(B, node, donates=False).ahead.keys() == {"192.0.2.1:1"}
    assert not compare(B, node).ahead
    assert not compare(A, node, donates=False).ahead  # it has what they have
    # The nodes may be about to finish the same step.
    assert not compare(B, announced(**{"192.0.2.1:1": (at(2), 0.0)}), donates=False).ahead
    # A newcomer's first parameters do not replace what has been learned.
    elsewhere = Origin(Rank.FOUND_NOBODY, -5000.0, "a")
    for step in (2, 3):
        newcomer = announced(**{"192.0.2.1:1": (History(step, origin=elsewhere), 0.0)})
        assert bool(compare(B, newcomer, donates=False).ahead) is (step == 3)


def test_before_the_first_step_the_greater_origin_counts() -> None:
    """An appointed origin, then the earlier one, then any; one that cannot be downloaded yields to all."""
    increasing = [
        Origin(),
        Origin(Rank.FOUND_NOBODY, -2000.0, "z"),
        Origin(Rank.FOUND_NOBODY, -1000.0, "a"),
        Origin(Rank.FOUND_NOBODY, -1000.0, "b"),
        Origin(Rank.APPOINTED, -3000.0, "a"),
    ]
    assert sorted(increasing, key=lambda origin: History(origin=origin)) == increasing


@given(histories, histories)
def test_peers_of_two_origins_never_meet(one: History, other: History) -> None:
    """Neither before the first step nor after any, also in a group with the same id."""
    if one.origin.id == other.origin.id:
        return
    assert compare(one, announced(x=(other, 1.0))).together == ()
    first, second = History(origin=one.origin), History(origin=other.origin)
    assert first.phase != second.phase
    assert first.after(b"x" * 20, 1.0).phase != second.after(b"x" * 20, 1.0).phase


def test_where_peers_need_not_be_equal_only_another_origin_is_ahead() -> None:
    elsewhere = Origin(Rank.APPOINTED, -2000.0, "there")
    peers = announced(x=(at(9), 0.0), y=(History(2, origin=elsewhere), 0.0))
    assert not look_for_greater_origin(Own(at(3)), peers).ahead
    assert look_for_greater_origin(Own(at(3)), peers).together == ("x",)
    assert not look_for_greater_origin(Own(at(1)), peers).ahead  # one against two
    peers.pop("x")
    assert look_for_greater_origin(Own(at(1)), peers).ahead.keys() == {"y"}
    assert not look_for_greater_origin(Own(at(1)), peers, ignored=["y"]).ahead


def test_peers_that_have_ended_are_waited_for_by_those_that_have_ended_alone() -> None:
    peers = {
        "trains": Progress(A, 5.0, 1.0).pack(),
        "ends": Progress(A, stage=Stage.WAITING).pack(),
        "done": Progress(A, stage=Stage.ENDED, digest="12ab").pack(),
        "odd": b"",
    }
    assert compare(A, peers).together == ("trains",)
    assert compare(A, peers, trains=False).together == ("done", "ends")
    assert compare(A, peers, trains=False).samples == 0
    assert still_training(peers) == {"trains", "odd"}
    assert done_training(peers) == {"ends", "done"}
    assert done_training(peers, Stage.ENDED) == {"done"}


def test_peers_whose_origin_is_not_known_count_as_of_one_run() -> None:
    peers = announced(x=(at(9), 0.0), y=(History(2, origin=Origin(Rank.APPOINTED, -2.0, "b")), 0.0)) | {"odd": b""}
    assert same_origin(at(3), peers) == {"x", "odd"}


@pytest.mark.parametrize("samples", [float("inf"), 1e308, float("nan"), -1.0, -0.5, 2**64 - 1, True, "7", None])
def test_no_member_can_make_a_history_that_is_malformed(samples: object) -> None:
    total = sum(Statement.read({"samples": said}).samples or 0.0 for said in (samples, samples, 5))
    progress = Progress(at(3, 10.0, "aa").after(b"x" * 20, total))
    assert progress.history.samples == 5.0
    assert Progress.unpack(progress.pack()) == progress


def test_a_state_is_taken_only_if_it_is_as_far_as_its_donor_claims() -> None:
    for history in (B, B.after(b"x" * 20, 1.0)):
        check_history({"history": history.pack()}, B)
    for user in ({"history": A.pack()}, {"history": History().pack()}, {}):
        with pytest.raises(StateError):
            check_history(user, B)


def after(history: History, letter: str, count: int) -> History:
    for number in range(count):
        history = history.after(f"{letter}{number}".encode(), 1.0)
    return history


MINE = after(at(0), "m", 100)
ELSEWHERE = History(10**6, 1.0, "f" * 16, Origin(Rank.APPOINTED, -1.0, "elsewhere"))


def leaves(own: History, theirs: History, absent: Collection[str] = (), **peers: History) -> bool:
    return takes_over(Own(own, absent=absent), theirs, {name: Progress(history) for name, history in peers.items()})


@pytest.mark.parametrize("theirs", [after(MINE, "x", 1000), ELSEWHERE], ids=["the same run", "another run"])
def test_a_history_is_worth_the_peers_that_hold_it(theirs: History) -> None:
    assert leaves(MINE, theirs, x=theirs)
    assert not leaves(MINE, theirs, x=theirs, b=MINE)
    assert leaves(MINE, theirs, x=theirs, y=theirs, b=MINE)
    assert not leaves(MINE, theirs, x=theirs, y=theirs, b=MINE, c=MINE, d=MINE)
    assert leaves(MINE, theirs, ["b"], x=theirs, b=MINE) is (theirs is not ELSEWHERE)


def test_a_peer_goes_back_to_the_step_of_the_others() -> None:
    """It went on alone while they stood still."""
    gone_on, others = after(MINE, "d", 15), after(MINE, "c", 1)
    assert leaves(gone_on, others, b=others, c=others)
    assert not compare(gone_on, announced(b=(MINE, 0.0), c=(MINE, 0.0))).ahead
    assert compare(gone_on, announced(b=(others, 0.0), c=(others, 0.0))).ahead.keys() == {"b", "c"}


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@given(lengths, lengths, st.lists(st.integers(0, 20), max_size=3))
def test_of_two_sides_exactly_one_gives_way(left: list[int], right: list[int], behind: list[int]) -> None:
    """A peer of each side sees the same records as the other; some peers have not come to where they part."""
    peers = {f"x{n}": after(MINE, "a", steps) for n, steps in enumerate(left)}
    peers |= {f"y{n}": after(MINE, "b", steps) for n, steps in enumerate(right)}
    peers |= {f"z{n}": after(at(0), "m", 100 - steps) for n, steps in enumerate(behind)}
    one, other = (max((name for name in peers if name[0] == side), key=peers.__getitem__) for side in "xy")

    def gives_way(name: str, to: str) -> bool:
        seen = {peer: Progress(history) for peer, history in peers.items() if peer != name}
        return takes_over(Own(peers[name]), peers[to], seen)

    assert gives_way(one, other) is not gives_way(other, one)


def test_peers_that_have_died_keep_nobody_from_the_others() -> None:
    """A peer that was cut off for a moment has made steps alone; the records of three dead peers are still there."""
    common = after(MINE, "f", 3)
    alone, others = after(common, "a", 2), after(common, "b", 4)
    dead = {f"d{step}": after(MINE, "f", step) for step in range(1, 4)}
    assert leaves(alone, others, (), b=others, c=others, **dead)
    assert leaves(alone, others, b=others, c=others, d=after(alone, "a", 1)) is (others > alone)
    assert leaves(common, others, ["d"], b=others, d=common)


@pytest.mark.parametrize("made", [True, False])
def test_a_state_with_the_same_history_changes_no_standing(made: bool) -> None:
    standing = HistoryStanding(made=made, rounds=3)
    assert standing.after_loading(MINE, MINE, made=False) == standing
    assert not standing.after_loading(after(MINE, "a", 1), MINE, made=False).made
    assert standing.after_loading(ELSEWHERE, MINE, made=False) == HistoryStanding()
    assert standing.after_loading(ELSEWHERE, MINE, made=True).made


def test_all_that_is_announced_comes_back() -> None:
    progress = Progress(MINE, parts={"frozen": "0f"}, moment=5.0, terms={"quorum": "2", "weight": "1"}, late=3)
    assert Progress.unpack(progress.pack()) == progress


def test_a_newcomer_takes_the_history_of_most_peers() -> None:
    peers = {name: Progress(history) for name, history in {"a": MINE, "b": after(MINE, "b", 1), "x": ELSEWHERE}.items()}
    offered = [(100.0, "a"), (101.0, "b"), (1e12, "x")]
    donors, claims = rank_donors(offered, peers)
    assert donors == ["a", "b", "x"]  # the history of "b" is not yet that of most
    assert [claim.history.origin.id for claim in claims] == ["here", "elsewhere"]
    assert str(claims[0]) == "step 101 of 2 peers (a, b)"
    peers.pop("b")
    assert rank_donors(offered[::2], peers)[0] == ["x", "a"]
    assert rank_donors(offered[::2], peers, given=["a"])[0] == ["a", "x"]
    assert rank_donors([*offered[::2], (7.0, "f")], peers, given=["a"])[0] == ["a", "x", "f"]  # of an older release
