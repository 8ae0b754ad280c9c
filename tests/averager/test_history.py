"""Which peers are ahead, and which step together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from averaging.errors import StateError
from averaging.strategies.catch_up import check_history
from averaging.strategies.lockstep import MAX_SAMPLES, gathered_samples
from averaging.training.history import (
    History,
    Made,
    Origin,
    Progress,
    Rank,
    Stage,
    done_training,
    same_origin,
    still_training,
)
from averaging.training.standing import TRAINED_TOGETHER, HistoryStanding, Others, Own, rank_donors, takes_over
from averaging.training.standing import compare_progress as compare
from averaging.training.standing import look_for_greater_origin as look

HERE = Origin(Rank.APPOINTED, -1000.0, "here")
A, B = History(3, 12.0, "aa", HERE), History(3, 12.0, "bb", HERE)

origins = st.builds(Origin, st.sampled_from(Rank), st.floats(-2e9, 0), st.text("0123456789abcdef", max_size=16))
histories = st.builds(
    History, st.integers(0, 50), st.floats(0, 1e9), st.text("0123456789abcdef", min_size=0, max_size=16), origins
)


def members(peers: Mapping[str, bytes]) -> dict[str, str]:
    """Each peer is a member of its own."""
    return {name: name for name in peers}


def compare_progress(
    own: History, peers: Mapping[str, bytes], partners: Collection[str] = (), *, donates: bool = True, **options: Any
) -> Others:
    return compare(Own(own, donates=donates), peers, members(peers), partners, **options)


def look_for_greater_origin(own: History, peers: Mapping[str, bytes], **options: Any) -> Others:
    return look(Own(own), peers, members(peers), **options)


def at(step: int, samples: float = 0.0, lineage: str = "") -> History:
    return History(step, samples, lineage, HERE)


def announced(**peers: tuple[History, float]) -> dict[str, bytes]:
    return {name: Progress(history, samples, samples / 2).pack() for name, (history, samples) in peers.items()}


@given(histories, st.floats(0, 1e9))
def test_progress_comes_back_as_it_was(history: History, samples: float) -> None:
    assert Progress.unpack(Progress(history, samples).pack()) == Progress(history, samples)
    assert History.unpack(history.pack()) == history


@given(st.binary(max_size=64))
def test_what_is_no_progress_is_nothing(packed: bytes) -> None:
    found = Progress.unpack(packed)
    assert found is None or Progress.unpack(found.pack()) == found


ORIGIN = HERE.pack()


@pytest.mark.parametrize(
    "packed",
    [
        [[-1, 1.0, "", ORIGIN], 1.0, 1.0, True, 0, ""],
        [[2**64 - 1, 1.0, "", ORIGIN], 1.0, 1.0, True, 0, ""],  # the next step could not be packed
        [[1, float("nan"), "", ORIGIN], 1.0, 1.0, True, 0, ""],
        [[1, 1.0, "x" * 65, ORIGIN], 1.0, 1.0, True, 0, ""],
        [[1, 1.0, "", [3, 0.0, ""]], 1.0, 1.0, True, 0, ""],
        [[1, 1.0, "", [1, float("inf"), ""]], 1.0, 1.0, True, 0, ""],
        [[1, 1.0, "", [1, 0.0, "x" * 65]], 1.0, 1.0, True, 0, ""],
        [[1, 1.0, ""], 1.0, 1.0, True, 0, ""],
        [[1, 1.0, "", ORIGIN], -1.0, 1.0, True, 0, ""],
        [[1, 1.0, "", ORIGIN], None, 1.0, True, 0, ""],
        [[1, 1.0, "", ORIGIN], 1.0, float("inf"), True, 0, ""],
        [[1, 1.0, "", ORIGIN], 1.0, 1.0, 1, 0, ""],
        [[1, 1.0, "", ORIGIN], 1.0, 1.0, True, 5, ""],
        [[1, 1.0, "", ORIGIN], 1.0, 1.0, True, 0, "x" * 65],
        [[1, 1.0, "", ORIGIN], 1.0, 1.0, True, None, ""],
        [[1, 1.0, "", ORIGIN], 1.0, 1.0, True],
        [1, 1.0, "", 1.0, 1.0],
        [],
    ],
)
def test_numbers_that_make_no_sense_are_nothing(packed: list[object]) -> None:
    assert Progress.unpack(msgpack.encode(packed)) is None


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
    peers = announced(x=(A, 5.0), y=(A, 7.0), z=(B, 100.0), w=(at(2), 50.0)) | {"odd": b"\xc1"}
    others = compare_progress(A, peers)
    assert others.samples == 12.0
    assert others.computing == 6.0
    assert others.together == ("x", "y")
    assert not others.ahead
    assert others.refused == {"z": B}  # one against three
    assert compare_progress(A, peers | announced(x=(B, 5.0), y=(B, 7.0))).ahead == {"x": B, "y": B, "z": B}


def test_a_partner_with_an_old_announcement_is_together_and_a_stranger_is_not() -> None:
    late = announced(partner=(at(1, 3.0, "cc"), 9.0), stranger=(at(1, 3.0, "cc"), 9.0))
    own = replace(A, trail=("cc", "dd"))
    others = compare_progress(own, late, {"partner"})
    assert others.together == ("partner",)
    assert (others.samples, others.computing) == (0.0, 0.0)  # its samples are for an earlier step
    assert not others.ahead
    gone_on = compare_progress(A, announced(partner=(at(4, 3.0, "cc"), 9.0)), {"partner"})
    assert (gone_on.together, list(gone_on.ahead)) == ((), ["partner"])


def test_more_steps_count_more_than_more_samples() -> None:
    assert compare_progress(at(3, 99.0, "aa"), announced(x=(at(4, 1.0, "bb"), 0.0))).ahead.keys() == {"x"}
    assert not compare_progress(at(4, 1.0, "bb"), announced(x=(at(3, 99.0, "aa"), 0.0))).ahead


@given(histories, histories)
def test_of_two_different_histories_exactly_one_gives_way(one: History, other: History) -> None:
    ahead = [
        bool(compare_progress(mine, announced(x=(yours, 0.0))).ahead) for mine, yours in [(one, other), (other, one)]
    ]
    assert sum(ahead) == (one != other)


def test_nobody_catches_up_with_a_peer_whose_state_cannot_be_downloaded_and_it_gives_way() -> None:
    client = announced(**{"client::1": (B, 0.0)})
    assert not compare_progress(A, client).ahead
    unshared = {"192.0.2.1:1": Progress(B, donates=False).pack()}
    assert not compare_progress(A, unshared).ahead
    node = announced(**{"192.0.2.1:1": (A, 0.0)})
    assert compare_progress(B, node, donates=False).ahead.keys() == {"192.0.2.1:1"}
    assert not compare_progress(B, node).ahead
    assert not compare_progress(A, node, donates=False).ahead  # it has what they have
    # The nodes may be about to finish the same step.
    assert not compare_progress(B, announced(**{"192.0.2.1:1": (at(2), 0.0)}), donates=False).ahead
    # A newcomer's first parameters do not replace what has been learned.
    elsewhere = Origin(Rank.FOUND_NOBODY, -5000.0, "a")
    for step in (2, 3):
        newcomer = announced(**{"192.0.2.1:1": (History(step, origin=elsewhere), 0.0)})
        assert bool(compare_progress(B, newcomer, donates=False).ahead) is (step == 3)


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
    assert compare_progress(one, announced(x=(other, 1.0))).together == ()
    first, second = History(origin=one.origin), History(origin=other.origin)
    assert first.phase != second.phase
    assert first.after(b"x" * 20, 1.0).phase != second.after(b"x" * 20, 1.0).phase


def test_where_peers_need_not_be_equal_only_another_origin_is_ahead() -> None:
    elsewhere = Origin(Rank.APPOINTED, -2000.0, "there")
    peers = announced(x=(at(9), 0.0), y=(History(2, origin=elsewhere), 0.0))
    assert not look_for_greater_origin(at(3), peers).ahead
    assert look_for_greater_origin(at(3), peers).together == ("x",)
    assert look_for_greater_origin(at(1), peers).refused.keys() == {"y"}  # one against two
    peers.pop("x")
    assert look_for_greater_origin(at(1), peers).ahead.keys() == {"y"}
    assert not look_for_greater_origin(at(1), peers, ignored=["y"]).ahead


def test_doubted_claims_are_passed_over() -> None:
    peers = announced(x=(at(9), 0.0), y=(at(10**12), 0.0), z=(at(3), 2.0))
    assert compare_progress(at(3), peers).ahead == {"x": at(9), "y": at(10**12)}
    others = compare_progress(at(3), peers, ignored=["y"])
    assert (others.ahead, others.together) == ({"x": at(9)}, ("z",))
    assert not compare_progress(at(3), peers, ignored=["x", "y"]).ahead


def test_peers_that_have_ended_are_waited_for_by_those_that_have_ended_alone() -> None:
    peers = {
        "trains": Progress(A, 5.0, 1.0).pack(),
        "ends": Progress(A, stage=Stage.WAITING).pack(),
        "done": Progress(A, stage=Stage.ENDED, digest="12ab").pack(),
        "odd": b"",
    }
    assert compare_progress(A, peers).together == ("trains",)
    assert compare_progress(A, peers, trains=False).together == ("done", "ends")
    assert compare_progress(A, peers, trains=False).samples == 0
    assert still_training(peers) == {"trains", "odd"}
    assert done_training(peers) == {"ends", "done"}
    assert done_training(peers, Stage.ENDED) == {"done"}


def test_peers_whose_origin_is_not_known_count_as_of_one_run() -> None:
    peers = announced(x=(at(9), 0.0), y=(History(2, origin=Origin(Rank.APPOINTED, -2.0, "b")), 0.0)) | {"odd": b""}
    assert same_origin(at(3), peers) == {"x", "odd"}


@pytest.mark.parametrize("samples", [float("inf"), 1e308, float("nan"), -1.0, -0.5, 2**64 - 1, True, "7", None])
def test_no_member_can_make_a_history_that_is_malformed(samples: object) -> None:
    total = sum(gathered_samples(user) for user in ({"samples": samples}, {"samples": samples}, {"samples": 5}))
    progress = Progress(at(3, 10.0, "aa").after(b"x" * 20, total))
    assert progress.history.samples == 5.0
    assert Progress.unpack(progress.pack()) == progress


@pytest.mark.parametrize("samples", [1, 0.5, 32, MAX_SAMPLES])
def test_what_a_member_reports_is_counted(samples: float) -> None:
    assert gathered_samples({"samples": samples}) == samples
    assert gathered_samples({"samples": 0}) == gathered_samples({}) == gathered_samples(b"?") == 0.0


def test_a_state_is_taken_only_if_it_is_as_far_as_its_donor_claims() -> None:
    for history in (B, B.after(b"x" * 20, 1.0)):
        check_history({"history": history.pack()}, B)
    for user in ({"history": A.pack()}, {"history": History().pack()}, {}):
        with pytest.raises(StateError):
            check_history(user, B)


def test_the_digests_of_parts_are_announced_and_malformed_ones_ignored() -> None:
    parts = {"frozen parameters": "00ff"}
    packed = Progress(A, parts=parts).pack()
    assert Progress.unpack(packed) == Progress(A, parts=parts)
    items = msgpack.decode(packed)
    for malformed in ("more", 5, [["a", "b"]], {"a": 1}, {1: "a"}, {"a": "f" * 65}):
        assert Progress.unpack(msgpack.encode([*items[:-1], malformed])) == Progress(A)


def at_host(**peers: Progress) -> tuple[dict[str, Progress], dict[str, str]]:
    """Peers by the name of their host, with a number for each endpoint there."""
    return dict(peers), {name: name.rstrip("0123456789") for name in peers}


TRAINED = HistoryStanding(made=True, rounds=TRAINED_TOGETHER, met=frozenset({"b"}))
MINE = History(100, 1.0, "a" * 16, HERE, trail=("9" * 16,))
FURTHER = History(10**6, 1.0, "f" * 16, HERE, trail=("9" * 16, "a" * 16))
ELSEWHERE = History(10**6, 1.0, "f" * 16, Origin(Rank.APPOINTED, -1.0, "evil"))


def leaves(standing: HistoryStanding, theirs: History, **peers: Progress) -> bool:
    known, counted = at_host(**peers)
    return takes_over(Own(MINE, "a", standing), theirs, known, counted)


@pytest.mark.parametrize("theirs", [FURTHER, ELSEWHERE], ids=["the same run", "another run"])
def test_a_history_is_worth_the_members_that_made_it(theirs: History) -> None:
    liar, partner = Progress(theirs, made=Made.TOGETHER), Progress(MINE, made=Made.TOGETHER)
    alone = HistoryStanding(made=True)
    assert not leaves(TRAINED, theirs, x=liar)
    assert not leaves(TRAINED, theirs, x=liar, x1=liar, x2=liar, x3=liar)  # many of one host
    assert not leaves(TRAINED, theirs, x=liar, b=partner)
    assert not leaves(TRAINED, theirs, x=liar, y=liar, b=partner, c=partner)
    assert leaves(TRAINED, theirs, x=liar, y=liar, z=liar, b=partner)
    assert not leaves(TRAINED, theirs, x=liar, y=Progress(theirs, made=Made.NOTHING), b=partner)
    assert leaves(alone, theirs, x=liar)
    assert not leaves(alone, theirs, x=liar, b=partner)
    assert leaves(replace(TRAINED, allow_takeover=True), theirs, x=liar, b=partner)
    assert leaves(TRAINED, theirs, b=liar) is (theirs is FURTHER)  # a partner that alone has made the last step


def test_a_peer_goes_back_to_the_step_of_the_others() -> None:
    """It went on alone while they stood still."""
    others = Progress(replace(MINE, step=101, lineage="c" * 16, trail=("a" * 16,)), made=Made.TOGETHER)
    gone_on = History(150, 1.0, "d" * 16, HERE)
    known, counted = at_host(b=others, c=others)
    assert takes_over(Own(gone_on, "a", TRAINED), others.history, known, counted)
    behind = Progress(MINE, made=Made.TOGETHER)
    gone_on = replace(gone_on, trail=("a" * 16, *("e" * 16,) * 49))
    assert compare(Own(gone_on, "a", TRAINED), {"b": behind.pack(), "c": behind.pack()}, counted).ahead == {}
    assert compare(Own(gone_on, "a", TRAINED), {"b": others.pack(), "c": others.pack()}, counted).ahead.keys() == {
        "b",
        "c",
    }


def steps_after(history: History, letter: str, count: int) -> History:
    for number in range(count):
        history = history.after(f"{letter}{number}".encode(), 1.0)
    return history


made_or_missed = st.tuples(st.sampled_from(Made), st.just(0)) | st.tuples(st.just(Made.NOTHING), st.integers(1, 6))
sides = st.lists(st.tuples(st.sampled_from("abc"), made_or_missed), min_size=1, max_size=4)


@given(sides, sides, st.integers(1, 4), st.integers(1, 4))
def test_of_two_sides_that_have_met_exactly_one_gives_way(
    left: list[tuple[str, tuple[Made, int]]], right: list[tuple[str, tuple[Made, int]]], ours: int, theirs: int
) -> None:
    """A peer of each side, which has made its history, sees the same records as the other."""
    one, other = steps_after(MINE, "a", ours), steps_after(MINE, "b", theirs)
    peers = {
        f"{host}{number}": Progress(one, made=made, missed=missed)
        for number, (host, (made, missed)) in enumerate([("x", (Made.TOGETHER, 0)), *left])
    }
    peers |= {
        f"{host}{number}": Progress(other, made=made, missed=missed)
        for number, (host, (made, missed)) in enumerate([("y", (Made.TOGETHER, 0)), *right], 10)
    }
    counted = {name: name[0] for name in peers}
    standing = HistoryStanding(made=True, rounds=9, met=frozenset(peers))

    def gives_way(name: str, own: History, to: History) -> bool:
        seen = {peer: progress for peer, progress in peers.items() if peer != name}
        return takes_over(Own(own, counted[name], standing), to, seen, counted)

    assert gives_way("x0", one, other) is not gives_way("y10", other, one)


def test_who_takes_the_last_step_over_stands_behind_the_ones_before() -> None:
    """Of four peers that were parted two and two, two make five steps, but only one of them the fifth."""
    fork = steps_after(MINE, "f", 3)
    five, fifth, first = steps_after(fork, "x", 4), steps_after(fork, "x", 5), steps_after(fork, "y", 1)
    trained = HistoryStanding(rounds=9, met=frozenset("abcd"))
    late = trained.after_step().after_loading(fifth, five, made=False)
    assert (late.made, late.missed, late.announced) == (False, 1, Made.NOTHING)
    records = {name: Progress(fifth, made=Made.TOGETHER) for name in "ab"} | {
        name: Progress(first, made=Made.TOGETHER) for name in "cd"
    }
    records["b"] = replace(records["a"], made=late.announced, missed=late.missed)

    def gives_way(name: str, standing: HistoryStanding, to: History, **more: Progress) -> bool:
        seen = {peer: progress for peer, progress in (records | more).items() if peer != name}
        return takes_over(Own(records[name].history, name, standing), to, seen, {peer: peer for peer in seen})

    assert not gives_way("a", trained.after_step(), first)
    assert not gives_way("b", late, first)
    assert gives_way("c", trained.after_step(), fifth)
    never = trained.after_loading(fifth, five, made=False)  # took the others over, too
    assert gives_way("b", never, first)
    assert gives_way("a", trained.after_step(), first, b=replace(records["b"], missed=0))
    assert gives_way("a", trained.after_step(), first, b=replace(records["b"], missed=5))  # has made the fork only
    assert gives_way("a", trained.after_step(), first, b=replace(records["b"], missed=10**9))


def test_who_took_a_false_step_over_does_not_stand_behind_it() -> None:
    """Two liars make a step after one of all, and a peer that sees nobody else follows them."""
    own, false = steps_after(MINE, "a", 1), steps_after(MINE, "x", 1)
    victim = Progress(false, missed=1, made=Made.NOTHING)
    liars = {name: Progress(false, made=Made.TOGETHER) for name in "xy"}
    honest = {name: Progress(own, made=Made.TOGETHER) for name in "bc"}
    peers = {**liars, **honest, "v": victim}
    counted = {name: name for name in peers}
    assert not takes_over(Own(own, "a", TRAINED), false, peers, counted)
    standing = HistoryStanding(rounds=9, met=frozenset("abc")).after_step().after_loading(false, MINE, made=False)
    assert takes_over(Own(false, "v", standing), own, {**liars, **honest}, counted | {"a": "a"})


def test_peers_that_have_died_keep_nobody_from_the_others() -> None:
    """A peer that was cut off for a moment has made steps alone; the records of three dead peers are still there."""
    common = steps_after(MINE, "f", 3)
    alone, others = steps_after(common, "a", 2), steps_after(common, "b", 4)
    dead = {f"d{step}": Progress(steps_after(MINE, "f", step), made=Made.TOGETHER) for step in range(1, 4)}
    peers = dead | {name: Progress(others, made=Made.TOGETHER) for name in "bc"}
    counted = {name: name for name in peers}
    own = Own(alone, "a", replace(TRAINED, met=frozenset(peers)))
    assert not takes_over(own, others, peers, counted)
    assert takes_over(replace(own, absent=dead.keys()), others, peers, counted)
    last = {"d3": Progress(steps_after(alone, "a", 1), made=Made.TOGETHER)}  # has made steps of this history only
    assert takes_over(own, others, {**last, "b": peers["b"], "c": peers["c"]}, counted) is (others > alone)
    one = {**last, "b": peers["b"]}
    assert not takes_over(replace(own, absent=["d3"]), others, one, counted)


@pytest.mark.parametrize("made", [True, False])
def test_a_state_with_the_same_history_changes_no_standing(made: bool) -> None:
    standing = HistoryStanding(made=made, rounds=3)
    assert standing.after_loading(MINE, MINE, made=False) == standing
    assert not standing.after_loading(ELSEWHERE, MINE, made=False).made
    assert standing.after_loading(ELSEWHERE, MINE, made=False).rounds == 0
    assert standing.after_loading(ELSEWHERE, MINE, made=True).made


def test_steps_that_were_taken_over_are_announced() -> None:
    for late in (None, 3):
        progress = Progress(MINE, made=Made.NOTHING, terms={"target": "8"}, late=late, missed=2)
        assert Progress.unpack(progress.pack()) == progress
        *items, missed = msgpack.decode(progress.pack())
        assert missed == 2
        for malformed in ("2", -1, 0.5, None):
            assert Progress.unpack(msgpack.encode([*items, malformed])) == replace(progress, missed=0)


def test_a_newcomer_takes_the_history_of_most_members() -> None:
    honest, ahead = Progress(MINE, made=Made.TOGETHER), replace(MINE, step=101, lineage="b" * 16, trail=("a" * 16,))
    peers, counted = at_host(
        a=honest, b=Progress(ahead, made=Made.TOGETHER), x=Progress(ELSEWHERE), x1=Progress(ELSEWHERE)
    )
    offered = [(100.0, "a"), (101.0, "b"), (1e12, "x"), (1e12, "x1")]
    donors, claims = rank_donors(offered, peers, counted)
    assert donors == ["a", "b", "x", "x1"]  # the history of "b" is not yet that of most
    assert [claim.history.origin.id for claim in claims] == ["here", "evil"]
    assert str(claims[0]) == "step 101 of 2 members (a, b)"
    peers, counted = at_host(a=honest, x=Progress(ELSEWHERE))
    assert rank_donors(offered[:3:2], peers, counted)[0] == ["x", "a"]
    assert rank_donors(offered[:3:2], peers, counted, given=["a"])[0] == ["a", "x"]
    peers, counted = at_host(a=honest, b=honest, x=Progress(FURTHER), c=Progress(MINE, made=Made.NOTHING))
    assert rank_donors([(100.0, "a"), (100.0, "b"), (1e12, "x"), (7.0, "f")], peers, counted)[0] == ["a", "b", "x", "f"]


def test_endpoints_of_another_machine_count_as_one_for_a_newcomer_and_for_who_has_trained_alone() -> None:
    honest, false = Progress(MINE, made=Made.TOGETHER), Progress(FURTHER, made=Made.TOGETHER)
    liars = {f"evil:{number}": false for number in range(6)}
    peers = {"home:1": honest, "home:2": honest, **liars}
    counted = {name: name.partition(":")[0] for name in peers}
    offered = [(1e12, name) for name in liars] + [(1.0, "home:1"), (1.0, "home:2")]
    assert rank_donors(offered, peers, counted, given=["home:1"])[0][:2] == ["home:1", "home:2"]
    elsewhere = {name: Progress(ELSEWHERE, made=Made.TOGETHER) for name in liars}
    peers = {"home:1": honest, "home:2": honest, **elsewhere}
    assert rank_donors(offered, peers, counted, given=["home:1"])[0][:2] == ["home:1", "home:2"]
    alone = Own(MINE, "home", HistoryStanding(made=True))
    lesser = History(MINE.step, MINE.samples, MINE.lineage, Origin(Rank.APPOINTED, -2000.0, "later"))
    late = {name: Progress(lesser, made=Made.ALONE) for name in liars}
    assert not takes_over(alone, lesser, late, counted)
    assert takes_over(alone, lesser, late, dict.fromkeys(counted, "home"))  # one machine: six are more than one
