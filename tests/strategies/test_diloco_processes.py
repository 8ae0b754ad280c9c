"""DiLoCo around its arithmetic, and what it shares with GradientAveraging: delays, failures, checkpoints."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Outcome, Receipt, Strategy
from averaging.errors import ConfigError
from tests.support.selection import rest_is_long
from tests.support.training import (
    PATIENCE,
    SGD,
    Start,
    backward,
    batch_of,
    equal,
    gather_until,
    model_of,
    parameters_of,
    pushed,
    run_of,
    step,
    steps,
)

UNIT = partial(torch.optim.SGD, lr=1.0)


def test_a_newcomer_takes_over_the_outer_state(start: Start) -> None:
    run = start()
    first = run.add(DiLoCo(3), SGD)
    for seed in range(7):
        step(run, 0, seed)
    newcomer = run.add(DiLoCo(3), SGD, model_of(5))
    assert (newcomer.global_step, newcomer.local_step) == (2, 6)
    ours, theirs = (opt.state_dict()["averaging"]["strategy"]["tensors"] for opt in run.averagers)
    assert ours.keys() == theirs.keys()
    assert any("momentum_buffer" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    names = [name for name, _ in run.models[1].named_parameters()]
    assert equal(run.parameters()[1], [ours[f"anchor/{name}"] for name in names])
    assert first.global_step == 2


@pytest.mark.parametrize("delay", [0, 1])
def test_local_steps_that_are_in_the_others_result_are_not_put_on_top_where_on_round_has_raised(
    start: Start, delay: int
) -> None:
    def raise_once(receipt: Receipt) -> None:
        receipts.append(receipt)
        if len(receipts) == 1:
            raise ValueError(receipt.outcome)

    receipts: list[Receipt] = []
    run = start()
    for on_round in (None, raise_once):
        plain = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(plain.weight)
        run.add(DiLoCo(2, delay=delay, outer=UNIT), UNIT, plain, on_round=on_round)
    run.meet()

    def train(number: int) -> None:
        for _ in range(1 + delay):
            pushed(run, number, -float(number))
        if number:
            with pytest.raises(ValueError, match="averaged"):
                pushed(run, number, -1.0)
        else:
            pushed(run, number, 0.0)

    run.each(train)
    run.wait_for_progress(1, 1)
    pushed(run, 1, 0.0)
    assert [averager.global_step for averager in run.averagers] == [1, 1]
    assert [parameter.item() for (parameter,) in run.parameters()] == [1.0, 1.0]  # the mean of 0 and 2


def test_a_result_that_comes_between_forward_and_backward_leaves_the_buffers_alone(start: Start) -> None:
    run = start()
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        run.add(DiLoCo(2, delay=1), SGD, model, buffers=dict(model.named_buffers()))
    run.meet()
    there = threading.Barrier(2)

    def train(number: int) -> None:
        steps(run, number, range(100 * number, 100 * number + 2))
        there.wait(PATIENCE)
        model, opt = run.models[number], run.averagers[number]
        inputs, targets = batch_of(100 * number + 2, 4)
        loss: torch.Tensor = (model(inputs) - targets).pow(2).mean()
        pending = opt.strategy._pending  # type: ignore[attr-defined]
        assert opt._thread.wait(pending.receipt).averaged
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()

    run.each(train)
    assert [opt.global_step for opt in run.averagers] == [1, 1]
    first, second = (dict(model.named_buffers())["1.running_var"] for model in run.models)
    assert torch.equal(first, second)


@pytest.mark.parametrize("delay", [0, 1])
def test_an_interrupt_ends_the_wait_for_a_round_and_not_the_round(
    start: Start, monkeypatch: pytest.MonkeyPatch, delay: int
) -> None:
    run = run_of(start, 2, partial(DiLoCo, 2, delay=delay))

    def interrupted(begun: object, **options: object) -> Receipt:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.averagers[0]._training, "receipt_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(run, 0, range(2 + delay))  # the other peer has not joined yet
    run.each(lambda number: steps(run, number, range(2 + delay if number else 1)))
    assert [opt.global_step for opt in run.averagers] == [1, 1]


def test_peers_that_begin_with_their_own_parameters_are_equal_after_average_now(start: Start) -> None:
    run = start()
    for seed in (0, 9):  # no peer offers a state, as when all start at the same time
        run.add(DiLoCo(2), SGD, model_of(seed), share_state=False, group_size=2)
    run.meet()
    assert not equal(*run.parameters())
    run.each(lambda number: run.averagers[number].average_now())
    assert equal(*run.parameters())
    run.each(lambda number: steps(run, number, range(100 * number, 100 * number + 4)))
    assert [opt.global_step for opt in run.averagers] == [2, 2]
    assert equal(*run.parameters())


@pytest.mark.parametrize("strategy", [partial(LocalSGD, 2, overlap=True), partial(DiLoCo, 2, delay=1)])
def test_average_now_waits_for_the_round_in_progress_first(start: Start, strategy: Callable[[], Strategy]) -> None:
    run = run_of(start, 2, strategy, group_size=2)

    def train(number: int) -> Receipt:
        steps(run, number, range(100 * number, 100 * number + 2))  # the second of these begins a round
        return run.averagers[number].average_now()

    assert [receipt.averaged for receipt in run.each(train)] == [True, True]
    assert equal(*run.parameters())
    for opt in run.averagers:
        opt.strategy.finish(opt._training)  # no change is pending
    assert equal(*run.parameters())


def test_a_failed_round_leaves_all_as_it_is_and_the_next_turn_tries_again(start: Start) -> None:
    receipts: list[Receipt] = []
    run = run_of(start, 2, partial(DiLoCo, 2), group_wait=0.3, on_round=receipts.append)
    for seed in range(2):
        step(run, 0, seed)
    assert [receipt.outcome for receipt in receipts] == [Outcome.NO_GROUP]
    assert run.averagers[0].global_step == 0
    plain = model_of(0)
    reference = SGD(plain.parameters())
    for seed in range(2):
        backward(plain, batch_of(seed, 4))
        reference.step()
    assert equal(run.parameters()[0], parameters_of(plain))


EACH = [
    partial(GradientAveraging, 12),
    partial(DiLoCo, 1, outer=partial(torch.optim.SGD, lr=1.0)),
    partial(LocalSGD, 1),
    partial(LocalSGD, 2, overlap=True),
]


@pytest.mark.parametrize(
    ("strategy", "reply_form"),
    rest_is_long(
        [*zip(EACH, ["delta", "average"] * 2, strict=True), *zip(EACH, ["average", "delta"] * 2, strict=True)], 4
    ),
)
def test_changes_below_half_a_step_of_int8_arrive(start: Start, strategy: partial[Strategy], reply_form: str) -> None:
    """The largest element of the block is 127, of the changes or of the parameters, and the others move by 0.1."""
    run, averages_changes = start(), strategy.func is not LocalSGD
    for _ in range(3):
        model = torch.nn.Linear(64, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        if not averages_changes:
            model.weight.data[0, 0] = 127.0
        lossy = strategy(compression="int8", error_feedback=True)
        run.add(lossy, partial(torch.optim.SGD, lr=1.0), model, reply_form=reply_form, group_size=3)
    run.meet()
    gradient = torch.full((1, 64), -0.1)
    gradient[0, 0] = -127.0 if averages_changes else 0.0
    options: dict[str, Any] = {"batch_size": 4} if strategy.func is GradientAveraging else {}

    def train(number: int) -> int:
        averager, weight = run.averagers[number], next(run.models[number].parameters())
        made = 0
        while made < 40:
            weight.grad = gradient.clone()
            averager.step(**options)
            made = made + 1 if averager.global_step is None else averager.global_step
        averager.strategy.finish(averager._training)
        return made

    assert run.each(train) == [40] * 3
    for trained in run.models:
        off = next(trained.parameters()).detach()[0, 1:] - 4.0
        assert off.abs().max() <= 2.0


@pytest.mark.parametrize("strategy", [partial(GradientAveraging, 8), partial(DiLoCo, 1)], ids=["gradients", "DiLoCo"])
def test_equal_histories_mean_equal_parameters_whatever_reducers_answer(
    start: Start, strategy: Callable[..., GradientAveraging | DiLoCo]
) -> None:
    run = run_of(start, 2, partial(strategy, compression="int8"), reply_form="delta")
    run.each(lambda number: gather_until(run, number, 4))
    assert equal(*run.parameters())


def test_a_run_goes_on_from_a_checkpoint(start: Start, tmp_path: Any) -> None:
    adam = partial(torch.optim.AdamW, lr=0.01)
    run = start()
    opt = run.add(DiLoCo(3), adam)
    for seed in range(7):
        step(run, 0, seed)
    torch.save({"model": run.models[0].state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt")
    for seed in range(7, 12):
        step(run, 0, seed)

    again = start()
    restarted = again.add(DiLoCo(3), adam, model_of(4))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again.models[0].load_state_dict(saved["model"])
    restarted.load_state_dict(saved["opt"])
    assert (restarted.global_step, restarted.local_step) == (2, 7)
    for seed in range(7, 12):
        step(again, 0, seed)
    assert restarted.global_step == 4
    assert equal(again.parameters()[0], run.parameters()[0])


def test_a_schedule_goes_on_from_a_checkpoint(start: Start, tmp_path: Any) -> None:
    """Schedulers continue from the present learning rate, so counting alone would lower it twice."""
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    run = start()
    opt = run.add(GradientAveraging(8), SGD, scheduler=schedule)
    for seed in range(6):
        step(run, 0, seed, batch_size=4)
    torch.save(opt.state_dict(), tmp_path / "checkpoint.pt")
    again = start()
    restarted = again.add(GradientAveraging(8), SGD, scheduler=schedule)
    restarted.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert restarted.global_step == 3
    assert restarted.param_groups[0]["lr"] == pytest.approx(0.005)
    for seed in range(2):
        step(again, 0, seed, batch_size=4)
    assert restarted.global_step == 4
    assert restarted.param_groups[0]["lr"] == pytest.approx(0.0005)


@pytest.mark.parametrize(
    ("strategy", "whole"),
    [
        (partial(LocalSGD, 2, overlap=True), True),
        (partial(LocalSGD, 2, overlap=True), False),
        (partial(LocalSGD, 2, overlap=True, statistics=True), False),
        (partial(DiLoCo, 2, delay=1), True),
    ],
)
def test_a_result_that_comes_after_a_checkpoint_was_loaded_is_not_put_on_top(
    start: Start, strategy: Callable[[], LocalSGD | DiLoCo], whole: bool
) -> None:
    """A checkpoint that is not `whole` has only the step counter besides the inner optimizer's state."""
    run = run_of(start, 2, strategy, partial(torch.optim.SGD, lr=1.0), lambda: torch.nn.Linear(1, 1, bias=False))
    opt, model = run.averagers[0], run.models[0]

    def together(number: int) -> None:
        for _ in range(2):
            pushed(run, number, float(number))
        run.averagers[number].strategy.finish(run.averagers[number]._training)

    run.each(together)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    run.each(together)
    for _ in range(2):
        pushed(run, 0, 5.0)  # the round has begun
    if not whole:
        saved[opt.state_key] = saved[opt.state_key]["local_step"]
    opt.load_state_dict(saved)
    model.load_state_dict(weights)
    for _ in range(2):
        pushed(run, 1, 7.0)
    steps_before = opt.global_step
    opt.strategy.finish(opt._training)
    assert opt.last_receipt is not None
    assert opt.last_receipt.averaged
    assert opt.global_step == steps_before
    assert torch.equal(parameters_of(model)[0], weights["weight"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 0}, "at least 1"),
        ({"sync_every": 10, "fragments": 3}, "multiple of fragments"),
        ({"sync_every": 10, "delay": 10}, "delay must be less"),
        ({"sync_every": 10, "quorum": 2, "delay": 2, "alpha": 0.5}, "alpha does not go with quorum"),
        ({"sync_every": 10, "alpha": 1.5}, "alpha"),
        ({"sync_every": 10, "outer": "sgd"}, "outer must make an optimizer .* not 'sgd'"),
        ({"sync_every": 10, "compression": "top_k", "density": 0}, "density.* must be above 0 and at most 1, not 0"),
        ({"sync_every": 10, "compression": "top_k", "bits": 3}, "bits.* must be 2, 4 or 8, not 3"),
        ({"sync_every": 10, "compression": "top_k", "decay": 1.1}, "decay.* must be from 0 to 1, not 1.1"),
        ({"sync_every": 10, "compression": "top_k", "mean_over": "some"}, "mean_over .* senders, all"),
        ({"sync_every": 10, "compression": "top_k", "error_feedback": True}, "leave error_feedback out"),
        ({"sync_every": 10, "density": 1 / 64}, "density is an option of compression='top_k'; set that"),
    ],
)
def test_invalid_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiLoCo(**arguments)


