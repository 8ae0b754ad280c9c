"""The code of the page about optimizers runs as it stands there."""

from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from averaging import DecentralizedAverager, LocalSGD
from tests.support.pages import ROOT, blocks_of

pytestmark = pytest.mark.optimizers


def block_with(text: str) -> str:
    (found,) = (one.text for one in blocks_of((ROOT / "docs/how-to/optimizers.md").read_text()) if text in one.text)
    return found


def test_a_loop_with_a_schedule_free_optimizer(nothing_is_left_behind: None) -> None:
    names: dict[str, Any] = {
        "schedulefree": schedulefree,
        "DecentralizedAverager": DecentralizedAverager,
        "LocalSGD": LocalSGD,
        "model": torch.nn.Linear(3, 1),
        "data": [torch.randn(4, 3) for _ in range(5)],
        "loss": lambda model, batch: model(batch).pow(2).mean(),
    }
    exec(block_with("opt.finish()  # the model holds"), names)
    assert not names["optimizer"].param_groups[0]["train_mode"]
    assert names["optimizer"].param_groups[0]["k"] == 5


def test_the_optimizer_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    names: dict[str, Any] = {
        "TrainingArguments": TrainingArguments,
        "Trainer": Trainer,
        "model": GPT2LMHeadModel(config),
        "data": [],
    }
    exec(block_with('optim="schedule_free_adamw"'), names)
    assert isinstance(names["optimizer"], schedulefree.AdamWScheduleFree)
    assert names["optimizer"].param_groups[0]["lr"] == 2.5e-3
