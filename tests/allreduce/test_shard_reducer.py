"""Reducers of a shard: the weighted average, robust rules and sparse contributions, against naive references."""

import random
import statistics
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from averaging.allreduce.shard_reducer import (
    RobustReducer,
    ShardReducer,
    SparseReducer,
    aggregate,
    centered_clip,
    limit_norms,
)
from averaging.errors import ProtocolViolationError
from averaging.protocol import MeanOver, TopK
from averaging.protocol.group import Aggregation, AggregationKind, parse_aggregation
from averaging.tensors import BlockLayout, Contribution, SparsePart, SparseTensor, combine
from tests.allreduce.sparse_rounds import dumb_average


@given(seed=st.integers(0, 2**32), senders=st.integers(0, 5), parts=st.integers(1, 5), with_local=st.booleans())
def test_every_part_is_the_average_of_the_senders_that_delivered_it(
    seed: int, senders: int, parts: int, with_local: bool
) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 7) for _ in range(parts)]
    weights = {f"s{i}": rng.choice([0.0, 0.5, 1.0, 3.0, 1e6]) for i in range(senders)}
    local_weight = rng.choice([0.0, 1.0, 2.0])
    values = {
        (s, p): torch.tensor([rng.uniform(-9, 9) for _ in range(sizes[p])]) for s in weights for p in range(parts)
    }
    local = [torch.tensor([rng.uniform(-9, 9) for _ in range(size)]) for size in sizes]
    before = {place: tensor.clone() for place, tensor in values.items()}
    local_before = [tensor.clone() for tensor in local]

    reducer = ShardReducer(sizes, weights)
    delivered: dict[str, int] = dict.fromkeys(weights, 0)
    alive = set(weights)
    results: dict[int, torch.Tensor | None] = {}
    contributors: dict[int, list[str]] = {}

    def take() -> None:
        for number in reducer.take_complete():
            assert number not in results
            contributors[number] = [s for s in weights if delivered[s] > number]
            results[number] = reducer.finish(number, local[number] if with_local else None, local_weight)

    take()
    while len(results) < parts:
        sender = rng.choice(sorted(s for s in alive if delivered[s] < parts))
        if rng.random() < 0.15:
            alive.discard(sender)
            reducer.drop(sender)
        else:
            sent = values[sender, delivered[sender]]
            if rng.random() < 0.5:
                reducer.add(sender, sent.clone(), spare=True)
            else:
                reducer.add(sender, sent)
            delivered[sender] += 1
        take()

    # What is not spare is not written: decoded parts may be shared, and the local one is this member's own tensors.
    assert all(torch.equal(values[place], tensor) for place, tensor in before.items())
    assert all(map(torch.equal, local, local_before))
    for number, result in results.items():
        terms = [(weights[s], values[s, number]) for s in contributors[number]]
        if with_local:
            terms.append((local_weight, local[number]))
        total = sum(weight for weight, _ in terms)
        if total == 0:
            assert result is None
            continue
        expected = (
            sum((weight * value.double() for weight, value in terms), torch.zeros(sizes[number]).double()) / total
        )
        assert result is not None
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_part_is_complete_before_the_slowest_sender() -> None:
    reducer = ShardReducer([2, 2], {"a": 1.0, "b": 1.0})
    reducer.add("a", torch.ones(2))
    reducer.add("a", torch.ones(2))
    assert list(reducer.take_complete()) == []
    reducer.add("b", torch.ones(2))
    assert list(reducer.take_complete()) == [0]
    reducer.drop("b")
    assert list(reducer.take_complete()) == [1]


@pytest.mark.parametrize("values", [torch.ones(3), torch.ones(1, 2), torch.ones(0)])
def test_a_part_of_the_wrong_shape_is_refused(values: torch.Tensor) -> None:
    reducer = ShardReducer([2], {"a": 1.0})
    with pytest.raises(ProtocolViolationError, match="part 0"):
        reducer.add("a", values)


def test_one_part_too_many_is_refused() -> None:
    reducer = ShardReducer([1], {"a": 1.0})
    reducer.add("a", torch.ones(1))
    with pytest.raises(ProtocolViolationError, match="more than the 1 parts"):
        reducer.add("a", torch.ones(1))


def test_a_weight_of_zero_keeps_even_nan_out() -> None:
    reducer = ShardReducer([1], {"a": 0.0})
    reducer.add("a", torch.tensor([float("nan")]))
    assert list(reducer.take_complete()) == [0]
    result = reducer.finish(0, torch.tensor([4.0]), 2.0)
    assert result is not None
    assert result.tolist() == [4.0]


