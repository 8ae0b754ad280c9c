"""DiLoCo with `visible` against plain torch, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD
from averaging.config import PeerConfig
from averaging.errors import ConfigError
from averaging.protocol import Mode
from tests.strategies.test_top_k import anchors, residual
from tests.support.training import Start

PEERS, EVERY, ROUNDS = 3, 4, 6
ADAM = partial(torch.optim.AdamW, lr=1e-4)


def wide() -> torch.nn.Sequential:
    """A model whose tensors have several blocks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.Tanh(), torch.nn.Linear(130, 3))


def gradients(model: torch.nn.Module, peer: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * peer + step)
    inputs, targets = torch.randn(8, 70, generator=generator), torch.randn(8, 3, generator=generator)
    model.zero_grad()
    (model(inputs) - targets).pow(2).mean().backward()


class PlainTorch:
    """The same peers in plain torch. One of them reduces, so that what replies have lost is in one place."""

    def __init__(self) -> None:
        self.models = [wide() for _ in range(PEERS)]
        self.inner = [ADAM(model.parameters()) for model in self.models]
        self.anchors = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self.models[0].parameters()]
        self.outer = torch.optim.SGD(self.anchors, lr=0.7, momentum=0.9, nesterov=True)
        self.residuals = [[torch.zeros_like(anchor) for anchor in self.anchors] for _ in range(PEERS)]
        self.lost = [torch.zeros_like(anchor) for anchor in self.anchors]
        self.sent = self.all = 0

    def round(self, number: int) -> None:
        for peer, (model, optimizer) in enumerate(zip(self.models, self.inner, strict=True)):
            for step in range(EVERY * number, EVERY * (number + 1)):
                gradients(model, peer, step)
                optimizer.step()
        with torch.no_grad():
            for place, anchor in enumerate(self.anchors):
                anchor.grad = self.mean(place, anchor.detach())
        self.outer.step()
        with torch.no_grad():
            for model in self.models:
                for parameter, anchor in zip(model.parameters(), self.anchors, strict=True):
                    parameter.copy_(anchor)

    def mean(self, place: int, anchor: torch.Tensor) -> torch.Tensor:
        total, seen_by_any = torch.zeros_like(anchor), torch.zeros_like(anchor, dtype=torch.bool)
        for model, residuals in zip(self.models, self.residuals, strict=True):
            change = residuals[place] + (anchor - list(model.parameters())[place])
            seen = (anchor - change).bfloat16() != anchor.bfloat16()
            sent = torch.where(seen, change.bfloat16().float(), 0.0)
            residuals[place] = change - sent
            total, seen_by_any = total + sent, seen_by_any | seen
            self.sent, self.all = self.sent + int(seen.sum()), self.all + seen.numel()
        exact = torch.where(seen_by_any, total / PEERS + self.lost[place], 0.0)
        reply = exact.bfloat16().float()
        self.lost[place] = torch.where(seen_by_any, exact - reply, self.lost[place])
        return reply


def test_all_rounds_are_those_of_plain_torch(start: Start) -> None:
    run, plain = start(), PlainTorch()
    for number in range(PEERS):
        mode = Mode.CLIENT if number else Mode.NODE
        run.add(DiLoCo(EVERY, compression="visible"), ADAM, wide(), mode=mode)
    run.meet()

    def train(peer: int, number: int) -> None:
        for step in range(EVERY * number, EVERY * (number + 1)):
            gradients(run.models[peer], peer, step)
            run.averagers[peer].step()

    for number in range(ROUNDS):
        run.each(partial(train, number=number))
        plain.round(number)
        for peer in range(PEERS):
            for mine, anchor in zip(anchors(run, peer), plain.anchors, strict=True):
                torch.testing.assert_close(mine, anchor.detach(), rtol=0, atol=1e-6)
            for mine, kept in zip(residual(run, peer), plain.residuals[peer], strict=True):
                torch.testing.assert_close(mine, kept, rtol=0, atol=1e-6)
            assert all(map(torch.equal, anchors(run, 0), anchors(run, peer)))
    assert 0.1 < plain.sent / plain.all < 0.9
    receipt = run.averagers[1].last_receipt
    assert receipt is not None
    assert receipt.averaged
    dense = sum(parameter.numel() for parameter in run.models[0].parameters()) * 4
    assert receipt.bytes_sent < 0.6 * dense


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(LocalSGD, 5), "of a change, but LocalSGD averages other tensors; use DiLoCo"),
        (partial(GradientAveraging, 5), r"use .* LocalSGD.of_changes\(sync_every, compression='visible'\)"),
        (partial(DiLoCo, 5, error_feedback=True), "error_feedback does not go with compression='visible'"),
        (partial(DiLoCo, 5, density=1 / 8), "density is an option of compression='top_k'"),
        (partial(DiLoCo, 5, mean_over="senders"), "mean_over is an option of compression='top_k'"),
        (partial(PeerConfig, run_id="run"), "visible sends some changes only; give it to a strategy"),
    ],
)
def test_what_does_not_go_with_it_is_named(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(compression="visible")


def test_another_aggregation_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"does not work with compression='visible': .* Use aggregation='mean'$"):
        start().add(DiLoCo(2, compression="visible"), ADAM, wide(), aggregation="median")
