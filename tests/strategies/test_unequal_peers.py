"""Peers of one run that differ: allowed, or refused by name at the start."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from averaging import DiLoCo, GradientAveraging, LocalSGD, Strategy
from averaging.errors import ConfigError
from averaging.training import History, Progress
from tests.support.training import SGD, Start, step
from tests.support.training_run import Noise, Run, Site, agree

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "local": LocalSGD,
    "diloco": DiLoCo,
    "gradients": lambda steps: GradientAveraging(4 * steps),
}


top_k = partial(DiLoCo, 2, compression="top_k")


@pytest.mark.parametrize(
    ("theirs", "ours", "options", "named"),
    [
        (LocalSGD("10s"), LocalSGD("20s"), {}, "sync_every is 20s at this peer, but 10s at"),
        (DiLoCo("10s"), DiLoCo(5), {}, "sync_every is a number of steps at this peer, but 10s at"),
        (LocalSGD(4), LocalSGD(4), {"weight": "samples"}, "weight is the number of samples at this peer, but a number"),
        (DiLoCo(4, quorum=2), DiLoCo(4), {}, "quorum is off at this peer, but 2 at"),
        (GradientAveraging(16), GradientAveraging(160), {}, "target_batch_size is 160 at this peer, but 16 at"),
        (top_k(density=1 / 8), top_k(density=1 / 4), {}, "density is 0.25 at this peer, but 0.125 at"),
        (top_k(), top_k(bits=8), {}, "bits is 8 at this peer, but 2 at"),
        (top_k(), top_k(mean_over="all"), {}, "mean_over is all at this peer, but senders at"),
    ],
    ids=["interval", "steps", "weight", "quorum", "target", "density", "bits", "mean_over"],
)
def test_options_that_all_peers_share_are_refused_by_name(
    start: Start, theirs: Strategy, ours: Strategy, options: dict[str, Any], named: str
) -> None:
    run = start()
    first = run.add(theirs, SGD)

    def join() -> None:
        run.add(ours, SGD, **options)
        step(run, 1, 0, batch_size=4)

    with pytest.raises(ConfigError, match=f"{named}.*{re.escape(first.endpoint)}; give all peers of the run the same"):
        join()


def test_a_peer_that_has_made_a_round_names_one_with_other_options_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    averager = start().add(DiLoCo(1), SGD)
    others = [Progress(History(), terms={"quorum": quorum}).pack() for quorum in ("7", "8")]

    def meet(count: int) -> None:
        averager.strategy.check_terms(averager._training, {f"other:{port}": others[port] for port in range(count)})

    averager._training.standing = replace(averager._training.standing, rounds=1)
    for count in (1, 1, 2, 2):
        meet(count)
    assert [text for text in caplog.messages if "quorum" in text] == [
        f"quorum is off at this peer, but {quorum} at other:{port}; give all peers of the run the same"
        for port, quorum in ((0, 7), (1, 8))
    ]


@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_numbers_of_steps_may_differ(kind: str) -> None:
    sites = [
        Site("192.0.2.1:1", [], 0.1, step_seconds=0.4, strategy=lambda: STRATEGIES[kind](4)),
        Site("192.0.2.2:1", ["192.0.2.1:1"], 0.2, step_seconds=0.2, strategy=lambda: STRATEGIES[kind](8)),
    ]
    first, second = Run(0, kind, sites, until=20.0, group_wait=3.0).simulate()
    for peer in (first, second):
        averaged = [receipt for receipt in peer.receipts if receipt.averaged]
        assert 8 <= len(averaged) <= 14  # of 1.6 s each: a round that is over is no reason for the next one
        assert all(len(receipt.members) == 2 for receipt in averaged)
        assert not any(receipt.drift for receipt in averaged)
    assert agree([first, second])


@pytest.mark.parametrize("kind", STRATEGIES)
def test_batch_sizes_may_differ(kind: str) -> None:
    make = partial(STRATEGIES[kind], 4)
    sites = [
        Site("192.0.2.1:1", [], 0.1, learner=lambda rng: _noise(rng, 4), strategy=make),
        Site("192.0.2.2:1", ["192.0.2.1:1"], 0.2, learner=lambda rng: _noise(rng, 12), strategy=make),
    ]
    first, second = Run(0, kind, sites, until=20.0, group_wait=3.0).simulate()
    averaged = [receipt for receipt in first.receipts if receipt.averaged and len(receipt.members) == 2]
    assert len(averaged) >= 5
    for receipt in averaged[1:]:
        weights = {account.endpoint: account.weight for account in receipt.accounts}
        # Gradients are means over samples, so they weigh as many; changes of equally many steps weigh alike.
        share = weights[second.name] / sum(weights.values())
        assert share == (0.75 if kind == "gradients" else 0.5)
    assert agree([first, second])


def _noise(rng: random.Random, batch_size: int) -> Noise:
    noise = Noise(rng, {})
    noise.batch_size = batch_size
    return noise
