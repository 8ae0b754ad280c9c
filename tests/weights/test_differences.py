"""Differences of pieces: lossless for all codings and element sizes, small for small changes, and safe to decode."""

from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, strategies as st

from averaging.errors import ProtocolViolationError
from averaging.weights.differences import Bytes, Coding, decode, encode


def decoded(coding: int, data: bytes, old: Bytes | None, itemsize: int, length: int) -> Bytes:
    out = np.full(length, 7, np.uint8)
    decode(coding, data, old, itemsize, out)
    return out


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@given(elements=st.integers(0, 300), changed=st.sampled_from([0.0, 0.01, 0.2, 0.5, 1.0]), seed=st.integers(0, 1 << 32))
def test_any_change_is_lossless(itemsize: int, elements: int, changed: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * itemsize, np.uint8)
    new = np.where(np.repeat(rng.random(elements) < changed, itemsize), rng.integers(0, 256, len(old), np.uint8), old)
    coding, data = encode(new, old, itemsize)
    assert len(data) <= max(len(new), 14)
    assert np.array_equal(decoded(coding, data, old, itemsize, len(new)), new)


def test_each_coding_is_chosen_where_it_is_shortest() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 256, 1 << 16, np.uint8)
    few, many = old.copy(), old.copy()
    few.view(np.uint16)[::100] += 1
    many.view(np.uint16)[::2] -= 1
    assert encode(few, old, 2)[0] is Coding.SPARSE
    assert encode(many, old, 2)[0] is Coding.DENSE
    assert encode(rng.integers(0, 256, 1 << 16, np.uint8), old, 2)[0] is Coding.RAW


def test_what_zstd_announces_is_checked_before_it_is_unpacked() -> None:
    bomb = zstandard.compress(bytes(1 << 30))
    assert len(bomb) < 1 << 17
    old = np.zeros(64, np.uint8)
    for data, coding in ((bomb, Coding.DENSE), (b"\x08\0\0\0\1" + bomb, Coding.SPARSE)):
        with pytest.raises(ProtocolViolationError, match="expected were"):
            decoded(coding, data, old, 4, 64)


@pytest.mark.parametrize(
    ("coding", "data", "match"),
    [
        (Coding.RAW, bytes(63), "63 bytes, announced were 64"),
        (Coding.SPARSE, b"\0\0", "without a head"),
        (Coding.SPARSE, b"\x11\0\0\0\1", "17 changes"),
        (Coding.SPARSE, b"\1\0\0\0\3", "distances of 3 bytes"),
        (Coding.SPARSE, b"\1\0\0\0\1" + zstandard.compress(b"\x10\1\0\0\0"), "element 16 of 16"),
        (Coding.DENSE, b"nonsense", "zstd cannot read"),
        (9, b"", "coding 9"),
    ],
)
def test_malformed_pieces(coding: int, data: bytes, match: str) -> None:
    with pytest.raises(ProtocolViolationError, match=match):
        decoded(coding, data, np.zeros(64, np.uint8), 4, 64)


def test_a_difference_needs_a_base() -> None:
    with pytest.raises(ProtocolViolationError, match="not named"):
        decoded(Coding.DENSE, b"", None, 4, 64)


@given(
    coding=st.integers(0, 3),
    data=st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(zstandard.compress)),
    head=st.sampled_from([b"", b"\1\0\0\0\1", b"\4\0\0\0\2"]),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_anything_may_arrive(coding: int, data: bytes, head: bytes, itemsize: int) -> None:
    with suppress(ProtocolViolationError):
        decoded(coding, head + data, np.zeros(64, np.uint8), itemsize, 64)
