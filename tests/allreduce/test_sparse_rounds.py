"""Rounds in TOP_K on the memory network in virtual time, compared with an average that is computed slowly."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from averaging.allreduce import ReplyResidual
from averaging.protocol import MeanOver, Member, Mode, TopK
from averaging.testing import virtual_time
from tests.allreduce.sparse_rounds import SparseSimulation
from tests.support.rounds import nodes
from tests.support.selection import rest_is_long


def check_same_bytes(simulation: SparseSimulation) -> list[torch.Tensor]:
    """All members hold the same bytes, which are returned."""
    held = {member.endpoint for member in simulation.group.members if member.sends}
    digests = {simulation.results[name].digest for name in held}
    assert len(digests) == 1
    assert digests != {""}
    first, *others = (simulation.averages[name] for name in held)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    return first


def check(simulation: SparseSimulation) -> None:
    """All members hold the average of all, and the same bytes."""
    first = check_same_bytes(simulation)
    for part in simulation.parts:
        expected = simulation.expected(part)
        found = first[part.tensor][part.slices[0].start : part.slices[0].stop]
        # What a reply loses is in the residual of its reducer.
        whole = (found.double() + simulation.residual(part)).numpy()
        np.testing.assert_allclose(whole, np.nan_to_num(expected), rtol=1e-5, atol=1e-6)
        assert (found[np.isnan(expected)] == 0).all()


@pytest.mark.parametrize("mean_over", MeanOver)
@pytest.mark.parametrize(("count", "density", "bits"), [(1, 1 / 16, 4), (2, 1 / 64, 2), (3, 1 / 2, 8), (8, 1.0, 2)])
def test_all_members_hold_the_average(count: int, density: float, bits: int, mean_over: MeanOver) -> None:
    simulation = SparseSimulation(count, nodes(count), top_k=TopK(density, bits, mean_over))
    virtual_time.run(simulation.run())
    for result in simulation.results.values():
        assert result.dropped == ()
        assert result.kept_local == 0
    sent = sum(result.part_bytes_sent for result in simulation.results.values())
    assert sent == sum(result.part_bytes_received for result in simulation.results.values())
    # A position and a value of so many bits for each element that is sent; the tables and the bias come on top.
    kept = sum(spec.numel // 4096 * simulation.top_k.kept(4096) for spec in simulation.schema.tensors)
    assert sent >= (count - 1) * kept * (12 + bits) / 8
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


@pytest.mark.parametrize("weight", [0.0, 100.0, 1e3, 1e9])
def test_what_is_visible_is_averaged_over_all(weight: float) -> None:
    """Of weights that are small enough all elements are sent, and of huge ones none."""
    members = [*nodes(3), Member("client::1", 0.5, mode=Mode.CLIENT), Member("aux:1", mode=Mode.AUXILIARY)]
    simulation = SparseSimulation(3, members, visible_in=weight)
    virtual_time.run(simulation.run())
    assert all(result.dropped == () for result in simulation.results.values())
    check(simulation)
    shares = [float(np.mean(~np.isnan(simulation.expected(part)))) for part in simulation.parts]
    assert (min(shares) == 1.0) is (weight == 0.0)
    assert (max(shares) == 0.0) is (weight == 1e9)
    sent = sum(result.part_bytes_sent for result in simulation.results.values())
    assert sent == sum(result.part_bytes_received for result in simulation.results.values())


NUMEL = 4 * 4096


def test_all_that_was_decoded_and_what_reducers_have_lost_is_the_sum_of_the_averages() -> None:
    """Also if the shards move from one reducer to another, and if one round in between is not applied."""
    top_k, residuals = TopK(1 / 16, 4), {f"peer:{port}": ReplyResidual() for port in range(1, 6)}
    decoded, averages = np.zeros(NUMEL), np.zeros(NUMEL)
    for number in range(4):
        members = nodes(4 + number % 2)
        simulation = SparseSimulation(
            number, members, [(64, NUMEL // 64)], top_k=top_k, part_size_bytes=1024, residuals=residuals
        )
        simulation.is_applied = number != 2
        virtual_time.run(simulation.run())
        if simulation.is_applied:
            check_same_bytes(simulation)
            decoded += simulation.averages["peer:1"][0].double().numpy()
            for part in simulation.parts:
                averages[part.slices[0].start : part.slices[0].stop] += np.nan_to_num(simulation.expected(part))
    residues = [residual for residual in residuals.values() if residual.tensors]
    assert len(residues) >= 4
    lost = torch.stack([residual.tensors[0] for residual in residues]).double().sum(dim=0).numpy()
    np.testing.assert_allclose(decoded + lost, averages, atol=1e-5)
    # A reply has 256 levels, and what it loses does not add up from round to round.
    assert np.abs(decoded - averages).max() > 1e-3
    assert np.abs(lost).max() < 0.1 * np.abs(averages).max()


def test_many_members_get_a_union_and_hold_the_same() -> None:
    simulation = SparseSimulation(1, nodes(16), [(64, 2048)], top_k=TopK(1 / 64, 2), part_size_bytes=1 << 16)
    virtual_time.run(simulation.run())
    assert sum(bool(residual.tensors) for residual in simulation.residuals.values()) == len(simulation.parts) == 2
    check(simulation)


# Members that break down, at any moment.


def check_parts(simulation: SparseSimulation, survivors: Sequence[str], lost: str) -> None:
    """Each part is the average of all or of the survivors, the same for all survivors that have it."""
    for part, reducer in simulation.parts.items():
        found = [
            simulation.averages[name][part.tensor][part.slices[0].start : part.slices[0].stop] for name in survivors
        ]
        held = [values for values in found if not values.isnan().any()]
        assert len(held) == len(found) or reducer == lost
        assert all(torch.equal(values, held[0]) for values in held)
        if not held or reducer == lost:
            continue
        whole = (held[0].double() + simulation.residual(part)).numpy()
        candidates = [simulation.expected(part), simulation.expected(part, survivors)]
        assert min(np.abs(whole - np.nan_to_num(one)).max() for one in candidates) < 1e-5


@pytest.mark.parametrize("seed", rest_is_long(range(24), 6))
def test_a_member_that_dies_costs_its_contribution_and_its_shard(seed: int) -> None:
    simulation = SparseSimulation(seed, nodes(4), top_k=TopK(1 / 8, 4), part_size_bytes=512)
    survivors = ["peer:1", "peer:2", "peer:3"]

    virtual_time.run(simulation.run(simulation.kills("peer:4", after=random.Random(seed).uniform(0, 0.2))))
    for name in survivors:
        result = simulation.results[name]
        assert {dropped.endpoint for dropped in result.dropped} <= {"peer:4"}
        assert result.dropped or not result.kept_local
    check_parts(simulation, survivors, "peer:4")


def test_a_dense_tensor_may_go_with_sparse_ones() -> None:
    simulation = SparseSimulation(1, nodes(3), dense=[1, 2])
    virtual_time.run(simulation.run())
    for name in simulation.tensors:
        for number in (1, 2):
            mean = simulation.mean()[number].reshape(-1)
            torch.testing.assert_close(simulation.averages[name][number].double(), mean, rtol=1e-5, atol=1e-6)
    check_same_bytes(simulation)


def test_a_block_may_have_more_bytes_than_a_part_and_than_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.allreduce.stream_limits.WINDOW_BYTES", 1024)
    simulation = SparseSimulation(1, nodes(2), [(64, 256)], top_k=TopK(1.0, 8), part_size_bytes=1024)
    virtual_time.run(simulation.run())
    assert all(result.dropped == () for result in simulation.results.values())
    check(simulation)


# Bytes.
