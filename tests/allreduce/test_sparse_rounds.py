"""Rounds in TOP_K on the memory network in virtual time, compared with an average that is computed slowly."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from averaging.protocol import MeanOver, Member, Mode, TopK
from averaging.testing import virtual_time
from tests.support.rounds import nodes
from tests.support.sparse_rounds import SparseSimulation


def check(simulation: SparseSimulation) -> None:
    """All members hold the average of all, and the same bytes."""
    held = {member.endpoint for member in simulation.group.members if member.sends}
    digests = {simulation.results[name].digest for name in held}
    assert len(digests) == 1
    assert digests != {""}
    first, *others = (simulation.averages[name] for name in held)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for part in simulation.parts:
        expected = simulation.expected(part)
        found = first[part.tensor][part.start : part.stop]
        # What a reply loses is in the residual of its reducer.
        whole = (found.double() + simulation.residual(part)).numpy()
        np.testing.assert_allclose(whole, np.nan_to_num(expected), rtol=1e-5, atol=1e-6)
        assert (found[np.isnan(expected)] == 0).all()


@pytest.mark.parametrize("mean_over", MeanOver)
@pytest.mark.parametrize(("density", "bits"), [(1 / 64, 2), (1 / 16, 4), (1 / 2, 8), (1.0, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_all_members_hold_the_average(count: int, density: float, bits: int, mean_over: MeanOver) -> None:
    simulation = SparseSimulation(count, nodes(count), top_k=TopK(density, bits, mean_over))
    virtual_time.run(simulation.run())
    for result in simulation.results.values():
        assert result.dropped == ()
        assert result.kept_local == 0
    check(simulation)


@pytest.mark.parametrize(("clients", "auxiliaries"), list(itertools.product(range(3), range(2))))
def test_clients_auxiliaries_and_weights(clients: int, auxiliaries: int) -> None:
    members = [Member("peer:1", weight=0.0), Member("peer:2", weight=3.0), Member("peer:3", weight=1e-3)]
    members += [Member(f"client::{number}", 0.5, mode=Mode.CLIENT) for number in range(clients)]
    members += [Member(f"aux:{number + 1}", mode=Mode.AUXILIARY) for number in range(auxiliaries)]
    random.Random(clients).shuffle(members)
    simulation = SparseSimulation(7, members, top_k=TopK(1 / 16, 8))
    virtual_time.run(simulation.run())
    assert all(result.dropped == () for result in simulation.results.values())
    check(simulation)