_WEIGHTS = st.floats(0, exclude_min=True, allow_infinity=False)  # every weight that a member may claim


@given(
    weights=st.lists(_WEIGHTS, min_size=1, max_size=6),
    local_weight=st.one_of(st.none(), _WEIGHTS),
    silent=st.one_of(st.none(), _WEIGHTS),
)
@example(weights=[5e-324], local_weight=1.0, silent=None)
@example(weights=[1e-39], local_weight=1.0, silent=None)
@example(weights=[1e308, 1e308], local_weight=None, silent=None)
@example(weights=[1.0, 1.0], local_weight=1.0, silent=1e50)
def test_extreme_weights_are_averaged_correctly(
    weights: list[float], local_weight: float | None, silent: float | None
) -> None:
    named = {str(number): weight for number, weight in enumerate(weights)}
    reducer = ShardReducer([1], named if silent is None else {**named, "silent": silent})
    terms = []
    for number, name in enumerate(named):
        terms.append((Fraction(named[name]), number + 1))
        reducer.add(name, torch.tensor([number + 1.0], dtype=torch.float16))
    reducer.drop("silent")
    assert list(reducer.take_complete()) == [0]
    local = None if local_weight is None else torch.tensor([9.0])
    if local_weight is not None:
        terms.append((Fraction(local_weight), 9))
    result = reducer.finish(0, local, local_weight or 0.0)
    assert result is not None
    expected = sum(weight * value for weight, value in terms) / sum(weight for weight, _ in terms)
    assert result.item() == pytest.approx(float(expected), rel=1e-5)


# Robust aggregation, compared with naive references and with the bounds from the literature

RULES = ["median", "trimmed:1", "trimmed:3", "clip:0.5", "clip:10"]
numbers = st.floats(-1e3, 1e3, width=32)
matrices = st.integers(1, 7).flatmap(
    lambda members: st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=members, max_size=members)
)


