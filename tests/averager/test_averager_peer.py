"""The averager as a peer, alone in its run, on the memory network."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

import averaging
from averaging import DecentralizedAverager, DiLoCo, GradientAveraging, LocalSGD, Mode, Outcome, Receipt, Strategy
from averaging.errors import ClosedError, ConfigError, JoinError, RoundError, StateError, TensorError, WaitTimeoutError
from averaging.testing.discovery import MemoryDiscovery
from tests.support.alone import Make, backward, linear, train


@pytest.mark.parametrize(("count", "timeout"), [(2.0, 1.0), (2, "1"), (2, float("nan"))])
def test_waiting_for_peers_wants_numbers(make: Make, count: Any, timeout: Any) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    with pytest.raises(ConfigError, match="must be a"):
        opt.wait_for_peers(count, timeout)
    assert opt.wait_for_peers(1, float("inf"))
    assert not opt.wait_for_peers(2, 0)
    with pytest.raises(WaitTimeoutError, match=r"fewer than 2 peers .* 192.0.2.1:1") as caught:
        opt.wait_for_peers(2, 0, required=True)
    assert caught.value.peers == {"192.0.2.1:1"}


def another(run_id: str, **options: Any) -> DecentralizedAverager:
    optimizer = torch.optim.SGD(linear().parameters())
    return DecentralizedAverager(optimizer, strategy=LocalSGD(1), run_id=run_id, **options)


def test_a_cell_that_runs_again_names_the_open_averager(monkeypatch: pytest.MonkeyPatch) -> None:
    opt = another("run")
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)  # as in a notebook
    with pytest.raises(ConfigError, match=rf"run 'run' at {opt.endpoint}, whose .* first one's close\(\)"):
        another("run")
    another("another run").close()
    another("run", join=[opt.endpoint]).close()  # it joins the first: both are meant
    averaging.close_all()
    with pytest.raises(ClosedError):
        opt.step()
    another("run").close()


def test_a_model_that_is_made_anew_beside_the_averager_is_named_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()), model=model)
    counts = []
    for made in (model, linear(), linear()):
        opt.zero_grad()
        made(torch.ones(1, 3)).sum().backward()
        opt.step()
        counts.append(caplog.text.count("no parameter of the optimizer has a gradient in this step"))
    assert counts == [0, 1, 1]


def test_a_second_part_of_a_model_does_not_become_the_first() -> None:
    """Two averagers with the same options, as of a generator and a discriminator, join the same remote peer."""
    with another("run"), pytest.raises(ConfigError, match="a model a run id of its own, such as 'run-head'"):
        another("run", join=["192.0.2.9:1"])


def test_a_forked_child_has_no_averager_that_leaves_on_a_signal(make: Make) -> None:
    """It is the parent's: a child that is terminated, such as a worker of a loader, ends as it would without one."""
    before = signal.getsignal(signal.SIGTERM)
    make(torch.optim.SGD(linear().parameters()))
    assert signal.getsignal(signal.SIGTERM) is not before
    child = os.fork()
    if not child:
        os._exit(signal.getsignal(signal.SIGTERM) is not before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    averaging.close_all()
    assert signal.getsignal(signal.SIGTERM) is before


def test_rounds_that_find_nobody_harm_nothing_and_warn_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = linear(), linear()
    receipts: list[Receipt] = []
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), model=model, sync_every=2, on_round=receipts.append)
    assert opt.last_receipt is None
    with caplog.at_level(logging.WARNING, "averaging.training"):
        train(model, opt, 6)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NO_GROUP] * 3
    assert [receipt.round for receipt in receipts] == [1, 2, 3]
    assert opt.last_receipt is receipts[-1]
    assert len(caplog.records) == 1
    assert "no other peer is in the run" in caplog.records[0].getMessage()
    assert "training goes on" in caplog.records[0].getMessage()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 6)
    assert torch.equal(model.weight, plain.weight)


def test_on_round_cannot_average_since_its_round_is_not_taken_up_yet(make: Make) -> None:
    refused: list[str] = []

    def average(receipt: Receipt) -> None:
        try:
            opt.average_now()
        except RoundError as error:
            refused.append(str(error))

    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), strategy=LocalSGD(1, overlap=True), on_round=average)
    train(model, opt, 1)
    opt.average_now()  # waits for the strategy's round first
    assert len(refused) == 2
    assert "call it after the step" in refused[0]


def test_a_buffer_that_newcomers_cannot_be_given_is_to_be_left_out(make: Make) -> None:
    frequencies = {"frequencies": torch.polar(torch.ones(3), torch.arange(3.0))}
    with pytest.raises(StateError, match=r"'buffer/frequencies' is torch.complex64; .*leave it out, .*share_state"):
        make(torch.optim.SGD(linear().parameters()), buffers=frequencies)
    make(torch.optim.SGD(linear().parameters()), buffers=frequencies, share_state=False)


@pytest.mark.parametrize("strategy", [LocalSGD(9), LocalSGD(9, overlap=True), DiLoCo(9), GradientAveraging(99)])
def test_that_it_was_moved_or_has_grown_is_the_next_steps_error(make: Make, strategy: Strategy) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    backward(model)
    opt.step(batch_size=4)
    opt.check_tensors()
    model.double()
    for check in (opt.check_tensors, partial(opt.step, batch_size=4)):
        with pytest.raises(TensorError, match=r"'group0.param0' has been moved"):
            check()
    assert opt.local_step == 1


