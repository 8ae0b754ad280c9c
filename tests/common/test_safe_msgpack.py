"""Bytes and values are those of the package msgpack; untrusted bytes are decoded in bounded memory."""

from __future__ import annotations

import decimal
import enum
import gc
import math
import struct
import tracemalloc
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from averaging.common.safe_msgpack import MAX_DEPTH, MAX_INTEGER_KEYS, check_keys, pack, pack_user, unpack
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
    st.datetimes(timezones=st.just(UTC)),
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


reference_pack = partial(msgpack.packb, datetime=True)
# Extensions as pairs: msgpack's own class has no negative codes, which the format has.
reference_unpack = partial(msgpack.unpackb, strict_map_key=False, timestamp=3, ext_hook=lambda code, data: (code, data))


def with_each(value: Any, convert: Callable[[Any], Any]) -> Any:
    """The value with each number, text and so on converted."""
    if isinstance(value, list):
        return [with_each(item, convert) for item in value]
    return {key: with_each(item, convert) for key, item in value.items()} if isinstance(value, dict) else convert(value)


def to_ours(value: Any) -> Any:
    return with_each(value, lambda item: Ext(item.code, item.data) if isinstance(item, msgpack.ExtType) else item)


def to_reference(value: Any) -> Any:
    def convert(item: Any) -> Any:
        return (item.code, bytes(item.data)) if isinstance(item, Ext) else item

    return with_each(value, convert)


@given(values)
def test_values_have_the_bytes_of_the_reference(value: Any) -> None:
    expected = reference_pack(value)
    assert pack(to_ours(value)) == expected
    assert pack_user(to_ours(value)) == expected


@pytest.mark.parametrize("edge", [0, *(2**bits for bits in (5, 7, 8, 15, 16, 31, 32, 63, 64))])
def test_integers_around_each_edge_have_their_shortest_form(edge: int) -> None:
    for value in (edge - 1, edge, edge + 1, -edge - 1, -edge, -edge + 1):
        if -(2**63) <= value < 2**64:
            assert pack(value) == reference_pack(value)
        else:
            with pytest.raises(OverflowError):
                pack(value)


class Level(enum.IntEnum):
    HIGH = 300


class Plain(enum.Enum):
    A = 1


class Name(str):
    __slots__ = ()


KNOWN: list[tuple[object, str]] = [
    (None, "c0"),
    (True, "c3"),
    (False, "c2"),
    (127, "7f"),
    (128, "cc80"),
    (-32, "e0"),
    (-33, "d0df"),
    (70_000, "ce00011170"),
    (2**64 - 1, "cfffffffffffffffff"),
    (-(2**63), "d38000000000000000"),
    (1.0, "cb3ff0000000000000"),
    (-0.0, "cb8000000000000000"),
    (math.inf, "cb7ff0000000000000"),
    (math.nan, "cb7ff8000000000000"),
    (np.float64(0.5), "cb3fe0000000000000"),
    (Level.HIGH, "cd012c"),
    ("ä", "a2c3a4"),
    (Name("ab"), "a26162"),
    ({Name("k"): Level.HIGH}, "81a16bcd012c"),
    ("x" * 32, "d920" + "78" * 32),
    (b"", "c400"),
    (bytearray(b"ab"), "c4026162"),
    (memoryview(b"ab"), "c4026162"),
    (b"x" * 256, "c50100" + "78" * 256),
    ([1, (2, [])], "9201920290"),
    (torch.Size([2, 3]), "920203"),
    ([0] * 16, "dc0010" + "00" * 16),
    ({"b": 1, "a": b"\x00"}, "82a16201a161c40100"),
    ({1: None, b"k": [True]}, "8201c0c4016b91c3"),
    ({str(n): n for n in range(16)}, "de0010" + "".join(f"{pack(str(n)).hex()}{n:02x}" for n in range(16))),
    (Ext(0x40, b"ab"), "d5406162"),
    (Ext(5, b"abc"), "c70305616263"),
    (datetime.fromtimestamp(1, UTC), "d6ff00000001"),
    (datetime.fromtimestamp(1.5, UTC), "d7ff7735940000000001"),
    (datetime.fromtimestamp(-1, UTC), "c70cff00000000ffffffffffffffff"),
]


