"""Who held a round back, against a dumb reference, and the digests of averages."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging.allreduce.drop_codes import code_of
from averaging.allreduce.partition import Part
from averaging.allreduce.round_account import RoundAccount, RoundResult
from averaging.allreduce.send_window import reach
from averaging.allreduce.shard_digest import ShardDigest, digest_of
from averaging.allreduce.stragglers import Lag, find_straggler
from averaging.errors import AveragingError, CallRefusedError, NonFiniteError, PeerUnreachableError
from averaging.observe.receipts import DropCode, Dropped, Straggler
from averaging.protocol.group import Group, Member, Mode
from averaging.transport import virtual_time

SENDERS = ("a", "b", "c")
events = st.lists(st.tuples(st.sampled_from(SENDERS), st.sampled_from(["part"] * 8 + ["drop"])), max_size=40)


@given(events, st.integers(1, 8), st.integers(1, 4))
def test_the_lag_is_the_time_in_which_all_others_were_done_or_far_ahead(
    happened: list[tuple[str, str]], parts: int, ahead: int
) -> None:
    lag = Lag(SENDERS, [min(done + ahead, parts) for done in range(parts + 1)])
    reached = dict.fromkeys(SENDERS, 0)
    expected = dict.fromkeys(SENDERS, 0)
    for moment, (name, what) in enumerate(happened):
        if what == "drop":
            lag.dropped(name, moment)
            if reached.pop(name, None) is None:
                continue
        elif name not in reached:
            lag.delivered(name, moment)  # it was on its way
            continue
        elif reached[name] < parts:
            reached[name] += 1
            lag.delivered(name, moment)
        else:
            continue
        # One second at a time, until the next event that counts.
        waits_until = next(
            (
                later
                for later in range(moment + 1, len(happened))
                if happened[later][0] in reached
                and (happened[later][1] == "drop" or reached[happened[later][0]] < parts)
            ),
            moment,
        )
        for one, count in reached.items():
            others = [other for who, other in reached.items() if who != one]
            if others and count < parts and all(other >= min(count + ahead, parts) for other in others):
                expected[one] += waits_until - moment
    assert lag.seconds == {name: seconds for name, seconds in expected.items() if name in lag.seconds}
    assert all(seconds == 0 for name, seconds in expected.items() if name not in lag.seconds)


@pytest.mark.parametrize(
    ("lag", "parts_in", "averages_in", "seconds", "dropped", "expected"),
    [
        ({"b": 2.9}, {"b": 3.0, "c": 0.1}, {"b": 3.0, "c": 3.1}, 3.2, (), Straggler("b", 2.9, "parts")),
        ({"b": 2.9, "c": 0.2}, {"b": 3.0, "c": 0.1}, {}, 3.2, ("b",), None),  # it is named already; c is quick
        ({"b": 0.05}, {"b": 0.06, "c": 0.01}, {}, 0.06, (), None),  # too short to be noticed
        ({"b": 1.0}, {"b": 9.0, "c": 8.0}, {}, 9.0, (), None),  # little of the whole
        ({}, {"b": 3.0}, {"b": 0.3}, 3.0, (), Straggler("b", 2.7, "parts")),  # two peers
        ({}, {"b": 3.0}, {"b": 0.3}, 3.0, ("b",), None),  # it is named already
        ({}, {"b": 0.3}, {"b": 3.0}, 3.0, (), None),  # two peers, and the slow one may be this one
        ({}, {"b": 3.0}, {}, 3.0, (), None),  # one client: nothing to compare it with
        ({}, {}, {"a": 0.5, "b": 0.6, "c": 3.1}, 3.1, (), Straggler("c", 2.5, "averages")),
        ({}, {}, {"a": 0.5, "c": 3.0}, 3.0, ("a",), None),
        ({}, {}, {"a": 2.9, "b": 2.95, "c": 3.0}, 3.1, (), None),
        ({}, {}, {}, 1.0, (), None),
    ],
)
def test_who_stands_out(
    lag: dict[str, float],
    parts_in: dict[str, float],
    averages_in: dict[str, float],
    seconds: float,
    dropped: tuple[str, ...],
    expected: Straggler | None,
) -> None:
    found = find_straggler(lag, parts_in, averages_in, seconds, dropped)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.endpoint, found.what) == (expected.endpoint, expected.what)
        assert found.seconds == pytest.approx(expected.seconds)


def played(*moments: tuple[float, str], averaged: bool = False, members: str = "abc") -> RoundResult:
    """Of a round of `a` in which parts come from the others at these moments, and nothing from the auxiliary `x`.

    At a moment of its own `a` is ready to answer; "-b" is one at which `b` is lost.
    """

    async def main() -> RoundResult:
        group = Group(b"g", (*map(Member, members), Member("x", mode=Mode.AUXILIARY)))
        mine = [Part(0, start, start + 2) for start in (0, 2)]
        shares = {name: mine if name == "a" else [] for name in (*members, "x")}
        tally = RoundAccount(group, "a", shares, reach=reach([8, 8], 8), alike=True)
        await asyncio.sleep(10.0)
        tally.begin()
        began = asyncio.get_running_loop().time()
        for moment, name in moments:
            await asyncio.sleep(began + moment - asyncio.get_running_loop().time())
            if name == "a":
                tally.ready()
            elif name.startswith("-"):
                tally.lose(Dropped(name[1:], "gone", DropCode.CONNECTION_LOST))
            else:
                tally.received_part(name, 8)
        if averaged:
            tally.put(mine[0], torch.zeros(2))
        return tally.result()

    return virtual_time.run(main())


def test_who_holds_a_round_back_stands_out_by_a_good_part_of_all_of_it() -> None:
    assert played((1.0, "b"), (1.0, "b"), (2.0, "c"), (3.0, "c")).straggler == Straggler("c", 2.0, "parts")
    assert played((8.0, "b"), (8.0, "b"), (8.5, "c"), (9.0, "c")).straggler is None


def test_an_auxiliary_that_sends_nothing_holds_nobody_back() -> None:
    assert played((1.0, "b"), (1.0, "c"), (3.0, "b"), (3.0, "c")).straggler is None


def test_nobody_holds_a_round_back_before_this_member_is_ready_to_answer() -> None:
    assert played((0.1, "b"), (0.2, "b"), (5.0, "a"), (5.1, "c"), (5.2, "c")).straggler is None
    assert played((0.1, "b"), (0.2, "b"), (1.0, "a"), (5.0, "c")).straggler == Straggler("c", 4.0, "parts")


def test_who_is_lost_hides_no_straggler() -> None:
    told = played((0.1, "b"), (0.1, "b"), (0.2, "c"), (1.0, "-d"), (5.0, "c"), members="abcd")
    assert told.straggler == Straggler("c", 4.0, "parts")


def test_another_member_is_heard_if_its_part_came_to_an_average() -> None:
    assert not played((1.0, "b")).heard
    assert not played(averaged=True).heard
    assert played((1.0, "b"), averaged=True).heard


def test_a_share_is_a_part_of_all_elements_and_where_there_are_none_it_is_0() -> None:
    assert [account.share for account in played().accounts] == [1.0, 0.0, 0.0, 0.0]

    async def main() -> RoundResult:
        return RoundAccount(Group(b"g", (Member("a"),)), "a", {"a": []}, reach=[0], alike=True).result()

    assert [account.share for account in virtual_time.run(main()).accounts] == [0.0]


def shard(*parts: bytes | memoryview) -> str:
    digest = ShardDigest()
    for part in parts:
        digest.add(part)
    assert digest.parts == len(parts)
    return str(digest)


@pytest.mark.parametrize("length", [1, 7, 8191, 8192, 8193, 16384, 100_003])
def test_every_byte_counts(length: int) -> None:
    rng = random.Random(length)
    part = rng.randbytes(length)
    told = shard(b"first", part)
    assert shard(b"first", memoryview(part)) == told
    assert shard(part, b"first") != told
    assert shard(b"first", part + b"\x00") != told
    for place in {0, length - 1, rng.randrange(length)}:
        other = bytearray(part)
        other[place] ^= 1 << rng.randrange(8)
        assert shard(b"first", bytes(other)) != told
    if length > 16:
        assert shard(b"first", part[8:16] + part[:8] + part[16:]) != told  # two words changed places


def test_it_is_xxh3_of_all_bytes_in_order() -> None:
    assert shard(b"a", b"bc") == shard(b"abc") == "78af5f94892f3950"  # as xxhsum -H3 has it


def test_one_digest_of_all_shards() -> None:
    assert len(digest_of(["1" * 16, "2" * 16])) == 16
    assert digest_of(["1" * 16, "2" * 16]) != digest_of(["2" * 16, "1" * 16])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PeerUnreachableError("a:1", "gone"), DropCode.CONNECTION_LOST),
        (CallRefusedError("a:1", "no"), DropCode.REFUSED),
        (NonFiniteError("NaN"), DropCode.NON_FINITE),
        (AveragingError("?"), DropCode.PROTOCOL_VIOLATION),
    ],
)
def test_codes_of_errors(error: AveragingError, code: DropCode) -> None:
    assert code_of(error) is code
