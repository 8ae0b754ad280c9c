"""LocalSGD besides its arithmetic: late changes, statistics, slower peers."""

from functools import partial

import pytest
import torch

from averaging import LocalSGD, Outcome, Receipt
from tests.support.training import (
    SGD,
    Start,
    backward,
    batch_of,
    end_rounds,
    pushed,
    run_of,
    steps,
)


def test_overlap_adds_the_change_when_it_arrives(start: Start) -> None:
    """Two peers at 1 and 3 average to 2, and their steps during the round are kept."""
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
    end_rounds(run)
    assert [next(model.parameters()).item() for model in run.models] == [12.0, 2.0]


def test_a_second_moment_stays_positive_when_a_change_comes_late(start: Start) -> None:
    adam = partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.95))
    strategy = partial(LocalSGD, 2, overlap=True, statistics=True)
    run = run_of(start, 2, strategy, adam, lambda: torch.nn.Linear(3, 1, bias=False))
    for gradient in [10.0] * 2 + [0.0] * 20:  # the second of these begins the round, and does not wait for the other
        pushed(run, 0, gradient)
    for _ in range(2):
        pushed(run, 1, 1e-3)
    end_rounds(run)
    (state,) = run.averagers[0].state_dict()["state"].values()
    # The mean of both, decayed by 20 steps without a gradient.
    mean = (0.05 + 0.05 * 0.95) * (100 + 1e-6) / 2
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((1, 3), mean * 0.95**20))


def test_a_running_variance_stays_positive_when_a_change_comes_late(start: Start) -> None:
    """Otherwise its root, in evaluation, would be NaN."""
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
    end_rounds(run)
    torch.testing.assert_close(buffers["running_var"], torch.full((3,), 5.0))  # the mean, decayed since
    torch.testing.assert_close(buffers["running_mean"], torch.tensor([-40.0, 40.0, 0.0]))  # the whole change


def test_statistics_are_not_compressed(start: Start) -> None:
    """A codec with one scale for all values rounds a small second moment to 0, by which Adam divides."""
    run = start()
    for _ in range(2):
        torch.manual_seed(0)
        strategy = LocalSGD(2, statistics=True, compression="int8", error_feedback=True)
        run.add(strategy, partial(torch.optim.Adam, lr=0.01, betas=(0.9, 0.95)), torch.nn.Embedding(6, 4))
    run.meet()

    def train(number: int) -> None:
        for iteration in range(40):  # some rows occur at one peer only, and only in the first steps
            run.models[number].zero_grad()
            rows = torch.tensor([number, 2, 3] if iteration < 2 else [2, 3])
            loss: torch.Tensor = run.models[number](rows).pow(2).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            run.averagers[number].step()

    before = run.parameters()[0][0]
    run.each(train)
    for (after,) in run.parameters():
        assert (after - before).abs().max() < 0.6


@pytest.mark.parametrize("overlap", [False, True])
def test_statistics_that_come_later_are_averaged_from_then_on(start: Start, overlap: bool) -> None:
    strategy = partial(LocalSGD, 2, statistics=True, overlap=overlap)
    run = run_of(start, 2, strategy, partial(torch.optim.AdamW, lr=0.01), round_timeout=2.0)

    def step_without_head(number: int, seed: int) -> None:
        backward(run.models[number], batch_of(100 * number + seed, 4))
        if number == 1:
            for parameter in run.models[number][2].parameters():  # type: ignore[index]
                parameter.grad = None
        run.averagers[number].step()

    def apart(number: int) -> None:
        for seed in range(2):
            step_without_head(number, seed)
        if overlap:  # the round has ended before the next one is due
            run.averagers[number].strategy.finish(run.averagers[number]._training)

    def together(number: int) -> None:
        steps(run, number, range(100 * number + 2, 100 * number + 4))
        run.averagers[number].strategy.finish(run.averagers[number]._training)

    run.each(apart)
    run.each(together)  # both begin when both rounds have failed
    assert [(opt.last_receipt or Receipt(0, Outcome.FAILED)).averaged for opt in run.averagers] == [True, True]
    first, second = (opt.state_dict()["state"] for opt in run.averagers)
    for place in range(4):
        torch.testing.assert_close(first[place]["exp_avg"], second[place]["exp_avg"])