def tensors(rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


@given(matrices)
def test_the_median_is_that_of_each_coordinate(rows: list[list[float]]) -> None:
    result = aggregate(Aggregation(AggregationKind.MEDIAN), tensors(rows), [1.0] * len(rows))
    assert result.tolist() == pytest.approx([statistics.median(column) for column in zip(*rows, strict=True)], abs=1e-9)


@given(matrices, st.integers(1, 4), st.data())
def test_trimming_leaves_out_the_extremes_of_each_coordinate(
    rows: list[list[float]], trim: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(rows), max_size=len(rows)))
    result = aggregate(Aggregation(AggregationKind.TRIMMED, trim), tensors(rows), weights)
    cap = sorted(weights)[(len(rows) - 1) // 2]
    while 2 * trim >= len(rows):
        trim -= 1
    for coordinate, value in enumerate(result.tolist()):
        ranked = sorted(range(len(rows)), key=lambda member: (rows[member][coordinate], member))
        kept = ranked[trim : len(rows) - trim]
        total = sum(min(weights[member], cap) for member in kept)
        mean = sum(min(weights[member], cap) * rows[member][coordinate] for member in kept) / total
        assert value == pytest.approx(mean, abs=1e-6)


@given(matrices, st.sampled_from([0.5, 10.0]))
def test_clipping_converges_to_the_balance_of_the_pulls(rows: list[list[float]], tau: float) -> None:
    """The result minimises the (convex) sum of Huber losses: no nearby point is lower."""
    values = tensors(rows)

    def loss(point: torch.Tensor) -> float:
        total = 0.0
        for value in values:
            distance = float(torch.linalg.vector_norm(value - point))
            total += distance**2 / 2 if distance <= tau else tau * (distance - tau / 2)
        return total

    at_median = loss(aggregate(Aggregation(AggregationKind.MEDIAN), values, [1.0] * len(rows)))
    result = centered_clip(values, [1.0] * len(rows), tau)
    least = loss(result)
    assert least <= at_median + 1e-6
    if sum(float(torch.linalg.vector_norm(value - result)) <= tau for value in values) > len(rows) / 2:
        for axis in range(3):
            for distance in (-1e-2, 1e-2):
                moved = result.clone()
                moved[axis] += distance
                assert loss(moved) >= least - 1e-6 * tau * len(rows)


@pytest.mark.parametrize("far", [1e3, 1e6, 1e15])
@pytest.mark.parametrize(("count", "false", "tau"), [(16, 7, 10.0), (8, 2, 1.0), (5, 2, 3.0)])
def test_the_bias_of_clipping_does_not_depend_on_the_distance_of_false_values(
    count: int, false: int, tau: float, far: float
) -> None:
    values = [torch.tensor([far if member < false else 0.0]) for member in range(count)]
    result = aggregate(Aggregation(AggregationKind.CLIP, tau), values, [1.0] * count)
    assert result.item() == pytest.approx(false * tau / (count - false), rel=1e-4)


@pytest.mark.parametrize("rule", ["median", "trimmed:3", "clip:1"])
@given(
    seed=st.integers(0, 2**32), false=st.sampled_from([1e6, -1e6, 3e38, float("inf"), float("nan")]),
    claimed=st.sampled_from([5e-324, 1e-300, 1e-6, 1.0, 1e30]),
)  # fmt: skip
def test_three_false_members_of_eight_have_a_bounded_effect(rule: str, seed: int, false: float, claimed: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    honest = [torch.randn(6, generator=generator) for _ in range(5)]
    values = [*honest, *[torch.full((6,), false)] * 3]
    result = aggregate(parse_aggregation(rule), values, [1.0, 2.0, 3.0, 2.0, 1.0, *[claimed] * 3])
    stacked = torch.stack(honest)
    if rule == "clip:1":
        # At most 3 capped false weights against 5 honest ones of at least a third, within the spread of the honest.
        assert (result - stacked.mean(dim=0)).norm() < 20
    else:
        assert ((stacked.amin(dim=0) - 1e-5 <= result) & (result <= stacked.amax(dim=0) + 1e-5)).all()


def test_members_left_after_trimming_count_however_small_their_weights() -> None:
    values = [torch.tensor([1.0, 9.0]), torch.tensor([2.0, 8.0]), torch.tensor([3.0, 7.0])]
    result = aggregate(Aggregation(AggregationKind.TRIMMED, 1.0), values, [1.0, 1e-300, 1.0])
    assert result.tolist() == [2.0, 8.0]


@pytest.mark.parametrize("tau", [1e-3, 1e-30])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [1e30, 1e-300]])
def test_pulls_that_vanish_in_the_dtype_are_no_error(tau: float, weights: list[float]) -> None:
    result = aggregate(Aggregation(AggregationKind.CLIP, tau), [torch.tensor([-1.0]), torch.tensor([3e38])], weights)
    assert -1.0 <= result.item() <= 3e38


def test_many_members_are_sorted_like_few() -> None:
    values = [torch.tensor([float(member * 7 % 45)]) for member in range(45)]
    assert aggregate(Aggregation(AggregationKind.MEDIAN), values, [1.0] * 45).item() == 22.0


def test_more_coordinates_than_one_block() -> None:
    values = [torch.arange(200_000.0) + member for member in (5, 0, 1)]
    assert torch.equal(aggregate(Aggregation(AggregationKind.MEDIAN), values, [1.0] * 3), torch.arange(200_000.0) + 1)


def shard_reducer(rule: str, sizes: list[int], weights: dict[str, float]) -> ShardReducer:
    return ShardReducer(sizes, weights, lambda _: RobustReducer(parse_aggregation(rule)))


@pytest.mark.parametrize("rule", RULES)
def test_the_reducer_uses_the_senders_that_delivered_and_releases_the_part(rule: str) -> None:
    reducer = shard_reducer(rule, [2, 2], {"a": 1.0, "b": 1.0, "c": 0.0})
    for name, value in (("a", 1.0), ("b", 3.0), ("c", float("nan"))):
        reducer.add(name, torch.full((2,), value, dtype=torch.float16))
    reducer.drop("b")
    assert list(reducer.take_complete()) == [0]
    local = torch.tensor([9.0, 5.0])
    expected = aggregate(parse_aggregation(rule), [torch.full((2,), 1.0), torch.full((2,), 3.0), local], [1.0] * 3)
    assert expected.tolist() != [2.0, 2.0]  # the result without this member's contribution
    assert expected.equal(reducer.finish(0, local, 1.0))
    assert reducer.finish(0, None, 0.0) is None
    for name in ("a", "c"):
        reducer.add(name, torch.full((2,), 7.0))
    assert list(reducer.take_complete()) == [1]
    # The weight of an auxiliary is ignored.
    assert torch.tensor([7.0, 7.0]).equal(reducer.finish(1, None, 5.0))


