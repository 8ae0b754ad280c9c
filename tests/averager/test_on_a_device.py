"""Models on a device whose memory the CPU cannot read: all strategies and codes copy what they need, to the bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from averaging import DiLoCo
from tests.support.device_runs import CODES, STRATEGIES, trained
from tests.support.separate_device import moved, to_separate

EVERYDAY = ["gradients", "local, overlap", "diloco, fragments"]
"""Those that copy in different ways; the others take longer than they find."""


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long) for name in STRATEGIES]
)
def test_every_strategy_trains_as_on_the_cpu(name: str) -> None:
    on_cpu = trained(STRATEGIES[name])
    assert trained(STRATEGIES[name], moved, to_separate) == on_cpu


@pytest.mark.long
@pytest.mark.parametrize("code", CODES)
def test_every_code_gives_all_peers_the_same(code: str) -> None:
    weights = trained(lambda: DiLoCo(2, compression=code), moved, to_separate)
    on_cpu = trained(lambda: DiLoCo(2, compression=code))
    assert torch.allclose(torch.tensor(weights), torch.tensor(on_cpu), atol=0.1)


def test_the_largest_elements_only() -> None:
    strategy = partial(DiLoCo, 2, compression="top_k", density=1.0, bits=8)
    weights, on_cpu = trained(strategy, moved, to_separate), trained(strategy)
    assert torch.allclose(torch.tensor(weights), torch.tensor(on_cpu), atol=0.1)
