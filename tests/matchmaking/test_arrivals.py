"""When members began to look for a group, which late arrival is reported, and peers that nobody can reach."""

import logging
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from hypothesis import given, strategies as st

from averaging.matchmaking.memory import MIN_LATE_FRACTION, MIN_LATE_SECONDS, RENEWAL_SECONDS, Arrivals
from averaging.receipts.explanation import explain
from averaging.receipts.receipt import LateArrival, Receipt
from tests.support.selection import rest_is_long
from tests.support.training_run import STEP_SECONDS, STRATEGIES, Run, Site, agree

OWN, A, B, LATE, CLIENT = "own:1", "a:1", "b:1", "late:1", "client::1"
ALL = (OWN, A, B, LATE)


def looking(*names: str) -> dict[str, bool]:
    return dict.fromkeys(names, True)


def named(late: LateArrival | None) -> tuple[str, Any]:
    """The reported member and its seconds; an empty name and 0 if none is reported."""
    return ("", 0.0) if late is None else (late.endpoint, late.seconds)


def observed(*late: str) -> Arrivals:
    """A search of `OWN` from 100 on: A and B arrive within 0.2 s, those in `late` at 109; it is ready at 109.5."""
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe(looking(OWN), 100.0)
    arrivals.observe(looking(OWN, A), 100.1)
    arrivals.observe(looking(OWN, A, B), 100.2)
    arrivals.observe(looking(OWN, A, B, *late), 109.0)
    arrivals.set_ready(109.5)
    return arrivals


def test_the_arrival_of_peers_that_were_already_looking_is_unknown() -> None:
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe(looking(A, B), 100.01)
    arrivals.set_ready(100.02)
    assert arrivals.waited(A) is None
    assert arrivals.waited(OWN) == pytest.approx(0.02)
    assert arrivals.last((OWN, A, B), since=0.0) is None  # it does not report itself
    arrivals.observe(looking(A, B, LATE), 105.0)
    arrivals.set_ready(105.0)
    assert arrivals.last(ALL, since=98.0) == LateArrival(LATE, 5.0)  # the others came before this peer


def test_a_renewed_declaration_is_not_a_new_arrival() -> None:
    arrivals = observed(LATE)
    arrivals.observe(looking(OWN, B, LATE), 110.0)
    arrivals.observe(looking(OWN, A, B, LATE), 110.0 + 0.9 * RENEWAL_SECONDS)
    arrivals.set_ready(120.0)
    assert arrivals.waited(A) == pytest.approx(19.9)
    arrivals.observe(looking(OWN, B, LATE), 120.0)
    arrivals.observe(looking(OWN, A, B, LATE), 120.0 + 1.1 * RENEWAL_SECONDS)
    arrivals.set_ready(130.0)
    assert arrivals.waited(A) == pytest.approx(10.0 - 1.1 * RENEWAL_SECONDS)


def test_a_search_that_has_ended_does_not_count_for_the_next_one() -> None:
    arrivals = Arrivals(OWN, 100.0)
    arrivals.observe({A: True, B: False}, 100.0)  # A's record is still from the last round
    arrivals.observe({A: False, B: False}, 100.1)
    arrivals.observe({A: True, B: False}, 104.0)
    arrivals.set_ready(108.0)
    assert arrivals.waited(A) == pytest.approx(4.0)
    assert arrivals.waited(B) == 0.0  # its next declaration has not come yet


def test_only_its_leader_knows_when_a_client_arrived() -> None:
    arrivals = observed()
    members = (OWN, A, B, CLIENT)
    assert arrivals.waited(CLIENT) is None
    assert arrivals.last(members, since=98.0) is None
    arrivals = observed()
    arrivals.add_request(CLIENT, 108.5)
    arrivals.add_request(CLIENT, 109.4)  # again, after the leader has renewed its declaration
    assert arrivals.waited(CLIENT) == pytest.approx(1.0)
    assert named(arrivals.last(members, since=98.0)) == (CLIENT, pytest.approx(8.3))


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6), st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_the_reported_member_is_the_last_of_the_sorted_arrivals(
    moments: list[float], before: float, after: float
) -> None:
    came = {f"peer-{number}:1": moment for number, moment in enumerate(moments)}
    arrivals = Arrivals(OWN, 0.0)
    arrivals.observe({}, 0.0)
    for moment in sorted(moments):
        arrivals.observe({name: True for name, at in came.items() if at <= moment}, moment)
    ready = max(moments) + after
    arrivals.set_ready(ready)
    order = sorted([(0.0, OWN), *((at, name) for name, at in came.items())])
    gap = order[-1][0] - order[-2][0]
    wanted = gap >= MIN_LATE_SECONDS and gap >= MIN_LATE_FRACTION * (ready + before)
    found = arrivals.last([OWN, *came], since=-before)
    assert found == (LateArrival(order[-1][1], gap) if wanted else None)
    assert all(arrivals.waited(name) == ready - at for name, at in came.items())


