"""Sparse contributions: blocks, the choice, the bytes, and what is decoded, against a reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from averaging.errors import ConfigError, TensorError
from averaging.protocol import CompressionType, MeanOver, TopK, parse_compression
from averaging.tensors import (
    BlockLayout,
    Contribution,
    SparseTensor,
    decode_top_k,
    decode_union,
    encode_union,
    top_k_nbytes,
)
from tests.tensors import dumb_top_k as dumb
from tests.tensors.test_compression import torch_by_default

SHAPES = [(), (0,), (1,), (4096,), (4097,), (5, 0), (64, 64), (3, 200), (200, 3), (65, 64), (130, 90), (70, 5, 7)]


def numbers(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed numbers, no two of the same magnitude."""
    count = math.prod(shape)
    order = np.random.default_rng(seed).permutation(count)
    quantiles: torch.Tensor = torch.special.ndtri((torch.from_numpy(order) + 0.75) / (count + 1))
    return (quantiles.to(torch.float32) * scale).reshape(shape)


def sparse(values: torch.Tensor, top_k: TopK) -> SparseTensor:
    layout = BlockLayout(tuple(values.shape))
    return SparseTensor.of(layout.to_blocks(values), layout, top_k)


def block_size_of(layout: BlockLayout, start: int) -> int:
    return next(run.size for run in layout.runs if run.start <= start < run.stop)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_are_those_of_the_reference(shape: tuple[int, ...]) -> None:
    values = numbers(shape)
    layout = BlockLayout(shape)
    expected = dumb.blocks_of(values.numpy())
    sizes = [run.size for run in layout.runs for _ in range(run.count)]
    assert sizes == [len(block) for block in expected if block]
    flat = layout.to_blocks(values)
    assert flat.tolist() == [values[place].item() for block in expected for place in block]
    assert torch.equal(layout.from_blocks(flat), values)
    assert layout.numel == values.numel() == flat.numel()


