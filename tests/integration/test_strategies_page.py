"""The strategy in the docs works as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from averaging import Outcome, Receipt
from tests.integration.training import Run, backward, batch_of, equal

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"


def test_the_pages_own_strategy_averages_after_1_2_4_8_steps(start: Callable[[], Run]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
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
