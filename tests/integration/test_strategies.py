"""What the strategies do around the arithmetic: peers alone, late, new, restarted; gradients that are refused."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from averaging import CompressionType, DiLoCo, GradientAveraging, LocalSGD, Mode, Outcome, Receipt, Strategy, group
from averaging.errors import ConfigError, PeerUnreachableError, StateError, TensorError
from averaging.strategies.history import Progress
from averaging.strategies.retries import FIRST_PAUSE
from tests.integration.training import PATIENCE, Run, backward, batch_of, equal, model_of, parameters_of

SGD = partial(torch.optim.SGD, lr=0.05)
Start = Callable[[], Run]


def step(run: Run, number: int, seed: int, samples: int = 4, **options: Any) -> None:
    backward(run.models[number], batch_of(seed, samples))
    run.averagers[number].step(**options)


def steps(run: Run, number: int, seeds: Iterable[int]) -> None:
    for seed in seeds:
        step(run, number, seed)


def gather_until(run: Run, number: int, global_step: int, samples: int = 4) -> None:
    """Steps of GradientAveraging until this peer has made so many global ones."""
    seed = 0
    while (run.averagers[number].global_step or 0) < global_step:
        seed += 1
        step(run, number, 1000 * number + seed, samples, batch_size=samples)


# GradientAveraging


def test_a_peer_alone_gathers_its_batch_and_says_that_it_is_alone(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    opt = run.add(GradientAveraging(12), SGD)
    before = run.parameters()[0]
    for seed in range(2):
        step(run, 0, seed, batch_size=4)
    assert equal(run.parameters()[0], before)
    assert (opt.global_step, opt.local_step, opt.status.samples, opt.status.alone) == (0, 2, 8.0, True)
    step(run, 0, 2, batch_size=4)
    assert (opt.global_step, opt.local_step, opt.status.samples) == (1, 3, 0.0)

    plain = model_of(0)
    inputs, targets = (torch.cat(tensors) for tensors in zip(*(batch_of(seed, 4) for seed in range(3)), strict=True))
    backward(plain, (inputs, targets))
    SGD(plain.parameters()).step()
    for ours, theirs in zip(run.parameters()[0], parameters_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs)
    for seed in range(3, 9):
        step(run, 0, seed, batch_size=4)
    assert [record.getMessage() for record in caplog.records if "alone and trains on" in record.getMessage()] != []
    assert len([record for record in caplog.records if "alone" in record.getMessage()]) == 1


def test_a_newcomer_goes_on_from_the_global_step_of_the_run(start: Start) -> None:
    run = start()
    adam = partial(torch.optim.AdamW, lr=0.01)
    run.add(GradientAveraging(4), adam)
    gather_until(run, 0, 5)
    newcomer = run.add(GradientAveraging(8), adam, model_of(9))
    assert newcomer.global_step == 5
    assert equal(*run.parameters())
    run.meet()
    run.averagers[0].strategy.target_batch_size = 8  # type: ignore[attr-defined]
    run.each(lambda number: gather_until(run, number, 8))
    assert [opt.global_step for opt in run.averagers] == [8, 8]
    assert equal(*run.parameters())
    assert all(len(opt.last_receipt.members) == 2 for opt in run.averagers if opt.last_receipt)


def test_peers_of_the_same_speed_do_not_gather_more_than_the_batch(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is first waits for the batches that the others compute, and does not begin one too many."""
    run = start()
    for _ in range(3):
        opt = run.add(GradientAveraging(12), SGD)
        # Batches that take long beside the time in which word gets around.
        monkeypatch.setattr(opt._training, "now", lambda: 1000 * time.time())
    run.meet()
    batches = [0, 0, 0]

    def train(number: int) -> None:
        while (run.averagers[number].global_step or 0) < 8:
            batches[number] += 1
            backward(run.models[number], batch_of(1000 * number + batches[number], 4))
            run.heard(number, run.averagers[number].global_step or 0, of=2)
            run.averagers[number].step(batch_size=4)

    run.each(train)
    assert all(equal(run.parameters()[0], other) for other in run.parameters())
    assert sum(batches) <= 1.5 * 3 * 8  # at first nobody knows how large the batches of others are


