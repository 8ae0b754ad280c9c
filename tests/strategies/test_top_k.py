"""DiLoCo with `top_k` and `visible`: nothing that was trained is lost, and all peers hold the same."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DiLoCo, LocalSGD, Receipt
from averaging.errors import ConfigError, TensorError
from averaging.protocol import CompressionType
from averaging.strategies.diloco import NESTEROV
from tests.strategies.test_quorum_simulated import Trainers
from tests.support.conservation import TrainingLedger
from tests.support.training import PATIENCE, SGD, Run, Start, batch_of, equal, model_of, run_of, step, steps
from tests.support.training_run import Site, agree

EXACT = 2e-6
"""Share of the sum of all steps that rounding to float32 may take."""

SLOW = partial(torch.optim.SGD, lr=0.002)
"""Steps so small that some of their changes are not visible."""

top_k = partial(DiLoCo, compression="top_k", density=1 / 8, decay=1.0)
visible = partial(DiLoCo, compression="visible")


def optimizer_for(strategy: Callable[[], DiLoCo]) -> Callable[..., torch.optim.Optimizer]:
    return SLOW if strategy().compression is CompressionType.VISIBLE else SGD


def of_peers(
    start: Start, count: int, strategy: Callable[[], DiLoCo], **options: Any
) -> tuple[Run, list[TrainingLedger]]:
    run = run_of(start, count, strategy, optimizer_for(strategy), **options)
    return run, [TrainingLedger(averager) for averager in run.averagers]


def anchors(run: Run, number: int) -> list[torch.Tensor]:
    return [anchor.detach().clone() for anchor in strategy_of(run, number)._anchors.values()]


def strategy_of(run: Run, number: int) -> DiLoCo:
    strategy = run.averagers[number].strategy
    assert isinstance(strategy, DiLoCo)
    return strategy


def residual(run: Run, number: int) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in strategy_of(run, number).own_state().values()]


def train(run: Run, count: int, first: int = 0) -> None:
    """Each peer makes so many steps with batches of its own."""
    run.each(lambda number: steps(run, number, range(1000 * number + first, 1000 * number + first + count)))


@pytest.mark.parametrize(
    "strategy",
    [
        partial(top_k, 3),
        partial(top_k, 3, mean_over="all", bits=8),
        partial(LocalSGD.of_changes, 3, compression="top_k", density=1 / 8, decay=1.0),
        partial(top_k, 4, fragments=2),
        partial(top_k, 4, delay=2, alpha=1.0),
        partial(top_k, 6, fragments=2, delay=1, alpha=1.0),
        partial(visible, 3),
        partial(LocalSGD.of_changes, 3, compression="visible"),
        partial(visible, 6, fragments=2, delay=1, alpha=1.0),
    ],
)
def test_every_step_is_sent_or_in_the_residual(start: Start, strategy: Callable[[], DiLoCo]) -> None:
    run, ledgers = of_peers(start, 3, strategy)
    train(run, 24)
    assert max(ledger.error() for ledger in ledgers) < EXACT
    assert all(any(tensor.any() for tensor in residual(run, number)) for number in range(3))
    assert len({averager.global_step for averager in run.averagers}) == 1
    assert equal(anchors(run, 0), anchors(run, 1))
    assert equal(anchors(run, 0), anchors(run, 2))


def with_residual(run: Run, number: int) -> TrainingLedger:
    """Gives a peer a residual, as if it had made rounds before."""
    generator = torch.Generator().manual_seed(number)
    strategy = strategy_of(run, number)
    strategy.load_own({name: torch.randn(t.shape, generator=generator) * 0.01 for name, t in strategy._anchors.items()})
    return TrainingLedger(run.averagers[number])


@pytest.mark.parametrize(
    "strategy",
    [
        partial(top_k, 4),
        partial(top_k, 4, delay=1, alpha=1.0),
        partial(top_k, 8, fragments=2),
        partial(visible, 4, delay=1, alpha=1.0),
    ],
)
def test_a_peer_that_misses_a_step_keeps_its_residual_and_its_local_steps(
    start: Start, strategy: Callable[[], DiLoCo]
) -> None:
    run = run_of(start, 3, strategy, optimizer_for(strategy), group_size=2)  # a group of the two other peers is full
    ledgers = [with_residual(run, number) for number in range(3)]
    before = residual(run, 2)
    steps(run, 2, range(500, 502))
    run.each(lambda number: steps(run, number, range(100 * number, 100 * number + 5)) if number < 2 else None)
    assert [averager.global_step for averager in run.averagers] == [1, 1, 0]
    run.wait_for_progress(2, 1, of=2)
    step(run, 2, 502)
    assert run.averagers[2].global_step == 1
    assert equal(anchors(run, 0), anchors(run, 2))
    assert equal(residual(run, 2), before)
    assert max(ledger.error() for ledger in ledgers) < EXACT


@pytest.mark.parametrize(
    "strategy",
    [partial(top_k, 2), partial(top_k, 3, delay=1, alpha=1.0), partial(top_k, 4, fragments=2), partial(visible, 2)],
)
def test_what_others_have_applied_without_this_peer_is_not_sent_twice(
    start: Start, strategy: Callable[[], DiLoCo]
) -> None:
    """Its own part of that round is in the others' state, and only the rest of it stays in the residual."""

    def raise_once(receipt: Receipt) -> None:
        receipts.append(receipt)
        if len(receipts) == 2:
            raise ValueError(receipt.outcome)

    receipts: list[Receipt] = []
    run = start()
    for on_round in (None, raise_once):
        run.add(strategy(), optimizer_for(strategy), on_round=on_round)
    run.meet()
    ledgers = [TrainingLedger(averager) for averager in run.averagers]
    failed: list[int] = []

    def make_rounds(number: int) -> None:
        while len(receipts) < 2 and not failed:
            try:
                step(run, number, 1000 * number + run.averagers[number].local_step)
            except ValueError:
                failed.append(number)
            if number == 0 and run.averagers[0].global_step == 2:
                return

    run.each(make_rounds)
    assert failed == [1]
    assert [averager.global_step for averager in run.averagers] == [2, 1]
    before = residual(run, 1)
    run.wait_for_progress(1, 2)
    step(run, 1, 7)  # it takes over the state
    assert run.averagers[1].global_step == 2
    assert equal(anchors(run, 0), anchors(run, 1))
    after = residual(run, 1)
    assert len(after) > len(before) or not equal(after, before)
    assert max(ledger.error() for ledger in ledgers) < EXACT


