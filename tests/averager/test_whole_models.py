"""What the averager knows of the model: buffers become equal, and `finish` and a warning name what differs."""

import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.errors import StateError
from averaging.receipts.status import Finish
from tests.support.pages import ROOT, blocks_of
from tests.support.training import PATIENCE, SGD, Run, Start

STRATEGIES: list[Callable[[], Strategy]] = [
    partial(LocalSGD, 3),
    partial(LocalSGD, 3, overlap=True),
    partial(DiLoCo, 3),
    partial(GradientAveraging, 8),
]


@pytest.fixture
def run(start: Start) -> Run:
    return start()


def normed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Counting(nn.Sequential):
    """Has integer buffers only."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen")[inputs.numel() % 3] += 1
        outputs: torch.Tensor = self[0](inputs)
        return outputs


def adapted(seed: int) -> nn.Module:
    """A frozen base, which differs with the seed, and an adapter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return model


def trained(parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
    return SGD([one for one in parameters if one.requires_grad])


def train(run: Run, steps: int = 6) -> list[Finish]:
    """Trains all peers, each with other data and another number of steps, to the end."""
    run.meet()

    def train_one(number: int) -> Finish:
        model, opt = run.models[number], run.averagers[number]
        generator = torch.Generator().manual_seed(number)
        for _ in range(steps + number):
            opt.zero_grad()
            inputs = torch.randn(4 + number, 4, generator=generator) + 5 * number
            torch.autograd.backward(model(inputs).square().mean())
            opt.step(batch_size=4)
        return opt.finish(PATIENCE)

    return run.each(train_one)


def differing(models: list[nn.Module]) -> list[str]:
    """The names in the state dicts of two models whose values differ."""
    ours, theirs = (model.state_dict() for model in models)
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_that_a_model_with_batch_norm_computes_with_is_equal_in_the_end(
    run: Run, strategy: Callable[[], Strategy]
) -> None:
    for seed in range(2):
        run.add(strategy(), SGD, normed(seed))
    finishes = train(run)
    assert differing(run.models) == []
    assert [str(finish).partition("; the last ")[0] for finish in finishes] == ["all 2 peers hold the same weights"] * 2
    assert run.models[0].get_buffer("1.num_batches_tracked") >= 7  # the larger number of steps


def test_integer_buffers_alone_take_the_largest(run: Run) -> None:
    for _ in range(2):
        run.add(LocalSGD(3), SGD, Counting())
    assert all(finish.alike for finish in train(run))
    assert differing(run.models) == []
    counted = run.models[0].get_buffer("seen").tolist()
    assert counted[1] >= 6  # batches of the first peer, with 16 elements
    assert counted[2] >= 7  # batches of the other, with 20


def test_a_buffer_that_is_left_out_is_named_in_the_end(run: Run) -> None:
    for seed in range(2):
        model = normed(seed)
        run.add(LocalSGD(3), SGD, model, buffers={"1.running_mean": model.get_buffer("1.running_mean")})
    finishes = train(run)
    assert "1.running_var" in differing(run.models)
    assert not any(finish.alike for finish in finishes)
    assert all("hold other buffers" in str(finish) for finish in finishes)
    assert list(finishes[0].differing.values()) == [("buffers",)]


def test_peers_with_other_frozen_parameters_are_named_from_the_start_to_the_end(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(2):
        run.add(LocalSGD(3), trained, adapted(seed))
    named = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(named) == 1  # the newcomer names the first peer at once
    assert named[0].startswith(f"{run.averagers[0].endpoint}: other values in parameters that the optimizer does not")
    finishes = train(run)
    assert f"{run.averagers[1].endpoint}: other values in parameters" in caplog.text
    assert not any(finish.alike for finish in finishes)
    assert "hold other frozen parameters" in str(finishes[0])
    assert finishes[0].digest == finishes[1].digest  # what is trained is equal


def test_frozen_parameters_that_change_are_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        run.add(LocalSGD(3), trained, adapted(0))
    with torch.no_grad():
        run.models[1].get_parameter("0.bias").add_(1.0)
    finishes = train(run)
    assert "parameters that the optimizer does not train have changed since the start" in caplog.text
    assert all("hold other frozen parameters" in str(finish) for finish in finishes)


def unsaved(values: torch.Tensor) -> nn.Module:
    model = adapted(0)
    model.register_buffer("table", values, persistent=False)
    return model


def test_other_buffers_that_no_state_dict_has_are_named_from_the_start_to_the_end(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for value in range(2):
        run.add(LocalSGD(3), trained, unsaved(torch.full((4,), float(value))))
    other = "other values in buffers with persistent=False"
    assert f"{run.averagers[0].endpoint}: {other}" in caplog.text
    finishes = train(run)
    assert f"{run.averagers[1].endpoint}: {other}" in caplog.text
    assert all(finish.alike for finish in finishes)  # all that a state dict has
    assert str(finishes[0]) == (
        f"all 2 peers hold the same weights; {run.averagers[1].endpoint} with other buffers with persistent=False: "
        "outputs may differ"
    )


@pytest.mark.parametrize("value", [float("nan"), 4.5e-41])
def test_buffers_that_nothing_has_written_are_named_at_the_start(
    run: Run, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    run.add(LocalSGD(3), trained, unsaved(torch.tensor([0.0, value])))
    assert "memory that nothing has written: table. After to_empty()" in caplog.text


def test_equal_masks_that_no_state_dict_has_are_no_news(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        run.add(LocalSGD(3), trained, unsaved(torch.tensor([-torch.inf, 0.0, torch.finfo(torch.float32).min])))
    assert [str(finish) for finish in train(run)] == ["all 2 peers hold the same weights"] * 2
    assert "persistent=False" not in caplog.text


def test_without_the_model_the_end_says_what_was_not_compared(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(2):
        run.add(LocalSGD(3), SGD, normed(seed), gives_model=False)
    assert caplog.text.count("made without model=") == 2
    finishes = train(run)
    assert "buffers and frozen parameters were not compared" in str(finishes[0])


@pytest.mark.parametrize(("strategy", "first_gives_it"), [(partial(LocalSGD, 3), False), (partial(DiLoCo, 3), True)])
def test_peers_with_the_model_and_without_train_together_if_it_has_no_buffers(
    run: Run, strategy: Callable[[], Strategy], first_gives_it: bool
) -> None:
    for gives_model in (first_gives_it, not first_gives_it):
        torch.manual_seed(len(run.models))
        run.add(strategy(), SGD, nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), gives_model=gives_model)
    assert all(finish.alike for finish in train(run))
    assert differing(run.models) == []


def test_a_peer_without_the_model_lacks_its_buffers_and_is_told_so(run: Run) -> None:
    run.add(LocalSGD(3), SGD, normed(0), gives_model=False)
    with pytest.raises(StateError, match="'buffer/1.running_mean' only here; give all peers of the run model=model"):
        run.add(LocalSGD(3), SGD, normed(0))


def test_an_averaged_copy_goes_on_at_a_newcomer_as_the_page_says(run: Run) -> None:
    """Its count of updates comes with it; else the newcomer's first update would overwrite the copy."""
    page = (ROOT / "docs/how-to/optimizers.md").read_text()
    (block,) = (each.text for each in blocks_of(page) if "ema." in each.text)
    copies: list[AveragedModel] = []

    def add() -> None:
        model = nn.Linear(3, 1)
        copies.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))  # type: ignore[no-untyped-call]
        names = {"model": model, "ema": copies[-1]}
        exec(block, names)
        run.add(LocalSGD(2), SGD, model, buffers=names["buffers"])

    def step(number: int) -> None:
        run.averagers[number].zero_grad()
        torch.autograd.backward(run.models[number](torch.ones(2, 3)).square().mean())
        run.averagers[number].step()
        copies[number].update_parameters(run.models[number])

    add()
    for _ in range(4):
        step(0)
    add()
    copy = copies[1].state_dict()
    assert copy["n_averaged"].item() >= 3, "as many as when the state of its donor was committed"
    before = copy["module.weight"].clone()
    step(1)
    expected = 0.9 * before + 0.1 * run.models[1].state_dict()["weight"]
    torch.testing.assert_close(copies[1].state_dict()["module.weight"], expected)
