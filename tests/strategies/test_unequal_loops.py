"""Loops of 100 and 103 batches end cleanly with every strategy: nobody waits for those that have no batch left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.receipts import Finish
from tests.support.selection import rest_is_long
from tests.support.training import FOR_EVER, SGD, Start, equal, step

LENGTHS = (100, 103, 100)
BATCH = 4

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "LocalSGD, whose last round would be in step 101": lambda: LocalSGD(101),
    "GradientAveraging": lambda: GradientAveraging(10 * BATCH * len(LENGTHS)),
    "DiLoCo": lambda: DiLoCo(10),
    "LocalSGD": lambda: LocalSGD(10),
    "LocalSGD with overlap": lambda: LocalSGD(10, overlap=True),
    "LocalSGD of changes": lambda: LocalSGD.of_changes(10, compression="top_k"),
    "DiLoCo, whose last round would be in step 101": lambda: DiLoCo(101),
    "DiLoCo in fragments, with delay": lambda: DiLoCo(10, fragments=2, delay=2, alpha=0.5),
    "GradientAveraging, in each step": lambda: GradientAveraging(BATCH * len(LENGTHS)),
}


@pytest.mark.parametrize("name", rest_is_long(STRATEGIES, 3))
def test_loops_of_unequal_length_end_alike_and_in_time(name: str, start: Start) -> None:
    run = start()
    for _ in LENGTHS:
        run.add(STRATEGIES[name](), SGD, group_wait=FOR_EVER)
    run.meet()

    def train(number: int) -> Finish:
        for batch in range(LENGTHS[number]):
            step(run, number, 1000 * number + batch, BATCH, batch_size=BATCH)
        return run.averagers[number].finish(FOR_EVER)

    ends = run.each(train)
    assert all(finish.alike for finish in ends), ends
    first, *others = run.parameters()
    assert all(equal(first, other) for other in others)