def test_a_parameter_that_takes_another_one_s_place_is_the_next_step_s_error(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, opt, 1)
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["params"][1] = model.bias = torch.nn.Parameter(torch.ones(7))  # another head
    with pytest.raises(TensorError, match="the inner optimizer has other parameters than when the averager was made"):
        opt.step()


def test_closed_it_says_so_and_the_inner_optimizer_trains_on(make: Make) -> None:
    model = linear()
    with make(torch.optim.SGD(model.parameters())) as opt:
        train(model, opt, 2)
    opt.close()
    uses: list[Callable[[], object]] = [
        lambda: opt.step(),
        lambda: opt.average_now(),
        lambda: opt.load_state_dict(opt.state_dict()),
        lambda: opt.peers,
        lambda: opt.status,
        lambda: opt.endpoint,
        lambda: opt.wait_for_peers(2, 1.0),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="the averager of run 'alone' has been closed"):
            use()
    assert opt.state_dict()["averaging"]["local_step"] == 2
    train(model, opt.optimizer, 1)


def test_a_peer_that_fails_is_the_next_steps_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))
    train(model, opt, 1)

    async def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MemoryDiscovery, "store", break_down)
    with suppress(ClosedError):  # its thread may have ended already
        opt.load_state_dict(opt.state_dict())  # declares the state again
    with pytest.raises(ClosedError, match="ended after ZeroDivisionError"):
        opt._thread.run(asyncio.Event().wait())
    with pytest.raises(ClosedError, match="ended after ZeroDivisionError"):
        train(model, opt, 1)
    assert opt.local_step == 1


@pytest.mark.parametrize("strategy", [LocalSGD(2), DiLoCo(2), GradientAveraging(8)])
def test_a_strategy_serves_one_averager_and_another_only_if_that_could_not_start(
    make: Make, strategy: Strategy
) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(linear().parameters(), lr=0.1)

    with pytest.raises(ConfigError, match="without a dot"):
        make(optimizer(), strategy=strategy, run_id="a.b")
    with pytest.raises(JoinError):
        DecentralizedAverager(optimizer(), strategy=strategy, run_id="alone", join=["127.0.0.1:9"], join_timeout=0.01)
    opt = make(optimizer(), strategy=strategy)
    tensors = opt.state_dict()["averaging"]["strategy"]["tensors"]
    assert len(tensors) == (2 if isinstance(strategy, DiLoCo) else 0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"belongs to another averager.*make a new one for each"):
            make(optimizer(), strategy=strategy)
        opt.close()


def test_it_starts_before_anything_runs_or_not_at_all(make: Make) -> None:
    def params() -> list[torch.nn.Parameter]:
        return list(linear().parameters())

    with pytest.raises(ConfigError, match="auxiliary"):
        make(torch.optim.SGD(params()), mode=Mode.AUXILIARY)
    with pytest.raises(ConfigError, match="auxiliary"):
        make(torch.optim.SGD(params()), mode="auxiliary")
    with pytest.raises(ConfigError, match="strategy must be a Strategy object"):
        make(torch.optim.SGD(params()), strategy=LocalSGD)
    with pytest.raises(ConfigError, match="weight"):
        make(torch.optim.SGD(params()), weight=float("nan"))
    with pytest.raises(ConfigError, match="the first argument must be an optimizer, not Linear"):
        make(linear())
    for buffers in (linear().named_buffers(), [torch.ones(1)]):
        with pytest.raises(ConfigError, match=r"such as dict\(model.named_buffers\(\)\), not (generator|list)"):
            make(torch.optim.SGD(params()), buffers=buffers)
    with pytest.raises(ConfigError, match="buffer 'mean' must be a tensor, not NoneType"):
        make(torch.optim.SGD(params()), buffers={"mean": None})
    with pytest.raises(ConfigError, match="LBFGS evaluates the model during its step"):
        make(torch.optim.LBFGS(params()), strategy=GradientAveraging(8))
    inner = torch.optim.SGD(params(), lr=0.1)
    with pytest.raises(ConfigError, match="StepLR; a scheduler that already exists is stepped by the training loop"):
        make(inner, scheduler=torch.optim.lr_scheduler.StepLR(inner, 2))
    for scheduler, made in ((torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau"), (id, "int")):
        with pytest.raises(ConfigError, match=f"cannot drive {made}; make it with the averager as its optimizer"):
            make(inner, scheduler=scheduler)
    with pytest.raises(ConfigError, match="without a dot"):
        make(torch.optim.SGD(params()), run_id="a.b")
    with pytest.raises(TensorError, match="'group0.param1' does not require a gradient"):
        make(torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), torch.ones(1)]))


def test_a_weight_of_samples_needs_the_size_of_each_batch(make: Make) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    opt = make(torch.optim.SGD([weight], lr=0.1), weight="samples")
    assert opt.weight == "samples"
    weight.grad = torch.ones(2)
    for wrong in (None, 0, -1, True):
        with pytest.raises(ConfigError, match=r"weight='samples' counts samples: call opt.step\(batch_size=n\)"):
            opt.step(batch_size=wrong)
    assert opt.local_step == 0
    opt.step(batch_size=8)
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert opt.state_dict()["averaging"]["samples"] == saved["averaging"]["samples"] == [8, {}]
    with pytest.raises(ConfigError, match="weight must be a number or 'samples', not 'tokens'"):
        opt.weight = "tokens"
