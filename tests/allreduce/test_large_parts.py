"""Larger parts than the schema's, in a group whose members all have a fast network."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from averaging.allreduce import Part
from averaging.allreduce.partition import large_part_bytes, partition
from averaging.matchmaking import rules
from averaging.protocol import Aggregation, AggregationKind, CompressionType, JoinRequest, Member, Mode, pack_gather
from averaging.tensors import Schema, describe
from averaging.testing import virtual_time
from averaging.timing import Deadlines
from tests.support.rounds import Simulation, nodes

GATHER = pack_gather(1.0, None, Mode.NODE)
MIB = 1 << 20


def schema_of(*sizes: int, part_size_bytes: int = 256, **options: object) -> Schema:
    tensors = [torch.empty(size) for size in sizes]
    return describe([str(number) for number in range(len(sizes))], tensors, part_size_bytes=part_size_bytes, **options)  # type: ignore[arg-type]


def slices(shards: Sequence[Sequence[Part]]) -> list[list[tuple[int, int]]]:
    """The elements of each shard as (tensor, element)."""
    return [
        [(number, element) for part in shard for number, start, stop in part.slices for element in range(start, stop)]
        for shard in shards
    ]


@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.FLOAT16])
def test_large_parts_have_the_same_elements_at_the_same_reducers(compression: CompressionType) -> None:
    schema = schema_of(20000, 3, 5, 7001, compression=compression)
    usual, large = (partition(schema, [1.0, 2.0, 1.0], joins=True, large=is_large) for is_large in (False, True))
    assert slices(usual) == slices(large)
    assert sum(map(len, large)) < sum(map(len, usual)) / 1.9
    most, width = large_part_bytes(schema, 3), 4 if compression is CompressionType.NONE else 2
    assert most == 256 * (27009 * width // 64 // 256)
    assert all(part.numel * width <= most for shard in large for part in shard)
    # Nothing is copied together for it: only slices that would have been joined without it are.
    assert all(part.numel * width <= 256 for shard in large for part in shard if len(part.slices) > 1)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": CompressionType.BLOCKWISE_INT8},
        {"compression": CompressionType.QUANTILE_8BIT},
        {"aggregation": Aggregation(AggregationKind.CLIP, 1.0)},
    ],
)
def test_what_depends_on_the_parts_keeps_those_of_the_schema(options: dict[str, object]) -> None:
    schema = schema_of(9000, 7001, part_size_bytes=2048, **options)
    assert partition(schema, [1.0, 1.0], joins=True, large=True) == partition(schema, [1.0, 1.0], joins=True)


@pytest.mark.parametrize("seed", range(5))
def test_a_round_gives_the_same_with_large_parts(seed: int) -> None:
    results = []
    for large in (False, True):
        simulation = Simulation(
            seed, nodes(2), [(4000,), (7, 3), (1500,)], joins_parts=True, large_parts=large, part_size_bytes=64
        )
        virtual_time.run(simulation.run())
        assert not any(result.dropped or result.kept_local for result in simulation.results.values())
        assert len({result.digest for result in simulation.results.values()}) == 1
        results.append(simulation.tensors)
    usual, with_large = results
    for name, tensors in usual.items():
        assert all(torch.equal(one, other) for one, other in zip(tensors, with_large[name], strict=True))


@pytest.mark.parametrize("leader", [True, False])
@pytest.mark.parametrize("wanting", [{"a:1", "b:1"}, {"a:1"}])
@pytest.mark.parametrize("joining", [{"a:1", "b:1"}, {"a:1"}])
def test_parts_are_large_if_all_members_want_that(leader: bool, wanting: set[str], joining: set[str]) -> None:
    names = ["a:1", "b:1"]
    searching = rules.LeaderCandidate(
        Member("me:1"),
        b"hash",
        3,
        followers={name: Member(name) for name in names},
        large_parts=leader,
        requests={
            name: JoinRequest(name, b"hash", 0.0, GATHER, joins_parts=name in joining, large_parts=name in wanting)
            for name in names
        },
    )
    message = rules.assemble(searching, dict.fromkeys(["me:1", *names], GATHER), random.Random(1))
    groups = [rules.read_group(message, name, "me:1", GATHER) for name in ("me:1", *names)]
    assert [group.large_parts for group in groups] == [leader and len(wanting) == len(joining) == 2] * 3
    assert [group.joins_parts for group in groups] == [len(joining) == 2] * 3


def test_a_network_is_fast_if_a_mebibyte_takes_less_than_two_milliseconds() -> None:
    deadlines = Deadlines(1.0, 1.0)
    assert not deadlines.fast
    deadlines.record_round(64 * MIB, 0.127)
    assert deadlines.fast
    deadlines.record_round(MIB, 10.0)  # says nothing
    assert deadlines.fast
    deadlines.record_round(64 * MIB, 0.129)
    assert not deadlines.fast
