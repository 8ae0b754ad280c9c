"""Peers of one run that differ: allowed, or refused by name at the start."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.errors import StateError
from tests.support import training_run
from tests.support.training import SGD, Run, model_of
from tests.support.training_run import Site, agree

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "local": LocalSGD,
    "diloco": DiLoCo,
    "gradients": lambda steps: GradientAveraging(4 * steps),
}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("bfloat16_first", [False, True])
def test_a_model_of_another_dtype_is_refused_by_name(kind: str, bfloat16_first: bool) -> None:
    dtypes = [torch.bfloat16, torch.float32] if bfloat16_first else [torch.float32, torch.bfloat16]
    run = Run()
    try:
        first = run.add(STRATEGIES[kind](4), SGD, model_of(0, dtypes[0]))
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        with pytest.raises(StateError) as raised:
            run.add(STRATEGIES[kind](4), SGD, model_of(0, dtypes[1]))
        assert f"{first.endpoint}: its tensor '0.weight' is {names[0]}[7, 5], here '0.weight' is {names[1]}" in str(
            raised.value
        )
    finally:
        run.close()


@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_numbers_of_steps_may_differ(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    made = iter([STRATEGIES[kind](4), STRATEGIES[kind](8)])
    monkeypatch.setitem(training_run.STRATEGIES, "unequal", lambda _: next(made))
    sites = [
        Site("192.0.2.1:1", [], 0.1, step_seconds=0.4),
        Site("192.0.2.2:1", ["192.0.2.1:1"], 0.2, step_seconds=0.2),
    ]
    first, second = training_run.Run(0, "unequal", sites, until=20.0, group_wait=3.0).simulate()
    for peer in (first, second):
        averaged = [receipt for receipt in peer.receipts if receipt.averaged]
        assert len(averaged) >= 8
        assert all(len(receipt.members) == 2 for receipt in averaged)
        assert not any(receipt.drift for receipt in averaged)
    assert agree([first, second])


@pytest.mark.parametrize("kind", STRATEGIES)
def test_batch_sizes_may_differ(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(training_run.STRATEGIES, "unequal", lambda _: STRATEGIES[kind](4))
    sites = [
        Site("192.0.2.1:1", [], 0.1, learner=lambda rng: _noise(rng, 4)),
        Site("192.0.2.2:1", ["192.0.2.1:1"], 0.2, learner=lambda rng: _noise(rng, 12)),
    ]
    first, second = training_run.Run(0, "unequal", sites, until=20.0, group_wait=3.0).simulate()
    averaged = [receipt for receipt in first.receipts if receipt.averaged and len(receipt.members) == 2]
    assert len(averaged) >= 5
    for receipt in averaged[1:]:
        weights = {account.endpoint: account.weight for account in receipt.accounts}
        # Gradients are means over samples, so they weigh as many; changes of equally many steps weigh alike.
        share = weights[second.name] / sum(weights.values())
        assert share == (0.75 if kind == "gradients" else 0.5)
    assert agree([first, second])


def _noise(rng: random.Random, batch_size: int) -> training_run.Noise:
    noise = training_run.Noise(rng, {})
    noise.batch_size = batch_size
    return noise
