"""Codecs that work in pieces give the same bytes and values as a naive codec on the whole tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from averaging.protocol.messages import CompressionType
from averaging.tensors.compression import decode, encode

BLOCK = 1024

EDGES = [0, 1, 1023, 1024, 1025, 2047, 2**17 - 1, 2**17, 2**17 + 1, 2**18 - 1, 2**18, 2**18 + 1, 2**18 + 1024, 600_001]
"""Lengths around a block, and around the pieces of both codecs."""

ODD = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -3e38, 65504.0, 65519.9, -65520.0, 7e4], dtype=np.float32)


def numbers(count: int, seed: int, odd: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Normally distributed numbers of different magnitudes, some of them replaced by special values."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(count) * 10.0 ** int(rng.integers(-3, 4))).astype(np.float32)
    if count:
        values[rng.integers(0, count, odd)] = rng.choice(ODD, odd)
    return values


def int8_bytes(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> bytes:
    scales, data = b"", b""
    for start in range(0, len(values), BLOCK):
        block = torch.from_numpy(values[start : start + BLOCK])
        largest = block.abs().max()
        ratios = block / (largest if largest > 0 else 1.0)
        if not largest.isfinite():
            ratios = ratios.nan_to_num()
        scales += largest.numpy().tobytes()
        data += (ratios * 127).round().to(torch.int8).numpy().tobytes()
    return scales + data


def int8_values(raw: bytes, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    blocks = -(-count // BLOCK)
    scales = np.frombuffer(raw, np.float32, blocks) / np.float32(127)
    data = np.frombuffer(raw, np.int8, count, offset=4 * blocks).astype(np.float32)
    return data * np.repeat(scales, BLOCK)[:count]


def check(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    wire = encode(torch.from_numpy(values), CompressionType.BLOCKWISE_INT8)
    raw, expected_raw, scales = bytes(wire.buffer), int8_bytes(values), -(-len(values) // BLOCK)
    if np.isfinite(values).all():
        assert raw == expected_raw
    else:  # any NaN will do
        np.testing.assert_array_equal(np.frombuffer(raw, "f4", scales), np.frombuffer(expected_raw, "f4", scales))
        assert raw[4 * scales :] == expected_raw[4 * scales :]
    with np.errstate(invalid="ignore"):
        expected = int8_values(bytes(wire.buffer), len(values))
    np.testing.assert_array_equal(decode(wire).numpy(), expected)
    with np.errstate(over="ignore"):
        half = np.clip(values, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(
        np.frombuffer(encode(torch.from_numpy(values), CompressionType.FLOAT16).buffer, np.float16), half
    )


@pytest.mark.parametrize("count", EDGES)
def test_lengths_around_the_pieces(count: int) -> None:
    check(numbers(count, count, 0))
    check(numbers(count, count + 1, 7))


@settings(max_examples=60)
@given(count=st.integers(0, 5000), seed=st.integers(0, 10**6), odd=st.sampled_from([0, 1, 9]))
def test_any_length(count: int, seed: int, odd: int) -> None:
    check(numbers(count, seed, odd))
