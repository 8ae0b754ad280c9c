"""Codecs: shapes, dtypes and memory, their errors, and a decoder that trusts nothing."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from averaging.errors import ProtocolViolationError, TensorError
from averaging.protocol.messages import CompressionType, WireTensor
from averaging.tensors.compression import codec_of, decode, encode
from averaging.tensors.manifest import AVERAGED_DTYPES
from tests.support.selection import examples

Array = npt.NDArray[np.float32]

CODES = [code for code in CompressionType if not code.is_sparse]
LOSSY = [code for code in CODES if code is not CompressionType.NONE]
SHAPES = [(), (0,), (3, 0), (0, 3), (1,), (7,), (3, 5), (2, 3, 4), (1, 1, 1), (1025,), (2048,), (5, 1)]


def floats(limit: float) -> st.SearchStrategy[Array]:
    """Arrays of 0 to 3 dimensions: small ones with magnitudes up to `limit`, or normally distributed ones."""
    bound = float(np.float32(limit))
    small = hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12),
        elements=st.floats(-bound, bound, width=32),
    )
    return small | st.builds(
        lambda seed, count, scale, shift: (np.random.default_rng(seed).standard_normal(count) * scale + shift).astype(
            np.float32
        ),
        st.integers(0, 1000),
        st.integers(0, 3000),
        st.sampled_from([1e-12, 1e-3, 1.0, 1e4]),
        st.sampled_from([0.0, 1.0, -300.0]),
    )


@contextmanager
def torch_by_default(*, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Iterator[None]:
    """Sets torch's default dtype or device as an application may have done."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("usual", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_torch_s_default_dtype_and_device_change_nothing(code: CompressionType, usual: dict[str, Any]) -> None:
    values, none = torch.linspace(-1, 1, 3000), torch.zeros(0)
    expected = encode(values, code)
    with torch_by_default(**usual):
        found = encode(values, code)
        decoded, empty = decode(found), decode(encode(none, code))
    assert bytes(found.buffer) == bytes(expected.buffer)
    assert torch.equal(decoded, decode(expected))
    assert torch.equal(empty, none)


def round_trip(values: Array, code: CompressionType) -> npt.NDArray[np.float64]:
    decoded = decode(encode(torch.tensor(values), code))
    assert decoded.dtype is torch.float32
    assert tuple(decoded.shape) == values.shape
    return decoded.numpy().astype(np.float64)


# --- shapes, dtypes, memory -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype(shape: tuple[int, ...]) -> None:
    for code, dtype in product(CODES, AVERAGED_DTYPES.values()):
        check_shape_and_dtype(code, shape, dtype)


def check_shape_and_dtype(code: CompressionType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    wire = encode(tensor, code)
    assert wire.size == shape
    assert not wire.requires_grad
    decoded = decode(wire)
    assert tuple(decoded.shape) == shape
    assert not decoded.requires_grad
    if code is CompressionType.NONE:
        assert decoded.dtype is dtype
        assert torch.equal(decoded, tensor.detach())
    else:
        assert decoded.dtype is torch.float32
        assert wire == encode(tensor.detach().float(), code)


@pytest.mark.parametrize("code", CODES)
def test_layout_in_memory_does_not_matter(code: CompressionType) -> None:
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    before = tensor.clone()
    assert encode(tensor.t(), code) == encode(tensor.t().contiguous(), code)
    assert encode(tensor[::2, 3:], code) == encode(tensor[::2, 3:].contiguous(), code)
    for shape in ((1,), (0,), (5, 7)):
        assert encode(torch.ones(1).expand(shape), code) == encode(torch.ones(shape), code)
        with_dtype = torch.ones((), dtype=torch.bfloat16).expand(shape)
        assert encode(with_dtype, code) == encode(with_dtype.clone(), code)
    assert torch.equal(tensor, before)


def test_none_shares_the_memory_it_keeps_alive() -> None:
    buffer = np.arange(1000, dtype=np.float32).tobytes()
    address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    references = sys.getrefcount(buffer)
    decoded = decode(WireTensor(buffer, (10, 100), "float32"))
    assert decoded.data_ptr() == address
    assert sys.getrefcount(buffer) == references + 1
    del decoded
    assert sys.getrefcount(buffer) == references


def test_integers_are_refused() -> None:
    for code in CODES:
        with pytest.raises(TensorError):
            encode(torch.zeros(3, dtype=torch.int32), code)
        with pytest.raises(TensorError):
            codec_of(code, torch.int64)


# --- errors ---------------------------------------------------------------------------------------


@given(floats(1e37))
def test_meanstd_error(values: Array) -> None:
    decoded = round_trip(values, CompressionType.MEANSTD_16BIT)
    rows = values.astype(np.float64).reshape(math.prod(values.shape[:-1]), math.prod(values.shape[-1:]))
    for row, got in zip(rows, decoded.reshape(rows.shape), strict=True):
        if row.size:
            std = max(float(np.std(row)), 1e-6)
            # centring, dividing, multiplying and adding each round once in float32, of numbers up to these
            rounding = 2**-22 * (np.max(np.abs(row)) + np.abs(row - row.mean()))
            bound = np.abs(row - row.mean()) * 2**-11 + std * 2**-25 + rounding
            assert np.all(np.abs(got - row) <= bound)


@given(floats(1e37))
def test_uniform_error(values: Array) -> None:
    flat = values.astype(np.float64).reshape(-1)
    decoded = round_trip(values, CompressionType.UNIFORM_8BIT).reshape(-1)
    if flat.size < 2:
        assert np.array_equal(decoded, flat)
        return
    width = 6 * float(np.std(flat, ddof=1)) / 256
    rounding = 2**-22 * np.max(np.abs(flat))
    # buckets 1 to 254; the two at the ends also hold outliers
    inner = np.abs(flat - flat.mean()) < 126.5 * width - rounding
    assert np.all(np.abs(decoded - flat)[inner] <= width * (1 + 2**-14) + rounding)


@given(floats(3e38), st.sampled_from([CompressionType.UNIFORM_8BIT, CompressionType.QUANTILE_8BIT]))
def test_decoded_number_lies_within_its_bucket(values: Array, code: CompressionType) -> None:
    flat = values.reshape(-1)
    wire = encode(torch.tensor(values), code)
    indices = np.frombuffer(wire.buffer, dtype=np.uint8, offset=1024)
    table = np.frombuffer(wire.buffer, dtype=np.float32, count=256)
    decoded = round_trip(values, code).reshape(-1)
    for bucket in range(256):
        inside = flat[indices == bucket]
        if inside.size:
            assert inside.min() <= table[bucket] <= inside.max()
            assert np.all(decoded[indices == bucket] == table[bucket])
        else:
            assert table[bucket] == 0
    if code is CompressionType.QUANTILE_8BIT and flat.size:
        # buckets follow the order of the numbers, and are equally full if no number repeats
        assert np.array_equal(np.sort(indices), indices[np.argsort(flat, kind="stable")])
        if len(np.unique(flat)) == flat.size:
            assert np.bincount(indices).max() <= math.ceil(flat.size / 256) + 1


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=255))
def test_quantiles_are_lossless_for_few_elements(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    assert np.array_equal(round_trip(array, CompressionType.QUANTILE_8BIT), array)


@pytest.mark.parametrize("code", CODES)
@given(
    values=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=0, max_dims=2, max_side=40),
        elements=st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf]),
    )
)
def test_non_finite_numbers_can_be_encoded(code: CompressionType, values: Array) -> None:
    decoded = decode(encode(torch.tensor(values), code))
    assert tuple(decoded.shape) == values.shape
    # a non-finite number never decodes to a finite one, except that FLOAT16 clamps infinity
    lost = np.isnan(values) if code is CompressionType.FLOAT16 else ~np.isfinite(values)
    assert not np.any(np.isfinite(decoded.numpy()) & lost)


