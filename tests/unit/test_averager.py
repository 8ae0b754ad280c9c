"""The averager as the rest of torch sees it: alone in its run, on a network in memory."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from averaging import (
    DecentralizedAverager,
    DiLoCo,
    GradientAveraging,
    LocalSGD,
    Mode,
    Outcome,
    Receipt,
    Strategy,
)
from averaging.discovery.memory import MemoryDiscovery, MemoryRegistry
from averaging.errors import ClosedError, ConfigError, NoSeedAnsweredError, RoundError, StateError, TensorError
from averaging.transport.memory import MemoryNetwork

Make = Callable[..., DecentralizedAverager]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes an averager that starts a run and finds nobody, at once."""
    made = []

    def make_one(optimizer: torch.optim.Optimizer, every: int = 1000, **options: Any) -> DecentralizedAverager:
        defaults: dict[str, Any] = {"timeout": 0.02, "strategy": LocalSGD(every), "run_id": "alone"}
        transport = MemoryNetwork(random.Random(0)).transport("192.0.2.1:1")
        registry = MemoryRegistry()
        made.append(
            DecentralizedAverager(
                optimizer,
                transport=transport,
                discovery=lambda endpoint, _: MemoryDiscovery(registry),
                **(defaults | options),
            )
        )
        return made[-1]

    yield make_one
    for averager in made:
        averager.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("the averager")]


def linear() -> torch.nn.Linear:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 2)


def backward(model: torch.nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 3)).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


# An optimizer like others


def test_it_trains_exactly_as_the_inner_optimizer(make: Make) -> None:
    model, plain = linear(), linear()
    opt = make(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, opt, 5)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), 5)
    assert torch.equal(model.weight, plain.weight)
    assert opt.local_step == 5


def test_it_is_an_optimizer_with_the_inner_ones_attributes(make: Make) -> None:
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = make(inner)
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.optimizer is inner
    train(model, opt, 1)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups is inner.param_groups
    assert opt.state is inner.state
    assert opt.defaults is inner.defaults
    assert opt.state[model.weight]["momentum_buffer"] is not None


def test_the_number_of_steps_of_a_0_dim_parameter_is_no_statistic_of_it(make: Make) -> None:
    scale = torch.nn.Parameter(torch.tensor(2.0))
    opt = make(torch.optim.Adam([scale]))
    scale.pow(2).backward()  # type: ignore[no-untyped-call]
    opt.step()
    assert list(opt._training.statistics()) == ["exp_avg/group0.param0", "exp_avg_sq/group0.param0"]


def test_zero_grad_is_the_inner_ones(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))
    backward(model)
    opt.zero_grad(set_to_none=False)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()
    opt.zero_grad()
    assert model.weight.grad is None


def test_a_closure_is_called_and_its_loss_returned(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.LBFGS(model.parameters(), max_iter=3))
    losses = []

    def closure() -> float:
        opt.zero_grad()
        losses.append(backward(model).item())
        return losses[-1]

    assert opt.step(closure) == losses[0]
    assert len(losses) > 1
    assert opt.local_step == 1