def test_a_peer_that_missed_a_step_takes_over_the_state_of_another(start: Start) -> None:
    run = start()
    for _ in range(3):
        run.add(GradientAveraging(8), SGD, matchmaking_time=1.0)
    run.meet()

    def train(number: int) -> None:
        if number < 2:
            gather_until(run, number, 3)

    run.each(train)  # the third is busy with its first batch all the while
    slow = run.averagers[2]
    assert slow.global_step == 0
    run.heard(2, 3)
    step(run, 2, 77, batch_size=4)
    assert slow.global_step == 3
    assert slow.status.samples == 0  # its gradients were for the parameters of step 0
    assert equal(run.parameters()[2], run.parameters()[0])
    run.each(lambda number: gather_until(run, number, 5))
    assert all(equal(run.parameters()[0], other) for other in run.parameters())


def test_one_that_is_ahead_and_cannot_be_reached_is_told_of_once_and_not_asked_at_each_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr("averaging.strategies.together.monotonic", lambda: now[0])
    run = start()
    for _ in range(3):
        run.add(GradientAveraging(8), SGD, matchmaking_time=1.0)
    run.meet()
    late = run.averagers[2]
    transport = late._peer._transport
    reach = transport.download_state

    async def refused(endpoint: str, resume: Any = None) -> Any:
        asked.append(endpoint)
        raise PeerUnreachableError(endpoint, "connection refused")
        yield

    monkeypatch.setattr(transport, "download_state", refused)
    run.each(lambda number: gather_until(run, number, 1) if number < 2 else None)
    run.heard(2, 1, of=2)
    for seed in range(20):
        step(run, 2, seed, batch_size=4)
    ahead = {peer.endpoint for peer in run.averagers[:2]}
    assert (len(asked), set(asked)) == (2, ahead)
    now[0] += FIRST_PAUSE
    step(run, 2, 20, batch_size=4)
    assert len(asked) == 4
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len([told for told in warnings if "connection refused" in told]) == 1, warnings
    monkeypatch.setattr(transport, "download_state", reach)
    now[0] += 2 * FIRST_PAUSE
    step(run, 2, 21, batch_size=4)
    assert late.global_step == 1


def test_a_client_trains_along(start: Start) -> None:
    run = start()
    for mode in (Mode.NODE, Mode.NODE, Mode.CLIENT):
        run.add(GradientAveraging(12), SGD, mode=mode)
    run.meet()
    run.each(lambda number: gather_until(run, number, 4))
    assert all(equal(run.parameters()[0], other) for other in run.parameters())
    assert all(len(opt.last_receipt.members) == 3 for opt in run.averagers if opt.last_receipt)


def test_parameters_for_which_nobody_has_a_gradient_are_passed_over(start: Start) -> None:
    """AdamW would decay them; one peer's gradient is enough."""
    run = start()
    adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        run.add(GradientAveraging(8), adam)
    run.meet()
    before = run.parameters()[0]

    def train(number: int) -> None:
        while not run.averagers[number].global_step:
            backward(run.models[number], batch_of(number, 4))
            parameters = list(run.models[number].parameters())
            parameters[0].grad = None
            if number == 0:
                parameters[1].grad = None
            run.averagers[number].step(batch_size=4)

    run.each(train)
    after = run.parameters()[0]
    assert torch.equal(after[0], before[0])
    assert all(not torch.equal(after[place], before[place]) for place in (1, 2, 3))
    assert equal(*run.parameters())


