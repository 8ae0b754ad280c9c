"""One `opt.step()` with a round visits so many functions in so many files: what a reader has to know. It only falls."""

from __future__ import annotations

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


class Visits:
    """The functions that threads enter while `counting`, without comprehensions and lambdas."""

    def __init__(self) -> None:
        self.counting = False
        self.by_thread: dict[str, set[CodeType]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.counting and event == "call" and code.co_filename.startswith(PACKAGE) and "<" not in code.co_name:
            self.by_thread.setdefault(threading.current_thread().name, set()).add(code)


def counted(functions: set[CodeType]) -> tuple[int, int]:
    return len(functions), len({code.co_filename for code in functions})


@pytest.mark.parametrize(
    ("make", "training", "together"),
    [(lambda: LocalSGD(2), (120, 28), (600, 75)), (lambda: DiLoCo(2), (185, 35), (690, 78))],
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
            for seed in range(6):
                backward(run.models[number], batch_of(seed, 4))
                if number == 0:
                    visits.counting = seed == 5
                run.averagers[number].step()

        run.each(train)
    finally:
        threading.setprofile(None)
    of_threads = {
        name: {code for code in functions if code.co_filename.removeprefix(PACKAGE).split("/")[1] not in BESIDE}
        for name, functions in visits.by_thread.items()
    }
    of_training = min((found for name, found in of_threads.items() if "Pool" in name), key=len)
    found = (*counted(of_training), *counted(set().union(*of_threads.values())))
    assert [figure for figure, most in zip(found, (*training, *together), strict=True) if figure > most] == []
