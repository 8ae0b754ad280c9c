"""LocalSGD whose statistics are averaged in some rounds of the parameters only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import ConfigError, DecentralizedAverager, LocalSGD, Receipt
from tests.support.training import Run, Start, backward, batch_of, model_of, run_of
from tests.support.training_run import Run as SimulatedRun, Site

AdamW = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95))
KINDS = "exp_avg", "exp_avg_sq"


def local_adam_by_hand(peers: int, rounds: int, every: tuple[int, int]) -> list[list[torch.Tensor]]:
    """DES-LOC with AdamW, two steps in a round: what each peer holds then, parameters and both moments."""
    models = [model_of(0) for _ in range(peers)]
    inner = [AdamW(model.parameters()) for model in models]
    for number in range(1, rounds + 1):
        for peer, model in enumerate(models):
            for step in (2 * number - 2, 2 * number - 1):
                backward(model, batch_of(100 * peer + step, 4))
                inner[peer].step()
        for place in range(len(list(models[0].parameters()))):
            copies = [list(model.parameters())[place] for model in models]
            averaged = [[copy.detach() for copy in copies]]
            for kind, rounds_between in zip(KINDS, every, strict=True):
                if number % rounds_between == 0:
                    averaged.append(
                        [optimizer.state[copy][kind] for optimizer, copy in zip(inner, copies, strict=True)]
                    )
            for tensors in averaged:
                mean = torch.stack(tensors).mean(dim=0)
                for tensor in tensors:
                    tensor.copy_(mean)
    return [held(model, optimizer) for model, optimizer in zip(models, inner, strict=True)]


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    moments = [optimizer.state[parameter][kind] for kind in KINDS for parameter in parameters]
    return [tensor.detach().clone() for tensor in [*parameters, *moments]]


def train(run: Run, steps: range) -> None:
    def of_peer(number: int) -> None:
        for step in steps:
            backward(run.models[number], batch_of(100 * number + step, 4))
            run.averagers[number].step()

    run.each(of_peer)


def topics(receipts: list[Receipt]) -> list[str]:
    """What was averaged in each round, without the phase."""
    assert all(receipt.averaged for receipt in receipts)
    return [receipt.topic.partition("/")[0] for receipt in receipts]


@pytest.mark.parametrize("every", [(3, 6), (2, 3), (1, 2), 2])
def test_moments_are_averaged_as_seldom_as_the_option_says(start: Start, every: int | tuple[int, int]) -> None:
    receipts: list[Receipt] = []
    strategy = partial(LocalSGD, 2, statistics=True, statistics_every=every)
    run = run_of(start, 2, strategy, AdamW, on_round=receipts.append)
    train(run, range(12))
    pair = (every, every) if isinstance(every, int) else every
    for ours, expected in zip(run.models, local_adam_by_hand(2, 6, pair), strict=True):
        number = run.models.index(ours)
        for tensor, other in zip(held(ours, run.averagers[number].optimizer), expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-9)
    made = topics(receipts)
    counts = [made.count(f"statistics-{kind + 1}") for kind in range(2)]
    assert counts == [2 * (6 // rounds) for rounds in pair]
    assert made.count("") == 2 * 6


def test_half_of_the_bytes_of_local_adam(start: Start) -> None:
    sent = []
    for every in (None, (3, 6)):
        receipts: list[Receipt] = []
        run = run_of(
            start, 2, partial(LocalSGD, 2, statistics=True, statistics_every=every), AdamW, on_round=receipts.append
        )
        train(run, range(12))
        sent.append(sum(receipt.bytes_sent for receipt in receipts))
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)


def test_peers_that_have_counted_other_rounds_agree_on_the_larger_number(start: Start) -> None:
    """One has an older checkpoint, from which its strategy counts on; a newcomer takes over the count of the run."""
    receipts: list[Receipt] = []
    strategy = partial(LocalSGD, 2, statistics=True, statistics_every=(2, 100))
    run = run_of(start, 2, strategy, AdamW, on_round=receipts.append)
    train(run, range(6))
    saved = run.averagers[1].state_dict()
    train(run, range(6, 8))
    run.averagers[1].load_state_dict(saved)
    run.add(strategy(), AdamW, on_round=receipts.append)
    run.meet()
    receipts.clear()
    train(run, range(8, 12))
    assert sorted(topics(receipts)) == [""] * 6 + ["statistics-1"] * 3  # in the sixth round
    assert all(len(receipt.members) == 3 for receipt in receipts)
    first, *others = [held(model, opt.optimizer) for model, opt in zip(run.models, run.averagers, strict=True)]
    for other in others:
        for ours, theirs in zip(first[:8], other[:8], strict=True):  # the parameters and first moments
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_rounds_by_the_clock_with_a_newcomer_and_a_peer_that_is_killed() -> None:
    """In virtual time: whoever is in a round of the momentum holds the same then."""
    momentum: dict[str, list[tuple[float, ...]]] = {}

    def note(opt: DecentralizedAverager, _: int) -> None:
        receipt = opt.last_receipt
        if receipt is not None and receipt.averaged and receipt.topic.startswith("statistics"):
            (state,) = opt.optimizer.state.values()
            if receipt.group_id.hex() not in seen.setdefault(id(opt), set()):
                seen[id(opt)].add(receipt.group_id.hex())
                momentum.setdefault(receipt.group_id.hex(), []).append(tuple(state["momentum_buffer"].tolist()))

    seen: dict[int, set[str]] = {}
    first = "192.0.2.1:1"
    starts_and_lives = [(0.1, 999.0), (0.2, 999.0), (0.3, 75.0), (33.0, 999.0)]
    sites = [
        Site(f"192.0.2.{number}:1", [first] if number > 1 else [], starts, lives, tamper=note, step_seconds=0.5)
        for number, (starts, lives) in enumerate(starts_and_lives, 1)
    ]
    for site in sites:
        site.strategy = lambda: LocalSGD("10s", statistics=True, statistics_every=3)
    SimulatedRun(0, "local", sites, until=160.0, group_wait=5.0).simulate()
    together = [held for held in momentum.values() if len(held) > 1]
    assert {len(held) for held in together} == {3, 4}, momentum
    assert all(len(set(held)) == 1 for held in momentum.values())
    averaged = [receipt.topic.partition("/")[0] for receipt in sites[0].receipts if receipt.averaged]
    assert averaged.count("statistics-1") == averaged.count("") // 3 >= 4


def test_a_momentum_alone_is_a_first_moment_and_squares_alone_are_second_moments(start: Start) -> None:
    kinds: dict[int, Callable[..., torch.optim.Optimizer]] = {
        1: partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        2: partial(torch.optim.RMSprop, lr=0.01),
    }
    for kind, optimizer in kinds.items():
        receipts: list[Receipt] = []
        run = run_of(
            start,
            2,
            partial(LocalSGD, 1, statistics=True, statistics_every=(2, 2)),
            optimizer,
            on_round=receipts.append,
        )
        train(run, range(4))
        assert set(topics(receipts)) == {"", f"statistics-{kind}"}
        first, second = (opt.optimizer.state_dict()["state"] for opt in run.averagers)
        (name,) = [name for name, value in first[0].items() if isinstance(value, torch.Tensor) and value.dim()]
        for place in range(4):
            assert torch.equal(first[place][name], second[place][name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"statistics_every": (3, 6)}, "statistics_every needs statistics=True; set it"),
        ({"statistics": True, "statistics_every": (3, 6), "overlap": True}, "leave one of them out"),
        ({"statistics": True, "statistics_every": 3, "quorum": 2}, "statistics does not go with LocalSGD.of_changes"),
        *(
            ({"statistics": True, "statistics_every": bad}, "two whole numbers of rounds, at least 1, such as")
            for bad in (0, -1, (3,), (3, 6, 9), (3, 0), (3.0, 6), True, (True, 2), "36", 2.5)
        ),
    ],
)
def test_bad_values_are_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSGD(10, **options)


def test_a_run_with_another_number_of_rounds_is_named(start: Start) -> None:
    run = start()
    run.add(LocalSGD(2, statistics=True, statistics_every=(3, 6)), AdamW)
    with pytest.raises(ConfigError, match="statistics_every is 3 and 5 at this peer, but 3 and 6 at"):
        run.add(LocalSGD(2, statistics=True, statistics_every=(3, 5)), AdamW)


def test_one_number_is_for_both() -> None:
    assert repr(LocalSGD(2, statistics=True, statistics_every=4)).endswith("statistics_every=(4, 4))")
    assert LocalSGD(2, statistics=True, statistics_every=(1, 1)).statistics_every is None