def test_most_of_a_model_of_many_tensors_may_lack_gradients(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the experts of a mixture do. Who lacks which must fit into a gather."""
    monkeypatch.setattr(group, "MAX_GATHER_BYTES", 256)
    run = start()
    adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        run.add(GradientAveraging(2), adam, torch.nn.ParameterList([torch.ones(1) for _ in range(600)]))
    run.meet()

    def train(number: int) -> None:
        while not run.averagers[number].global_step:
            parameters = list(run.models[number].parameters())
            parameters[200 * number + 100].grad = torch.ones(1)
            run.averagers[number].step(batch_size=1)

    run.each(train)
    changed = [place for place, parameter in enumerate(run.parameters()[0]) if parameter.item() != 1]
    assert changed == [100, 300]
    assert equal(*run.parameters())


def test_gradients_that_cannot_be_averaged_are_refused_and_cost_nothing(start: Start) -> None:
    run = start()
    opt = run.add(GradientAveraging(8), SGD)
    with pytest.raises(ConfigError, match=r"opt.step\(batch_size=n\)"):
        step(run, 0, 0)
    backward(run.models[0], batch_of(0, 4))
    weight = next(run.models[0].parameters())
    assert weight.grad is not None
    weight.grad[0, 0] = torch.nan
    with pytest.raises(TensorError, match=r"gradient of 'group0.param0' holds NaN"):
        opt.step(batch_size=4)
    weight.grad = torch.ones(7, 5).to_sparse()
    with pytest.raises(TensorError, match=r"gradient of 'group0.param0' is torch.sparse_coo; make it dense"):
        opt.step(batch_size=4)
    assert opt.status.samples == 0
    for seed in range(2):
        step(run, 0, seed, batch_size=4)
    assert opt.global_step == 1


def test_the_scheduler_follows_the_global_steps_also_at_a_newcomer(start: Start) -> None:
    run = start()
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
    opt = run.add(GradientAveraging(8), SGD, scheduler=schedule)
    for seed in range(6):
        step(run, 0, seed, batch_size=4)
    assert opt.global_step == 3
    assert opt.param_groups[0]["lr"] == pytest.approx(0.005)
    newcomer = run.add(GradientAveraging(8), SGD, scheduler=schedule)
    assert newcomer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_a_grad_scaler_and_closures_work(start: Start) -> None:
    run = start()
    opt = run.add(GradientAveraging(4), SGD)
    plain = model_of(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    inputs, targets = batch_of(0, 4)
    scaler.scale((run.models[0](inputs) - targets).pow(2).mean()).backward()
    scaler.step(opt, batch_size=4)
    scaler.update()
    loss = opt.step(lambda: backward(run.models[0], batch_of(1, 4)).item(), batch_size=4)
    assert opt.global_step == 2
    assert loss > 0
    reference = SGD(plain.parameters())
    for seed in range(2):
        backward(plain, batch_of(seed, 4))
        reference.step()
    for ours, theirs in zip(run.parameters()[0], parameters_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_clipping_bounds_what_is_averaged(start: Start) -> None:
    run = start()
    run.add(GradientAveraging(4, max_norm=0.01), partial(torch.optim.SGD, lr=1.0))
    before = run.parameters()[0]
    step(run, 0, 0, batch_size=4)
    moved = torch.cat([(a - b).flatten() for a, b in zip(run.parameters()[0], before, strict=True)])
    assert moved.norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_gathered_after_a_failed_round_is_clipped_as_one_batch(
    start: Start, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    run = start()
    for _ in range(2):
        run.add(GradientAveraging(8, max_norm=0.01), partial(torch.optim.SGD, lr=1.0), matchmaking_time=0.3)
    run.meet()
    step(run, 1, 1, batch_size=4)

    def gathered(told: Mapping[str, bytes]) -> bool:
        return any(one is not None and one.samples == 4 for one in map(Progress.unpack, told.values()))

    assert gathered(run.averagers[0]._training.told_until(gathered, PATIENCE))
    run.averagers[0]._training.forget()
    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(run.averagers[0]._training, "average", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                step(run, 0, 2, batch_size=4)
    else:
        step(run, 0, 2, batch_size=4)  # the batch is complete, but the other one does not come
        assert run.averagers[0].last_receipt is not None
        assert run.averagers[0].last_receipt.outcome is Outcome.NO_GROUP
    assert run.averagers[0].status.samples == 4.0
    run.averagers[1].close()
    run.averagers[0]._training.forget()
    step(run, 0, 3, batch_size=4)
    assert run.averagers[0].global_step == 1

    plain = model_of(0)
    inputs, targets = (torch.cat(tensors) for tensors in zip(batch_of(2, 4), batch_of(3, 4), strict=True))
    backward(plain, (inputs, targets))
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    partial(torch.optim.SGD, lr=1.0)(plain.parameters()).step()
    for ours, theirs in zip(run.parameters()[0], parameters_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_buffers_are_averaged_along_and_counters_reach_newcomers(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()

    def add(strategy: GradientAveraging) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        run.add(strategy, SGD, model, buffers=dict(model.named_buffers()))

    for _ in range(2):
        add(GradientAveraging(8))
    run.meet()
    run.each(lambda number: gather_until(run, number, 2, samples=(4, 2)[number]))
    buffers = [dict(model.named_buffers()) for model in run.models]
    assert torch.equal(buffers[0]["1.running_mean"], buffers[1]["1.running_mean"])
    assert buffers[0]["1.running_mean"].abs().sum() > 0
    counted = {
        opt.endpoint: one["1.num_batches_tracked"].item() for opt, one in zip(run.averagers, buffers, strict=True)
    }  # each its own: who is faster gathers more of the global batches
    assert all(counted.values())
    caplog.set_level(logging.INFO, "averaging.peer")
    add(GradientAveraging(8))
    (donor,) = [name for name in counted if f"took over the state of {name}," in caplog.text]
    assert dict(run.models[2].named_buffers())["1.num_batches_tracked"].item() == counted[donor]


@pytest.mark.parametrize(
    "strategy",
    [partial(GradientAveraging, 8), partial(DiLoCo, 2), partial(LocalSGD, 2), partial(LocalSGD, 2, overlap=True), None],
)
def test_buffers_are_not_compressed(start: Start, strategy: Callable[..., Strategy] | None) -> None:
    """A code with one scale for large and small ones makes 0 of a small variance, by whose root one divides."""
    run = start()
    constants = 10.0 ** -torch.arange(5.0)
    for _ in range(2):
        model: torch.nn.Module = model_of(0)
        model.register_buffer("constants", constants.clone())
        buffers = dict(model.named_buffers())
        chosen = LocalSGD(9) if strategy is None else strategy(compression="int8", error_feedback=True)
        run.add(chosen, SGD, model, buffers=buffers, compression="int8", group_size=2)
    run.meet()

    def train(number: int) -> None:
        opt = run.averagers[number]
        if strategy is None:
            opt.average_now()
        elif isinstance(opt.strategy, GradientAveraging):
            gather_until(run, number, 1)
        else:
            steps(run, number, range(2))
            opt.strategy.finish(opt._training)

    run.each(train)
    for opt, model in zip(run.averagers, run.models, strict=True):
        assert opt.last_receipt is not None
        assert opt.last_receipt.averaged
        torch.testing.assert_close(model.get_buffer("constants"), constants, rtol=1e-6, atol=0)


# DiLoCo


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
    assert equal(run.parameters()[1], [ours[f"anchor/group0.param{place}"] for place in range(4)])
    assert first.global_step == 2


def test_a_peer_that_missed_a_global_step_keeps_its_local_steps(start: Start) -> None:
    """It takes over the others' model and puts on top what it has done itself."""
    run = start()
    for _ in range(3):
        run.add(DiLoCo(4), SGD, matchmaking_time=1.0)
    run.meet()
    for seed in range(2):
        step(run, 2, seed)
    plain = model_of(0)
    reference = SGD(plain.parameters())
    for seed in range(3):
        backward(plain, batch_of(seed, 4))
        reference.step()
    own = [now - then for now, then in zip(parameters_of(plain), parameters_of(model_of(0)), strict=True)]

    def train(number: int) -> None:
        if number < 2:
            for seed in range(4):
                step(run, number, 100 * number + seed)

    run.each(train)
    late = run.averagers[2]
    assert late.global_step == 0
    others = parameters_of(run.models[0])
    run.heard(2, 1)
    step(run, 2, 2)
    assert late.global_step == 1
    for now, base, change in zip(run.parameters()[2], others, own, strict=True):
        torch.testing.assert_close(now, base + change)


def test_training_goes_on_during_a_round_with_delay(start: Start) -> None:
    """The other peer is not there yet; only when the result is due is it waited for."""
    run = start()
    for _ in range(2):
        run.add(DiLoCo(4, delay=2, alpha=0.5), SGD)
    run.meet()
    for seed in range(5):  # the round begins after 4 steps and must be there after 6
        step(run, 0, seed)
    assert run.averagers[0].global_step == 0
    with_others = threading.Thread(target=steps, args=(run, 1, range(50, 56)))
    with_others.start()
    step(run, 0, 5)
    with_others.join(PATIENCE)
    assert [opt.global_step for opt in run.averagers] == [1, 1]


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
        assert opt._thread.wait(pending).averaged
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
    run = start()
    for _ in range(2):
        run.add(DiLoCo(2, delay=delay), SGD)
    run.meet()

    def interrupted(begun: object) -> Receipt:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.averagers[0]._training, "receipt_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            steps(run, 0, range(2 + delay))  # the other has not come yet
    run.each(lambda number: steps(run, number, range(2 + delay if number else 1)))
    assert [opt.global_step for opt in run.averagers] == [1, 1]


def test_peers_that_begin_with_their_own_parameters_are_equal_after_average_now(start: Start) -> None:
    run = start()
    for seed in (0, 9):  # nobody offers a state, as when all begin at the same moment
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
    run = start()
    for _ in range(2):
        run.add(strategy(), SGD, group_size=2)
    run.meet()

    def train(number: int) -> Receipt:
        steps(run, number, range(100 * number, 100 * number + 2))  # the second of these begins a round
        return run.averagers[number].average_now()

    assert [receipt.averaged for receipt in run.each(train)] == [True, True]
    assert equal(*run.parameters())
    for opt in run.averagers:
        opt.strategy.finish(opt._training)  # nothing comes later
    assert equal(*run.parameters())


@pytest.mark.parametrize("model_first", [True, False])
def test_local_steps_before_the_first_global_one_are_in_a_checkpoint(start: Start, model_first: bool) -> None:
    run = start()
    original = run.add(DiLoCo(4), SGD)
    steps(run, 0, range(3))
    saved, weights = copy.deepcopy(original.state_dict()), copy.deepcopy(run.models[0].state_dict())
    steps(run, 0, range(3, 6))
    restored = run.add(DiLoCo(4), SGD, model_of(9), run_id="restored", join=[])
    if model_first:
        run.models[1].load_state_dict(weights)
    restored.load_state_dict(saved)
    if not model_first:
        run.models[1].load_state_dict(weights)
    steps(run, 1, range(3, 6))
    assert original.global_step == restored.global_step == 1
    assert equal(*run.parameters())


def test_a_failed_round_leaves_all_as_it_is_and_the_next_turn_tries_again(start: Start) -> None:
    receipts: list[Receipt] = []
    run = start()
    for _ in range(2):
        run.add(DiLoCo(2), SGD, matchmaking_time=0.3, on_round=receipts.append)
    run.meet()
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


def test_int8_with_error_feedback_stays_close_to_the_exact_run(start: Start) -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        run = start()
        for _ in range(2):
            run.add(DiLoCo(2, **options), SGD)
        run.meet()
        run.each(lambda number: steps(run, number, range(100 * number, 100 * number + 20)))
        assert [opt.global_step for opt in run.averagers] == [10, 10]
        assert equal(*run.parameters())
        return run.parameters()[0]

    exact, started = trained(), parameters_of(model_of(0))
    lossy = trained(compression=CompressionType.BLOCKWISE_INT8, error_feedback=True)
    off, moved = (
        torch.cat([(a - b).flatten() for a, b in zip(exact, other, strict=True)]).norm() for other in (lossy, started)
    )
    assert 0 < off < 0.02 * moved


@pytest.mark.parametrize("strategy", [partial(GradientAveraging, 8), partial(DiLoCo, 1)], ids=["gradients", "DiLoCo"])
def test_equal_histories_mean_equal_parameters_whatever_reducers_answer(
    start: Start, strategy: Callable[..., GradientAveraging | DiLoCo]
) -> None:
    run = start()
    for _ in range(2):
        run.add(strategy(compression="int8"), SGD, reply="delta")
    run.meet()
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
    """Schedules of torch go on from the rate that they find, so counting alone would lower it twice."""
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


@pytest.mark.parametrize("strategy", [partial(LocalSGD, 2, overlap=True), partial(DiLoCo, 2, delay=1)])
def test_a_result_that_comes_after_a_checkpoint_was_loaded_is_not_put_on_top(
    start: Start, strategy: Callable[[], LocalSGD | DiLoCo]
) -> None:
    run = start()
    for _ in range(2):
        run.add(strategy(), partial(torch.optim.SGD, lr=1.0), torch.nn.Linear(1, 1, bias=False))
    run.meet()
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


def test_a_checkpoint_of_another_strategy_is_refused_and_changes_nothing(start: Start) -> None:
    run = start()
    opt = run.add(DiLoCo(3), SGD)
    saved = opt.state_dict()
    other = start()
    local = other.add(LocalSGD(3), SGD)
    with pytest.raises(ConfigError, match="its strategy is DiLoCo, here it is LocalSGD"):
        local.load_state_dict(saved)
    assert local.local_step == 0


def test_a_newcomer_with_another_strategy_is_refused(start: Start) -> None:
    run = start()
    run.add(DiLoCo(3), SGD)
    with pytest.raises(StateError, match="its strategy is DiLoCo, here it is LocalSGD"):
        run.add(LocalSGD(3), SGD)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every": 0}, "at least 1"),
        ({"every": 10, "fragments": 3}, "multiple of fragments"),
        ({"every": 10, "delay": 10}, "delay must be less"),
        ({"every": 10, "alpha": 1.5}, "alpha"),
        ({"every": 10, "max_norm": 0.0}, "max_norm"),
        ({"every": 10, "max_norm": "1"}, "max_norm must be finite and above 0, not '1'"),
        ({"every": 10, "alpha": "0.5"}, "alpha must be from 0 to 1, not '0.5'"),
        ({"every": 10, "outer": "sgd"}, "outer must make an optimizer .* not 'sgd'"),
        ({"every": 10, "outer": None}, "outer must make an optimizer"),
    ],
)
def test_what_cannot_work_is_told_at_once(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DiLoCo(**arguments)


def test_more_fragments_than_tensors_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="4 tensors cannot be cut into 5 fragments"):
        start().add(DiLoCo(5, fragments=5), SGD)