@pytest.mark.parametrize("rule", ["mean", *RULES])
def test_float64_keeps_its_precision(rule: str) -> None:
    reducer = (
        ShardReducer([1], {"a": 1.0, "b": 1.0}) if rule == "mean" else shard_reducer(rule, [1], {"a": 1.0, "b": 1.0})
    )
    for name in ("a", "b"):
        reducer.add(name, torch.tensor([1.0 + 2**-50], dtype=torch.float64))
    assert list(reducer.take_complete()) == [0]
    result = reducer.finish(0, None, 0.0)
    assert result is not None
    assert result.item() == 1.0 + 2**-50


# Sparse contributions, compared with a slow reference

BLOCK = 4096
LARGEST = torch.finfo(torch.float32).max


def contribution(tensor: SparseTensor, start: int, stop: int) -> Contribution:
    return Contribution(tensor.values(start, stop), tensor.wire(start, stop).buffer)


def given_by(values: Mapping[int, float], numel: int = 8) -> Contribution:
    """A contribution with these elements."""
    indices = torch.tensor(sorted(values), dtype=torch.int64)
    return Contribution(SparsePart(numel, indices, torch.tensor([values[int(i)] for i in indices])), b"")


def average_of(
    given: Mapping[str, tuple[Contribution, float]],
    mean_over: MeanOver = MeanOver.SENDERS,
    local: tuple[Contribution | None, float] = (None, 0.0),
) -> SparsePart | None:
    """The average of one part."""
    weights = {name: weight for name, (_, weight) in given.items()}
    reducer = ShardReducer([8], weights, lambda _: SparseReducer())
    for name, (values, _) in given.items():
        reducer.add(name, values)
    assert list(reducer.take_complete()) == [0]
    scaled = reducer.finish(0, *local)
    return None if scaled is None else combine(scaled, mean_over)


@given(
    seed=st.integers(0, 2**32),
    senders=st.integers(0, 5),
    parts=st.integers(1, 3),
    with_local=st.booleans(),
    mean_over=st.sampled_from(MeanOver),
    bits=st.sampled_from([2, 4, 8]),
)
def test_every_sparse_part_is_the_average_of_the_senders_that_delivered_it(
    seed: int, senders: int, parts: int, with_local: bool, mean_over: MeanOver, bits: int
) -> None:
    rng = random.Random(seed)
    layout, top_k = BlockLayout((parts * BLOCK,)), TopK(rng.choice([1 / 512, 1 / 64, 1 / 8]), bits, mean_over)
    weights = {f"s{i}": rng.choice([0.0, 0.5, 1.0, 3.0, 1e6, 1e-20]) for i in range(senders)}
    generator = torch.Generator().manual_seed(seed)

    def any_tensor() -> SparseTensor:
        size = rng.choice([0.0, 1e-10, 1.0, 1.0, 50.0, 1e10])
        return SparseTensor.of(torch.randn(parts * BLOCK, generator=generator) * size, layout, top_k)

    sent, own = {name: any_tensor() for name in weights}, any_tensor() if with_local else None
    local_weight = rng.choice([0.0, 1.0, 2.0])

    reducer = ShardReducer([BLOCK] * parts, weights, lambda _: SparseReducer())
    delivered, alive, results = dict.fromkeys(weights, 0), set(weights), {}

    def take() -> None:
        for number in reducer.take_complete():
            piece = number * BLOCK, (number + 1) * BLOCK
            local = None if own is None else contribution(own, *piece)
            of = [(sent[s].values(*piece), weights[s]) for s in weights if delivered[s] > number]
            of += [] if own is None else [(own.values(*piece), local_weight)]
            results[number] = reducer.finish(number, local, local_weight), of

    take()
    while len(results) < parts:
        sender = rng.choice(sorted(s for s in alive if delivered[s] < parts))
        if rng.random() < 0.15:
            alive.discard(sender)
            reducer.drop(sender)
        else:
            start = delivered[sender] * BLOCK
            reducer.add(sender, contribution(sent[sender], start, start + BLOCK))
            delivered[sender] += 1
        take()

    for result, of in results.values():
        if not any(weight for _, weight in of):
            assert result is None
            continue
        average = combine(result, mean_over)
        expected = dumb_average([values for values, _ in of], [weight for _, weight in of], mean_over)
        assert average.indices.tolist() == np.flatnonzero(~np.isnan(expected)).tolist()
        exact, largest = expected[average.indices.numpy()], np.nanmax(np.abs(expected), initial=0.0)
        np.testing.assert_allclose(average.values.double().numpy(), exact, rtol=1e-5, atol=1e-6 * largest + 1e-44)