def test_local_sgd_of_changes_is_diloco_with_the_plainest_outer_optimizer(start: Start) -> None:
    strategy = LocalSGD.of_changes(10, fragments=2, delay=1)
    start().add(strategy, SGD)
    (group,) = strategy._fragments[0].outer.param_groups
    assert (group["lr"], group["momentum"]) == (1.0, 0.0)
    for option in ("outer", "overlap", "statistics", "statistics_every"):
        with pytest.raises(ConfigError, match=f"{option} does not go with LocalSGD.of_changes; "):
            LocalSGD.of_changes(10, **{option: True})


@pytest.mark.parametrize(
    ("options", "lr", "warns"),
    [
        ({}, 0.7, False),
        ({"compression": "top_k"}, 1.0, False),
        ({"compression": "top_k", "outer": partial(torch.optim.SGD, lr=0.4, momentum=0.9)}, 0.4, True),
    ],
)
def test_the_residual_takes_the_part_of_outer_momentum(
    start: Start, options: dict[str, Any], lr: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = DiLoCo(10, **options)
    start().add(strategy, SGD)
    (group,) = strategy._fragments[0].outer.param_groups
    assert group["lr"] == lr
    assert ("the outer optimizer has momentum" in caplog.text) is warns


def test_an_outer_optimizer_of_other_parameters_is_refused(start: Start) -> None:
    model = model_of(0)
    makers: list[Any] = [lambda _: SGD(model.parameters()), lambda anchors: SGD(anchors[:1]), lambda _: None]
    for outer in makers:
        with pytest.raises(ConfigError, match="outer must make an optimizer of all the parameters that it is called w"):
            start().add(DiLoCo(5, outer=outer), SGD, model)
    with pytest.raises(ConfigError, match="outer makes a LBFGS"):
        start().add(DiLoCo(5, outer=torch.optim.LBFGS), SGD, model)
