"""Averagers that train together over gRPC, each with a thread of its own, in one process or in several."""

import copy
import logging
import signal
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Mode, Receipt, Strategy
from averaging.errors import PeerUnreachableError, StateError
from averaging.protocol.messages import DownloadData, Resume
from averaging.transport.grpc import GrpcTransport
from tests.support.processes import JsonProcess
from tests.support.training import Start, backward, batch_of, equal, model_of, parameters_of, run_of, step, steps

adamw = partial(torch.optim.AdamW, lr=0.1)


def said(averager: DecentralizedAverager) -> str:
    """The optimizer's state as a string; equal strings are equal states."""
    return str(averager.state_dict()["state"])


# Rounds


@pytest.mark.parametrize("strategy", [LocalSGD(2), LocalSGD(2, overlap=True), DiLoCo(2), GradientAveraging(8)])
def test_models_that_are_shared_with_other_processes_meanwhile_are_averaged(start: Start, strategy: Strategy) -> None:
    run = run_of(start, 2, partial(copy.deepcopy, strategy), adamw, group_size=2)
    for model in run.models:
        model.share_memory()  # as a queue of torch.multiprocessing does with what is put into it

    def train(number: int) -> Receipt:
        for seed in range(2):
            step(run, number, 10 * number + seed, batch_size=4)
        return run.averagers[number].average_now()

    assert all(receipt.averaged for receipt in run.each(train))
    assert equal(*run.parameters())
    assert all(parameter.is_shared() for parameter in run.models[0].parameters())  # type: ignore[no-untyped-call]


def test_three_of_them_are_equal_too_and_weigh_as_configured(start: Start) -> None:
    run = start()
    for value, mode in enumerate((Mode.NODE, Mode.NODE, Mode.CLIENT)):
        averager = run.add(LocalSGD(1000), adamw, torch.nn.Linear(3, 2), mode=mode, group_size=3)
        averager.weight = float(value)
        with torch.no_grad():
            run.models[-1].get_parameter("weight").fill_(float(value))
    run.meet()
    receipts = run.each(lambda number: run.averagers[number].average_now(gather={"loss": 0.5}))
    assert all(receipt.averaged for receipt in receipts), receipts
    assert [receipt.gathered[run.averagers[0].endpoint] for receipt in receipts] == [{"loss": 0.5}] * 3
    for model in run.models:
        assert torch.allclose(model.get_parameter("weight"), torch.full((2, 3), 5 / 3))


# Newcomers


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters, lr=torch.tensor(0.1)),
    ],
)
def test_a_newcomer_has_model_optimizer_state_and_counter_before_its_first_step(
    start: Start, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    run = run_of(start, 2, partial(LocalSGD, 3), optimizer)
    run.each(lambda number: steps(run, number, range(10 * number, 10 * number + 3)))
    newcomer = run.add(LocalSGD(3), optimizer, model_of(7))
    assert equal(run.parameters()[0], run.parameters()[2])
    assert newcomer.local_step == 3
    assert newcomer.model_version == 2
    assert said(newcomer) in map(said, run.averagers[:2])  # both donors have averaged equally often
    step(run, 2, 0)
    assert newcomer.local_step == 4


def test_a_newcomer_gets_the_state_while_its_donor_evaluates_a_closure(start: Start) -> None:
    run = start()
    run.add(LocalSGD(1000), adamw, round_timeout=2.0)
    newcomers: list[list[torch.Tensor]] = []

    def closure() -> float:
        run.add(LocalSGD(1000), adamw, model_of(7))
        newcomers.append(parameters_of(run.models[-1]))
        return backward(run.models[0], batch_of(0, 4)).item()

    before = parameters_of(run.models[0])
    run.averagers[0].step(closure)
    assert equal(newcomers[0], before)
    assert not equal(run.parameters()[0], before)


def test_a_newcomer_keeps_its_hyperparameters_and_its_scheduler_goes_on_where_the_run_is(start: Start) -> None:
    run = start()
    first = run.add(LocalSGD(1000), adamw)
    steps(run, 0, range(3))
    first.load_state_dict(first.state_dict())
    other = run.add(LocalSGD(1000), partial(torch.optim.AdamW, lr=0.4))
    assert other.param_groups[0]["lr"] == 0.4
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1 / 2**step, last_epoch=other.local_step - 1)
    assert scheduler.get_last_lr() == [0.4 / 8]
    step(run, 1, 0)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.4 / 16]


