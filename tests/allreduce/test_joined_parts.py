"""Small slices of tensors that travel together, and large parts."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.allreduce import Part
from averaging.allreduce.part_forms import forms_of
from averaging.allreduce.partition import large_part_bytes, partition
from averaging.matchmaking import rules
from averaging.protocol import (
    MEAN,
    Aggregation,
    AggregationKind,
    CompressionType,
    JoinRequest,
    Member,
    Mode,
    TopK,
    pack_gather,
    parse_aggregation,
)
from averaging.protocol.messages import COMPRESSIONS
from averaging.tensors import Schema, TensorSpec, codec_of, decode_slices, describe, encode, encode_slices
from averaging.testing import virtual_time
from averaging.timing import Deadlines
from tests.support.rounds import Simulation, nodes

NONE, FLOAT16, INT8, TOP_K = (
    CompressionType.NONE,
    CompressionType.FLOAT16,
    CompressionType.BLOCKWISE_INT8,
    CompressionType.TOP_K,
)
KINDS = [("float32", NONE), ("float32", FLOAT16), ("float64", NONE), ("float32", INT8), ("float32", TOP_K)]
PART = 4096
DENSE = sorted({*COMPRESSIONS.values()})
GATHER = pack_gather(1.0, None, Mode.NODE)
MIB = 1 << 20


def schema_of(kinds: Sequence[tuple[int, tuple[str, CompressionType]]], aggregation: Aggregation = MEAN) -> Schema:
    specs = [TensorSpec(str(number), kind[0], (numel,), kind[1]) for number, (numel, kind) in enumerate(kinds)]
    return Schema(tuple(specs), PART, aggregation=aggregation, sparse=TopK())


@given(
    kinds=st.lists(st.tuples(st.sampled_from([0, 1, 3, 100, 700, 3000]), st.sampled_from(KINDS)), max_size=40),
    shares=st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any),
)
def test_slices_are_joined_and_keep_their_reducers(
    kinds: list[tuple[int, tuple[str, CompressionType]]], shares: list[int]
) -> None:
    schema = schema_of(kinds)
    forms = forms_of(schema)
    apart = partition(schema, [float(share) for share in shares])
    joined = partition(schema, [float(share) for share in shares], joins=True)
    assert [[piece for part in shard for piece in part.slices] for shard in joined] == [
        [piece for part in shard for piece in part.slices] for shard in apart
    ]
    for part in (part for shard in joined for part in shard if len(part.slices) > 1):
        specs = [schema.tensors[piece.tensor] for piece in part.slices]
        assert len({(spec.dtype, spec.compression) for spec in specs}) == 1
        assert specs[0].compression is not TOP_K
        codec = codec_of(specs[0].compression, specs[0].torch_dtype)
        assert sum(codec.nbytes((piece.numel,)) for piece in part.slices) <= PART
    for shard in joined:  # as few parts as possible
        for one, other in itertools.pairwise(shard):
            fits = sum(forms[piece.tensor].encoded_size(piece) for piece in (*one.slices, other.slices[0])) <= PART
            assert not (fits and forms[one.tensor].joins(forms[other.tensor]))


@pytest.mark.parametrize(("rule", "parts"), [("mean", 1), ("median", 1), ("trimmed:1", 1), ("clip:1", 5)])
def test_distances_of_clip_are_measured_in_the_parts_of_the_contract(rule: str, parts: int) -> None:
    schema = schema_of([(10, ("float32", NONE))] * 5, parse_aggregation(rule))
    assert len(partition(schema, [1.0], joins=True)[0]) == parts


@given(
    compression=st.sampled_from(DENSE),
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_each_slice_is_encoded_as_if_it_were_alone(compression: CompressionType, lengths: list[int], seed: int) -> None:
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    apart = [encode(piece, compression) for piece in torch.split(values, lengths)]
    joined = encode_slices(values, compression, lengths)
    assert bytes(joined.buffer) == b"".join(bytes(wire.buffer) for wire in apart)
    assert joined.size == (sum(lengths),)
    decoded = [decode_slices(wire, torch.float32, [length]) for wire, length in zip(apart, lengths, strict=True)]
    assert torch.equal(decode_slices(joined, torch.float32, lengths), torch.cat(decoded))


@pytest.mark.parametrize("compression", DENSE)
def test_a_round_gives_the_same_with_joined_parts(compression: CompressionType) -> None:
    shapes = [(number % 7 + 1,) for number in range(20)] + [(3, 50), (), (0,)]
    rounds = {}
    for joins in (False, True):
        simulation = Simulation(1, nodes(3), shapes, compression=compression, part_size_bytes=8192, joins_parts=joins)
        virtual_time.run(simulation.run())
        assert not any(result.dropped or result.kept_local for result in simulation.results.values())
        rounds[joins] = simulation
    apart, joined = rounds[False], rounds[True]
    for name, tensors in apart.tensors.items():
        for one, other in zip(tensors, joined.tensors[name], strict=True):
            # The order in which three contributions arrive decides how their sum is rounded.
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if compression is NONE else 0.05)
    digests = {result.digest for result in joined.results.values()}
    assert len(digests) == 1
    first, *others = joined.tensors.values()
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


# Larger parts than the schema's, in a group whose members all have a fast network


def schema_of_sizes(*sizes: int, part_size_bytes: int = 256, **options: object) -> Schema:
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
    schema = schema_of_sizes(20000, 3, 5, 7001, compression=compression)
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
    schema = schema_of_sizes(9000, 7001, part_size_bytes=2048, **options)
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
