"""Stragglers, compared with a naive reference, and the digests of averages."""

import asyncio

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.allreduce import Part
from averaging.allreduce.round_tally import Lag, RoundResult, RoundTally, find_straggler
from averaging.allreduce.stream_limits import send_limits
from averaging.protocol.group import Group, Member, Mode
from averaging.receipts.receipt import DropCode, Dropped, Straggler
from averaging.testing import virtual_time

SENDERS = ("a", "b", "c")
events = st.lists(st.tuples(st.sampled_from(SENDERS), st.sampled_from(["part"] * 8 + ["drop"])), max_size=40)


@given(events, st.integers(1, 8), st.integers(1, 4))
def test_the_lag_is_the_time_in_which_all_others_were_done_or_at_the_end_of_their_window(
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
            lag.delivered(name, moment)  # it was in transit
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
        (
            {"b": 2.9, "c": 0.2},
            {"b": 3.0, "c": 0.1},
            {},
            3.2,
            ("b",),
            None,
        ),  # b is dropped, so not named again; c is fast
        ({"b": 0.05}, {"b": 0.06, "c": 0.01}, {}, 0.06, (), None),  # below MIN_LAG_SECONDS
        ({"b": 1.0}, {"b": 9.0, "c": 8.0}, {}, 9.0, (), None),  # below MIN_LAG_FRACTION
        ({}, {"b": 3.0}, {"b": 0.3}, 3.0, (), Straggler("b", 2.7, "parts")),  # two peers
        ({}, {"b": 3.0}, {"b": 0.3}, 3.0, ("b",), None),  # it is named already
        ({}, {"b": 0.3}, {"b": 3.0}, 3.0, (), None),  # two peers; this one may be the slow one
        ({}, {"b": 3.0}, {}, 3.0, (), None),  # a single client: nothing to compare it with
        ({}, {}, {"a": 0.5, "b": 0.6, "c": 3.1}, 3.1, (), Straggler("c", 2.5, "averages")),
        ({}, {}, {"a": 0.5, "c": 3.0}, 3.0, ("a",), None),
        ({}, {}, {"a": 2.9, "b": 2.95, "c": 3.0}, 3.1, (), None),
        ({}, {}, {}, 1.0, (), None),
    ],
)
def test_the_straggler_is_found(
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
    """The result of a round at `a` in which parts of the others arrive at these times, and none from the auxiliary `x`.

    "a" marks the time at which `a` is ready to answer, "-b" the time at which `b` is dropped.
    """

    async def main() -> RoundResult:
        group = Group(b"g", (*map(Member, members), Member("x", mode=Mode.AUXILIARY)))
        mine = [Part.of(0, start, start + 2) for start in (0, 2)]
        shares = {name: mine if name == "a" else [] for name in (*members, "x")}
        account = RoundTally(group, "a", shares, send_limits=send_limits([8, 8], 8), identical=True)
        await asyncio.sleep(10.0)
        account.begin()
        began = asyncio.get_running_loop().time()
        for moment, name in moments:
            await asyncio.sleep(began + moment - asyncio.get_running_loop().time())
            if name == "a":
                account.ready()
            elif name.startswith("-"):
                account.drop(Dropped(name[1:], "gone", DropCode.CONNECTION_LOST))
            else:
                account.received_part(name, 8)
        if averaged:
            account.put(mine[0], torch.zeros(2))
        return account.result()

    return virtual_time.run(main())


def test_data_of_another_member_counts_only_if_something_was_averaged() -> None:
    assert not played((1.0, "b")).received_any
    assert not played(averaged=True).received_any
    assert played((1.0, "b"), averaged=True).received_any
