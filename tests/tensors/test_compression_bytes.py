"""The exact bytes of every codec, compared with naive numpy."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from averaging.protocol.messages import CompressionType, WireTensor
from averaging.tensors.compression import encode

Array = npt.NDArray[np.float32]

WIRE_DTYPES = {
    CompressionType.NONE: "float32",
    CompressionType.MEANSTD_16BIT: "compressed_float32",
    CompressionType.FLOAT16: "clamped_float32",
    CompressionType.QUANTILE_8BIT: "compressed_float32",
    CompressionType.UNIFORM_8BIT: "compressed_float32",
    CompressionType.BFLOAT16: "rounded_float32",
    CompressionType.BLOCKWISE_INT8: "compressed_float32",
}

GOLDEN = np.array([[0.5, -1.25, 3.0, 1e6], [7.0, 7.0, 7.0, 7.0], [-0.001, 0.1, 2.5, -4.0]], dtype=np.float32)


def raw_bytes(values: Array) -> bytes:
    return values.tobytes()


def float16_bytes(values: Array) -> bytes:
    return np.clip(values, -65504, 65504).astype(np.float16).tobytes()


def meanstd_bytes(values: Array) -> bytes:
    data, means, stds = b"", b"", b""
    for row in values:
        mean = np.float32(np.mean(row.astype(np.float64)))
        centred = row - mean
        std = np.float32(max(math.sqrt(sum(float(x) ** 2 for x in centred) / len(row)), 1e-6))
        data += (centred / std).astype(np.float16).tobytes()
        means += mean.tobytes()
        stds += std.tobytes()
    return data + means + stds


def lookup_bytes(values: Array, indices: list[int]) -> bytes:
    table = np.zeros(256, dtype=np.float32)
    for bucket in set(indices):
        inside = [float(x) for x, index in zip(values.flat, indices, strict=True) if index == bucket]
        table[bucket] = sum(inside) / len(inside)
    return table.tobytes() + bytes(indices)


def uniform_bytes(values: Array) -> bytes:
    flat = [float(x) for x in values.flat]
    mean = sum(flat) / len(flat)
    step = 6 * math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)) / 256
    return lookup_bytes(values, [min(max(round((x - mean) / step) + 128, 0), 255) for x in flat])


def quantile_bytes(values: Array) -> bytes:
    flat = [float(x) for x in values.flat]
    borders = [sorted(flat)[k * len(flat) // 256] for k in range(1, 256)]
    return lookup_bytes(values, [sum(border < x for border in borders) for x in flat])


def bfloat16_bytes(values: Array) -> bytes:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return rounded.astype(np.uint16).tobytes()


def blockwise_bytes(values: Array) -> bytes:
    scales, data = b"", b""
    flat = values.reshape(-1)
    for start in range(0, len(flat), 1024):
        block = flat[start : start + 1024]
        largest = np.max(np.abs(block))
        scales += largest.tobytes()
        data += np.round(block / (largest or np.float32(1)) * np.float32(127)).astype(np.int8).tobytes()
    return scales + data


DUMB = {
    CompressionType.NONE: raw_bytes,
    CompressionType.FLOAT16: float16_bytes,
    CompressionType.MEANSTD_16BIT: meanstd_bytes,
    CompressionType.UNIFORM_8BIT: uniform_bytes,
    CompressionType.QUANTILE_8BIT: quantile_bytes,
    CompressionType.BFLOAT16: bfloat16_bytes,
    CompressionType.BLOCKWISE_INT8: blockwise_bytes,
}


@pytest.mark.parametrize("code", DUMB)
@pytest.mark.parametrize(
    "values", [GOLDEN, np.random.default_rng(5).standard_normal((3, 701)).astype(np.float32)], ids=["by hand", "normal"]
)
def test_golden_bytes(code: CompressionType, values: Array) -> None:
    wire = encode(torch.tensor(values), code)
    assert wire == WireTensor(
        buffer=DUMB[code](values),
        size=values.shape,
        dtype=WIRE_DTYPES[code],
        compression=code,
        chunks=0,
        requires_grad=False,
    )
