"""The WAN benchmark's arithmetic, its delay and its verdicts; the links themselves need root."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.wan.limits import MIB, best_shares, equal_shares, limit, queue_bytes, transfer
from benchmarks.wan.relay import DelayQueue
from benchmarks.wan.report import times, verdicts


def test_equal_links_carry_twice_what_a_peer_does_not_reduce_itself() -> None:
    assert transfer(64 * MIB, [12.5e6] * 4, equal_shares(4)) == pytest.approx(2 * 64 * MIB * 3 / 4 / 12.5e6)
    assert limit(64 * MIB, [12.5e6] * 4, equal_shares(4), 0.04) == pytest.approx(8.053 + 0.08, abs=1e-3)


def test_a_peer_at_a_tenth_reduces_nothing_and_its_own_tensors_are_the_limit() -> None:
    rates = [125e6, 125e6, 125e6, 12.5e6]
    parts = best_shares(rates)
    assert parts == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert transfer(1e9, rates, parts) == pytest.approx(1e9 / 12.5e6)
    assert transfer(1e9, rates, equal_shares(4)) == pytest.approx(1.5e9 / 12.5e6)


@given(
    st.lists(st.floats(1, 100), min_size=2, max_size=6),
    st.data(),
)
def test_no_shares_are_faster_than_the_best(rates: list[float], data: st.DataObject) -> None:
    raw = data.draw(st.lists(st.floats(0.01, 1), min_size=len(rates), max_size=len(rates)))
    other = [part / sum(raw) for part in raw]
    best = best_shares(rates)
    assert sum(best) == pytest.approx(1)
    assert transfer(1.0, rates, best) <= transfer(1.0, rates, other) * (1 + 1e-9)


def test_the_queue_holds_a_batch_and_a_round_trip() -> None:
    assert queue_bytes(1000, 0.05) == (250_000, 6_250_000)
    assert queue_bytes(10, 0.04) == (72_000, 150_000)


def test_packets_come_out_in_order_when_they_are_due_and_not_before() -> None:
    queue = DelayQueue(2.0)
    assert queue.wait(0.0) is None
    assert queue.take(0.0) is None
    queue.put(10.0, b"a")
    queue.put(10.5, b"b")
    assert queue.wait(10.5) == 1.5
    assert queue.take(11.9) is None
    assert queue.take(12.25) == b"a"
    assert queue.take(12.25) is None
    assert queue.late == 0.25
    assert queue.wait(13.0) == 0.0
    assert queue.take(13.0) == b"b"
    assert len(queue) == 0
    assert queue.late == 0.5


@given(st.lists(st.floats(0, 100), max_size=20), st.floats(0, 10), st.floats(0, 120))
def test_what_is_out_at_a_time_is_what_came_a_delay_before(arrivals: list[float], delay: float, now: float) -> None:
    queue, out = DelayQueue(delay), []
    for number, arrival in enumerate(sorted(arrivals)):
        queue.put(arrival, bytes([number]))
    while (packet := queue.take(now)) is not None:
        out.append(packet[0])
    assert out == [number for number, arrival in enumerate(sorted(arrivals)) if arrival + delay <= now]


def _system(*seconds: float, limit_seconds: float = 1.0) -> dict[str, object]:
    rounds = [{"warm_up": False, "failure": "", "allreduce_seconds": one} for one in seconds]
    warm_up = {"warm_up": True, "failure": "", "allreduce_seconds": 99.0}
    return {"rounds": [warm_up, *rounds], "limit_seconds": limit_seconds, "optimum_seconds": limit_seconds}


def test_speedups_are_ratios_within_a_round() -> None:
    assert times(_system(1.0, 2.0, 4.0), _system(2.0, 6.0, 4.0)) == 2.0
    assert times(_system(), _system()) is None


def test_verdicts_are_met_at_the_target_and_missed_below_it() -> None:
    even = {
        "averaging none": _system(1.0, limit_seconds=0.9),
        "averaging fp16": _system(0.5),
        "averaging int8": _system(0.4),
    }
    uneven = {"averaging none, bandwidth stated": _system(1.2)}
    cases = [
        {"title": "small", "mib": 16, "uneven": False, "systems": even},
        {"title": "large", "mib": 64, "uneven": False, "systems": even},
        {"title": "uneven", "mib": 64, "uneven": True, "systems": uneven},
    ]
    found = list(verdicts(cases))
    assert [(one.measured, one.met) for one in found] == [
        ("90%", True),
        ("2.00", True),
        ("2.50", False),
        ("+20%", False),
    ]
    assert all(one.wanted.startswith(("large", "uneven")) for one in found)
