"""Hundreds of failures that a seed draws, in simulation: no sample, version or average suffers from any of them."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator

import pytest
import torch

from averaging.receipts import Outcome, Receipt
from tests.receipts.made import A, B
from tests.strategies.failure_run import Change, Contribution, FailureRun, Trace
from tests.support.ledger import LedgerError

KINDS = {"kill", "stop", "stuck loop", "half-open", "cut", "refused", "partition", "clock", "discovery", "slow"}

EACH, SEEDS = 250, range(40)
"""Failures of one run and the seeds of the long test: 10,000 failures together."""


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def check(seed: int, failures: int) -> FailureRun:
    run = FailureRun(seed, failures)
    run.check()
    print(f"seed {seed}: {run.summary()}")
    assert run.injected.total() >= failures
    assert run.ledger.samples.averaged > run.ledger.samples.trained / 2
    return run


def test_forty_failures() -> None:
    run = check(1, 40)
    assert len(run.injected) >= 7
    assert len(run.ended) >= 4


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_ten_thousand_failures(seed: int) -> None:
    assert set(check(seed, EACH).injected) == KINDS


class Halves(FailureRun):
    """Two of four peers are parted from the two others, again and again."""

    def _inject(self) -> str:
        self.injected["partition"] += 1
        self.network.cut(frozenset(sorted(self._living)[:2]))
        self._healing.append(self.network.heal)
        return "partition"


def test_halves_that_were_parted_average_together_again_soon() -> None:
    """Both are a step behind or ahead of each other, so each of the late two could average with the other."""
    run = Halves(2, 24)
    run.check()
    waits = [seconds for kinds, seconds in run.recoveries if "start" not in kinds]
    assert len(waits) > 4
    assert statistics.median(waits) < 2.0
    assert max(waits) < 8.0


def contribution(first: int, stop: int, value: float) -> Contribution:
    return Contribution(range(first, stop), 4 * (stop - first), torch.tensor([value]))


def trace(change: float, *, again: range = range(1, 2)) -> Trace:
    """Two steps of two peers, of which the second one also has the batches `again` of the first."""
    made = Trace()
    for group, (before, after, numbers) in enumerate([("0", "1", range(0, 1)), ("1", "2", again)]):
        gathered = {A: {"samples": 4 * len(numbers)}, B: {"samples": 4}}
        receipt = Receipt(1, Outcome.AVERAGED, group_id=bytes([group]), members=(A, B), gathered=gathered)
        made.offered[A, before, 4 * len(numbers)] = contribution(numbers.start, numbers.stop, 1.0)
        made.offered[B, before, 4] = contribution(group, group + 1, 3.0)
        mean = (len(numbers) + 3.0) / (len(numbers) + 1)
        made.changes[bytes([group])] = Change(receipt, before, after, torch.tensor([mean + change]))
        made.receipt(A, receipt)
        made.receipt(B, receipt)
    return made


def test_the_trace_follows_each_sample() -> None:
    assert trace(0.0).check("2") == 16


def test_a_sample_that_is_counted_twice_is_found() -> None:
    with pytest.raises(LedgerError, match="are in 2 and in a later version|later version of the same run"):
        trace(0.0, again=range(0, 2)).check("2")


def test_a_sample_that_is_lost_is_found() -> None:
    with pytest.raises(LedgerError, match="not the mean of"):
        trace(-1.0).check("2")  # only the first peer's
