"""The average of sparse contributions to a part, compared with a slow reference, with senders dropped at random."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from averaging.allreduce.shard_reducer import ShardReducer, SparseReducer, limit_norms
from averaging.protocol import MeanOver, TopK
from averaging.tensors import BlockLayout, Contribution, SparsePart, SparseTensor, combine
from tests.allreduce.sparse_rounds import dumb_average

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
def test_every_part_is_the_average_of_the_senders_that_delivered_it(
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
