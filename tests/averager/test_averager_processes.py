"""Averagers that train together over gRPC, each with a thread of its own, in one process or in several."""

from __future__ import annotations

import copy
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Mode, Outcome, Receipt, Strategy
from averaging.errors import PeerUnreachableError, StateError
from averaging.protocol.messages import DownloadData, Resume
from averaging.transport.grpc import GrpcTransport
from tests.support.processes import JsonProcess

Make = Callable[..., tuple[torch.nn.Linear, DecentralizedAverager]]
Optimizers = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.fixture
def make(nothing_is_left_behind: None) -> Iterator[Make]:
    """Makes an averager of a model with new parameters."""
    made: list[DecentralizedAverager] = []

    def make_one(
        optimizer: Optimizers = adamw, sync_every: int = 1000, features: int = 3, **options: Any
    ) -> tuple[torch.nn.Linear, DecentralizedAverager]:
        torch.manual_seed(len(made))
        model = torch.nn.Linear(features, 2)
        defaults: dict[str, Any] = {"run_id": "test", "strategy": LocalSGD(sync_every), "group_size": 2}
        made.append(DecentralizedAverager(optimizer(model.parameters()), **(defaults | options)))
        return model, made[-1]

    yield make_one
    for averager in made:
        averager.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("the averager")]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, data: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), data)).pow(2).mean().backward()
        optimizer.step()


def train_together(*pairs: tuple[torch.nn.Module, torch.optim.Optimizer], steps: int) -> None:
    """Each in its own thread, with its own data."""
    with ThreadPoolExecutor(len(pairs)) as pool:
        for future in [pool.submit(train, *pair, steps, 1.0 + number) for number, pair in enumerate(pairs)]:
            future.result(100)


def average_together(*averagers: DecentralizedAverager, **arguments: Any) -> list[Receipt]:
    with ThreadPoolExecutor(len(averagers)) as pool:
        futures = [pool.submit(averager.average_now, **arguments) for averager in averagers]
        return [future.result(100) for future in futures]


def equal(one: torch.nn.Linear, other: torch.nn.Linear) -> bool:
    return torch.equal(one.weight, other.weight) and torch.equal(one.bias, other.bias)


def said(averager: DecentralizedAverager) -> str:
    """The optimizer's state as a string; equal strings are equal states."""
    return str(averager.state_dict()["state"])


# Rounds


def test_two_train_apart_and_are_equal_after_each_round(make: Make) -> None:
    first, one = make(sync_every=4)
    second, other = make(sync_every=4, join=[one.endpoint])
    train_together((first, one), (second, other), steps=3)
    assert not equal(first, second)
    receipts: list[Receipt] = []
    other._on_round = receipts.append
    train_together((first, one), (second, other), steps=1)
    assert equal(first, second)
    assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED]
    assert set(receipts[0].members) == {one.endpoint, other.endpoint} == one.peers
    assert one.model_version == other.model_version == 2
    train_together((first, one), (second, other), steps=3)
    assert not equal(first, second)


@pytest.mark.parametrize("strategy", [LocalSGD(2), LocalSGD(2, overlap=True), DiLoCo(2), GradientAveraging(8)])
def test_models_that_are_shared_with_other_processes_meanwhile_are_averaged(make: Make, strategy: Strategy) -> None:
    first, one = make(strategy=copy.deepcopy(strategy))
    second, other = make(strategy=strategy, join=[one.endpoint])
    pairs = (first, one), (second, other)
    for model, averager in pairs:
        assert averager.wait_for_peers(2, 100)
        model.share_memory()  # as a queue of torch.multiprocessing does with what is put into it
        averager.register_step_pre_hook(lambda averager, args, kwargs: (args, {**kwargs, "batch_size": 4}))
    train_together(*pairs, steps=2)
    average_together(one, other)
    assert equal(first, second)
    assert first.weight.is_shared()  # type: ignore[no-untyped-call]
    assert all(averager.last_receipt is not None and averager.last_receipt.averaged for averager in (one, other))


def test_three_of_them_are_equal_too_and_weigh_as_configured(make: Make) -> None:
    _, first = pair = make(group_size=3)
    pairs = [pair, *(make(group_size=3, join=[first.endpoint], mode=mode) for mode in (Mode.NODE, Mode.CLIENT))]
    for value, (model, averager) in enumerate(pairs):
        with torch.no_grad():
            model.weight.fill_(float(value))
        averager.weight = float(value)
    receipts = average_together(*(averager for _, averager in pairs), gather={"loss": 0.5})
    assert all(receipt.averaged for receipt in receipts), receipts
    assert [receipt.gathered[first.endpoint] for receipt in receipts] == [{"loss": 0.5}] * 3
    for model, _ in pairs:
        assert torch.allclose(model.weight, torch.full((2, 3), 5 / 3))


# Newcomers


