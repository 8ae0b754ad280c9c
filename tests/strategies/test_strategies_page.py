"""The example strategy of docs/how-to/strategies.md works."""

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from averaging import DiLoCo, GradientAveraging, LocalSGD, Outcome, Receipt, Strategy, TensorError
from averaging.training import StrategyContext
from tests.strategies.test_strategy_proofs import Logged
from tests.support.training import SGD, Run, backward, batch_of, equal, model_of, parameters_of, run_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "strategies.md"


TOKENS, FINISHING, OF_ONES_OWN, SHARED_BODY = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("strategy", [partial(LocalSGD, 5), partial(GradientAveraging, 8), partial(DiLoCo, 5)])
def test_what_finish_leaves_in_the_model_is_the_same_everywhere(
    start: Callable[[], Run], strategy: Callable[[], Strategy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the code of the page at two peers with different steps since the last round."""
    run = run_of(start, 2, strategy, partial(torch.optim.SGD, lr=0.1), group_size=2)
    said: dict[int, str] = {}

    def train(number: int) -> None:
        for step in range(7):
            backward(run.models[number], batch_of(100 * number + step, 4))
            run.averagers[number].step(batch_size=3)
        (tmp_path / str(number)).mkdir()
        saved = SimpleNamespace(save=lambda state, name: torch.save(state, tmp_path / str(number) / name))
        names = {"opt": run.averagers[number], "model": run.models[number], "torch": saved}
        exec(FINISHING, names | {"print": lambda finish: said.setdefault(number, str(finish))})

    run.each(train)
    assert sorted(said) == [0, 1]
    assert all(text.startswith("all 2 peers hold the same weights") for text in said.values())
    one, other = (torch.load(tmp_path / str(number) / "model.pt") for number in range(2))
    assert equal(list(one.values()), list(other.values()))


def tokens_of(seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of two sequences, the second of which has padding."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.randint(11, (2, 2, length), generator=generator)
    labels[1, length // 2 :] = -100
    return inputs, labels


def language_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)).double()


@pytest.mark.parametrize(
    ("strategy", "weight"),
    [
        (lambda: Logged(12 + 768), 1.0),
        (lambda: LocalSGD(1), "samples"),
        (lambda: DiLoCo(1, outer=partial(torch.optim.SGD, lr=1.0)), "samples"),
    ],
    ids=["GradientAveraging", "LocalSGD", "DiLoCo"],
)
def test_a_language_model_with_short_and_long_batches_trains_as_one_process_with_the_joined_batch(
    start: Callable[[], Run], strategy: Callable[[], Strategy], weight: float | str
) -> None:
    """Runs the code of the page at two peers; a step of one has 12 tokens, of the other 768."""
    lengths, steps = (8, 512), 5
    page: dict[str, Any] = {"torch": torch}
    exec(TOKENS, page)
    run = start()
    for _ in lengths:
        run.add(strategy(), partial(torch.optim.SGD, lr=0.5), language_model(), weight=weight)
    run.meet()
    # The seeds of the batches in each global step; the short batches need not be as many as the long ones.
    trained: list[dict[int, list[int]]] = [{step: [step] for step in range(1, steps + 1)} for _ in lengths]

    def train(number: int) -> None:
        opt = run.averagers[number]

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for seed in itertools.count(1):
                if (opt.local_step if opt.global_step is None else opt.global_step) >= steps:
                    return
                if isinstance(opt.strategy, Logged):
                    opt.strategy.pending.append(seed)
                yield tokens_of(1000 * number + seed, lengths[number])

        page["train"](run.models[number], opt, batches())
        if isinstance(opt.strategy, Logged):
            trained[number] = opt.strategy.included

    run.each(train)
    alone = language_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(1, steps + 1):
        joined = [
            tokens_of(1000 * number + seed, length)
            for number, length in enumerate(lengths)
            for seed in trained[number].get(step, [])
        ]
        inputs, labels = (torch.cat([one.flatten() for one in all_]) for all_ in zip(*joined, strict=True))
        plain.zero_grad()
        torch.nn.functional.cross_entropy(alone(inputs), labels).backward()  # type: ignore[no-untyped-call]
        plain.step()
    for ours in run.parameters():
        for one, other in zip(ours, parameters_of(alone), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def train_all(run: Run, steps: int) -> None:
    def train(number: int) -> None:
        for step in range(steps):
            backward(run.models[number], batch_of(100 * number + step, 4))
            run.averagers[number].step()

    run.each(train)


def test_the_pages_own_strategy_averages_after_1_2_4_8_steps(start: Callable[[], Run]) -> None:
    code = OF_ONES_OWN
    page: dict[str, Any] = {}
    exec(code, page)
    run, receipts = start(), list[Receipt]()
    for number in range(2):
        on_round = receipts.append if number == 0 else None
        run.add(page["Doubling"](), partial(torch.optim.SGD, lr=0.1), on_round=on_round)
    run.meet()

    train_all(run, 8)
    assert [receipt.outcome for receipt in receipts] == [Outcome.AVERAGED] * 4
    assert equal(*run.parameters())


class Own(Strategy):
    """A strategy as users write it: it averages some tensors of the model, or others, after every second step."""

    def __init__(self, tensors: Callable[[StrategyContext], dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self._tensors = tensors

    def start(self, training: StrategyContext) -> None:
        self.topic = training.topic("own", self._tensors(training))

    def after_step(self, training: StrategyContext) -> None:
        if training.local_step % 2 == 0:
            training.average(self.topic)


@pytest.mark.parametrize(
    "tensors",
    [
        lambda training: training.tensors,
        lambda training: dict(list(training.parameters.items())[:1]),
        lambda training: {"flat": next(iter(training.parameters.values())).view(-1)[3:]},
        lambda training: training.trained,
    ],
    ids=["all", "first", "part", "trained"],
)
def test_newcomers_get_what_a_strategy_of_ones_own_has_averaged(
    start: Callable[[], Run], tensors: Callable[[StrategyContext], dict[str, torch.Tensor]]
) -> None:
    run = run_of(start, 2, partial(Own, tensors), partial(torch.optim.SGD, lr=0.1))

    train_all(run, 4)
    newcomer = run.add(Own(tensors), partial(torch.optim.SGD, lr=0.1), model_of(1))
    assert newcomer.local_step == 4
    assert any(equal(run.parameters()[2], donor) for donor in run.parameters()[:2])


def test_the_pages_strategy_with_tensors_of_its_own_has_newcomers_and_checkpoints(start: Callable[[], Run]) -> None:
    page: dict[str, Any] = {}
    exec(SHARED_BODY, page)

    def model(seed: int = 0) -> torch.nn.Sequential:
        torch.manual_seed(seed)
        layers = {"body": torch.nn.Linear(5, 7), "tanh": torch.nn.Tanh(), "head": torch.nn.Linear(7, 3)}
        return torch.nn.Sequential(OrderedDict(layers))

    run = start()
    for _ in range(2):
        run.add(page["SharedBody"](), SGD, model())
    run.meet()

    train_all(run, 8)
    one, other = (dict(model.named_parameters()) for model in run.models)
    assert {name for name in one if torch.equal(one[name], other[name])} == {"body.weight", "body.bias"}
    donor: Any = run.averagers[0].strategy
    newcomer = run.add(page["SharedBody"](), SGD, model(1))
    other_run = start().add(page["SharedBody"](), SGD, model(2))
    other_run.load_state_dict(run.averagers[0].state_dict())
    taken_over: list[Any] = [newcomer.strategy, other_run.strategy]
    for strategy in taken_over:
        assert strategy.rounds == donor.rounds == 2
        assert equal(list(strategy.slow.values()), list(donor.slow.values()))


def test_a_topic_of_a_list_is_refused(start: Callable[[], Run]) -> None:
    run = start()
    with pytest.raises(TensorError, match="topic 'own' needs a dict of its tensors by name, not a list"):
        run.add(Own(lambda training: list(training.parameters.values())), SGD)  # type: ignore[arg-type,return-value]
