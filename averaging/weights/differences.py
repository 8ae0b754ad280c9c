"""Encodes pieces of tensors without loss, as differences to an earlier version where that is shorter. Pure.

The elements are read as unsigned integers. A small change of a number is then a small difference, also where carries
change many bits. Differences are zigzag-coded (0, -1, 1, -2, … become 0, 1, 2, 3, …) and split into planes: first the
lowest byte of each element, then the next byte, and so on. zstd compresses the planes.

- `DENSE`: the planes of all elements.
- `SPARSE`: the distances between the elements that changed, then the planes of these elements. The payload begins with
  their number (4 bytes) and the bytes per distance (1 byte).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from averaging.errors import ProtocolViolationError

Bytes: TypeAlias = NDArray[np.uint8]
"""The bytes of a tensor or a piece, 1-D."""

_Elements: TypeAlias = NDArray[Any]  # unsigned integers of 1, 2, 4 or 8 bytes

LEVEL = 1  # of zstd; higher ones are slower than a link of 1 Gbit/s, and the result is the same or longer
SPARSE_BELOW = 0.25  # with more elements that changed, `SPARSE` is slower and hardly shorter
_HEAD = struct.Struct("<IB")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Coding(IntEnum):
    """How the bytes of a piece travel; the numbers are those on the wire."""

    RAW = 0
    DENSE = 1
    SPARSE = 2


def encode(new: Bytes, old: Bytes, itemsize: int) -> tuple[Coding, bytes]:
    """Encodes a piece as its difference to `old`, or as it is if that is shorter."""
    unsigned = _UNSIGNED[itemsize]
    differences = _zigzag(new.view(unsigned) - old.view(unsigned))
    count = int(np.count_nonzero(differences))
    if count < SPARSE_BELOW * len(differences):
        coding, data = Coding.SPARSE, _sparse(differences, count)
    else:
        coding, data = Coding.DENSE, zstandard.compress(_planes(differences), LEVEL)
    return (coding, data) if len(data) < len(new) else (Coding.RAW, new.tobytes())


def decode(coding: int, data: bytes, old: Bytes | None, itemsize: int, out: Bytes) -> None:
    """Decodes a piece from another peer into `out`, which is as long as the piece.

    `old` is the piece that it was encoded against; None if the reader has none. If the data is malformed
    (ProtocolViolationError), the contents of `out` are undefined.
    """
    if coding == Coding.RAW:
        if len(data) != len(out):
            raise ProtocolViolationError(f"a piece of {len(data)} bytes, announced were {len(out)}")
        out[:] = np.frombuffer(data, np.uint8)
        return
    if old is None:
        raise ProtocolViolationError("a difference to a version that was not named")
    if coding == Coding.DENSE:
        differences = _from_planes(_unpacked(data, len(out)), itemsize)
        np.add(old.view(differences.dtype), _unzigzag(differences), out=out.view(differences.dtype))
    elif coding == Coding.SPARSE:
        places, differences = _read_sparse(data, len(out) // itemsize, itemsize)
        out[:] = old
        out.view(differences.dtype)[places] += _unzigzag(differences)
    else:
        raise ProtocolViolationError(f"a piece with coding {coding}, which is unknown")


def _sparse(differences: _Elements, count: int) -> bytes:
    places = np.flatnonzero(differences)
    gaps = np.diff(places, prepend=-1) - 1
    largest = int(gaps.max()) if count else 0
    size = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    packed = _planes(gaps.astype(_UNSIGNED[size])) + _planes(differences[places])
    return _HEAD.pack(count, size) + zstandard.compress(packed, LEVEL)


def _read_sparse(data: bytes, elements: int, itemsize: int) -> tuple[NDArray[np.int64], _Elements]:
    """Returns the indices of the elements that changed, and their differences."""
    if len(data) < _HEAD.size:
        raise ProtocolViolationError("a sparse piece without a head")
    count, size = _HEAD.unpack_from(data)
    if count > elements or size not in (1, 2, 4):
        raise ProtocolViolationError(f"a sparse piece of {count} changes with distances of {size} bytes")
    packed = _unpacked(data[_HEAD.size :], count * (size + itemsize))
    gaps = _from_planes(packed[: count * size], size).astype(np.int64)
    places = np.cumsum(gaps + 1) - 1
    if count and places[-1] >= elements:
        raise ProtocolViolationError(f"a sparse piece changes element {places[-1]} of {elements}")
    return places, _from_planes(packed[count * size :], itemsize)


def _unpacked(data: bytes, expected: int) -> Bytes:
    """Decompresses data whose length is known. Its header is checked before memory is allocated."""
    try:
        announced = zstandard.get_frame_parameters(data).content_size
        if announced != expected:
            raise ProtocolViolationError(f"a difference of {announced} bytes, expected were {expected}")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise ProtocolViolationError(f"a difference that zstd cannot read: {error}") from None


def _zigzag(differences: _Elements) -> _Elements:
    bits = 8 * differences.itemsize
    zero = differences.dtype.type(0)
    result: _Elements = (differences << 1) ^ (zero - (differences >> (bits - 1)))
    return result


def _unzigzag(coded: _Elements) -> _Elements:
    result: _Elements = (coded >> 1) ^ (coded.dtype.type(0) - (coded & 1))
    return result


def _planes(elements: _Elements) -> bytes:
    little = elements.astype(elements.dtype.newbyteorder("<"), copy=False)
    return little.view(np.uint8).reshape(-1, elements.itemsize).T.tobytes()


def _from_planes(planes: Bytes, itemsize: int) -> _Elements:
    interleaved = np.ascontiguousarray(planes.reshape(itemsize, -1).T).reshape(-1)
    return interleaved.view(np.dtype(_UNSIGNED[itemsize]).newbyteorder("<"))