def test_a_non_finite_block_does_not_affect_the_others() -> None:
    values = torch.ones(3000)
    values[1500] = math.nan
    decoded = decode(encode(values, CompressionType.BLOCKWISE_INT8))
    assert decoded[1024:2048].isnan().all()
    assert torch.equal(decoded[:1024], values[:1024])
    assert torch.equal(decoded[2048:], values[2048:])


# --- a decoder that trusts nothing ----------------------------------------------------------------

names = st.sampled_from(
    [*AVERAGED_DTYPES, "compressed_float32", "clamped_float32", "rounded_float32", "", "int32", "object", "float32\n"]
) | st.text(max_size=12)
codes = st.sampled_from([*map(int, CompressionType)]) | st.integers(-(2**31), 2**31 - 1)
extents = st.integers(0, 6) | st.sampled_from([-1, 2**31, 2**32 - 1, 2**63, 2**64]) | st.integers()
sizes = st.lists(st.integers(0, 6), max_size=4) | st.lists(extents, max_size=70)


@settings(max_examples=examples(400))
@given(st.binary(max_size=2000), sizes, names, codes, st.integers(-5, 5))
def test_decoder_accepts_or_refuses(buffer: bytes, size: list[int], dtype: str, code: int, chunks: int) -> None:
    try:
        decoded = decode(WireTensor(buffer, tuple(size), dtype, code, chunks))
    except ProtocolViolationError:
        return
    assert list(decoded.shape) == size


@settings(max_examples=examples(400))
@given(st.data())
def test_decoder_accepts_any_bytes_of_the_right_length(data: st.DataObject) -> None:
    code = data.draw(st.sampled_from(CODES))
    size = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12))
    wire = encode(torch.zeros(size), code)
    length = len(wire.buffer)
    buffer = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(length)
    decoded = decode(WireTensor(buffer, size, wire.dtype, code))
    assert tuple(decoded.shape) == size
    for wrong in {length + 1, length + 4, max(length - 1, 0), 0} - {length}:
        with pytest.raises(ProtocolViolationError, match=rf"takes {length} bytes, but {wrong}"):
            decode(WireTensor(bytes(wrong), size, wire.dtype, code))


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (WireTensor(b"", (0,), "float32", 5), "unknown"),
        (WireTensor(b"", (0,), "int64"), "float32"),
        (WireTensor(b"", (0,), "float32", CompressionType.FLOAT16), "clamped_float32"),
        (WireTensor(b"", (-1,), "float32"), "negative"),
        (WireTensor(b"", (2**32 - 1, 2**32 - 1), "float32"), "more than"),
        (WireTensor(b"", (2**32, 2**32), "float32"), "more than"),  # the product overflows 64 bits to 0
        (WireTensor(b"\0" * 4, (1,) * 65, "float32"), "dimensions"),
        (WireTensor(b"", (2**39,), "float32"), "takes"),
    ],
)
def test_refusals_give_the_reason(wire: WireTensor, reason: str) -> None:
    with pytest.raises(ProtocolViolationError, match=reason):
        decode(wire)