@pytest.mark.parametrize("shape", [(130, 150), (200, 3)], ids=str)
def test_any_strides_and_dtypes_are_read(shape: tuple[int, int]) -> None:
    layout, values = BlockLayout(shape), numbers(shape[::-1]).to(torch.bfloat16).t()
    assert torch.equal(layout.to_blocks(values), layout.to_blocks(values.float().contiguous()))
    flat = layout.to_blocks(values.requires_grad_())
    assert not flat.requires_grad
    before = flat.clone()
    layout.from_blocks(flat).zero_()
    assert torch.equal(flat, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("most", [1, 5000, 1 << 30])
def test_parts_hold_whole_blocks_of_one_size(shape: tuple[int, ...], most: int) -> None:
    layout = BlockLayout(shape)
    end = 0
    for start, stop in layout.cuts(most):
        assert start == end < stop
        end = stop
        run = next(run for run in layout.runs if run.start <= start < run.stop)
        assert stop <= run.stop
        assert (start - run.start) % run.size == (stop - start) % run.size == 0
        assert stop - start <= max(most, run.size)
    assert end == layout.numel


# --- contributions --------------------------------------------------------------------------------


@pytest.mark.parametrize(("density", "bits"), [(1 / 64, 2), (1 / 7, 4), (1.0, 8)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bytes_are_those_of_the_reference(shape: tuple[int, ...], density: float, bits: int) -> None:
    values, top_k = numbers(shape, seed=3), TopK(density, bits)
    contribution = sparse(values, top_k)
    blocks = [
        np.array([values[place].item() for place in block], np.float32)
        for block in dumb.blocks_of(values.numpy())
        if block
    ]
    places = [dumb.chosen(block, max(1, round(len(block) * density))) for block in blocks]
    kept = np.concatenate([block[place] for block, place in zip(blocks, places, strict=True)] or [np.zeros(0, "f4")])
    table, codes = dumb.quantised(kept.astype(np.float32), bits)
    block = code = 0
    for start, stop in contribution.layout.cuts(9000):
        size = block_size_of(contribution.layout, start)
        indices = [index for place in places[block : block + (stop - start) // size] for index in place]
        block, codes_of_part = block + (stop - start) // size, codes[code : code + len(indices)]
        code += len(indices)
        wire = contribution.wire(start, stop)
        assert bytes(wire.buffer) == dumb.part_bytes(indices, table, codes_of_part, bits)
        assert len(wire.buffer) == top_k_nbytes(stop - start, size, top_k)
        assert (wire.size, wire.dtype, wire.compression) == ((stop - start,), "top_k_float32", CompressionType.TOP_K)


EXTREMES: dict[str, Any] = {
    "equal": lambda count: torch.full((count,), -2.5),
    "zeros": torch.zeros,
    "negative zeros": lambda count: -torch.zeros(count),
    "denormal": lambda count: numbers((count,), scale=1e-41),
    "huge": lambda count: torch.where(numbers((count,)) > 0, 3.4e38, -3.4e38),
    "one outlier": lambda count: torch.cat([torch.tensor([3.4e38]), numbers((count - 1,), scale=1e-30)]),
    "normal": lambda count: numbers((count,)),
}


@pytest.mark.parametrize("top_k", [TopK(1 / 64, 2), TopK(1.0, 4), TopK(0.3, 8)], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("shape", [(5,), (9000,), (100, 130)], ids=str)
def test_what_is_decoded_is_known_bit_for_bit(shape: tuple[int, ...], name: str, top_k: TopK) -> None:
    values = EXTREMES[name](math.prod(shape)).reshape(shape)
    contribution = sparse(values, top_k)
    flat = contribution.layout.to_blocks(values)
    whole = torch.zeros_like(flat)
    for start, stop in contribution.layout.cuts(6000):
        size = block_size_of(contribution.layout, start)
        known, found = contribution.values(start, stop), decode_top_k(contribution.wire(start, stop), size, top_k)
        assert torch.equal(known.indices, found.indices)
        assert known.indices.dtype is found.indices.dtype is torch.int64
        assert torch.equal(known.values.view(torch.int32), found.values.view(torch.int32))
        assert found.numel == stop - start
        assert torch.isfinite(found.values).all()
        whole[start:stop] = found.dense()
        for first in range(0, stop - start, size):  # the sent elements are the largest
            block = flat[start + first : start + first + size].abs()
            sent = found.indices[(found.indices >= first) & (found.indices < first + size)] - first
            assert len(sent) == top_k.kept(size)
            assert torch.equal(block[sent].sort().values, block.sort().values[-len(sent) :])
    assert torch.equal(contribution.dense(), whole)
    if name in ("equal", "zeros"):
        assert torch.equal(whole[whole != 0], flat[whole != 0])


@pytest.mark.parametrize("size", [4096, 64 * 37, 640, 37 * 51])
def test_the_largest_are_found_exactly_whatever_their_number(size: int) -> None:
    layout = BlockLayout((size,))
    random = np.random.default_rng(size)
    ties = torch.from_numpy(random.integers(-3, 4, size).astype(np.float32))
    outliers = torch.zeros(size)
    outliers[: size // 3] = numbers((size // 3,), scale=100.0)  # all in few groups
    for values in (numbers((size,)), ties, outliers, outliers.flip(0)):
        for k in {
            1,
            2,
            size // 65,
            size // 64,
            size // 32,
            size // 32 + 1,
            size // 16,
            size // 16 + 1,
            size // 2,
            size,
        }:
            sent = SparseTensor.of(values, layout, TopK(k / size)).values(0, size).indices
            assert len(set(sent.tolist())) == k
            assert torch.equal(values[sent].abs().sort().values, values.abs().sort().values[-k:])


@pytest.mark.parametrize("usual", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_torch_s_default_dtype_and_device_change_nothing(usual: dict[str, Any]) -> None:
    def wires() -> list[bytes]:
        contribution = sparse(values, top_k)
        parts = [contribution.wire(*cut) for cut in contribution.layout.cuts(9000)]
        sizes = [block_size_of(contribution.layout, start) for start, _ in contribution.layout.cuts(9000)]
        found = []
        for part, size in zip(parts, sizes, strict=True):
            sent = Contribution(decode_top_k(part, size, top_k), part.buffer)
            reply = encode_union([sent] * 5, size, top_k, torch.zeros_like(values).view(-1)[: part.size[0]])
            mean = decode_union(reply.wire, size, top_k, 5)
            assert torch.equal(mean.dense(), reply.part.dense())
            found += [bytes(part.buffer), bytes(reply.wire.buffer)]
        assert torch.equal(
            contribution.layout.from_blocks(contribution.dense()), contribution.layout.from_blocks(whole)
        )
        return found

    values, top_k = numbers((130, 150)), TopK(1 / 40, 4)
    whole = sparse(values, top_k).dense()
    expected = wires()
    with torch_by_default(**usual):
        assert wires() == expected


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(3,), (5000,), (130, 70)], ids=str)
def test_non_finite_numbers_are_refused(shape: tuple[int, ...], wrong: float) -> None:
    values = numbers(shape, scale=1e30)
    for place in (0, values.numel() // 2, values.numel() - 1):
        broken = values.clone()
        broken.view(-1)[place] = wrong
        with pytest.raises(TensorError, match="NaN or infinity cannot be sent in top_k"):
            sparse(broken, TopK())


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"density": 0}, "density, .* must be above 0 and at most 1, not 0"),
        ({"density": math.nan}, "density, .* not nan"),
        ({"bits": 3}, "bits, .* must be 2, 4 or 8, not 3"),
        ({"mean_over": "some"}, "mean_over must be one of senders, all, not 'some'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TopK(**options)


def test_options_by_name() -> None:
    assert TopK(1, 4, "all").mean_over is MeanOver.ALL  # type: ignore[arg-type]
    assert parse_compression("TOP_K") is CompressionType.TOP_K
    assert [TopK(1 / 64).kept(size) for size in (1, 64, 96, 1000, 4096)] == [1, 1, 2, 16, 64]
    with pytest.raises(ConfigError, match="one of none, .*, top_k, visible, not 'top_k_union'"):
        parse_compression("top_k_union")
