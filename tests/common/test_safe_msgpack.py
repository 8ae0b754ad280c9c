"""Decoding untrusted msgpack gives the same results as msgpack, in bounded memory."""

from __future__ import annotations

import gc
import math
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging.common.safe_msgpack import MAX_DEPTH, MAX_INTEGER_KEYS, check_keys, unpack
from averaging.errors import ProtocolViolationError, StateError
from averaging.protocol.group import MAX_GATHER_BYTES, unpack_gather
from averaging.state.manifest import BASE_ITEMS, MAX_METADATA_BYTES, max_items, read_manifest
from averaging.tensors.schema import describe

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=40) | st.sampled_from(["x" * 300, "x" * 70_000]),
    st.binary(max_size=40) | st.sampled_from([b"x" * 300, b"x" * 70_000]),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20) | st.just(b"x" * 300)),
    st.builds(msgpack.Timestamp, st.integers(0, 2**34 - 1), st.integers(0, 10**9 - 1)),
)
keys = st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(keys, inner),
    max_leaves=40,
)


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    return 1 + sum(1 + count(item) for item in value.values()) if isinstance(value, dict) else 1


def flat(pairs: list[tuple[Any, Any]]) -> list[Any]:
    return [one for pair in pairs for one in pair]


@given(values, st.booleans())
def test_it_decodes_what_msgpack_decodes_and_counts_the_items(value: Any, single: bool) -> None:
    packed = msgpack.packb(value, use_single_float=single)
    expected = msgpack.unpackb(packed, strict_map_key=False)
    assert unpack(packed, count(expected)) == expected
    with pytest.raises(ValueError, match="it has more than"):
        unpack(packed, count(expected) - 1)


@pytest.mark.parametrize("first", [first for first in range(256) if first != 0xC1])
def test_every_first_byte_is_decoded_as_by_msgpack(first: int) -> None:
    unpacker = msgpack.Unpacker(strict_map_key=False, object_pairs_hook=flat)
    unpacker.feed(bytes([first]) + bytes(40))
    items = count(unpacker.unpack())
    packed = b"\x92" + bytes([first]) + bytes(unpacker.tell() - 1) + b"\x92\xc0\xc0"  # two more items follow
    assert unpack(packed, 1 + items + 3) == msgpack.unpackb(packed, strict_map_key=False)
    with pytest.raises(ValueError, match="it has more than"):
        unpack(packed, items + 3)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(raw: bytes) -> None:
    try:
        expected = msgpack.unpackb(raw, strict_map_key=False)
        msgpack.unpackb(raw, strict_map_key=False, object_pairs_hook=lambda pairs: check_keys(dict(pairs)))
    except (ValueError, TypeError, msgpack.UnpackException):
        with pytest.raises(ValueError, match="."):
            unpack(raw, 1000)
        return
    found = unpack(raw, 1000)
    assert found == expected or (isinstance(found, float) and math.isnan(found))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_the_depth_is_bounded() -> None:
    unpack(nested(MAX_DEPTH), 1000)
    with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
        unpack(nested(MAX_DEPTH + 1), 1000)


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "empty lists": lambda size: b"\xdd" + struct.pack(">I", size) + b"\x90" * size,
    "empty maps": lambda size: b"\xdd" + struct.pack(">I", size) + b"\x80" * size,
    "lists of lists": lambda size: b"\xdd" + struct.pack(">I", size // 16) + (b"\x9f" + b"\x90" * 15) * (size // 16),
    "long lists in each other": lambda size: (b"\xdd" + struct.pack(">I", size)) * 500 + b"\xc0" * size,
    "lists that never come": lambda size: (b"\xdd" + b"\xff" * 4) * (size // 5),
    "maps that never come": lambda size: (b"\xdf" + b"\xff" * 4) * (size // 5),
}  # fmt: skip


NO_KEYS: dict[str, Any] = {
    "nil": None,
    "a boolean": True,
    "a number with a point": 1.0,
    "a timestamp": msgpack.Timestamp(1, 0),
    "an extension": msgpack.ExtType(5, b"x"),
    "a list": (1, 2),
}


@pytest.mark.parametrize("kind", NO_KEYS)
@pytest.mark.parametrize("place", [0, 1, 20, 70_000])
def test_a_key_is_text_bytes_or_an_integer(kind: str, place: int) -> None:
    keys = [f"k{number}" for number in range(place)]
    odd = {**dict.fromkeys(keys), NO_KEYS[kind]: 1}
    for value in (odd, [1, {"inside": odd}]):
        with pytest.raises(ValueError, match="a map has a key that is neither text, bytes nor an integer"):
            unpack(msgpack.packb(value), 200_000)
        with pytest.raises(ValueError, match="a dict has the key .*; keys can be text, bytes or integers"):
            check_keys(value)
    assert unpack(msgpack.packb([NO_KEYS[kind]]), 9) == [msgpack.unpackb(msgpack.packb(NO_KEYS[kind]))]


@pytest.mark.parametrize("key", [b"", b"x" * 300, b"x" * 70_000, "", "x" * 40, "x" * 300, "x" * 70_000])
def test_text_and_bytes_of_any_length_are_keys(key: str | bytes) -> None:
    assert unpack(msgpack.packb({key: 1}), 3) == {key: 1}


@pytest.mark.parametrize("least", [0, -32, -(2**7), -(2**15), -(2**31), -(2**63), 2**7, 2**8, 2**16, 2**32, 2**63])
def test_the_number_of_integer_keys_is_bounded(least: int) -> None:
    most = {least + number: [{number: None}] for number in range(MAX_INTEGER_KEYS)}
    packed = msgpack.packb([{"text": None} | most, most])
    assert unpack(packed, 20_000) == [{"text": None} | most, most]
    more = most | {least + MAX_INTEGER_KEYS: None}
    with pytest.raises(ValueError, match="a map has 1025 integers as keys, more than 1024"):
        unpack(msgpack.packb(more), 20_000)
    check_keys([most, most])
    with pytest.raises(ValueError, match="a dict has 1025 integers as keys, more than 1024; use text for them"):
        check_keys([more])


def peak(read: Callable[[], object]) -> int:
    gc.collect()  # garbage of other tests would be counted
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", HOSTILE)
def test_metadata_of_a_state_takes_little_memory(kind: str) -> None:
    odd = HOSTILE[kind](MAX_METADATA_BYTES - 4096)
    packed = b"\x81\xa4user" + odd
    schema = describe(["w"], [torch.zeros(3)], part_size_bytes=1024)

    def read() -> None:
        with pytest.raises(StateError, match="its metadata"):
            read_manifest(packed, max_items(schema))

    assert peak(read) < 1 << 20


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_gather_takes_little_memory(kind: str) -> None:
    gather = HOSTILE[kind](MAX_GATHER_BYTES - 4096)

    def read() -> None:
        with suppress(ProtocolViolationError):
            unpack_gather("a:1", gather)

    assert peak(read) < 10 << 20


def test_the_largest_accepted_input_is_bounded_too() -> None:
    items = BASE_ITEMS - 10
    packed = msgpack.packb({"version": 1, "tensors": [], "digest": [], "user": {"x": [[] for _ in range(items - 10)]}})
    assert peak(lambda: read_manifest(packed, BASE_ITEMS)) < 16 << 20