# LocalSGD


def test_overlap_adds_the_change_when_it_arrives(start: Start) -> None:
    """Two peers at 1 and 3 meet at 2; what they do meanwhile is kept."""
    run = start()
    for value in (1.0, 3.0):
        model = torch.nn.Linear(1, 1, bias=False)
        opt = run.add(LocalSGD(2, overlap=True), partial(torch.optim.SGD, lr=1.0), model)
        with torch.no_grad():
            model.weight.fill_(value)
        assert opt.local_step == 0
    run.meet()

    def move(number: int, gradient: float) -> None:
        weight = next(run.models[number].parameters())
        weight.grad = torch.full_like(weight, gradient)
        run.averagers[number].step()

    for _ in range(2):
        move(0, 0.0)  # the second of these begins the round, and does not wait for the other peer
    move(0, -10.0)
    assert next(run.models[0].parameters()).item() == 11.0
    for _ in range(2):
        move(1, 0.0)
    for opt in run.averagers:
        opt.strategy.finish(opt._training)
    assert [next(model.parameters()).item() for model in run.models] == [12.0, 2.0]
    assert all(opt.last_receipt is not None and opt.last_receipt.averaged for opt in run.averagers)


def test_a_newcomer_gets_what_a_peer_has_learnt_alone(start: Start) -> None:
    run = start()
    run.add(LocalSGD(4), SGD)
    steps(run, 0, range(8))
    learnt = run.parameters()[0]
    steps(run, 0, range(8, 10))
    newcomer = run.add(LocalSGD(4), SGD, model_of(3))
    assert newcomer.local_step == 8
    assert equal(run.parameters()[1], learnt)


