"""averaging.integrations.accelerate in real loops."""

from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, TensorDataset

from averaging import ConfigError, DecentralizedAverager, GradientAveraging, LocalSGD
from averaging.integrations.accelerate import AveragingLoop
from tests.support.training import Run
from tests.trainers import page
from tests.trainers.partner import RUN_ID, Noted, founder, going_on

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def no_accelerator_is_left() -> Iterator[None]:
    """accelerate has one state for all that a process does."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def data_of(samples: int, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


def averager_of(model: torch.nn.Module, **options: Any) -> DecentralizedAverager:
    usual: dict[str, Any] = {"run_id": RUN_ID, "strategy": LocalSGD(4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return DecentralizedAverager(optimizer, model=model, **(usual | options))


def page_peer(number: int, endpoints: SimpleQueue[str]) -> None:
    torch.manual_seed(number)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    names = {"accelerator": accelerator, "model": torch.nn.Linear(3, 1), "data": data_of(21)}
    page.run_as_one_of_two(page.ACCELERATE, number, endpoints, names)


def rank(number: int, ports: SimpleQueue[str]) -> None:
    page.as_rank(number, ports)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    with averager_of(model) as opt:
        try:
            AveragingLoop(accelerator, opt)
        except ConfigError as error:
            page.tell_error(error)
    torch.distributed.destroy_process_group()


def test_a_newcomer_makes_the_rest_of_the_steps(run: Run) -> None:
    accelerator = Accelerator(cpu=True)
    model, data = accelerator.prepare(torch.nn.Linear(3, 1), data_of(80))
    first = founder(run, model, 5)
    opt = averager_of(model, join=[first.endpoint], group_size=2, group_wait=30.0)
    loop, steps = AveragingLoop(accelerator, opt), 0
    with opt, going_on(run, 8) as told:
        for x, y in data:
            with loop.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            steps += 1
            if opt.local_step >= 13:
                break
        assert opt.finish().alike
    assert told == ["all 2 peers hold the same weights"]
    assert steps == 9
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), run.models[0].parameters(), strict=True))


def test_samples_are_those_of_the_batches_behind_a_step() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, data = accelerator.prepare(torch.nn.Linear(3, 1), data_of(21))
    strategy = Noted(8)
    with averager_of(model, strategy=strategy) as opt:
        loop = AveragingLoop(accelerator, opt)
        for epoch in range(2):
            for number, (x, y) in enumerate(data):
                with loop.accumulate(model, samples=len(x)):
                    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                    if (epoch, number) != (1, 1):  # as a GradScaler leaves a step out
                        loop.optimizer.step()
                    loop.optimizer.zero_grad()
        opt.step(batch_size=3)
    assert strategy.told == [8, 8, 5, 8, 5, 3]


@pytest.mark.parametrize("options", [{"strategy": GradientAveraging(8)}, {"weight": "samples"}])
def test_a_step_without_samples_is_advised_how_to_count_them(options: dict[str, Any]) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3, 1))
    with averager_of(model, **options) as opt:
        loop = AveragingLoop(accelerator, opt)
        with loop.accumulate(model), pytest.raises(ConfigError, match=r"has none: .*loop.accumulate\(model, samples"):
            loop.optimizer.step()


def test_what_cannot_work_is_said_with_its_remedy() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    with averager_of(model) as opt:
        model.double()
        told = r"moved in memory.* call accelerator.prepare\(model\) first, then create the averager, then the Averag"
        with pytest.raises(ConfigError, match=told):
            AveragingLoop(accelerator, opt)
    with pytest.raises(ConfigError, match="must be a DecentralizedAverager, not SGD"):
        AveragingLoop(accelerator, opt.optimizer)  # type: ignore[arg-type]


def test_a_model_on_another_device_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = torch.device("meta")  # as on a machine with a GPU, before the model is prepared
    with (
        averager_of(torch.nn.Linear(3, 1)) as opt,
        pytest.raises(ConfigError, match="on cpu, and accelerate trains on meta: call accelerator.prepare"),
    ):
        AveragingLoop(accelerator, opt)
