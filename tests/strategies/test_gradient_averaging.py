"""GradientAveraging besides its arithmetic: lone, late and new peers, and refused gradients."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Outcome, Strategy
from averaging.errors import ConfigError, TensorError
from averaging.protocol import group
from averaging.training.history import Progress
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
    run_of,
    step,
    steps,
)


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


def test_gradients_may_be_of_another_dtype_than_their_parameters(start: Start) -> None:
    run = start()
    opt = run.add(GradientAveraging(4), SGD, model_of(0, torch.bfloat16))
    dtype = torch.float32 if hasattr(torch.Tensor, "grad_dtype") else torch.bfloat16  # older torch has no `grad_dtype`
    for parameter in run.models[0].parameters():
        parameter.grad_dtype = dtype
        parameter.grad = torch.full_like(parameter, 0.5, dtype=dtype)
    opt.step(batch_size=4)
    assert opt.global_step == 1
    assert [p.grad.dtype for p in run.models[0].parameters() if p.grad is not None] == [dtype] * 4


def test_gradients_of_a_model_that_was_left_for_a_checkpoint_are_dropped(start: Start) -> None:
    run = start()
    opt = run.add(GradientAveraging(16), SGD)
    before = run.parameters()
    checkpoint = opt.state_dict()
    for parameter in run.models[0].parameters():
        parameter.grad = torch.full_like(parameter, 1e6)  # the loss has gone through the roof
    opt.step(batch_size=8)
    opt.load_state_dict(checkpoint)
    assert opt.status.samples == 0
    for parameter in run.models[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        opt.step(batch_size=8)
    assert opt.global_step == 1
    assert equal(run.parameters()[0], before[0])


def test_peers_of_the_same_speed_do_not_gather_more_than_the_batch(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first peer waits for the batches in progress at the others instead of computing another one."""
    run = start()
    for _ in range(3):
        opt = run.add(GradientAveraging(12), SGD)
        # Batches take long compared with the delay of announcements.
        monkeypatch.setattr(opt._training, "now", lambda: 1000 * time.time())
    run.meet()
    batches = [0, 0, 0]

    def train(number: int) -> None:
        while (run.averagers[number].global_step or 0) < 8:
            batches[number] += 1
            backward(run.models[number], batch_of(1000 * number + batches[number], 4))
            run.wait_for_progress(number, run.averagers[number].global_step or 0, of=2)
            run.averagers[number].step(batch_size=4)

    run.each(train)
    assert all(equal(run.parameters()[0], other) for other in run.parameters())
    assert sum(batches) <= 1.5 * 3 * 8  # at first no peer knows the batch sizes of the others


def test_parameters_for_which_nobody_has_a_gradient_are_passed_over(start: Start) -> None:
    """Otherwise AdamW would decay them; a gradient at one peer suffices for a step."""
    run = run_of(start, 2, partial(GradientAveraging, 8), partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
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
    """As with a mixture of experts. The list of lacking gradients must fit into `gather`."""
    monkeypatch.setattr(group, "MAX_GATHER_BYTES", 256)
    adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)

    def experts() -> torch.nn.Module:
        return torch.nn.ParameterList([torch.ones(1) for _ in range(600)])

    run = run_of(start, 2, partial(GradientAveraging, 2), adam, experts)

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
    with pytest.raises(TensorError, match=r"gradient of '0.weight' holds NaN"):
        opt.step(batch_size=4)
    weight.grad = torch.ones(7, 5).to_sparse()
    with pytest.raises(TensorError, match=r"gradient of '0.weight' is torch.sparse_coo; make it dense"):
        opt.step(batch_size=4)
    assert opt.status.samples == 0
    for seed in range(2):
        step(run, 0, seed, batch_size=4)
    assert opt.global_step == 1


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


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_is_gathered_after_a_failed_round_is_clipped_as_one_batch(
    start: Start, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    strategy = partial(GradientAveraging, 8, max_norm=0.01)
    run = run_of(start, 2, strategy, partial(torch.optim.SGD, lr=1.0), group_wait=0.3)
    step(run, 1, 1, batch_size=4)

    def gathered(announcements: Mapping[str, bytes]) -> bool:
        return any(one is not None and one.samples == 4 for one in map(Progress.unpack, announcements.values()))

    assert gathered(run.averagers[0]._training.announcements.wait_for(gathered, PATIENCE))
    run.averagers[0]._training.announcements.refresh()
    if interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(run.averagers[0]._training, "average", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                step(run, 0, 2, batch_size=4)
    else:
        step(run, 0, 2, batch_size=4)  # the batch is complete, but the other peer does not join
        assert run.averagers[0].last_receipt is not None
        assert run.averagers[0].last_receipt.outcome is Outcome.NO_GROUP
    assert run.averagers[0].status.samples == 4.0
    run.averagers[1].close()
    run.averagers[0]._training.announcements.refresh()
    step(run, 0, 3, batch_size=4)
    assert run.averagers[0].global_step == 1

    plain = model_of(0)
    inputs, targets = (torch.cat(tensors) for tensors in zip(batch_of(2, 4), batch_of(3, 4), strict=True))
    backward(plain, (inputs, targets))
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    partial(torch.optim.SGD, lr=1.0)(plain.parameters()).step()
    for ours, theirs in zip(run.parameters()[0], parameters_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [partial(GradientAveraging, 8), partial(DiLoCo, 2), partial(LocalSGD, 2), partial(LocalSGD, 2, overlap=True), None],
)
def test_buffers_are_not_compressed(start: Start, strategy: Callable[..., Strategy] | None) -> None:
    """A codec with one scale for all values rounds a small variance to 0, by whose root the layer divides."""
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
