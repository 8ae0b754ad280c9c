"""The pure parts of the convergence benchmark: bytes per step, and what counts as met."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.convergence.report import bytes_per_step, verdicts
from benchmarks.convergence.train import Recipe


def case(
    title: str, loss: float, sent: list[int], local: list[int], together: int | None, **more: Any
) -> dict[str, Any]:
    counts = {"local_steps": local, "global_steps": together, "counts_samples": False}
    return {"title": title, "loss": loss, "bytes_sent": sent} | counts | more


SINGLE = case("alone", 2.0, [0], [100], 100)
GRADIENTS = case("gradients", 2.01, [900, 1100], [30, 20], 10, counts_samples=True)


def test_a_step_with_gradient_averaging_is_a_global_one() -> None:
    assert bytes_per_step(GRADIENTS) == 100.0
    assert bytes_per_step(GRADIENTS | {"counts_samples": False}) == 40.0


@pytest.mark.parametrize(("loss", "sent", "met"), [(2.059, 200, [True, True]), (2.061, 201, [False, False])])
def test_verdicts_are_computed(loss: float, sent: int, met: list[bool]) -> None:
    diloco = case("diloco", loss, [sent, sent], [100, 100], 2)
    found = verdicts({"single": SINGLE, "gradients": GRADIENTS, "diloco-50": diloco})
    assert [one.met for one in found] == [True, *met]
    assert found[0].measured == "+0.50%"


def test_what_is_not_there_is_not_judged() -> None:
    assert verdicts({"gradients": GRADIENTS}) == []


def test_the_learning_rate_rises_then_falls() -> None:
    recipe = Recipe(steps=100)
    step = recipe.peers * recipe.batch
    factors = [recipe.lr_factor(step * number) for number in range(101)]
    assert factors[0] == pytest.approx(0.2)
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[-1] == pytest.approx(0.05)