@pytest.mark.parametrize(("value", "expected"), KNOWN, ids=[expected[:20] for _, expected in KNOWN])
def test_known_values_have_known_bytes(value: object, expected: str) -> None:
    assert pack(value).hex() == pack_user(value).hex() == expected


@pytest.mark.parametrize(
    "place", [lambda item: item, lambda item: [{"k": (item,)}], lambda item: {"k": item}], ids=["bare", "deep", "value"]
)
@pytest.mark.parametrize(
    "value",
    [{1}, frozenset("a"), 1j, object(), torch.zeros(1), np.int64(1), np.zeros(2), uuid.UUID(int=1), decimal.Decimal(1),
     datetime(2026, 1, 1), datetime(2026, 1, 1).date(), Plain.A, Fraction(1), range(3)],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_what_msgpack_has_no_form_for_is_refused_as_by_the_reference(
    value: object, place: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError):
        msgpack.packb(place(value))
    with pytest.raises(TypeError, match="can not serialize '"):
        pack_user(place(value))


def test_values_that_contain_themselves_and_text_with_surrogates_are_refused() -> None:
    circle: list[Any] = []
    circle.append({"k": circle})
    for encode in (pack, pack_user):
        with pytest.raises(ValueError, match="contains itself"):
            encode(circle)
        with pytest.raises(ValueError, match="surrogates not allowed"):
            encode({"k": "\ud800"})


@pytest.mark.parametrize(
    "packed",
    ["", "91", "c1", "c0c0", "a1ff", "81c0", "c705ff3132333435", "d4ff00", "d7ff" + "ff" * 8, "c70cff" + "7f" * 12],
)
def test_bytes_that_are_no_value_are_a_value_error(packed: str) -> None:
    with pytest.raises(ValueError, match="."):
        unpack(bytes.fromhex(packed), 1000)


@given(values, st.booleans())
def test_it_decodes_what_msgpack_decodes_and_counts_the_items(value: Any, single: bool) -> None:
    packed = reference_pack(value, use_single_float=single)
    expected = reference_unpack(packed)
    assert to_reference(unpack(packed, count(expected))) == expected
    with pytest.raises(ValueError, match="it has more than"):
        unpack(packed, count(expected) - 1)


@pytest.mark.parametrize("first", [first for first in range(256) if first != 0xC1])
def test_every_first_byte_is_decoded_as_by_msgpack(first: int) -> None:
    unpacker = msgpack.Unpacker(strict_map_key=False, object_pairs_hook=flat)
    unpacker.feed(bytes([first]) + bytes(40))
    items = count(unpacker.unpack())
    packed = b"\x92" + bytes([first]) + bytes(unpacker.tell() - 1) + b"\x92\xc0\xc0"  # two more items follow
    assert to_reference(unpack(packed, 1 + items + 3)) == reference_unpack(packed)
    with pytest.raises(ValueError, match="it has more than"):
        unpack(packed, items + 3)


@example(b"\xd5\x80\x00\x00")
@given(st.binary(max_size=60))
def test_other_bytes_are_refused(raw: bytes) -> None:
    try:
        expected = reference_unpack(raw)
        reference_unpack(raw, object_pairs_hook=lambda pairs: check_keys(dict(pairs)))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        with pytest.raises(ValueError, match="."):
            unpack(raw, 1000)
        return
    found = to_reference(unpack(raw, 1000))
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
    packed = msgpack.packb([NO_KEYS[kind]])
    assert to_reference(unpack(packed, 9)) == reference_unpack(packed)


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