@pytest.mark.parametrize(
    "optimizer",
    [
        adamw,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters, lr=torch.tensor(0.1)),
    ],
)
def test_a_newcomer_has_model_optimizer_state_and_counter_before_its_first_step(
    make: Make, optimizer: Optimizers
) -> None:
    first, one = make(optimizer, sync_every=3)
    second, other = make(optimizer, sync_every=3, join=[one.endpoint])
    train_together((first, one), (second, other), steps=3)
    third, newcomer = make(optimizer, join=[one.endpoint])
    assert equal(first, third)
    assert newcomer.local_step == 3
    assert newcomer.model_version == 2
    assert said(newcomer) in (said(one), said(other))  # both donors have averaged equally often
    train(third, newcomer, 1)
    assert newcomer.local_step == 4


def test_a_newcomer_gets_the_state_while_its_donor_evaluates_a_closure(make: Make) -> None:
    first, one = make(round_timeout=2.0)
    models: list[torch.nn.Linear] = []

    def closure() -> float:
        models.append(make(join=[one.endpoint])[0])
        first(torch.ones(4, 3)).sum().backward()
        return 0.0

    before = copy.deepcopy(first)
    one.step(closure)
    assert equal(models[0], before)
    assert not equal(first, before)


def test_a_newcomer_keeps_its_hyperparameters_and_its_scheduler_goes_on_where_the_run_is(make: Make) -> None:
    first, one = make()
    train(first, one, 3)
    one.load_state_dict(one.state_dict())
    second, other = make(lambda parameters: torch.optim.AdamW(parameters, lr=0.4), join=[one.endpoint])
    assert other.param_groups[0]["lr"] == 0.4
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1 / 2**step, last_epoch=other.local_step - 1)
    assert scheduler.get_last_lr() == [0.4 / 8]
    train(second, other, 1)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.4 / 16]


def test_a_checkpoint_that_the_founder_loads_is_what_newcomers_get(make: Make) -> None:
    first, one = make()
    train(first, one, 5)
    checkpoint = {"model": copy.deepcopy(first.state_dict()), "optimizer": copy.deepcopy(one.state_dict())}
    one.close()
    second, restarted = make()
    second.load_state_dict(checkpoint["model"])
    restarted.load_state_dict(checkpoint["optimizer"])
    assert restarted.local_step == 5
    third, newcomer = make(join=[restarted.endpoint])
    assert equal(first, third)
    assert newcomer.local_step == 5
    assert said(newcomer) == said(restarted) == said(one)


def test_a_newcomer_to_whom_nobody_offers_a_state_keeps_its_own_and_says_so(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "averaging")
    first, one = make(share_state=False)
    second, other = make(join=[one.endpoint])
    assert not equal(first, second)
    assert other.model_version == 1  # the next newcomers get it
    assert "no peer of run 'test' has the state of a greater origin" in caplog.text


def test_a_newcomer_that_cannot_get_the_state_does_not_start(make: Make) -> None:
    class Deaf(GrpcTransport):
        async def download_state(
            self, endpoint: str, resume: Resume | None = None
        ) -> AsyncGenerator[DownloadData, None]:
            raise PeerUnreachableError(endpoint, "connection refused")
            yield DownloadData()

    first, one = make()
    with pytest.raises(StateError, match=r"connection refused.*does not train without the run's state"):
        make(join=[one.endpoint], transport=Deaf("127.0.0.1:0", max_message_bytes=8 << 20))
    train(first, one, 1)


def test_a_newcomer_with_another_optimizer_or_model_does_not_start(make: Make) -> None:
    _, one = make()
    with pytest.raises(StateError, match="its optimizer is AdamW, but this peer's is SGD"):
        make(lambda parameters: torch.optim.SGD(parameters, lr=0.1), join=[one.endpoint])
    with pytest.raises(StateError, match=r"its tensor 'group0.param0' is float32\[2, 3\], here .*\[2, 4\]"):
        make(features=4, join=[one.endpoint])


def test_a_newcomer_whose_parameters_are_in_another_order_does_not_start(make: Make) -> None:
    """They have the same shapes, so each would get the values of the other."""

    def model_of(*names: str) -> torch.optim.Optimizer:
        return torch.optim.SGD([(name, torch.nn.Parameter(torch.ones(2))) for name in names], lr=0.1)

    _, one = make(lambda _: model_of("keys", "queries"))
    for parameter in one.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    one.step()
    with pytest.raises(StateError, match="averages 'keys' where this peer has 'queries'"):
        make(lambda _: model_of("queries", "keys"), join=[one.endpoint])


def test_after_a_failed_start_model_and_optimizer_are_as_they_were(make: Make) -> None:
    _, one = make()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 1)
    before = str(model.state_dict()), str(optimizer.state_dict())
    with pytest.raises(StateError):
        DecentralizedAverager(optimizer, run_id="test", strategy=LocalSGD(1), join=[one.endpoint])
    assert (str(model.state_dict()), str(optimizer.state_dict())) == before


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