def test_the_optimizers_statistics_are_averaged_if_asked(start: Start) -> None:
    adam = partial(torch.optim.AdamW, lr=0.01)
    run = start()
    for _ in range(2):
        run.add(LocalSGD(3, statistics=True), adam)
    run.meet()
    run.each(lambda number: steps(run, number, range(100 * number, 100 * number + 3)))
    first, second = (opt.state_dict()["state"] for opt in run.averagers)
    for place in range(4):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(first[place][name], second[place][name])
    assert equal(*run.parameters())


def pushed(run: Run, number: int, gradient: float) -> None:
    """One step of a peer whose model is one tensor, with that gradient everywhere."""
    (weight,) = run.models[number].parameters()
    weight.grad = torch.full_like(weight, gradient)
    run.averagers[number].step()


def test_a_second_moment_stays_positive_when_a_change_comes_late(start: Start) -> None:
    run = start()
    adam = partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.95))
    for _ in range(2):
        run.add(LocalSGD(2, overlap=True, statistics=True), adam, torch.nn.Linear(3, 1, bias=False))
    run.meet()
    for gradient in [10.0] * 2 + [0.0] * 20:  # the second of these begins the round, and does not wait for the other
        pushed(run, 0, gradient)
    for _ in range(2):
        pushed(run, 1, 1e-3)
    for opt in run.averagers:
        opt.strategy.finish(opt._training)
        assert opt.last_receipt is not None
        assert opt.last_receipt.averaged
    (state,) = run.averagers[0].state_dict()["state"].values()
    # What 20 steps without a gradient leave of the mean of both.
    mean = (0.05 + 0.05 * 0.95) * (100 + 1e-6) / 2
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((1, 3), mean * 0.95**20))


