"""Converts arrays to the buffers of the protocol and back, with numpy only.

A tensor is a dict with the fields of the message `Tensor`, and `compression` is the name of the enum value.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]

DTYPES = {
    "FLOAT16": "clamped_float32",
    "MEANSTD_16BIT": "compressed_float32",
    "UNIFORM_8BIT": "compressed_float32",
    "QUANTILE_8BIT": "compressed_float32",
}

BYTES_PER_ELEMENT = {"FLOAT16": 2, "MEANSTD_16BIT": 2, "UNIFORM_8BIT": 1, "QUANTILE_8BIT": 1}


def pack(values: Array, compression: str) -> dict[str, Any]:
    """Packs a tensor into one message."""
    if compression == "NONE":
        buffer = values.tobytes()
    elif compression == "FLOAT16":
        buffer = np.clip(values, -65504, 65504).astype("<f2").tobytes()
    elif compression == "MEANSTD_16BIT":
        buffer = _pack_rows(values)
    else:
        buffer = _pack_buckets(values, compression)
    dtype = DTYPES.get(compression, values.dtype.name)
    return {"buffer": buffer, "size": list(values.shape), "dtype": dtype, "compression": compression}


def unpack(tensor: dict[str, Any]) -> Array:
    """Unpacks the array of a tensor; raises ValueError if its fields contradict each other."""
    buffer, size = tensor["buffer"], tuple(tensor.get("size", ()))
    compression = tensor.get("compression", "NONE")
    dtype = tensor.get("dtype", "")
    if dtype != DTYPES.get(compression, dtype) or set(tensor) - {"buffer", "size", "dtype", "compression"}:
        raise ValueError(f"{compression} came as {dtype} with {sorted(tensor)}")
    values: Array
    if compression == "NONE":
        values = np.frombuffer(buffer, np.dtype(dtype))
    elif compression == "FLOAT16":
        values = np.frombuffer(buffer, "<f2").astype(np.float32)
    elif compression == "MEANSTD_16BIT":
        values = _unpack_rows(buffer, size)
    else:
        values = np.frombuffer(buffer, "<f4", 256)[np.frombuffer(buffer, np.uint8, offset=1024)]
    return values.reshape(size)


def _pack_rows(values: Array) -> bytes:
    means = values.mean(axis=-1, keepdims=True, dtype=np.float64).astype("<f4")
    centred = values - means
    stds = np.sqrt(np.mean(np.square(centred, dtype=np.float64), axis=-1, keepdims=True))
    stds = np.maximum(stds, 1e-6).astype("<f4")
    return b"".join([(centred / stds).astype("<f2").tobytes(), means.tobytes(), stds.tobytes()])


def _unpack_rows(buffer: bytes, size: tuple[int, ...]) -> Array:
    rows = int(np.prod(size[:-1]))
    elements = int(np.prod(size))
    data = np.frombuffer(buffer, "<f2", elements).astype(np.float32).reshape(rows, -1)
    means, stds = np.frombuffer(buffer[2 * elements :], "<f4").reshape(2, rows, 1)
    return np.asarray(data * stds + means, dtype=np.float32)


def _pack_buckets(values: Array, compression: str) -> bytes:
    if compression == "UNIFORM_8BIT":
        step = 6 * float(values.std()) / 256 or 1.0
        indices = np.clip(np.rint((values - values.mean()) / step) + 128, 0, 255)
    else:
        borders = np.quantile(values, np.arange(1, 256) / 256)
        indices = np.searchsorted(borders, values)
    indices = indices.astype(np.uint8).reshape(-1)
    counts = np.bincount(indices, minlength=256)
    sums = np.bincount(indices, weights=values.reshape(-1), minlength=256)
    lookup = np.divide(sums, counts, out=np.zeros(256), where=counts > 0).astype("<f4")
    return b"".join([lookup.tobytes(), indices.tobytes()])
