"""The example strategy of docs/how-to/strategies.md works."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Outcome, Receipt, Strategy
from tests.support.training import Run, backward, batch_of, equal

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "strategies.md"


FINISHING, OF_ONES_OWN = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("strategy", [partial(LocalSGD, 5), partial(GradientAveraging, 8), partial(DiLoCo, 5)])
def test_what_finish_leaves_in_the_model_is_the_same_everywhere(
    start: Callable[[], Run], strategy: Callable[[], Strategy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the code of the page at two peers with different steps since the last round."""
    run = start()
    for _ in range(2):
        run.add(strategy(), partial(torch.optim.SGD, lr=0.1), group_size=2)
    run.meet()
    said: dict[int, str] = {}

    def train(number: int) -> None:
        for step in range(7):
            backward(run.models[number], batch_of(100 * number + step, 4))
            run.averagers[number].step(batch_size=3)
        (tmp_path / str(number)).mkdir()
        saved = SimpleNamespace(save=lambda state, name: torch.save(state, tmp_path / str(number) / name))
        names = {"opt": run.averagers[number], "model": run.models[number], "torch": saved}
        exec(FINISHING, names | {"print": lambda finish: said.setdefault(number, str(finish))})

    run.each(train)
    assert said == dict.fromkeys(range(2), "all 2 peers hold the same weights")
    one, other = (torch.load(tmp_path / str(number) / "model.pt") for number in range(2))
    assert equal(list(one.values()), list(other.values()))


def test_the_pages_own_strategy_averages_after_1_2_4_8_steps(start: Callable[[], Run]) -> None:
    code = OF_ONES_OWN
    page: dict[str, Any] = {}
    exec(code, page)
    run, receipts = start(), list[Receipt]()
    for number in range(2):
        on_round = receipts.append if number == 0 else None
        run.add(page["Doubling"](), partial(torch.optim.SGD, lr=0.1), on_round=on_round)
    run.meet()

    def train(number: int) -> None:
        for step in range(8):
            backward(run.models[number], batch_of(100 * number + step, 4))
            run.averagers[number].step()

    run.each(train)
    assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED] * 4
    assert equal(*run.parameters())
