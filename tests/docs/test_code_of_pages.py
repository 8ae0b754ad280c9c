"""The code of some pages works as it stands there, but for addresses and sizes."""

import asyncio
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel

from averaging import DecentralizedAverager, GradientAveraging, LocalSGD, Peer, Receipt
from averaging.training.named_tensors import TrainedModel, named_buffers
from tests.support.pages import ROOT, blocks_of


def code_of(page: str, heading: str = "") -> list[str]:
    """The blocks of Python of a how-to; of the section of that heading if one is given."""
    text = (ROOT / "docs" / "how-to" / page).read_text()
    if heading:
        text = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [block.text for block in blocks_of(text) if block.language == "python"]


OPTIMIZER, TENSORS = code_of("coming-from.md")
JOIN = 'join=["192.0.2.7:4222"]'
MAKING, EXCEPTING, COPYING = code_of("optimizers.md", "Modules")


def test_what_replaces_hivemind_s_optimizer_makes_a_global_step_of_a_joined_batch() -> None:
    model = torch.nn.Linear(3, 1)
    names: dict[str, Any] = {
        "DecentralizedAverager": DecentralizedAverager,
        "GradientAveraging": GradientAveraging,
        "torch": torch,
        "model": model,
        "make_scheduler": partial(LinearLR, total_iters=10),
    }
    model(torch.randn(32, 3)).sum().backward()
    assert JOIN in OPTIMIZER
    assert "=4096" in OPTIMIZER
    exec(OPTIMIZER.replace(JOIN, "join=[]").replace("=4096", "=64"), names)
    with names["opt"] as opt:
        assert opt.global_step == 0
        opt.step(batch_size=32)
        assert opt.global_step == 1


def test_tensors_alone_are_averaged() -> None:
    assert JOIN in TENSORS
    code = TENSORS.replace(JOIN, "join=join").replace("receipt =", "found.put_nowait(peer.endpoint)\n    receipt =")
    names: dict[str, Any] = {"Peer": Peer}
    exec(f"async def average(weight, join, found):\n{textwrap.indent(code, '    ')}    return receipt", names)
    weights = [torch.zeros(4), torch.full((4,), 2.0)]

    async def main() -> list[Receipt]:
        found = asyncio.Queue[str]()
        founder = asyncio.create_task(names["average"](weights[0], [], found))
        newcomer = asyncio.create_task(names["average"](weights[1], [await found.get()], found))
        return [await founder, await newcomer]

    assert all(receipt.averaged for receipt in asyncio.run(main()))
    for weight in weights:
        torch.testing.assert_close(weight, torch.ones(4))


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


def test_the_code_about_tests_runs_and_gives_what_the_page_says() -> None:
    [code] = code_of("testing.md")
    names: dict[str, Any] = {}
    exec(code, names)
    assert [tensor.tolist() for tensor in names["tensors"]] == [[3.0] * 4, [3.0] * 4, [1.0] * 4]


def test_two_peers_average_their_moments_in_the_rounds_that_the_page_says() -> None:
    (code,) = (code for code in code_of("optimizers.md") if "statistics_every" in code)
    code = code.replace("=50", "=1").replace("strategy=", "group_size=2, on_round=topics[number].append, strategy=")
    topics: list[list[Receipt]] = [[], []]
    opts: list[DecentralizedAverager] = []
    for number in range(2):
        names: dict[str, Any] = {"torch": torch, "model": torch.nn.Linear(2, 1), "topics": topics, "number": number}
        names |= {
            "DecentralizedAverager": DecentralizedAverager,
            "LocalSGD": LocalSGD,
            "join": [opt.endpoint for opt in opts],
        }
        exec(code, names)
        opts.append(names["opt"])
    with opts[0], opts[1], ThreadPoolExecutor() as threads:
        assert all(opt.wait_for_peers(2, 60.0) for opt in opts)

        def train(opt: DecentralizedAverager) -> None:
            for _ in range(6):
                for parameter in opt.param_groups[0]["params"]:
                    parameter.grad = torch.randn_like(parameter)
                opt.step()

        list(threads.map(train, opts))
    for receipts in topics:
        made = ["".join(receipt.topic.partition("/")[0].split("statistics-")) for receipt in receipts]
        assert made == ["", "", "", "1", "", "", "", "1", "2"]