# One of four peers is much slower than the rest

NAMES = [f"peer-{number}:1" for number in range(4)]
SLOW = NAMES[-1]
TIMES = 10.0


def simulated(strategy: str, *, times: float, until: float) -> list[Site]:
    """A run of four peers; a step of the last one takes so many times as long as one of the others."""
    sites = [Site(name, [NAMES[0]] if number else [], 0.05 * number) for number, name in enumerate(NAMES)]
    sites[-1].step_seconds = times * STEP_SECONDS
    return Run(1, strategy, sites, until=until, group_wait=40.0).simulate()


def receipts_of(sites: Sequence[Site], name: str) -> list[Receipt]:
    """The receipts of one peer in which all four took part."""
    found = next(site for site in sites if site.name == name).receipts
    return [receipt for receipt in found if len(receipt.members) == len(NAMES)]


def rate_of(receipts: Sequence[Receipt], name: str) -> float:
    rates = [one.step_rate for receipt in receipts for one in receipt.accounts if one.endpoint == name]
    return median(rate for rate in rates if rate is not None)


REMEDIES = {"local": "fewer local steps", "diloco": "every", "gradients": "target_batch_size"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_others_name_the_slow_peer_its_step_rate_and_what_to_do(strategy: str) -> None:
    sites = simulated(strategy, times=TIMES, until=80.0)
    units = 4 if strategy == "gradients" else 1  # samples of a step
    for name in NAMES[:-1]:
        receipts = receipts_of(sites, name)
        assert len(receipts) >= 3
        for receipt in receipts:
            late = receipt.last_to_arrive
            assert late is not None
            assert late.endpoint == SLOW
            assert 0.5 * receipt.phases["looking"] < late.seconds <= receipt.phases["looking"]
            waited = {account.endpoint: account.waited for account in receipt.accounts}
            assert waited[name] == pytest.approx(receipt.phases["looking"], abs=0.05)
            assert waited[SLOW] == pytest.approx(0.0, abs=0.05)
            assert all(seconds is None or seconds >= late.seconds for other, seconds in waited.items() if other != SLOW)
    own = receipts_of(sites, SLOW)
    assert own
    assert all(receipt.last_to_arrive is None for receipt in own)
    for teller in NAMES:  # the time in which a peer waits is no part of its rate
        for name in NAMES:
            seconds = STEP_SECONDS * (TIMES if name == SLOW else 1.0)
            assert rate_of(receipts_of(sites, teller), name) == pytest.approx(units / seconds, rel=0.15)
    for tellers in (NAMES, NAMES[:1]):
        lines = list(explain([one for name in tellers for one in receipts_of(sites, name)], summary_only=True))
        assert f"last to arrive: {SLOW}" in next(line for line in lines if line.startswith("last to arrive"))
        assert SLOW in next(line for line in lines if line.startswith("step rate"))
        assert REMEDIES[strategy] in next(line for line in lines if line.startswith("hint"))


@pytest.mark.parametrize("strategy", rest_is_long(reversed(STRATEGIES)))
def test_peers_of_equal_speed_are_not_named(strategy: str) -> None:
    """Their steps take from 0.8 to 1.2 times the usual time."""
    sites = simulated(strategy, times=1.0, until=30.0)
    told = [receipt for name in NAMES for receipt in receipts_of(sites, name)]
    assert len(told) > 20
    assert not [receipt for receipt in told if receipt.last_to_arrive is not None]
    assert "last to arrive: no peer regularly" in list(explain(told, summary_only=True))


SEEDS = ["192.0.2.1:1", "192.0.2.2:1"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_peer_with_a_loopback_address_delays_nobody(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sites = [Site(SEEDS[0], [], 0.0), Site(SEEDS[1], SEEDS[:1], 0.5), Site("127.0.0.1:5", SEEDS[:1], 1.0)]
    run = Run(1, strategy, sites, until=20.0, group_wait=5.0)
    for site in run.simulate():
        others = set(SEEDS) - {site.name} if site is sites[2] else {"127.0.0.1:5"}
        assert others <= {name for name in (*SEEDS, "127.0.0.1:5") if f"averages with no peer at {name}" in caplog.text}
        late = [receipt for receipt in site.receipts[2:] if receipt.seconds > 2.0]
        assert late == []
    assert agree(sites[:2])
    assert all(len(receipt.members) == 2 for site in sites[:2] for receipt in site.receipts[2:])
