"""An averager of a model on a GPU: every strategy and code, and what trainers do around it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from tests.gpu.device_runs import LOSSY, STRATEGIES, trained
from tests.support.training import Start, backward, batch_of, equal, model_of, parameters_of

pytestmark = pytest.mark.gpu

GradScaler: Any = torch.amp.GradScaler

GPU = torch.device("cuda", 0)


def on_gpu(model: torch.nn.Module) -> torch.nn.Module:
    return model.to(GPU)


def put(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(GPU)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_strategy_trains_to_the_same_bit_as_on_the_cpu(name: str) -> None:
    assert trained(STRATEGIES[name], on_gpu, put) == trained(STRATEGIES[name])


@pytest.mark.parametrize("code", LOSSY)
def test_every_code_gives_all_peers_the_same(code: str) -> None:
    weights, on_cpu = (trained(partial(DiLoCo, 2, **LOSSY[code]), *there) for there in ((on_gpu, put), ()))
    assert torch.allclose(torch.tensor(weights), torch.tensor(on_cpu), atol=0.1)


def test_a_peer_with_a_gpu_averages_with_one_without(start: Start) -> None:
    run = start()
    run.add(LocalSGD(2), partial(torch.optim.SGD, lr=0.1), on_gpu(model_of(0)))
    run.add(LocalSGD(2), partial(torch.optim.SGD, lr=0.1), model_of(0))
    run.meet()

    def train(number: int) -> None:
        where = (GPU, torch.device("cpu"))[number]
        for step in range(4):
            inputs, targets = (tensor.to(where) for tensor in batch_of(10 * number + step, 4))
            backward(run.models[number], (inputs, targets))
            run.averagers[number].step()
        run.averagers[number].finish(60.0)

    run.each(train)
    assert equal([tensor.cpu() for tensor in parameters_of(run.models[0])], parameters_of(run.models[1]))


@pytest.mark.parametrize("name", ["gradients", "local", "local, overlap", "diloco"])
def test_a_grad_scaler_and_autocast(start: Start, name: str) -> None:
    """In float16 with scaled gradients; a step that the scaler leaves out is left out."""
    strategies: dict[str, Callable[[], Strategy]] = {
        "gradients": lambda: GradientAveraging(16),
        "local": lambda: LocalSGD(2),
        "local, overlap": lambda: LocalSGD(4, overlap=True),
        "diloco": lambda: DiLoCo(2, outer=partial(torch.optim.SGD, lr=1.0)),
    }
    run = start()
    for _ in range(2):
        run.add(strategies[name](), partial(torch.optim.AdamW, lr=0.01), on_gpu(model_of(0)))
    run.meet()

    def train(number: int) -> tuple[float, float]:
        model, opt = run.models[number], run.averagers[number]
        scaler: Any = GradScaler("cuda", init_scale=2.0**14)
        losses = []
        for step in range(24):
            opt.zero_grad()
            inputs, targets = (tensor.to(GPU) for tensor in batch_of(step % 3, 8))
            with torch.autocast("cuda", torch.float16):
                loss: Any = torch.nn.functional.mse_loss(model(inputs), targets)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            if step == 5:
                next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            before = opt.local_step
            scaler.step(opt, batch_size=8)
            scaler.update()
            assert opt.local_step == before + (step != 5)
        opt.finish(60.0)
        return losses[0], losses[-3]

    assert all(last < first for first, last in run.each(train))
    assert equal(*run.parameters())


def test_a_newcomer_takes_over_a_state_on_the_gpu(start: Start) -> None:
    run = start()
    strategy = partial(DiLoCo, 2)
    run.add(strategy(), partial(torch.optim.AdamW, lr=0.01), on_gpu(model_of(0)))
    for step in range(6):
        inputs, targets = (tensor.to(GPU) for tensor in batch_of(step, 4))
        backward(run.models[0], (inputs, targets))
        run.averagers[0].step()
    newcomer = run.add(strategy(), partial(torch.optim.AdamW, lr=0.01), on_gpu(model_of(1)))
    assert newcomer.global_step == run.averagers[0].global_step == 3
    assert equal(*run.parameters())
    (one, other) = (averager._training.optimizer.state for averager in run.averagers)
    for mine, theirs in zip(one.values(), other.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
