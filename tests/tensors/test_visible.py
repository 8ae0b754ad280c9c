"""VISIBLE: which elements of a change are sent, their bytes, and their average, against a reference."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from averaging.errors import TensorError
from averaging.protocol import CompressionType
from averaging.tensors import (
    BlockLayout,
    Contribution,
    VisibleTensor,
    decode_union,
    decode_visible,
    encode_union,
    union_limit,
    visible_limit,
)
from tests.support.selection import examples
from tests.tensors import dumb_top_k as dumb
from tests.tensors.test_sparse import EXTREMES, SHAPES, numbers


def rounded(number: float) -> float:
    """The nearest number in bfloat16, of two the even one: of the bits of a float32 the upper 16."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    up = bits + 0x7FFF + (bits >> 16 & 1)
    return float(struct.unpack("<f", struct.pack("<I", up >> 16 << 16))[0])


def visible(change: torch.Tensor, weights: torch.Tensor) -> VisibleTensor:
    layout = BlockLayout(tuple(change.shape))
    return VisibleTensor.of(layout.to_blocks(change), layout, layout.to_blocks(weights))


def dumb_bytes(block_sizes: int, blocks: list[list[float]], seen: list[list[int]]) -> bytes:
    """A part: form 2 or 4, whichever is shorter."""
    values = b"".join(
        struct.pack("<f", rounded(block[index]))[2:]
        for block, indices in zip(blocks, seen, strict=True)
        for index in indices
    )
    counts = b"".join(struct.pack("<H", len(indices)) for indices in seen)
    packed = counts + dumb.packed([index for indices in seen for index in indices], 12)
    bits = sum(1 << (number * block_sizes + index) for number, indices in enumerate(seen) for index in indices)
    bitmap = bits.to_bytes(-(-block_sizes * len(blocks) // 8), "little")
    return (b"\2" + packed if len(packed) <= len(bitmap) else b"\4" + bitmap) + values


@pytest.mark.parametrize("lr", [1e-6, 1e-4, 1e-2, 10.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_are_those_of_the_reference(shape: tuple[int, ...], lr: float) -> None:
    weights, change = numbers(shape, 1, 0.05), numbers(shape, 2, lr)
    contribution = visible(change, weights)
    after = weights - change  # in float32
    blocks = [block for block in dumb.blocks_of(change.numpy()) if block]
    seen = [
        [n for n, place in enumerate(block) if rounded(after[place].item()) != rounded(weights[place].item())]
        for block in blocks
    ]
    values = [[change[place].item() for place in block] for block in blocks]
    place = 0
    for start, stop in contribution.layout.cuts(9000):
        size = contribution.layout.block_size(start)
        end = place + (stop - start) // size
        wire = contribution.wire(start, stop)
        assert bytes(wire.buffer) == dumb_bytes(size, values[place:end], seen[place:end])
        assert (wire.size, wire.dtype, wire.compression) == ((stop - start,), "top_k_float32", CompressionType.VISIBLE)
        place = end


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("shape", [(5,), (9000,), (100, 130)], ids=str)
def test_what_is_decoded_is_known_bit_for_bit(shape: tuple[int, ...], name: str) -> None:
    change = EXTREMES[name](math.prod(shape)).reshape(shape)
    contribution = visible(change, numbers(shape, 5))
    whole = torch.zeros(change.numel())
    for start, stop in contribution.layout.cuts(6000):
        size = contribution.layout.block_size(start)
        wire, known = contribution.wire(start, stop), contribution.values(start, stop)
        found = decode_visible(wire, size)
        assert torch.equal(known.indices, found.indices)
        assert torch.equal(known.values.view(torch.int32), found.values.view(torch.int32))
        assert len(wire.buffer) <= visible_limit(stop - start, size)
        whole[start:stop] = found.dense()
    assert torch.equal(contribution.dense(), whole)
    exact = contribution.layout.to_blocks(change)
    assert torch.equal(whole.double() + (exact - whole).double(), exact.double())  # what is kept is exact


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused(wrong: float) -> None:
    change = torch.zeros(130, 70)
    change[129, 69] = wrong
    with pytest.raises(TensorError, match="NaN or infinity cannot be sent in visible"):
        visible(change, torch.ones(130, 70))


@settings(max_examples=examples(160), deadline=None)
@given(
    members=st.integers(1, 9),
    blocks=st.integers(1, 3),
    width=st.integers(1, 64),
    lr=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1.0]),
    alike=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 100),
)
def test_the_average_counts_who_did_not_send_as_0(
    members: int, blocks: int, width: int, lr: float, alike: float, seed: int
) -> None:
    size, shape = 64 * width, (64 * blocks, width)
    numel, weights = blocks * size, numbers(shape, seed, 0.05)
    common, given, sums, everyone = numbers(shape, 1000), [], torch.zeros(numel, dtype=torch.float64), 0.0
    seen = torch.zeros(numel, dtype=torch.bool)
    for member in range(members):
        change = (math.sqrt(alike) * common + math.sqrt(1 - alike) * numbers(shape, member)) * lr
        contribution = visible(change, weights)
        wire, weight = contribution.wire(0, numel), 1.0 + member % 3
        given.append(Contribution(decode_visible(wire, size), wire.buffer, weight))
        layout = contribution.layout
        exact, before = layout.to_blocks(change), layout.to_blocks(weights)
        chosen = (before - exact).bfloat16() != before.bfloat16()
        sums += torch.where(chosen, exact.bfloat16().double(), 0.0) * weight
        everyone += weight
        seen |= chosen
    residual = numbers((numel,), seed, lr)
    reply = encode_union(given, size, None, residual)
    assert reply.loss is not None
    part = decode_union(reply.wire, size, None, members)
    assert part.indices.tolist() == seen.nonzero().view(-1).tolist()
    assert torch.equal(part.values.view(torch.int32), reply.part.values.view(torch.int32))
    assert torch.equal(part.values, part.values.bfloat16().float())
    expected = (sums / everyone).float()[seen] + residual[seen]
    torch.testing.assert_close(part.values + reply.loss, expected, rtol=1e-6, atol=1e-12)
    assert len(reply.wire.buffer) <= union_limit(numel, size, None, members)
    np.testing.assert_allclose(reply.loss.abs(), 0, atol=float(expected.abs().max() if len(expected) else 0) / 256)
