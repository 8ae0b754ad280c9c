"""Faults of real processes and connections after some normal rounds: learned deadlines keep the delay small."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from averaging.timing.deadlines import MIN_WAITS
from tests.peer.held import Held, wait_until_given_back
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.processes import JsonProcess, Workers, average
from tests.support.selection import rest_is_long

OPTIONS = {"group_size": 3, "stall_timeout": 3600.0, "round_timeout": 3600.0}
"""Without learned deadlines they would wait for a victim until the test fails."""
LANES = ["direct", "grpc"]
FAULTY = {"group_wait": 30.0}
"""It never leads, since the others' time ends first: a leader might fail before all members know of the group."""
PARTS_OF_USUAL_ROUNDS = MIN_WAITS * 26
"""Parts that a member sends to the two others: 600,000 float32 in parts of 64 KiB are 37 for all three."""


def check_others(workers: Workers, receipts: list[dict[str, Any]]) -> None:
    """They dropped only the victim, and hold the average of all, of the two, or their own values.

    Or that of the victim and one of them, if the victim has lost the other, whose connection failed before the one's.
    """
    for number, receipt in enumerate(receipts):
        assert receipt["outcome"] == "averaged", receipt
        assert set(receipt["dropped"]) <= {workers.endpoints[2]}, receipt
        possible = [1.0, 0.5, (number + 2) / 2, *([float(number)] if receipt["kept_local"] else [])]
        assert all(any(abs(value - p) < 1e-3 for p in possible) for value in receipt["values"]), receipt
    assert any(receipt["dropped"] for receipt in receipts)


def dropped_at_a_learned_deadline(receipt: dict[str, Any]) -> bool:
    """Whether a member was dropped at a deadline such as `4 × its median of 1 s` or `2 × its last of 1 s`."""
    return any("× its " in reason for reason in receipt["reasons"])


def reset(processes: list[JsonProcess]) -> None:
    """Gives them different values again."""
    for process in processes:
        process.send("reset")
        process.expect("reset")


def using(lane: str) -> dict[str, Any]:
    """Options of a worker for a lane."""
    return {"direct_listen": "127.0.0.1:0"} if lane == "direct" else {}


@contextmanager
def proxies(lane: str, rate: float | None = None) -> Iterator[tuple[list[FaultProxy], dict[str, Any]]]:
    """Proxies before one peer, the last of which the parts pass, and the options of the peer."""
    with FaultProxy(rate) as proxy, FaultProxy(rate) as beside:
        behind: dict[str, Any] = {"listen": f"127.0.0.1:{proxy.target}", "advertise": f"127.0.0.1:{proxy.port}"}
        if lane == "grpc":
            yield [proxy], behind
        else:
            behind |= {"direct_listen": f"127.0.0.1:{beside.target}", "direct_advertise": beside.port}
            yield [proxy, beside], behind


def usual_rounds(processes: list[JsonProcess], lane: str, count: int) -> None:
    """All three take part, in the last round over `lane`; before it a direct connection may come too late."""
    for _ in range(count - 1):
        next_round(processes)
    next_round(processes, lane)


def next_round(processes: list[JsonProcess], lane: str | None = None) -> None:
    """All three take part again, over `lane` if it is given."""
    for receipt in average(*processes):
        assert receipt["outcome"] == "averaged", receipt
        assert len(receipt["members"]) == 3, receipt
        assert receipt["dropped"] == [], receipt
        assert lane is None or set(receipt["lanes"]) == {lane}, receipt


@pytest.mark.parametrize("lane", rest_is_long(LANES))
def test_a_process_that_is_stopped_and_continues(workers: Workers, lane: str) -> None:
    stops = FAULTY | {"fatal_step": "sending", "after": PARTS_OF_USUAL_ROUNDS, "sends": "SIGSTOP"}
    processes = workers.start(*({"value": n, **OPTIONS, **using(lane), **(stops if n == 2 else {})} for n in range(3)))
    usual_rounds(processes, lane, MIN_WAITS)
    before = [Held.by(process) for process in processes]
    reset(processes)
    for process in processes:
        process.send("average")
    receipts = [process.expect("receipt") for process in processes[:2]]
    assert any(map(dropped_at_a_learned_deadline, receipts)), receipts
    processes[2].signal(signal.SIGCONT)
    own = processes[2].expect("receipt")
    assert not dropped_at_a_learned_deadline(own), own  # it drops no other for its own stop
    assert set(own["dropped"]) <= set(workers.endpoints[:2])
    check_others(workers, receipts)
    next_round(processes)
    wait_until_given_back(processes, before)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("fault", rest_is_long([Fault.HALF_OPEN, Fault.CORRUPT, Fault.STALL, Fault.CUT]))
def test_a_connection_that_fails_in_the_round(workers: Workers, fault: Fault, lane: str) -> None:
    with proxies(lane) as (before_it, behind):
        proxy, behind = before_it[-1], FAULTY | behind
        common = OPTIONS | using(lane)
        processes = workers.start(*({"value": n, **common, **(behind if n == 2 else {})} for n in range(3)))
        assert workers.endpoints[2] == behind["advertise"]
        usual_rounds(processes, lane, MIN_WAITS)
        before = [Held.by(process) for process in processes]
        reset(processes)
        proxy.arm(fault, after=400_000)
        receipts = average(*processes)
        assert proxy.struck.is_set()
        check_others(workers, receipts[:2])
        proxy.heal()
        next_round(processes)
        wait_until_given_back(processes, before)


@pytest.mark.parametrize("lane", rest_is_long(LANES, 0))  # every day in virtual time
def test_no_member_is_dropped_over_a_slow_link(workers: Workers, lane: str) -> None:
    with proxies(lane, rate=1e6) as (_, behind):
        common = OPTIONS | using(lane)
        processes = workers.start(*({"value": n, **common, **(behind if n == 2 else {})} for n in range(3)))
        usual_rounds(processes, lane, MIN_WAITS + 1)
