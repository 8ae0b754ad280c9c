"""Shares are compared with bisection, parts with a count of every element."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from averaging.allreduce.part_forms import Part, forms_of
from averaging.allreduce.partition import busiest_link, packed_sizes, partition, shares
from averaging.errors import ConfigError, RoundError
from averaging.protocol.group import Member, Mode
from averaging.protocol.messages import CompressionType, TopK
from averaging.tensors import BlockLayout, top_k_nbytes
from averaging.tensors.schema import Schema, TensorSpec


def group(*bandwidths: float | None, clients: Sequence[int] = (), auxiliaries: Sequence[int] = ()) -> list[Member]:
    modes = dict.fromkeys(clients, Mode.CLIENT) | dict.fromkeys(auxiliaries, Mode.AUXILIARY)
    return [
        Member(f"peer{index}:1", bandwidth=bandwidth, mode=modes.get(index, Mode.NODE))
        for index, bandwidth in enumerate(bandwidths)
    ]


def schema(*shapes: tuple[int, ...], part_size: int, code: CompressionType = CompressionType.NONE) -> Schema:
    specs = tuple(TensorSpec(f"t{index}", "float32", shape, code) for index, shape in enumerate(shapes))
    return Schema(specs, part_size)


def lengths(parts: list[list[Part]]) -> list[list[int]]:
    return [[part.numel for part in mine] for mine in parts]


# --- shares ---------------------------------------------------------------------------------------


def test_equal_if_no_bandwidth_is_announced() -> None:
    assert shares(group(None, None, None, clients=[1], auxiliaries=[2])) == [1.0, 0.0, 1.0]
    assert shares(group(None)) == [1.0]


def test_in_proportion_if_two_or_one() -> None:
    fast, slow = shares(group(300.0, 100.0))
    assert fast == 3 * slow
    assert shares(group(100.0, 900.0, clients=[1]))[1] == 0
    assert shares(group(100.0))[0] > 0


@given(st.lists(st.integers(0, 10), min_size=1, max_size=6).filter(any))
def test_the_busiest_link_carries_what_its_member_sends_and_receives(proportions: list[int]) -> None:
    total = sum(proportions)
    # Each member sends the shards of the others, and its own averages to all others; a single member only its own.
    sent = [(total - share) + (len(proportions) - 1) * share for share in proportions]
    assert busiest_link(proportions, 840) == pytest.approx(840 * (max(sent) / total if len(sent) > 1 else 1))


def test_shares_computed_by_hand() -> None:
    # T·10 - 1 twice: T = 3 / 20; the share of 4 would be negative
    assert shares(group(10.0, 4.0, 10.0)) == pytest.approx([0.5, 0.0, 0.5])
    # T = 4 / 28
    assert shares(group(8.0, 10.0, 10.0)) == pytest.approx([1 / 7, 3 / 7, 3 / 7])
    assert shares(group(10.0, 4.0, 10.0))[1] == 0
    # g = 4 includes the client, as does the median of the announced bandwidths, 8; T = 5 / 24
    assert shares(group(10.0, None, 6.0, 8.0, clients=[3])) == pytest.approx([13 / 24, 8 / 24, 3 / 24, 0.0])
    # an auxiliary reduces like a node
    assert shares(group(8.0, 10.0, 10.0, auxiliaries=[1])) == shares(group(8.0, 10.0, 10.0))


@pytest.mark.parametrize("unit", [1e-307, 1.0, 1e308])
def test_extreme_bandwidths(unit: float) -> None:
    for bandwidths in ([unit] * 5, [unit, None, unit, None, 0.0]):
        result = shares(group(*bandwidths))
        assert result[:4] == pytest.approx([result[0]] * 4)
        assert partition(schema((8,), part_size=8), result)
    mixed = shares(group(1.7e308, 5e-324, None, 1.7e308, clients=[0, 3]))
    assert mixed == pytest.approx([0.0, 0.0, 1.0, 0.0])


bandwidth = st.none() | st.floats(1e-3, 1e9) | st.sampled_from([0.0, 1.0, 100.0, 101.0])
member = st.tuples(bandwidth, st.sampled_from(Mode))


def members_of(drawn: list[tuple[float | None, Mode]]) -> list[Member]:
    return [Member(f"peer{i}:1", bandwidth=announced, mode=mode) for i, (announced, mode) in enumerate(drawn)]


@given(st.lists(member, min_size=3, max_size=12).map(members_of))
def test_shares_against_bisection(members: list[Member]) -> None:
    if not any(m.reduces for m in members):
        with pytest.raises(RoundError):
            shares(members)
        return
    result = shares(members)
    assert len(result) == len(members)
    assert all(type(share) is float and share >= 0 for share in result)
    assert all(share == 0 for share, m in zip(result, members, strict=True) if not m.reduces)
    announced = [m.bandwidth for m in members if m.bandwidth is not None]
    known = {
        i: statistics.median(announced) if m.bandwidth is None else m.bandwidth
        for i, m in enumerate(members)
        if m.reduces and announced
    }
    fastest = max(known.values(), default=0.0)
    if fastest == 0:
        assert result == [1.0 if m.reduces else 0.0 for m in members]
        return
    others = len(members) - 2
    low, high = 0.0, (others + 1) / fastest  # at the high end only the fastest reduces
    for _ in range(200):
        middle = (low + high) / 2
        enough = sum(max(0.0, (middle * b - 1) / others) for b in known.values()) >= 1
        low, high = (low, middle) if enough else (middle, high)
    for i, b in known.items():
        assert result[i] == pytest.approx(max(0.0, (high * b - 1) / others), rel=1e-9, abs=1e-9)
    assert math.fsum(result) == pytest.approx(1)


def test_a_group_without_reducers_is_refused() -> None:
    with pytest.raises(RoundError, match="clients"):
        shares(group(1.0, None, clients=[0, 1]))
    with pytest.raises(RoundError):
        shares([])


# --- parts ----------------------------------------------------------------------------------------


def test_example_of_the_protocol() -> None:
    tensors = schema((300000,), (10, 10), (5,), part_size=1 << 18)
    parts = partition(tensors, [150000, 75052, 75053])
    assert lengths(parts) == [[65536, 65536], [65536], [65536, 37856, 100, 5]]
    assert parts[2] == [Part.of(0, 196608, 262144), Part.of(0, 262144, 300000), Part.of(1, 0, 100), Part.of(2, 0, 5)]


def test_part_size_counts_bytes_on_the_wire() -> None:
    assert lengths(partition(schema((10,), part_size=16), [1.0])) == [[4, 4, 2]]
    assert lengths(partition(schema((10,), part_size=17), [1.0])) == [[4, 4, 2]]
    assert lengths(partition(schema((10,), part_size=16, code=CompressionType.FLOAT16), [1.0])) == [[8, 2]]
    assert lengths(partition(schema((10,), part_size=16, code=CompressionType.UNIFORM_8BIT), [1.0])) == [[10]]
    mixed = Schema((TensorSpec("a", "float64", (4,)), TensorSpec("b", "bfloat16", (9,))), 16)
    assert lengths(partition(mixed, [1.0])) == [[2, 2, 8, 1]]


def test_the_last_interval_ends_with_the_last_element() -> None:
    # floor() alone would end it at 999, and the tie for the part at 799 would go to the last but one
    uneven = [0.1] * 10
    assert (np.cumsum(uneven) / np.sum(uneven) * 1000).astype(np.int64)[-3:].tolist() == [799, 899, 999]
    parts = partition(schema((799,), (201,), part_size=4 * 201), uneven)
    assert parts[-1] == [Part.of(1, 0, 201)]


def test_rounding_at_the_end_does_not_reach_a_client() -> None:
    # Ten times 0.1 sums to less sequentially than in pairs, so the last element falls to the last member
    uneven = [0.1] * 10 + [0.0]
    assert int(np.cumsum(uneven)[-1] / np.sum(uneven) * 1000) == 999
    parts = partition(schema((999,), (), part_size=400), uneven)
    assert parts[-1] == []
    assert parts[-2][-1] == Part.of(1, 0, 1)


def test_invalid_inputs_are_refused() -> None:
    tensors = schema((8,), part_size=16)
    for wrong in ([], [0.0, 0.0], [1.0, -1.0], [-1.0, 3.0], [math.nan, 1.0], [math.inf, 1.0]):
        with pytest.raises(RoundError):
            partition(tensors, wrong)
    with pytest.raises(ConfigError):
        partition(schema((8,), part_size=3), [1.0])


def dumb_partition(schema: Schema, shares: Sequence[float], length: int) -> list[list[Part]]:
    """Counts, for each part and member, the elements of the part that lie in the member's interval."""
    total = sum(spec.numel for spec in schema.tensors)
    pivots = (np.cumsum(shares) / np.sum(shares) * total).astype(np.int64)
    pivots[-1] = total
    owners = [next(member for member, pivot in enumerate(pivots) if element < pivot) for element in range(total)]
    result: list[list[Part]] = [[] for _ in shares]
    offset = 0
    for number, spec in enumerate(schema.tensors):
        for start in range(0, spec.numel, length):
            stop = min(start + length, spec.numel)
            inside = owners[offset + start : offset + stop]
            counts = [inside.count(member) for member in range(len(shares))]
            result[counts.index(max(counts))].append(Part.of(number, start, stop))
        offset += spec.numel
    return result