def test_a_running_variance_stays_positive_when_a_change_comes_late(start: Start) -> None:
    """Below 0 its root is NaN, in evaluation."""
    run = start()
    for variance in (100.0, 0.0):
        model = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False))
        model.register_buffer("running_var", torch.zeros(3))
        model.register_buffer("running_mean", torch.zeros(3))
        run.add(LocalSGD(2, overlap=True), SGD, model, buffers=dict(model.named_buffers()))
        model.get_buffer("running_var").fill_(variance)
        model.get_buffer("running_mean").copy_(variance * torch.tensor([1.0, -1.0, 0.0]))
    run.meet()
    buffers = dict(run.models[0].named_buffers())
    for _ in range(2):
        pushed(run, 0, 0.0)  # the second of these begins the round, and does not wait for the other
    buffers["running_var"].mul_(0.1)
    buffers["running_mean"].mul_(0.1)
    for _ in range(2):
        pushed(run, 1, 0.0)
    for opt in run.averagers:
        opt.strategy.finish(opt._training)
        assert opt.last_receipt is not None
        assert opt.last_receipt.averaged
    torch.testing.assert_close(buffers["running_var"], torch.full((3,), 5.0))  # what is left by now of the mean
    torch.testing.assert_close(buffers["running_mean"], torch.tensor([-40.0, 40.0, 0.0]))  # the whole change


