"""When members began to look for a group, as one of them observes it, and which of them is named as the last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.matchmaking.arrivals import (
    BEGINNING_SECONDS,
    RENEWAL_SECONDS,
    STANDS_OUT_FRACTION,
    STANDS_OUT_SECONDS,
    Arrivals,
)
from averaging.observe.receipts import LateArrival

OWN, A, B, LATE, CLIENT = "own:1", "a:1", "b:1", "late:1", "client::1"
ALL = (OWN, A, B, LATE)


def looking(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def named(late: LateArrival | None) -> tuple[str, Any]:
    """Who is named, and the seconds; nobody and 0 if nobody is."""
    return ("", 0.0) if late is None else (late.endpoint, late.seconds)


def observed(*late: str) -> Arrivals:
    """The search of `OWN` from 100 on; A and B come within 0.2 s, those in `late` at 109, and it is ready at 109.5."""
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe(looking(OWN), 100.0)
    arrivals.observe(looking(OWN, A), 100.1)
    arrivals.observe(looking(OWN, A, B), 100.2)
    arrivals.observe(looking(OWN, A, B, *late), 109.0)
    arrivals.ready(109.5)
    return arrivals


def test_the_last_member_is_named_and_by_how_much_it_came_after_the_one_before_it() -> None:
    arrivals = observed(LATE)
    assert named(arrivals.last(ALL, since=98.0)) == (LATE, pytest.approx(8.8))
    assert [arrivals.waited(name) for name in ALL] == pytest.approx([9.5, 9.4, 9.3, 0.5])


def test_a_member_whose_declaration_has_not_come_when_the_group_is_ready_has_come_just_then() -> None:
    arrivals = observed()
    assert arrivals.waited(LATE) == 0.0
    assert named(arrivals.last(ALL, since=98.0)) == (LATE, pytest.approx(9.3))


def test_nobody_is_named_for_little() -> None:
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe({}, 100.0)
    arrivals.observe(looking(LATE), 100.0 + 0.9 * STANDS_OUT_SECONDS)
    arrivals.ready(100.1)
    assert arrivals.last((OWN, LATE), since=100.0) is None
    arrivals = observed(LATE)
    least = 109.5 - 8.8 / STANDS_OUT_FRACTION
    assert arrivals.last(ALL, since=least + 1.0) is not None
    assert arrivals.last(ALL, since=least - 1.0) is None


def test_only_those_for_whom_the_group_waited_count() -> None:
    arrivals = observed(LATE)
    assert arrivals.last((OWN, A, B), since=98.0) is None
    assert arrivals.last((LATE,), since=98.0) is None
    assert arrivals.last((), since=98.0) is None


def test_a_peer_that_finds_the_others_looking_does_not_know_since_when() -> None:
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe(looking(A, B), 100.01)
    arrivals.ready(100.02)
    assert arrivals.waited(A) is None
    assert arrivals.waited(OWN) == pytest.approx(0.02)
    assert arrivals.last((OWN, A, B), since=0.0) is None  # it does not name itself
    arrivals.observe(looking(A, B, LATE), 105.0)
    arrivals.ready(105.0)
    assert arrivals.last(ALL, since=98.0) == LateArrival(LATE, 5.0)  # they came before this peer at any rate


def test_a_declaration_that_is_renewed_is_no_new_arrival() -> None:
    arrivals = observed(LATE)
    arrivals.observe(looking(OWN, B, LATE), 110.0)
    arrivals.observe(looking(OWN, A, B, LATE), 110.0 + 0.9 * RENEWAL_SECONDS)
    arrivals.ready(120.0)
    assert arrivals.waited(A) == pytest.approx(19.9)
    arrivals.observe(looking(OWN, B, LATE), 120.0)
    arrivals.observe(looking(OWN, A, B, LATE), 120.0 + 1.1 * RENEWAL_SECONDS)
    arrivals.ready(130.0)
    assert arrivals.waited(A) == pytest.approx(10.0 - 1.1 * RENEWAL_SECONDS)


def test_a_search_that_is_over_says_nothing_of_the_next_one() -> None:
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe({A: True, B: False}, 100.0)  # A's record of the last round is old
    arrivals.observe({A: False, B: False}, 100.1)
    arrivals.observe({A: True, B: False}, 104.0)
    arrivals.ready(108.0)
    assert arrivals.waited(A) == pytest.approx(4.0)
    assert arrivals.waited(B) == 0.0  # its next declaration has not come yet


def test_whoever_says_first_that_the_group_is_complete_has_not_left_it() -> None:
    arrivals = observed(LATE)
    arrivals.observe({OWN: True, A: False, B: True, LATE: False}, 109.4)
    arrivals.ready(109.4 + 0.5 * BEGINNING_SECONDS)
    assert arrivals.waited(A) == pytest.approx(9.3 + 0.5 * BEGINNING_SECONDS)
    arrivals.ready(109.4 + 1.5 * BEGINNING_SECONDS)
    assert arrivals.waited(A) == 0.0  # that was another group


def test_of_a_client_only_its_leader_knows() -> None:
    arrivals = observed()
    members = (OWN, A, B, CLIENT)
    assert arrivals.waited(CLIENT) is None
    assert arrivals.last(members, since=98.0) is None
    arrivals = observed()
    arrivals.asked(CLIENT, 108.5)
    arrivals.asked(CLIENT, 109.4)  # again, as it must when the leader declares itself anew
    assert arrivals.waited(CLIENT) == pytest.approx(1.0)
    assert named(arrivals.last(members, since=98.0)) == (CLIENT, pytest.approx(8.3))


def test_a_request_may_come_before_the_declaration() -> None:
    arrivals = Arrivals(OWN, 100.0)
    arrivals.asked(A, 100.0)
    arrivals.observe(looking(A, B), 100.1)
    arrivals.ready(103.0)
    assert arrivals.waited(A) == pytest.approx(3.0)
    assert arrivals.waited(B) is None


def test_who_may_have_come_after_a_client_of_whom_nothing_is_known_is_not_named() -> None:
    """A client that came last kept the group waiting for longer than the member before it had."""
    arrivals = observed(LATE)
    members = (*ALL, CLIENT)
    assert named(arrivals.last(members, since=98.0)) == (LATE, pytest.approx(8.8))
    arrivals.ready(109.0 + 8.9)
    assert arrivals.last(members, since=98.0) is None


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_the_last_one_is_that_of_a_sorted_list(moments: list[float], before: float, after: float) -> None:
    came = {f"peer-{number}:1": moment for number, moment in enumerate(moments)}
    arrivals = Arrivals(OWN, 0.0)
    arrivals.observe({}, 0.0)
    for moment in sorted(moments):
        arrivals.observe({name: True for name, at in came.items() if at <= moment}, moment)
    ready = max(moments) + after
    arrivals.ready(ready)
    order = sorted([(0.0, OWN), *((at, name) for name, at in came.items())])
    gap = order[-1][0] - order[-2][0]
    wanted = gap >= STANDS_OUT_SECONDS and gap >= STANDS_OUT_FRACTION * (ready + before)
    found = arrivals.last([OWN, *came], since=-before)
    assert found == (LateArrival(order[-1][1], gap) if wanted else None)
    assert all(arrivals.waited(name) == ready - at for name, at in came.items())