share = st.sampled_from([0.0, 1.0, 2.0]) | st.floats(0, 1) | st.floats(0, 1e9)
some_shares = st.lists(share, min_size=1, max_size=9).filter(lambda drawn: sum(drawn) > 1e-300)
shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=6)


@given(shapes, some_shares, st.integers(1, 40))
def test_parts_against_counting(drawn: list[tuple[int, ...]], shares: list[float], length: int) -> None:
    shares = [*shares, 1.0]  # with a trailing 0 the last element may have no owner, see above
    tensors = schema(*drawn, part_size=4 * length)
    assert partition(tensors, shares) == dumb_partition(tensors, shares, length)


# --- the largest elements of each block -----------------------------------------------------------


@given(
    shapes=st.lists(st.lists(st.integers(0, 150), max_size=3).map(tuple), min_size=1, max_size=4),
    part_size=st.sampled_from([1024, 4096, 10_000, 1 << 20]),
    density=st.sampled_from([1e-4, 1 / 64, 0.3, 1.0]),
    bits=st.sampled_from([2, 8]),
    proportions=st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any),
    dense=st.booleans(),
)
def test_blocks_never_straddle_parts_nor_reducers(
    shapes: list[tuple[int, ...]], part_size: int, density: float, bits: int, proportions: list[int], dense: bool
) -> None:
    top_k = TopK(density, bits)
    specs = [TensorSpec(f"t{i}", "float32", shape, CompressionType.TOP_K) for i, shape in enumerate(shapes)]
    specs += [TensorSpec("dense", "float32", (700,))] if dense else []
    whole = Schema(tuple(specs), part_size, sparse=top_k)
    shards = partition(whole, [float(share) for share in proportions])
    assert all(not shard for shard, share in zip(shards, proportions, strict=True) if not share)
    parts = sorted((part for shard in shards for part in shard), key=lambda part: part.slices)
    owners = {part: owner for owner, shard in enumerate(shards) for part in shard}
    in_order = [owners[part] for part in parts]
    assert in_order == sorted(in_order)
    for number, spec in enumerate(specs):
        own = [part for part in parts if part.tensor == number]
        assert [0, *(part.slices[0].stop for part in own)] == [*(part.slices[0].start for part in own), spec.numel]
        if spec.compression is CompressionType.TOP_K:
            runs = BlockLayout(spec.shape).runs
            for part in own:
                (run,) = [run for run in runs if run.start <= part.slices[0].start < run.stop]
                assert part.slices[0].stop <= run.stop
                assert (part.slices[0].start - run.start) % run.size == part.numel % run.size == 0
                (size,) = packed_sizes(forms_of(whole), [part])
                assert size == top_k_nbytes(part.numel, run.size, top_k)
                # As large as a part may be; one block and a table may be larger.
                assert size <= max(part_size, run.size * 2.5) + 1024 + 2
                assert part.numel <= max(part_size, run.size)