def test_a_newcomer_to_whom_nobody_offers_a_state_keeps_its_own_and_says_so(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "averaging")
    run = start()
    run.add(LocalSGD(1000), adamw, share_state=False)
    newcomer = run.add(LocalSGD(1000), adamw, model_of(7))
    assert not equal(*run.parameters())
    assert newcomer.model_version == 1  # the next newcomers get it
    assert "no peer of run 'test' has the state of a greater origin" in caplog.text


class Deaf(GrpcTransport):
    """Downloads nothing."""

    async def download_state(self, endpoint: str, resume: Resume | None = None) -> AsyncGenerator[DownloadData, None]:
        raise PeerUnreachableError(endpoint, "connection refused")
        yield DownloadData()


def test_a_newcomer_that_cannot_get_the_state_does_not_start(start: Start) -> None:
    run = start()
    run.add(LocalSGD(1000), adamw)
    with pytest.raises(StateError, match=r"connection refused.*does not train without the run's state"):
        run.add(LocalSGD(1000), adamw, transport=Deaf("127.0.0.1:0", max_message_bytes=8 << 20))
    step(run, 0, 0)


def test_a_newcomer_with_another_optimizer_or_model_does_not_start_and_both_are_as_they_were(start: Start) -> None:
    run, model = start(), model_of(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model, batch_of(0, 4))
    optimizer.step()
    before = str(model.state_dict()), str(optimizer.state_dict())
    run.add(LocalSGD(1000), adamw)
    with pytest.raises(StateError, match="its optimizer is AdamW, but this peer's is SGD"):
        run.add(LocalSGD(1000), lambda _: optimizer, model)
    assert (str(model.state_dict()), str(optimizer.state_dict())) == before
    with pytest.raises(StateError, match=r"its tensor '0.weight' is float32\[7, 5\], here '0.weight' is .*\[7, 4\]"):
        run.add(LocalSGD(1000), adamw, torch.nn.Sequential(torch.nn.Linear(4, 7), *list(model)[1:]))


def test_a_newcomer_whose_parameters_are_in_another_order_does_not_start(start: Start) -> None:
    """They have the same shapes, so each would get the values of the other."""

    def named(*names: str) -> Any:
        return lambda _: torch.optim.SGD([(name, torch.nn.Parameter(torch.ones(2))) for name in names], lr=0.1)

    run = start()
    run.add(LocalSGD(1000), named("keys", "queries"), gives_model=False)
    with pytest.raises(StateError, match="averages 'keys' where this peer has 'queries'"):
        run.add(LocalSGD(1000), named("queries", "keys"), gives_model=False)


# Processes


def worker(way: str) -> JsonProcess:
    return JsonProcess("python", "-W", "error", "-m", "tests.averager.worker", way)


def test_an_interrupt_in_a_round_leaves_the_run_in_order() -> None:
    with worker("interrupted") as process:
        process.expect("averaging")
        process.signal(signal.SIGINT)
        interrupted = process.expect("interrupted")
        assert interrupted["local_step"] == 2
        assert not interrupted["looking"]
        assert process.expect("left")["threads"] == []
        assert process.wait() == 0
        assert process.stderr == ""


@pytest.mark.long
def test_data_loaders_fork_workers_silently() -> None:
    with worker("loaders") as process:
        trained = process.expect("trained")
        assert (trained["equal"], trained["rounds"]) == (True, [6, 6])
        assert process.wait() == 0
        assert process.stderr == ""