def test_the_order_of_arrival_changes_no_bit() -> None:
    layout, top_k = BlockLayout((BLOCK,)), TopK(1 / 16, 8)
    tensors = {str(n): SparseTensor.of(torch.randn(BLOCK) * 3**n, layout, top_k) for n in range(6)}
    found = []
    for order in (list(tensors), list(reversed(tensors)), sorted(tensors, key=lambda name: (int(name) % 2, name))):
        reducer = ShardReducer([BLOCK], {name: 1.0 + int(name) for name in tensors}, lambda _: SparseReducer())
        for name in order:
            reducer.add(name, contribution(tensors[name], 0, BLOCK))
        found.append(combine(reducer.finish(0, None, 0.0), MeanOver.ALL).values)
    assert all(torch.equal(values, found[0]) for values in found)


@pytest.mark.parametrize("mean_over", MeanOver)
@pytest.mark.parametrize("value", [1e3, 1e30, LARGEST])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_huge_values_move_the_average_no_further_than_an_ordinary_contribution(
    count: int, value: float, mean_over: MeanOver
) -> None:
    honest = {f"h{n}": (given_by({n % 8: 1.0, (n + 1) % 8: -1.0}), 1.0) for n in range(count - 1)}
    norm = 2**0.5
    hostile = {"hostile": (given_by({0: value, 3: -value, 7: value}), 1.0)}
    average = average_of(honest | hostile, mean_over)
    assert average is not None
    without = average_of(honest, mean_over)
    assert without is not None
    moved = float((average.dense() - without.dense()).norm())
    assert moved <= 2 * norm * (1 if mean_over is MeanOver.SENDERS else 1 / count + 1e-6)


@pytest.mark.parametrize("mean_over", MeanOver)
@pytest.mark.parametrize("weight", [1e3, 1e38, 1e300])
def test_a_huge_weight_decides_the_average_but_not_its_length(weight: float, mean_over: MeanOver) -> None:
    honest = {f"h{n}": (given_by({n: 1.0}), 1.0) for n in range(3)}
    average = average_of(honest | {"hostile": (given_by({3: 1e9, 4: 1e9}), weight)}, mean_over)
    assert average is not None
    # Each element is within what somebody has sent, at most the median norm, which is 1.
    assert float(average.values.abs().max()) <= 1.0
    if mean_over is MeanOver.SENDERS:
        assert average.dense()[:3].tolist() == [1.0, 1.0, 1.0]  # nobody else has sent these


def test_weights_that_differ_by_more_than_float32_holds_are_no_error() -> None:
    tiny, huge = (given_by({1: 2.0, 2: 2.0}), 5e-324), (given_by({2: 1.0}), 1.7e308)
    average = average_of({"tiny": tiny, "huge": huge})
    assert average is not None
    assert average.dense()[:3].tolist() == pytest.approx([0.0, 2**-0.5, 1.0])


def test_elements_that_only_members_of_weight_0_sent_are_not_averaged() -> None:
    none = (given_by({1: 5.0, 2: float("inf")}), 0.0)
    for mean_over in MeanOver:
        average = average_of({"a": none, "b": (given_by({2: 4.0}), 2.0)}, mean_over)
        assert average is not None
        assert (average.indices.tolist(), average.values.tolist()) == ([2], [4.0])
    assert average_of({"a": none}) is None
    assert average_of({"a": none}, local=(given_by({1: 1.0}), 0.0)) is None
    assert average_of({}) is None


@given(st.lists(st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=9))
@example([0.0, 0.0])
@example([5e-324, 1e300])
@example([5.6766230246609836e299, 3.5292198942270265e-17])
def test_norms_are_limited_to_the_lower_median(norms: list[float]) -> None:
    scales = limit_norms(norms)
    ordinary = sorted(norm for norm in norms if norm > 0)
    assert all(0 <= scale <= 1 for scale in scales)
    for norm, scale in zip(norms, scales, strict=True):
        if ordinary:
            assert norm * scale <= ordinary[(len(ordinary) - 1) // 2] * (1 + 1e-12) + 1e-300
        assert scale == 1 or norm > ordinary[(len(ordinary) - 1) // 2]
