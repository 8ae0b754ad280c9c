"""Robust aggregation, compared with naive references and with the bounds from the literature."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging import Outcome
from averaging.allreduce.shard_reducer import (
    RobustReducer,
    ShardReducer,
    aggregate,
    centered_clip,
)
from averaging.protocol.group import Aggregation, AggregationKind, ReplyForm, parse_aggregation
from tests.support.swarm import Swarm, spread

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


@pytest.mark.parametrize("rule", RULES)
def test_float64_keeps_its_precision(rule: str) -> None:
    reducer = shard_reducer(rule, [1], {"a": 1.0})
    reducer.add("a", torch.tensor([1.0 + 2**-50], dtype=torch.float64))
    result = reducer.finish(0, None, 0.0)
    assert result is not None
    assert result.item() == 1.0 + 2**-50


@pytest.mark.parametrize("reply", list(ReplyForm))
@pytest.mark.parametrize(("rule", "bound"), [("median", 1.0), ("trimmed:2", 1.0), ("clip:3", 3.0)])
def test_two_false_members_of_eight_have_a_bounded_effect(rule: str, bound: float, reply: ReplyForm) -> None:
    swarm = Swarm(5)
    values = [torch.rand(700, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    honest = torch.stack(values[:6]).mean(dim=0)
    for false in values[6:]:
        false.fill_(1e6)
    peers = [
        swarm.peer(f"peer:{n + 1}", [values[n]], group_size=8, aggregation=rule, part_size_bytes=1024, reply_form=reply)
        for n in range(8)
    ]
    for receipts in swarm.simulate(swarm.average_together(peers)):
        assert receipts[0].outcome is Outcome.AVERAGED
        assert receipts[0].dropped == ()
    assert spread(values[:6]) < 1e-9
    assert float((values[0] - honest).abs().max()) < bound
