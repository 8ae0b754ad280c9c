"""Peers in processes of their own, on real gRPC and gossip; some are killed at a named step."""

from collections.abc import Collection
from statistics import mean
from typing import Any

import pytest

from tests.support.processes import JsonProcess, Workers, average
from tests.support.selection import rest_is_long

STEPS = [("sending", 1), ("reducing", 3), ("sending", 0), ("sending", 5), ("reducing", 0), ("reducing", 12)]


@pytest.mark.parametrize(("step", "after"), rest_is_long(STEPS))
def test_a_follower_killed_in_the_round_costs_only_its_own(workers: Workers, step: str, after: int) -> None:
    processes, receipts = average_with_a_victim(workers, step, after, group_wait=8.0)
    for number, receipt in enumerate(receipts):
        check_survivor(number, receipt, range(3), [workers.endpoints[3]])
    # The survivors go on: the next round is one of three.
    assert {receipt["outcome"] for receipt in average(*processes[:3])} == {"averaged"}


@pytest.mark.parametrize(("step", "after"), rest_is_long(STEPS))
def test_a_leader_killed_in_the_round_costs_only_its_own(workers: Workers, step: str, after: int) -> None:
    """It may die before all of its followers have been told that the group begins; the others go on without those."""
    processes, receipts = average_with_a_victim(workers, step, after, group_wait=4.0)
    told = [number for number, receipt in enumerate(receipts) if workers.endpoints[3] in receipt["members"]]
    lost = [endpoint for number, endpoint in enumerate(workers.endpoints) if number not in told]
    for number in told if len(told) > 1 else []:  # whoever was told alone has nobody left to average with
        check_survivor(number, receipts[number], told, lost)
    assert {receipt["outcome"] for receipt in average(*processes[:3])} == {"averaged"}


def average_with_a_victim(
    workers: Workers, step: str, after: int, *, group_wait: float
) -> tuple[list[JsonProcess], list[dict[str, Any]]]:
    """Three processes average with a fourth that dies; it follows one of them if its time ends after theirs."""
    options = {"group_size": 4, "group_wait": 4.0, "round_timeout": 10.0}
    victim = {"value": 3, **options, "group_wait": group_wait, "fatal_step": step, "after": after}
    processes = workers.start(*({"value": n, **options} for n in range(3)), victim)
    processes[3].send("average")
    receipts = average(*processes[:3])
    assert processes[3].wait() == -9
    return processes, receipts


def check_survivor(number: int, receipt: dict[str, Any], survivors: Collection[int], lost: list[str]) -> None:
    """What comes of a round at one of those who survive it, where the member that averages 3 is killed."""
    assert receipt["outcome"] == "averaged"
    assert sorted(receipt["dropped"]) == sorted(lost), receipt["reasons"]
    # With the victim, without it, or, where the victim had to reduce, the local value.
    possible = [mean([*survivors, 3]), mean(survivors), float(number)]
    assert all(any(abs(value - p) < 1e-3 for p in possible) for value in receipt["values"]), receipt["values"]
    # The loss is noticed, not waited out until the round's deadline.
    assert not any("the round's deadline" in reason for reason in receipt["reasons"]), receipt["reasons"]


def test_a_leader_killed_in_matchmaking_is_replaced(workers: Workers) -> None:
    """The leader dies when it has accepted one follower and accepts the next; they find each other without it."""
    leader = {"value": 9, "group_size": 3, "group_wait": 3.0, "fatal_step": "leading", "after": 1}
    follower = {"group_size": 3, "group_wait": 6.0, "known": 3}  # else they may know nobody but the leader
    processes = workers.start(leader, {"value": 0, **follower}, {"value": 2, **follower})
    processes[0].send("average")
    receipts = average(*processes[1:])
    assert processes[0].wait() == -9
    for receipt in receipts:
        assert receipt["outcome"] == "averaged"
        assert sorted(receipt["members"]) == sorted(workers.endpoints[1:])
        assert receipt["values"] == [pytest.approx(1.0, abs=1e-3)]


def test_a_donor_killed_half_way_is_replaced_by_the_next(workers: Workers) -> None:
    best = {"value": 1, "version": 9, "fatal_step": "donating", "after": 2}
    processes = workers.start(best, {"value": 2, "version": 5}, {"value": 3, "donors": 2})
    processes[2].send("download")
    assert processes[2].expect("state") == {"event": "state", "version": 5, "first": 2.0}
    assert processes[0].wait() == -9


def test_a_download_that_fails_everywhere_changes_nothing(workers: Workers) -> None:
    fatal = {"fatal_step": "donating", "after": 1}
    donors = [{"value": 1, "version": 9, **fatal}, {"value": 2, "version": 5, **fatal}]
    processes = workers.start(*donors, {"value": 3, "donors": 2})
    processes[2].send("download")
    failure = processes[2].expect("failure")
    assert failure["first"] == 3.0
    for endpoint in workers.endpoints[:2]:
        assert endpoint in failure["message"]
