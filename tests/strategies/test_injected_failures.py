"""Hundreds of failures that a seed draws, in simulation: no sample, version or average suffers from any of them."""

import logging
import statistics
from collections.abc import Iterator

import pytest

from tests.strategies.failure_run import FailureRun

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
