"""The code about modules in docs/how-to/optimizers.md works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from averaging import DecentralizedAverager, LocalSGD
from averaging.training.named_tensors import TrainedModel, named_buffers

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "optimizers.md").read_text()
MODULES = PAGE.partition("## Modules\n")[2].partition("\n## ")[0]
MAKING, EXCEPTING, COPYING = re.findall(r"```python\n(.*?)```", MODULES, re.DOTALL)


def test_the_averager_of_the_page_averages_the_buffers_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names: dict[str, Any] = {"torch": torch, "model": model}
    exec(MAKING, names | {"DecentralizedAverager": DecentralizedAverager, "LocalSGD": LocalSGD}, names)
    with names["opt"] as opt:
        assert list(opt._training.buffers) == ["buffer/1.running_mean", "buffer/1.running_var"]


def test_a_buffer_is_left_out_and_a_copy_is_averaged_as_the_page_says() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    model.register_buffer("cache", torch.zeros(1))
    names: dict[str, Any] = {"model": model, "ema": AveragedModel(model)}
    exec(EXCEPTING, names)
    assert "buffer/cache" not in named_buffers(names["buffers"], TrainedModel(model)).averaged
    exec(COPYING, names)
    copied = named_buffers(names["buffers"], TrainedModel(model)).averaged
    assert "buffer/ema.module.0.weight" in copied
