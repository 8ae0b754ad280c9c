"""One `opt.step()` with a round visits so many functions in so many files: what a reader has to know. It only falls."""

import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

import averaging
from averaging import DiLoCo, LocalSGD, Strategy
from tests.support.training import Start, backward, batch_of, run_of

PACKAGE = averaging.__path__[0]

BESIDE = ("discovery", "metrics", "seeds")
"""Rooms whose work goes on beside a round."""

ROUNDS = (5, 7, 9, 11)
"""Steps with a round. If the other peer is late, more functions are visited, so the smallest counts are used."""


class Visits:
    """The functions that threads enter in each `step` that is counted, without comprehensions and lambdas."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.trains = ""  # the thread that calls `step`
        self.by_step: dict[int, dict[str, set[CodeType]]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, step = frame.f_code, self.step
        if step is None or event != "call" or not code.co_filename.startswith(PACKAGE) or "<" in code.co_name:
            return
        if code.co_filename.removeprefix(PACKAGE).split("/")[1] not in BESIDE:
            by_thread = self.by_step.setdefault(step, {})
            by_thread.setdefault(threading.current_thread().name, set()).add(code)

    def counts(self, step: int) -> tuple[int, ...]:
        by_thread = self.by_step[step]
        return (*counted(by_thread[self.trains]), *counted(set().union(*by_thread.values())))


def counted(functions: set[CodeType]) -> tuple[int, int]:
    return len(functions), len({code.co_filename for code in functions})


@pytest.mark.parametrize(
    ("make", "training", "together"),
    [(lambda: LocalSGD(2), (110, 26), (585, 72)), (lambda: DiLoCo(2), (184, 34), (650, 75))],
    ids=["LocalSGD", "DiLoCo"],
)
def test_a_step_with_a_round_visits_few_functions(
    start: Start, make: Callable[[], Strategy], training: tuple[int, int], together: tuple[int, int]
) -> None:
    visits = Visits()
    threading.setprofile(visits)
    try:
        run = run_of(start, 2, make)

        def train(number: int) -> None:
            for seed in range(12):
                backward(run.models[number], batch_of(seed, 4))
                if number == 0 and seed in ROUNDS:
                    visits.step, visits.trains = seed, threading.current_thread().name
                run.averagers[number].step()
                if number == 0:
                    visits.step = None

        run.each(train)
    finally:
        threading.setprofile(None)
    found = [min(figures) for figures in zip(*map(visits.counts, ROUNDS), strict=True)]
    assert [figure for figure, most in zip(found, (*training, *together), strict=True) if figure > most] == []
