"""How many rounds of small groups bring all peers to the same values, and what failures cost.

Source: Ryabinin et al., Moshpit SGD (2021), arXiv:2103.03239, and the averaging experiments published with it: rounds
until the variance of standard normal values is below 1e-9, mean of 10 runs.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from tests.matchmaking.mixing import GroupBits, bits_rounds, grid_rounds
from tests.support.selection import rest_is_long
from tests.support.swarm import Swarm, scalars

SEEDS = range(4)
MANY = range(60)
PUBLISHED = {(8, 3, 0.005): 7.7, (8, 3, 0.01): 8.5, (32, 2, 0.005): 5.4, (32, 2, 0.01): 5.8}
"""Rounds by side of the grid, axes, and the probability with which each peer fails in a round."""


def mean(rounds: list[int]) -> float:
    return float(np.mean(rounds))


def noise(rounds: list[int]) -> float:
    """Standard error of a mean of 10 runs, such as the published ones, with the spread of these."""
    return float(np.std(rounds, ddof=1)) / math.sqrt(10)


@pytest.mark.parametrize(("side", "axes"), [(2, 5), (3, 3), (4, 3), (5, 2), (8, 3), (32, 2)])
def test_a_full_grid_reaches_the_exact_mean_after_one_round_per_axis(side: int, axes: int) -> None:
    peers = GroupBits(side, axes, seed=1)
    exact = math.fsum(peers.values) / len(peers.values)
    for _ in range(axes):
        assert set(Counter(peers.bits).values()) == {side}
        assert peers.values.var() > 1e-6
        peers.round()
    np.testing.assert_allclose(peers.values, exact, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(("side", "axes", "probability"), PUBLISHED)
def test_the_authors_grid_gives_the_published_rounds(side: int, axes: int, probability: float) -> None:
    """So the figures are of a rule by which the others of a group average without the peer that failed."""
    rounds = [grid_rounds(side, axes, seed, probability) for seed in MANY]
    assert abs(mean(rounds) - PUBLISHED[side, axes, probability]) < 2 * noise(rounds)


@pytest.mark.parametrize(("side", "axes", "probability"), rest_is_long(PUBLISHED, 2))
def test_lost_contributions_cost_no_more_rounds_than_published(side: int, axes: int, probability: float) -> None:
    """The published mean is one of 10 runs, which others like them miss by their standard error."""
    rounds = [bits_rounds(side, axes, seed, probability) for seed in SEEDS]
    alike = [grid_rounds(side, axes, seed, probability) for seed in MANY]
    assert mean(rounds) <= PUBLISHED[side, axes, probability] + noise(alike)


@pytest.mark.parametrize("count", [5, 6, 9, 10])
def test_matchmaking_leaves_alone_whom_the_model_leaves_alone(count: int) -> None:
    """More peers than fit into a group: full ones, one of the rest, and nobody for a single peer that is left."""
    swarm = Swarm(count)
    peers = [
        swarm.peer(f"peer:{n + 1}", [tensor], group_size=4, group_wait=5.0, round_timeout=8.0)
        for n, tensor in enumerate(scalars(count, count))
    ]
    sizes = Counter(len(receipts[0].members) for receipts in swarm.simulate(swarm.average_together(peers)))
    assert sizes.pop(4) == count // 4 * 4
    assert sizes == {2: 2} if count % 4 == 2 else sizes == {0: 1}
