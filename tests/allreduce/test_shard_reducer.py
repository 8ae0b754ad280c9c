"""The weighted average of a shard, compared with a naive reference, with senders dropped at random times."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from averaging.allreduce.shard_reducer import ShardReducer
from averaging.errors import ProtocolViolationError


@given(
    seed=st.integers(0, 2**32),
    senders=st.integers(0, 5),
    parts=st.integers(1, 5),
    with_local=st.booleans(),
)
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


def test_float64_keeps_its_precision() -> None:
    reducer = ShardReducer([1], {"a": 1.0, "b": 1.0})
    for name, value in (("a", 1.0), ("b", 1.0 + 2**-50)):
        reducer.add(name, torch.tensor([value], dtype=torch.float64))
    reducer.take_complete()
    result = reducer.finish(0, None, 0.0)
    assert result is not None
    assert result.item() == 1.0 + 2**-51