def test_the_residual_of_a_peer_that_is_alone_decays_and_its_steps_are_whole(start: Start) -> None:
    run = start()
    run.add(top_k(2, decay=0.5), SGD)
    with_residual(run, 0)
    plain, before = start(), residual(run, 0)
    plain.add(LocalSGD.of_changes(2), SGD)
    for one in (run, plain):
        steps(one, 0, range(6))
        assert one.averagers[0].global_step == 3
    assert equal(run.parameters()[0], plain.parameters()[0])
    assert equal(residual(run, 0), [tensor / 8 for tensor in before])


@pytest.mark.parametrize("of", [top_k, visible])
def test_what_comes_late_and_who_pauses_lose_nothing(of: Callable[..., DiLoCo]) -> None:
    """One peer needs the time of ten steps for one, another pauses for a fifth of the time; nobody waits."""
    strategy = partial(of, 20, delay=5, quorum=2)
    trainers = Trainers(strategy, (0.1, 0.1, 1.0, 0.1), 30.0, {3: (100, 6.0)}, seed=2, learning_rate=0.003)
    ledgers: dict[str, TrainingLedger] = {}

    def watched(site: Site, before: Any, averager: Any, number: int) -> None:
        if site.name not in ledgers:
            ledgers[site.name] = TrainingLedger(averager)
        before(averager, number)

    for site in trainers.sites:
        site.tamper = partial(watched, site, site.tamper)
    assert agree(trainers.run.simulate())
    assert max(trainers.ages("peer-2:1")) >= 3
    assert trainers.paused["peer-3:1"] >= 1
    assert len(ledgers) == 4
    for ledger in ledgers.values():
        assert any(tensor.any() for tensor in ledger.strategy.own_state().values())
        assert ledger.error() < EXACT


