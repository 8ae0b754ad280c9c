"""Rounds by the clock of the run: real averagers on the memory network, in virtual time."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from averaging import DecentralizedAverager, DiLoCo, LocalSGD, Strategy
from tests.support.training_run import Noise, Run, Site, agree

FIRST = "192.0.2.1:1"

MAKERS: dict[str, Callable[[], Strategy]] = {
    "local": lambda: LocalSGD("10s"),
    "overlap": lambda: LocalSGD("10s", overlap=True),
    "diloco": lambda: DiLoCo("10s"),
}


class TwoTensors(Noise):
    """Noise for two tensors, so that a model can be cut into two fragments."""

    def __init__(self, rng: random.Random, batch_size: int) -> None:
        super().__init__(rng, {"momentum": 0.0}, tensors=2)
        self.batch_size = batch_size


def sites(*step_seconds: float, **options: Any) -> list[Site]:
    return [
        Site(f"192.0.2.{number}:1", [FIRST] if number > 1 else [], 0.1 * number, step_seconds=seconds, **options)
        for number, seconds in enumerate(step_seconds, 1)
    ]


def run(make: Callable[[], Strategy], peers: list[Site], until: float) -> list[Site]:
    for peer in peers:
        peer.strategy = make
    return Run(0, "diloco", peers, until=until, group_wait=5.0).simulate()


@pytest.mark.parametrize("kind", ["overlap", "diloco"])
def test_peers_of_any_speed_average_at_the_same_moments_and_hardly_wait(kind: str) -> None:
    peers = run(MAKERS[kind], sites(0.1, 0.1, 1.0), until=65.0)
    assert len(peers) == 3
    for peer in peers:
        averaged = [receipt for receipt in peer.receipts if receipt.averaged]
        assert len(averaged) >= 5
        assert all(len(receipt.members) == 3 for receipt in averaged[1:])
        assert all(-0.5 < (receipt.started + 5) % 10 - 5 < 1.3 for receipt in averaged[1:])
        waited = sum(receipt.phases["looking"] for receipt in averaged[1:])
        assert waited < 0.05 * 60
    assert all(peer.finish is not None and peer.finish.alike for peer in peers)
    assert agree(peers)


def test_nobody_waits_for_a_peer_whose_step_is_longer_than_the_interval() -> None:
    fast, other, slow = run(MAKERS["local"], sites(0.1, 0.1, 16.0), until=120.0)
    for peer in (fast, other):
        averaged = [receipt for receipt in peer.receipts if receipt.averaged]
        assert len(averaged) >= 10
        assert sum(receipt.phases["looking"] for receipt in averaged) < 0.12 * 120
    assert sum(receipt.averaged and len(receipt.members) == 3 for receipt in slow.receipts) >= 2


@pytest.mark.parametrize("seconds", [(0.1, 0.1), (0.1, 2.0), (0.7, 0.1)])
def test_nobody_makes_a_step_alone_at_a_moment_before_which_others_have_told_none(seconds: tuple[float, ...]) -> None:
    """Others have made no step yet, or what they told came since the last step: they would lose what they gather."""
    peers = sites(*seconds)
    for peer in peers:
        peer.starts += 8.9
    for peer in run(MAKERS["diloco"], peers, until=35.0):
        receipts = [receipt for receipt in [*peer.receipts, *peer.last_receipts] if receipt.averaged]
        assert peer.global_step == len(receipts) >= 2


def test_the_last_steps_of_a_peer_that_ends_before_the_last_moment_are_averaged() -> None:
    peers = sites(0.1, 0.1, 0.1)
    peers[0].steps = 290.0  # it waits for the others, which average once more without it, and make no step after
    for peer in run(MAKERS["diloco"], peers, until=30.0):
        assert peer.finish is not None
        assert peer.finish.dropped == 0
        assert peer.finish.receipt is not None
        assert len(peer.finish.receipt.members) == 3
    assert agree(peers)


def test_a_newcomer_between_two_moments_that_makes_no_step_for_long_holds_nobody_up() -> None:
    peers = sites(0.1, 0.1)
    # Its steps end at about 52, 77 and 102 s, the last one long before the others stop to wait for it.
    peers.append(Site("192.0.2.3:1", [FIRST], 27.0, step_seconds=25.0))
    first, second, newcomer = run(MAKERS["local"], peers, until=100.0)
    early = [receipt for receipt in first.receipts if receipt.averaged and receipt.started % 1000 < 47]
    assert len(early) >= 4
    assert all(receipt.phases["looking"] < 0.5 and len(receipt.members) == 2 for receipt in early[1:])
    assert agree([first, second, newcomer])


@pytest.mark.parametrize("make", [lambda: LocalSGD("10s"), lambda: DiLoCo("10s", quorum=2)], ids=["local", "quorum"])
def test_a_newcomer_comes_to_the_next_moment_and_goes_on_with_the_learning_rate_of_the_run(
    make: Callable[[], Strategy],
) -> None:
    """A schedule counts a peer's own local steps; a newcomer has those of its donor. So no rate counts as drift."""
    rates: dict[int, list[tuple[int, float]]] = {}

    def note(number: int, averager: DecentralizedAverager, step: int) -> None:
        rates.setdefault(number, []).append((step, averager.param_groups[0]["lr"]))

    halves = partial(torch.optim.lr_scheduler.StepLR, step_size=50, gamma=0.5)
    peers = sites(0.1, 0.1, 1.0, scheduler=halves)
    peers.append(Site("192.0.2.4:1", [FIRST], 23.0, step_seconds=0.1, scheduler=halves))
    for number, peer in enumerate(peers):
        peer.tamper = partial(note, number)
    trained = run(make, peers, until=45.0)
    assert agree(trained)
    for peer in trained:
        averaged = [receipt for receipt in peer.receipts if receipt.averaged]
        assert [len(receipt.members) for receipt in averaged][-2:] == [4, 4]
        assert not any(receipt.drift for receipt in averaged)
    assert 100 < rates[3][0][0] < 230
    assert rates[2][-1][0] < 50
    for seen in rates.values():
        assert all(rate == pytest.approx(0.1 * 0.5 ** (step // 50)) for step, rate in seen)


@pytest.mark.parametrize(
    ("make", "seconds"),
    [
        pytest.param(lambda: DiLoCo("20s", fragments=2), 20, id="fragments"),
        pytest.param(lambda: DiLoCo("10s", compression="top_k", density=0.5), 10, id="top_k"),
    ],
)
def test_peers_with_other_batch_sizes_weigh_as_many_samples(make: Callable[[], Strategy], seconds: int) -> None:
    peers = sites(0.1, 1.0, options={"weight": "samples"})
    for peer, batch_size in zip(peers, (4, 32), strict=True):
        peer.learner = partial(TwoTensors, batch_size=batch_size)
    fast, slow = run(make, peers, until=65.0)
    averaged = [receipt for receipt in fast.receipts if receipt.averaged and len(receipt.members) == 2]
    assert len(averaged) >= 5
    for receipt in averaged[2:]:  # the first ones have what came before the peers met
        weights = {account.endpoint: account.weight for account in receipt.accounts}
        assert weights[fast.name] == pytest.approx(4 * seconds / 0.1, rel=0.15)
        assert weights[slow.name] == pytest.approx(32 * seconds / 1.0, rel=0.15)
        assert weights[slow.name] % 32 == 0
    assert agree([fast, slow])
