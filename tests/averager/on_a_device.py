"""Models on a device whose memory the CPU cannot read: all strategies and codes copy what they need, to the bit.

`test_on_a_device` runs it in a process of its own, because torch knows the device until its process ends.
"""

from functools import partial

import pytest
import torch

from averaging import DiLoCo
from averaging.weights.snapshot import begin_copy, seal
from tests.gpu.device_runs import LOSSY, STRATEGIES, trained
from tests.gpu.device_states import check_committed_states
from tests.gpu.separate_device import moved, separate_device, to_separate
from tests.support.selection import rest_is_long
from tests.support.training import Start, model_of

EVERYDAY = ["gradients", "local, overlap", "diloco, fragments"]
"""Those that copy in different ways; the others take longer than they find."""

DEVICE = separate_device()  # before the first gradient, when torch counts devices


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long) for name in STRATEGIES]
)
def test_every_strategy_trains_as_on_the_cpu(name: str) -> None:
    on_cpu = trained(STRATEGIES[name])
    assert trained(STRATEGIES[name], moved, to_separate) == on_cpu


@pytest.mark.parametrize("code", rest_is_long(LOSSY))
def test_every_code_gives_all_peers_the_same(code: str) -> None:
    strategy = partial(DiLoCo, 2, **LOSSY[code])
    weights, on_cpu = trained(strategy, moved, to_separate), trained(strategy)
    assert torch.allclose(torch.tensor(weights), torch.tensor(on_cpu), atol=0.1)


async def test_newcomers_get_what_was_committed() -> None:
    await check_committed_states(DEVICE, 1000)


def test_a_newcomer_takes_over_a_state(start: Start) -> None:
    run = start()
    adamw = partial(torch.optim.AdamW, lr=0.01)
    run.add(DiLoCo(2), adamw, moved(model_of(0)))
    for _ in range(4):
        run.models[0](to_separate(torch.ones(1, 5))).sum().backward()
        run.averagers[0].step()
    newcomer = run.add(DiLoCo(2), adamw, moved(model_of(1)))
    assert newcomer.global_step == run.averagers[0].global_step == 2
    assert all(map(equal_on_cpu, *(model.parameters() for model in run.models)))


def equal_on_cpu(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().cpu(), other.detach().cpu())


def test_what_is_sent_to_followers() -> None:
    model = moved(model_of(0))
    published = begin_copy(model.state_dict())
    for (_, copy), tensor in zip(seal(published, 1, None).parts(), model.state_dict().values(), strict=True):
        assert torch.equal(copy, tensor.cpu())