@pytest.mark.parametrize("strategy", [partial(top_k, 2), partial(top_k, 2, delay=1, alpha=1.0), partial(visible, 2)])
def test_a_newcomer_begins_without_a_residual_and_gets_nobodys(start: Start, strategy: Callable[[], DiLoCo]) -> None:
    """Nor does it send the local steps that its donor has made during a delay."""
    run, ledgers = of_peers(start, 2, strategy)
    train(run, 5)
    shared = run.averagers[0]._training_state.shared()
    kinds = {name.split("/")[1] for name in shared.tensors if name.startswith("strategy/")}
    assert kinds - {"outer0"} == {"anchor"}
    run.add(strategy(), optimizer_for(strategy), model_of(7))
    assert run.averagers[2].global_step == 2
    assert residual(run, 2) == []
    assert equal(run.parameters()[2], anchors(run, 0))
    run.meet()
    ledgers.append(TrainingLedger(run.averagers[2]))
    train(run, 6, first=5)
    assert len({averager.global_step for averager in run.averagers}) == 1
    assert residual(run, 2)
    assert max(ledger.error() for ledger in ledgers) < EXACT


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(
    ("strategy", "afterwards"),
    [
        (top_k, top_k),
        (top_k, partial(top_k, density=1 / 2)),
        (visible, visible),
        (visible, partial(top_k, outer=NESTEROV)),
    ],
)
def test_a_restart_from_a_checkpoint_goes_on_with_the_residual(
    start: Start, delay: int, strategy: Callable[..., DiLoCo], afterwards: Callable[..., DiLoCo], tmp_path: Any
) -> None:
    """With a delay it is saved while a round is in progress, whose result never comes."""
    strategy, afterwards = (partial(each, 4, delay=delay, alpha=1.0) for each in (strategy, afterwards))
    run, ledgers = of_peers(start, 2, strategy)
    train(run, 9)
    opt = run.averagers[0]
    if delay:  # the others may have the result already
        pending = strategy_of(run, 0)._pending
        assert pending is not None
        assert opt._thread.wait(pending.receipt).averaged  # type: ignore[arg-type]
    torch.save({"model": run.models[0].state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt")
    before = residual(run, 0)
    assert any(tensor.any() for tensor in before)

    again = start()
    restarted = again.add(afterwards(), optimizer_for(strategy), model_of(4))
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again.models[0].load_state_dict(saved["model"])
    restarted.load_state_dict(saved["opt"])
    assert equal(residual(again, 0), before)
    ledger = TrainingLedger(restarted, ledgers[0])
    assert ledger.error() < EXACT
    again.add(afterwards(), optimizer_for(strategy), model_of(5))
    again.meet()
    train(again, 12, first=50)
    assert ledger.error() < EXACT


def test_a_residual_that_cannot_be_used_is_named(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run = start()
    opt = run.add(top_k(2), SGD)
    with_residual(run, 0)
    saved = opt.state_dict()
    other = start().add(DiLoCo(2, outer=partial(torch.optim.SGD, lr=1.0)), SGD)
    other.load_state_dict(saved)
    assert "without compression='top_k' or 'visible' they are dropped" in caplog.text
    own = saved["averaging"]["strategy"]["own"]
    name, before = next(iter(own)), residual(run, 0)
    for bad, message in (
        (torch.zeros(2, 2), f"'{name}' is torch.float32 \\[2, 2\\] in the state"),
        (torch.full_like(own[name], torch.nan), r"\(the residual of top_k or visible\) holds NaN or infinity"),
        ("text", "under 'own', not tensors by name"),
    ):
        with pytest.raises(ConfigError, match=message):
            opt.load_state_dict({**saved, "averaging": replaced(saved["averaging"], own | {name: bad})})
    with pytest.raises(ConfigError, match="holds 5 under 'own', not tensors by name"):
        opt.load_state_dict({**saved, "averaging": replaced(saved["averaging"], 5)})
    assert equal(residual(run, 0), before)


def replaced(saved: dict[str, Any], own: Any) -> dict[str, Any]:
    return {**saved, "strategy": {**saved["strategy"], "own": own}}


@pytest.mark.parametrize("strategy", [partial(top_k, 4), partial(visible, 4)])
def test_the_end_says_what_was_never_sent(
    start: Start, strategy: Callable[[], DiLoCo], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "averaging.training")
    run, ledgers = of_peers(start, 2, strategy)
    train(run, 9)
    finished = run.each(lambda number: run.averagers[number].finish(PATIENCE))
    assert all(finish.alike for finish in finished)
    assert {averager.global_step for averager in run.averagers} == {3}  # the step after the last round is in it
    assert max(ledger.error() for ledger in ledgers) < EXACT
    texts = [record.getMessage() for record in caplog.records if "never sent" in record.getMessage()]
    assert len(texts) == 2
    assert all("times as much)" in text for text in texts)


@pytest.mark.parametrize("of", [top_k, visible])
def test_rounding_to_bfloat16_is_no_change(start: Start, of: Callable[..., DiLoCo]) -> None:
    """What the parameters cannot hold of the anchors would otherwise be measured, and kept, in each round again."""
    strategy = partial(of, 2, outer=partial(torch.optim.SGD, lr=0.7))
    run = run_of(start, 2, strategy, SGD, lambda: model_of(0, torch.bfloat16))
    ledgers = [TrainingLedger(averager) for averager in run.averagers]

    def idle(number: int, count: int) -> None:
        for _ in range(count):
            for parameter in run.models[number].parameters():
                parameter.grad = torch.zeros_like(parameter)
            run.averagers[number].step()

    def pushed(number: int) -> None:
        for seed in range(6):
            inputs, targets = batch_of(100 * number + seed, 4, torch.bfloat16)
            run.models[number].zero_grad()
            (run.models[number](inputs) - targets).pow(2).mean().backward()
            run.averagers[number].step()

    run.each(pushed)
    assert not equal(anchors(run, 0), [anchor.to(torch.bfloat16).float() for anchor in anchors(run, 0)])
    assert max(ledger.error() for ledger in ledgers) < EXACT
    run.each(lambda number: idle(number, 20))
    assert max(ledger.error() for ledger in ledgers) < EXACT


class Tied(torch.nn.Module):
    """Two parameters in the same memory, of which an optimizer has both."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Parameter(torch.randn(6, 4))
        self.other = torch.nn.Parameter(self.one.data.view(shape))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.one[:5, :3] + self.other.reshape(6, 4)[0, :3]


def test_parameters_that_share_their_memory_are_sent_alike(start: Start) -> None:
    run = run_of(start, 2, partial(top_k, 2), SGD, lambda: Tied((6, 4)))
    train(run, 12)
    for number in range(2):
        one, other = residual(run, number)
        assert one.any()
        assert torch.equal(one, other)
    assert equal(anchors(run, 0), anchors(run, 1))
    with pytest.raises(TensorError, match=r"'one' shares its memory with another one of another shape or fragment"):
        start().add(top_k(2), SGD, Tied((24,)))
    with pytest.raises(TensorError, match=r"of another shape or fragment, of which other elements would be sent"):
        start().add(top_k(2, fragments=2), SGD, Tied((6, 4)))