class Probing(torch.optim.SGD):
    """Evaluates the closure before its step, and once more a little way off, as sharpness-aware ones do."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameter = self.param_groups[0]["params"][0]
        with torch.no_grad():
            parameter.add_(1.0)
            closure()
            parameter.sub_(1.0)
        super().step()
        return loss


def test_the_tensors_are_free_while_a_closure_is_evaluated_until_the_optimizer_has_changed_them(make: Make) -> None:
    model = linear()
    opt = make(Probing(model.parameters(), lr=0.1))
    lock = opt._training._peer._tensors._lock
    free = []

    def probe() -> bool:
        if taken := lock.acquire(blocking=False):
            lock.release()
        return taken

    def closure() -> float:
        with ThreadPoolExecutor() as other_thread:
            free.append(other_thread.submit(probe).result())
        with torch.enable_grad():
            return backward(model).item()

    opt.step(closure)
    assert free == [True, False]


def test_what_a_closure_raises_is_raised_and_the_step_not_counted(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))

    def closure() -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        opt.step(closure)
    assert opt.local_step == 0
    train(model, opt, 1)
    assert opt.local_step == 1


@pytest.mark.parametrize(
    ("schedule", "loss"),
    [
        (lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)), None),
        (lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10), None),
        (lambda opt: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3), None),
        (lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0), 1.0),
    ],
)
def test_schedulers_drive_it_as_they_drive_the_inner_optimizer(
    make: Make, schedule: Callable[[torch.optim.Optimizer], Any], loss: float | None
) -> None:
    rates: list[list[float]] = []
    for wrap in (make, lambda optimizer: optimizer):
        model = linear()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
        scheduler = schedule(optimizer)
        rates.append([])
        for _ in range(8):
            train(model, optimizer, 1)
            scheduler.step(*([] if loss is None else [loss]))
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 2


def test_a_chained_scheduler_is_driven_too_and_goes_on_from_a_checkpoint(make: Make) -> None:
    def chained(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ChainedScheduler:
        warm = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=2)
        return torch.optim.lr_scheduler.ChainedScheduler(
            [warm, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
        )

    plain = torch.optim.SGD(linear().parameters(), lr=1.0)
    expected = chained(plain)
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=1.0), scheduler=chained)
    for _ in range(4):
        train(model, opt, 1)
        plain.step()
        expected.step()
        assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    again = make(torch.optim.SGD(linear().parameters(), lr=1.0), scheduler=chained)
    again.load_state_dict(opt.state_dict())
    assert again.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_a_grad_scaler_leaves_out_steps_with_infinite_gradients(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        opt.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).pow(2).mean() * factor).backward()
        scaler.step(opt)
        scaler.update()
    assert opt.local_step == 2
    assert scaler.get_scale() == 2.0
    assert model.weight.isfinite().all()


def test_hooks_are_called_once_with_the_averager(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()), every=1)
    happened: list[Any] = []
    opt.register_step_pre_hook(lambda this, args, kwargs: happened.append(("before", this)))
    opt.register_step_post_hook(lambda this, args, kwargs: happened.append(("after", this, opt.last_receipt is None)))
    opt.optimizer.register_step_post_hook(lambda this, args, kwargs: happened.append(("inner", this)))
    train(model, opt, 1)
    assert happened == [("before", opt), ("inner", opt.optimizer), ("after", opt, False)]


def test_hooks_on_the_state_dict_may_change_it(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.5))
    happened = []
    opt.register_state_dict_pre_hook(lambda this: happened.append("save"))
    opt.register_state_dict_post_hook(lambda this, state: {"packed": state})
    opt.register_load_state_dict_pre_hook(lambda this, state: dict(state["packed"]))
    opt.register_load_state_dict_post_hook(lambda this: happened.append("loaded"))
    saved = opt.state_dict()
    assert list(saved) == ["packed"]
    opt.param_groups[0]["lr"] = 0.1
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5
    assert happened == ["save", "loaded"]


def test_param_groups_are_fixed(make: Make) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    with pytest.raises(ConfigError, match="inner optimizer before"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(opt.param_groups) == 1


def test_it_is_neither_copied_nor_pickled(make: Make) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="cannot be copied or pickled; save its state_dict"):
            attempt(opt)


def test_a_strategy_is_copied_and_pickled_only_until_an_averager_has_it(make: Make) -> None:
    strategy = LocalSGD(every=7)
    for copied in (copy.copy(strategy), copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert copied.every == 7
    opt = make(torch.optim.SGD(linear().parameters()), strategy=strategy)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"cannot be copied or pickled any more; make a new one .*state_dict"):
            attempt(opt.strategy)


def test_its_repr_says_all_there_is_to_know(make: Make) -> None:
    opt = make(torch.optim.SGD(linear().parameters(), lr=0.25), every=50)
    for word in ("192.0.2.1:1", "'alone'", "LocalSGD(every=50)", "step 0", "SGD (", "lr: 0.25"):
        assert word in repr(opt)
    opt.close()
    assert "not running" in repr(opt)


# Checkpoints


def test_a_checkpoint_whose_last_outer_state_is_unreadable_changes_none(make: Make) -> None:
    model, strategy = linear(), DiLoCo(2, fragments=2)
    opt = make(torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy)
    fresh = opt.state_dict()
    train(model, opt, 4)
    before = [fragment.outer.state_dict()["state"][0]["momentum_buffer"].clone() for fragment in strategy._fragments]
    fresh["averaging"]["strategy"]["user"]["outer"][1]["class"] = "Adam"
    with pytest.raises(ConfigError, match="its optimizer is Adam, here it is SGD"):
        opt.load_state_dict(fresh)
    after = [fragment.outer.state_dict()["state"][0]["momentum_buffer"] for fragment in strategy._fragments]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_checkpoint_of_another_scheduler_changes_nothing_and_is_told_so(make: Make) -> None:
    model = linear()
    opt = make(
        torch.optim.SGD(model.parameters(), lr=0.5),
        strategy=DiLoCo(1),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    )
    train(model, opt, 3)
    saved = opt.state_dict()
    fresh = linear()
    again = make(
        torch.optim.SGD(fresh.parameters(), lr=0.25),
        strategy=DiLoCo(1),
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0),
    )
    with pytest.raises(
        ConfigError, match=r"another scheduler than LambdaLR \(KeyError: 'lr_lambdas'\); use the same one"
    ):
        again.load_state_dict(saved)
    assert (again.local_step, again.global_step, again.param_groups[0]["lr"]) == (0, 0, 0.25)
    del saved["averaging"]["scheduler"]  # as the error says
    again.load_state_dict(saved)
    assert (again.local_step, again.global_step, again.scheduler and again.scheduler.last_epoch) == (3, 3, 3)


def test_a_checkpoint_that_the_strategy_cannot_read_changes_no_scheduler(make: Make) -> None:
    model = linear()
    opt = make(
        torch.optim.SGD(model.parameters(), lr=0.5),
        strategy=DiLoCo(1),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    )
    saved = copy.deepcopy(opt.state_dict())
    train(model, opt, 3)
    saved["averaging"]["strategy"]["tensors"].clear()
    with pytest.raises(ConfigError, match="not of DiLoCo"):
        opt.load_state_dict(saved)
    assert (opt.local_step, opt.param_groups[0]["lr"], opt.scheduler and opt.scheduler.last_epoch) == (3, 0.05, 3)


def test_a_checkpoint_brings_back_state_and_counter(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, opt, 3)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    train(model, opt, 2)
    expected = model.weight.detach().clone()
    other = linear()
    again = make(torch.optim.AdamW(other.parameters(), lr=0.1))
    other.load_state_dict(weights)
    again.load_state_dict(saved)
    assert again.local_step == 3
    train(other, again, 2)
    assert torch.equal(other.weight, expected)


def test_the_inner_optimizers_checkpoint_fits_and_the_other_way_round(make: Make) -> None:
    model = linear()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, plain, 3)
    opt = make(torch.optim.AdamW(linear().parameters(), lr=0.7))
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["lr"] == 0.1
    assert opt.local_step == 0
    plain.load_state_dict(opt.state_dict())


@pytest.mark.parametrize("own", [None, {}, {"local_step": -1}, {"local_step": "3"}, {"local_step": True}])
def test_a_malformed_checkpoint_changes_nothing(make: Make, own: object) -> None:
    opt = make(torch.optim.SGD(linear().parameters(), lr=0.5))
    saved = opt.state_dict() | {"averaging": own}
    saved["param_groups"] = [saved["param_groups"][0] | {"lr": 0.1}]
    with pytest.raises(ConfigError, match="not a step counter"):
        opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5


def test_a_checkpoint_of_another_model_is_torchs_own_error(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))
    saved = torch.optim.SGD([model.weight]).state_dict()
    with pytest.raises(ValueError, match="parameter group"):
        opt.load_state_dict(saved | {"averaging": {"local_step": 9}})
    assert opt.local_step == 0
    train(model, opt, 1)


# A peer


def test_who_starts_a_run_has_a_state_worth_downloading(make: Make) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    assert opt.model_version == 1
    assert opt.endpoint == "192.0.2.1:1"
    assert opt.peers == {"192.0.2.1:1"}
    assert opt.status.peer.run_id == "alone"
    assert opt.status.peer.state_version == 1


@pytest.mark.parametrize(("count", "timeout"), [("2", 1.0), (2.0, 1.0), (2, "1"), (2, None), (2, float("nan"))])
def test_waiting_for_peers_wants_numbers(make: Make, count: Any, timeout: Any) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    with pytest.raises(ConfigError, match="must be a"):
        opt.wait_for_peers(count, timeout)
    assert opt.wait_for_peers(1, float("inf"))
    assert not opt.wait_for_peers(2, 0)


def test_rounds_that_find_nobody_harm_nothing_and_warn_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model, plain = linear(), linear()
    receipts: list[Receipt] = []
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), every=2, on_round=receipts.append)
    assert opt.last_receipt is None
    with caplog.at_level(logging.WARNING, "averaging.training"):
        train(model, opt, 6)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NO_GROUP] * 3
    assert [receipt.round for receipt in receipts] == [1, 2, 3]
    assert opt.last_receipt is receipts[-1]
    assert len(caplog.records) == 1
    assert "nobody else was seen" in caplog.records[0].getMessage()
    assert "training goes on" in caplog.records[0].getMessage()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 6)
    assert torch.equal(model.weight, plain.weight)


def test_another_reason_or_the_same_after_a_success_is_told_again(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opt = make(torch.optim.SGD(linear().parameters()))
    ends = [(Outcome.FAILED, "a"), (Outcome.FAILED, "a"), (Outcome.NO_GROUP, "b"), (Outcome.AVERAGED, "")]
    receipts = [Receipt(number, *end) for number, end in enumerate([*ends, (Outcome.NO_GROUP, "b")])]
    coming = iter(receipts)

    async def average(topic: object, **arguments: object) -> Receipt:
        return next(coming)

    monkeypatch.setattr(opt._peer, "average", average)
    for _ in receipts:
        opt.average_now()
    assert [record.getMessage()[:8] for record in caplog.records] == ["round 0:", "round 2:", "round 4:"]


def test_the_weight_is_the_attribute_or_the_calls_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    opt = make(torch.optim.SGD(linear().parameters()), weight=2)
    calls = []

    async def average(topic: object, **arguments: object) -> Receipt:
        calls.append({name: arguments[name] for name in ("weight", "gather")})
        return Receipt(0, Outcome.AVERAGED)

    monkeypatch.setattr(opt._peer, "average", average)
    opt.average_now()
    opt.weight = 3
    opt.average_now()
    opt.average_now(weight=0, gather={"loss": 1})
    assert calls == [
        {"weight": 2.0, "gather": None},
        {"weight": 3.0, "gather": None},
        {"weight": 0, "gather": {"loss": 1}},
    ]
    with pytest.raises(ConfigError, match="weight"):
        opt.weight = -1
    assert opt.weight == 3.0


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
    assert "call average_now() later" in refused[0]


def test_what_on_round_raises_is_raised(make: Make) -> None:
    def refuse(receipt: Receipt) -> None:
        raise ZeroDivisionError

    opt = make(torch.optim.SGD(linear().parameters()), on_round=refuse)
    with pytest.raises(ZeroDivisionError):
        opt.average_now()
    assert opt.last_receipt is not None


def test_nan_is_refused_by_the_parameters_name(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))
    with torch.no_grad():
        model.bias[1] = torch.nan
    with pytest.raises(TensorError, match=r"'group0.param1' holds nan at flat index 1"):
        opt.average_now()


def test_a_mask_among_the_buffers_is_to_be_left_out(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()), buffers={"mask": torch.full((2, 2), -torch.inf).triu(1)})
    with pytest.raises(TensorError, match=r"'buffer/mask' holds -inf at flat index 1; .*leave it out"):
        opt.average_now()


def test_a_model_that_was_moved_is_not_averaged_with_its_old_self(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters()))
    model.weight.data = model.weight.data.clone()
    with pytest.raises(TensorError, match=r"'group0.param0' has been moved"):
        opt.average_now()


@pytest.mark.parametrize("strategy", [LocalSGD(9), LocalSGD(9, overlap=True), DiLoCo(9), GradientAveraging(99)])
def test_that_it_was_moved_or_has_grown_is_the_next_steps_error(make: Make, strategy: Strategy) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)
    backward(model)
    opt.step(batch_size=4)
    model.double()
    with pytest.raises(TensorError, match=r"'group0.param0' has been moved"):
        opt.step(batch_size=4)
    assert opt.local_step == 1


def test_a_parameter_that_the_inner_optimizer_was_given_later_is_the_next_steps_error(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1))
    opt.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(TensorError, match="add them before, or close this averager and make a new one"):
        opt.step()


def test_a_parameter_that_takes_another_one_s_place_is_the_next_step_s_error(make: Make) -> None:
    model = linear()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, opt, 1)
    opt.load_state_dict(opt.state_dict())
    opt.param_groups[0]["params"][1] = model.bias = torch.nn.Parameter(torch.ones(7))  # another head
    with pytest.raises(TensorError, match="the inner optimizer has other parameters than when the averager was made"):
        opt.step()


def test_sparse_gradients_cannot_be_clipped_and_are_told_so(make: Make) -> None:
    model = torch.nn.Embedding(4, 3, sparse=True)
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), strategy=LocalSGD(9, max_norm=1.0))
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TensorError, match="a sparse gradient cannot be clipped; leave max_norm out"):
        opt.step()
    assert opt.local_step == 0


def test_a_state_that_cannot_travel_is_an_error_with_a_remedy(make: Make) -> None:
    model = linear()
    inner = torch.optim.SGD(model.parameters())
    inner.state[model.weight]["odd"] = print
    with pytest.raises(StateError, match="share_state=False"):
        make(inner)
    train(model, make(inner, share_state=False), 1)


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
    with suppress(ClosedError):  # it may be known already
        opt.load_state_dict(opt.state_dict())  # has the state declared anew
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
    with pytest.raises(NoSeedAnsweredError):
        DecentralizedAverager(optimizer(), strategy=strategy, run_id="alone", join=["127.0.0.1:9"], join_timeout=0.01)
    opt = make(optimizer(), strategy=strategy)
    tensors = opt.state_dict()["averaging"]["strategy"]["tensors"]
    assert len(tensors) == (2 if isinstance(strategy, DiLoCo) else 0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"serves another averager, or one that was closed; make one for each"):
            make(optimizer(), strategy=strategy)
        opt.close()


def test_it_starts_before_anything_runs_or_not_at_all(make: Make) -> None:
    def params() -> list[torch.nn.Parameter]:
        return list(linear().parameters())

    with pytest.raises(ConfigError, match="auxiliary"):
        make(torch.optim.SGD(params()), mode=Mode.AUXILIARY)
    with pytest.raises(ConfigError, match="auxiliary"):
        make(torch.optim.SGD(params()), mode="auxiliary")
    with pytest.raises(ConfigError, match="strategy must be one that was made"):
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
    with pytest.raises(ConfigError, match="StepLR; one that is made already is stepped by the training loop"):
        make(inner, scheduler=torch.optim.lr_scheduler.StepLR(inner, 2))
    for scheduler, made in ((torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau"), (id, "int")):
        with pytest.raises(ConfigError, match=f"cannot drive {made}; make it around the averager"):
            make(inner, scheduler=scheduler)
    with pytest.raises(ConfigError, match="without a dot"):
        make(torch.optim.SGD(params()), run_id="a.b")
    with pytest.raises(TensorError, match="'group0.param1' does not require a gradient"):
        make(torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), torch.ones(1)]))