def test_statistics_are_not_compressed(start: Start) -> None:
    """A code with one scale for large and small ones makes 0 of a small second moment, by which Adam divides."""
    run = start()
    for _ in range(2):
        torch.manual_seed(0)
        strategy = LocalSGD(2, statistics=True, compression="int8", error_feedback=True)
        run.add(strategy, partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.95)), torch.nn.Embedding(6, 4))
    run.meet()

    def train(number: int) -> None:
        for turn in range(40):  # some rows are seen by one of them alone, and not any more
            run.models[number].zero_grad()
            rows = torch.tensor([number, 2, 3] if turn < 2 else [2, 3])
            loss: torch.Tensor = run.models[number](rows).pow(2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            run.averagers[number].step()

    before = run.parameters()[0][0]
    run.each(train)
    for (after,) in run.parameters():
        assert (after - before).abs().max() < 0.6


@pytest.mark.parametrize("overlap", [False, True])
def test_statistics_that_come_later_are_averaged_from_then_on(start: Start, overlap: bool) -> None:
    run = start()
    for _ in range(2):
        run.add(LocalSGD(2, statistics=True, overlap=overlap), partial(torch.optim.AdamW, lr=0.01), timeout=2.0)
    run.meet()

    def step_without_head(number: int, seed: int) -> None:
        backward(run.models[number], batch_of(100 * number + seed, 4))
        if number == 1:
            for parameter in run.models[number][2].parameters():  # type: ignore[index]
                parameter.grad = None
        run.averagers[number].step()

    def apart(number: int) -> None:
        for seed in range(2):
            step_without_head(number, seed)
        if overlap:  # the round has ended before the next turn
            run.averagers[number].strategy.finish(run.averagers[number]._training)

    def together(number: int) -> None:
        steps(run, number, range(100 * number + 2, 100 * number + 4))
        run.averagers[number].strategy.finish(run.averagers[number]._training)

    run.each(apart)
    run.each(together)  # both begin it when both rounds have failed
    assert [(opt.last_receipt or Receipt(0, Outcome.FAILED)).averaged for opt in run.averagers] == [True, True]
    first, second = (opt.state_dict()["state"] for opt in run.averagers)
    for place in range(4):
        torch.testing.assert_close(first[place]["exp_avg"], second[place]["exp_avg"])


def test_a_slower_peer_comes_early_rather_than_too_late(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait until some moment; it would need longer for all its steps, so it joins before that."""
    run = start()
    for every in (2, 1000):
        run.add(LocalSGD(every), SGD, matchmaking_time=20.0)
    run.meet()
    now = [1000.0]
    slow = run.averagers[1]._training
    monkeypatch.setattr(slow, "now", lambda: now[0])
    monkeypatch.setattr(slow, "awaited_until", lambda topic, phase="": now[0] + 5.0)
    waiting = threading.Thread(target=steps, args=(run, 0, range(2)))
    waiting.start()
    for seed in range(2):  # two, to know how long a step takes
        step(run, 1, 50 + seed)
        now[0] += 1.0
    waiting.join(PATIENCE)
    assert equal(*run.parameters())


def test_nobody_hears_a_complaint_of_a_peer_that_averages(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    for _ in range(2):
        run.add(DiLoCo(2), SGD)
    run.meet()
    with caplog.at_level(logging.WARNING, "averaging"):
        run.each(lambda number: steps(run, number, range(8)))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("averaging")] == []
