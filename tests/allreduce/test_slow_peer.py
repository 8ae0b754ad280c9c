"""One of four peers is much slower than the rest: the receipts of the others name it, with its step rate."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest

from averaging.receipts.explanation import explain
from averaging.receipts.receipt import Receipt
from tests.support.selection import rest_is_long
from tests.support.training_run import STEP_SECONDS, STRATEGIES, Run, Site

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
