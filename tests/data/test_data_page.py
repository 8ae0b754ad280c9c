"""docs/how-to/data.md: its code trains each sample once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from averaging import DecentralizedAverager, LocalSGD
from tests.support.pages import blocks_of

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "data.md").read_text()
SAMPLES, SHARDS = [block.text for block in blocks_of(PAGE) if block.language == "python"]


def run(code: str, **names: Any) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-9)
    with DecentralizedAverager(inner, model=model, run_id="page", strategy=LocalSGD(1000), listen="127.0.0.1:0") as opt:
        names |= {"opt": opt, "model": model}
        exec(code, names)
    return names


def test_the_loop_of_the_page_trains_each_sample_once_an_epoch() -> None:
    values = torch.arange(100.0).unsqueeze(1)
    seen: list[float] = []

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.extend(targets.flatten().tolist())
        return (outputs - targets).pow(2).mean()

    names = run(SAMPLES, dataset=TensorDataset(values, values), loss_of=loss_of)
    assert sorted(seen) == sorted(3 * values.flatten().tolist())
    assert names["sampler"].statistics.most_duplicates == 0


def read(path: int) -> Iterator[torch.Tensor]:
    for line in range(7):
        yield torch.tensor([10.0 * path + line])


def test_the_loop_over_shards_trains_each_sample_once_an_epoch() -> None:
    seen: list[float] = []

    def loss_of(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        seen.extend(batch.flatten().tolist())
        return outputs.pow(2).mean()

    run(SHARDS.replace("1000", "7"), paths=range(12), read=read, loss_of=loss_of)
    assert sorted(seen) == sorted(3 * [float(sample) for path in range(12) for sample in read(path)])
