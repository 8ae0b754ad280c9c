"""All-reduce rounds on the memory network in virtual time, compared with the mean."""

import asyncio
import itertools
import random

import pytest
import torch

from averaging.allreduce import RoundResult
from averaging.protocol.group import Member, Mode, ReplyForm
from averaging.protocol.messages import COMPRESSIONS, CompressionType
from averaging.testing import virtual_time
from tests.support.rounds import STALL_TIMEOUT, Simulation, assert_close, nodes
from tests.support.selection import rest_is_long

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("reply", list(ReplyForm))
@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_members_end_with_the_mean(count: int, reply: ReplyForm, dtype: torch.dtype) -> None:
    simulation = Simulation(count, nodes(count), dtype=dtype, reply=reply)
    virtual_time.run(simulation.run())
    for name, result in simulation.results.items():
        assert result.dropped == ()
        assert result.kept_local == 0
        assert_close(simulation.tensors[name], simulation.mean(), TOLERANCE[dtype])
    if reply is ReplyForm.AVERAGE:
        first, *others = simulation.tensors.values()
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("compression", sorted({*COMPRESSIONS.values()} - {CompressionType.NONE}))
def test_lossy_codecs_give_all_members_the_same_bytes(compression: CompressionType) -> None:
    simulation = Simulation(3, nodes(4), [(300,), (5, 7)], compression=compression, part_size_bytes=256)
    virtual_time.run(simulation.run())
    first, *others = simulation.tensors.values()
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    # Parts and average are each encoded once. The coarsest codec has 256 buckets over six standard deviations.
    for tensor, wanted in zip(first, simulation.mean(), strict=True):
        assert (tensor.double() - wanted).abs().mean() < 0.05


@pytest.mark.parametrize(("clients", "auxiliaries"), list(itertools.product(range(3), range(3))))
def test_clients_and_auxiliaries(clients: int, auxiliaries: int) -> None:
    members = nodes(2)
    members += [Member(f"client::{number}", mode=Mode.CLIENT) for number in range(clients)]
    members += [Member(f"aux:{number + 1}", mode=Mode.AUXILIARY) for number in range(auxiliaries)]
    random.Random(7).shuffle(members)
    simulation = Simulation(7, members)
    virtual_time.run(simulation.run())
    for member in members:
        after = simulation.tensors[member.endpoint]
        assert simulation.results[member.endpoint].dropped == ()
        if member.mode is Mode.AUXILIARY:
            assert all(torch.equal(a, b) for a, b in zip(after, simulation.before[member.endpoint], strict=True))
        else:
            assert_close(after, simulation.mean(), 1e-6)


@pytest.mark.parametrize("seed", rest_is_long(range(20), 5))
def test_a_member_that_leaves_announces_it(seed: int) -> None:
    simulation = Simulation(seed, nodes(3), [(200,)])
    took = 0.0

    async def leave(tasks: dict[str, asyncio.Task[RoundResult]]) -> None:
        nonlocal took
        await asyncio.sleep(0.01 * (seed + 1) / 2)
        await simulation.cancel(tasks["peer:3"])
        await asyncio.wait([tasks["peer:1"], tasks["peer:2"]])
        took = asyncio.get_running_loop().time()

    virtual_time.run(simulation.run(leave))
    assert took < STALL_TIMEOUT  # no deadline had to pass
    for name in ("peer:1", "peer:2"):
        simulation.assert_between_the_means(name, ["peer:1", "peer:2"])


@pytest.mark.parametrize("seed", rest_is_long(range(40), 10))
def test_every_round_ends_whatever_messages_are_lost(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 9)
    simulation = Simulation(seed, nodes(count), [(100,), (30,)], loss=rng.choice([0.001, 0.01, 0.1]))
    virtual_time.run(simulation.run())
    assert simulation.failures == {}
    for name, result in simulation.results.items():
        for dropped in result.dropped:
            assert dropped.endpoint != name
            assert dropped.reason
