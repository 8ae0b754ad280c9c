"""The average of sparse contributions: its arithmetic, its forms on the wire, and what is lost in them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from averaging.protocol import CompressionType, MeanOver, TopK
from averaging.tensors import (
    BlockLayout,
    Contribution,
    EncodedUnion,
    SparsePart,
    SparseTensor,
    combine,
    decode_top_k,
    decode_union,
    encode_union,
    union_limit,
)
from tests.support.selection import examples

AS_THEY_CAME, INDICES_8BIT, INDICES_BFLOAT16, BITMAP_8BIT, BITMAP_BFLOAT16 = range(5)


def contributions(
    members: int, blocks: int, size: int, top_k: TopK, *, alike: float = 0.0, seed: int = 0
) -> list[Contribution]:
    """Random contributions to a part whose correlation is `alike`."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(blocks * size, generator=generator)
    found = []
    for member in range(members):
        own = torch.randn(blocks * size, generator=generator)
        values = math.sqrt(alike) * common + math.sqrt(1 - alike) * own
        layout = BlockLayout((blocks * size,))
        if size < 4096:
            layout = BlockLayout((blocks * 64, size // 64))
        wire = SparseTensor.of(values, layout, top_k).wire(0, blocks * size)
        part = decode_top_k(wire, size, top_k)
        found.append(Contribution(part, wire.buffer, weight=1 + member % 3, scale=1 / (1 + member % 2)))
    return found


def dumb_mean(all_of_them: list[Contribution], mean_over: MeanOver) -> dict[int, float]:
    """The mean of every element that somebody sent."""
    sums: dict[int, list[float]] = {}
    for one in all_of_them:
        for index, value in zip(one.part.indices.tolist(), one.part.values.tolist(), strict=True):
            held = sums.setdefault(index, [0.0, 0.0])
            held[0] += value * one.scale * one.weight
            held[1] += one.weight
    everyone = sum(one.weight for one in all_of_them)
    senders = mean_over is MeanOver.SENDERS
    return {index: total / (weight if senders else everyone) for index, (total, weight) in sums.items()}


def same(one: SparsePart, other: SparsePart) -> bool:
    return (
        one.numel == other.numel
        and torch.equal(one.indices, other.indices)
        and torch.equal(one.values.view(torch.int32), other.values.view(torch.int32))
    )


def check(reply: EncodedUnion, mean: SparsePart, size: int, top_k: TopK, members: int) -> None:
    """All members decode what the reducer knows, and what it has lost is what they lack."""
    assert same(decode_union(reply.wire, size, top_k, members), reply.part)
    assert torch.equal(reply.part.indices, mean.indices)
    lost = torch.zeros_like(mean.values) if reply.loss is None else reply.loss
    assert torch.allclose(reply.part.values + lost, mean.values, rtol=1e-6, atol=1e-9)
    assert len(reply.wire.buffer) <= union_limit(mean.numel, size, top_k, members)
    assert (reply.wire.size, reply.wire.compression) == ((mean.numel,), CompressionType.TOP_K_UNION)


@pytest.mark.parametrize("mean_over", MeanOver)
def test_the_mean_is_weighted_and_scaled(mean_over: MeanOver) -> None:
    top_k = TopK(1 / 16, 4, mean_over)
    given = contributions(5, 3, 4096, top_k, alike=0.5)
    expected = dumb_mean(given, mean_over)
    mean = combine(given, mean_over)
    assert mean.indices.tolist() == sorted(expected)
    # Every operation is rounded once and in this order, so that all members compute the same bits.
    assert mean.values.tolist() == [float(np.float32(expected[index])) for index in sorted(expected)]


def test_zeros_are_sent_and_counted() -> None:
    sent = SparsePart(8, torch.tensor([1, 5]), torch.tensor([0.0, 2.0]))
    other = SparsePart(8, torch.tensor([5]), torch.tensor([-2.0]))
    mean = combine([Contribution(sent, b""), Contribution(other, b"", scale=0.0)], MeanOver.SENDERS)
    assert (mean.indices.tolist(), mean.values.tolist()) == ([1, 5], [0.0, 1.0])


def test_huge_values_stay_finite() -> None:
    most = torch.finfo(torch.float32).max
    part = SparsePart(8, torch.tensor([1, 5]), torch.tensor([most, -most]))
    for mean_over in MeanOver:
        mean = combine([Contribution(part, b"", weight=3e38)] * 5, mean_over)
        assert mean.values.tolist() == [most, -most]
    three = [Contribution(part, bytes(11))] * 100
    reply = encode_union(three, 8, TopK(2 / 8), residual=torch.full((8,), most))
    assert torch.isfinite(reply.part.values).all()
    assert same(decode_union(reply.wire, 8, TopK(2 / 8), 100), reply.part)


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize(("blocks", "size"), [(1, 4096), (4, 4096), (3, 64 * 30), (5, 64)])
@pytest.mark.parametrize("members", [1, 3, 32])
def test_every_form_is_decoded_as_its_sender_says(members: int, blocks: int, size: int, alike: float) -> None:
    for top_k in (TopK(1 / 64, 2), TopK(1 / 16, 8, MeanOver.ALL)):
        given = contributions(members, blocks, size, top_k, alike=alike)
        check(encode_union(given, size, top_k), combine(given, top_k.mean_over), size, top_k, members)


def test_the_smallest_form_is_taken() -> None:
    def form(members: int, blocks: int, density: float, bits: int = 2, alike: float = 0.0) -> int:
        top_k = TopK(density, bits)
        given = contributions(members, blocks, 4096, top_k, alike=alike)
        return encode_union(given, 4096, top_k).wire.buffer[0]

    assert form(1, 16, 1 / 64) == AS_THEY_CAME
    assert form(2, 16, 1 / 64) == AS_THEY_CAME
    assert form(32, 8, 1 / 64) == BITMAP_8BIT
    assert form(8, 32, 1 / 100, alike=1.0) == INDICES_8BIT
    assert form(8, 8, 1 / 1024, alike=1.0) == INDICES_BFLOAT16
    assert form(8, 2, 1 / 10, alike=1.0) == BITMAP_BFLOAT16


def test_a_residual_is_added_to_a_union_and_what_is_lost_comes_back() -> None:
    top_k = TopK(1 / 16)
    given = contributions(8, 4, 4096, top_k)
    mean = combine(given, top_k.mean_over)
    residual, total = torch.zeros(mean.numel), torch.zeros(mean.numel, dtype=torch.float64)
    for _ in range(20):
        reply = encode_union(given, 4096, top_k, residual)
        assert reply.loss is not None
        residual[reply.part.indices] = reply.loss
        total[reply.part.indices] += reply.part.values
    assert torch.allclose(total + residual, 20 * mean.dense().double(), atol=1e-4)
    assert residual.abs().max() < 0.2  # it does not grow


@settings(max_examples=examples(160), deadline=None)
@given(
    members=st.integers(1, 12),
    blocks=st.integers(1, 3),
    width=st.integers(1, 64),
    kept=st.floats(1e-4, 1),
    bits=st.sampled_from([2, 4, 8]),
    mean_over=st.sampled_from(MeanOver),
    alike=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_any_part(
    members: int, blocks: int, width: int, kept: float, bits: int, mean_over: MeanOver, alike: float
) -> None:
    top_k, size = TopK(kept, bits, mean_over), 64 * width
    given = contributions(members, blocks, size, top_k, alike=alike, seed=width)
    residual = torch.from_numpy(np.random.default_rng(1).standard_normal(blocks * size).astype(np.float32))
    mean = combine(given, mean_over)
    check(encode_union(given, size, top_k), mean, size, top_k, members)
    reply = encode_union(given, size, top_k, residual)
    if reply.loss is not None:
        mean = SparsePart(mean.numel, mean.indices, mean.values + residual[mean.indices])
    check(reply, mean, size, top_k, members)
