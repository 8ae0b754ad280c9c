"""Bytes and values are those of the package msgpack; bytes of others are a value or a ValueError."""

import decimal
import enum
import math
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from msgspec.msgpack import Ext

from averaging.common.safe_msgpack import MAX_DEPTH, check_portable, pack, pack_user, unpack

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
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(keys, inner), max_leaves=40)


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


class Level(enum.IntEnum):
    HIGH = 300


class Name(str):
    __slots__ = ()


class Plain(enum.Enum):
    A = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "cb7ff8000000000000"),
        (np.float64(0.5), "cb3fe0000000000000"),
        ({Name("k"): Level.HIGH}, "81a16bcd012c"),
        ([bytearray(b"a"), memoryview(b"b")], "92c40161c40162"),
        (torch.Size([2, 3]), "920203"),
        (Ext(5, b"abc"), "c70305616263"),
        (datetime.fromtimestamp(-1, UTC), "c70cff00000000ffffffffffffffff"),
    ],
)
def test_known_values_have_known_bytes(value: object, expected: str) -> None:
    assert pack(value).hex() == pack_user(value).hex() == expected


@pytest.mark.parametrize(
    "value",
    [{1}, frozenset("a"), 1j, object(), torch.zeros(1), np.int64(1), uuid.UUID(int=1), decimal.Decimal(1),
     datetime(2026, 1, 1), Plain.A, range(3)],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_what_msgpack_has_no_form_for_is_refused_as_by_the_reference(value: object) -> None:
    for place in (value, [{"k": (value,)}]):
        with pytest.raises(TypeError):
            msgpack.packb(place)
        with pytest.raises(TypeError, match="can not serialize '"):
            pack_user(place)


def test_values_that_contain_themselves_and_text_with_surrogates_are_refused() -> None:
    circle: list[Any] = []
    circle.append({"k": circle})
    for encode in (pack, pack_user):
        with pytest.raises(ValueError, match="contains itself"):
            encode(circle)
        with pytest.raises(ValueError, match="surrogates not allowed"):
            encode({"k": "\ud800"})


@given(values, st.booleans())
def test_it_decodes_what_msgpack_decodes(value: Any, single: bool) -> None:
    packed = reference_pack(value, use_single_float=single)
    assert to_reference(unpack(packed)) == reference_unpack(packed)


@example(b"\xd5\x80\x00\x00")
@given(st.binary(max_size=60))
def test_other_bytes_are_refused(raw: bytes) -> None:
    try:
        expected = reference_unpack(raw)
        reference_unpack(raw, object_pairs_hook=lambda pairs: check_portable(dict(pairs)))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        with pytest.raises(ValueError, match="."):
            unpack(raw)
        return
    found = to_reference(unpack(raw))
    assert found == expected or (isinstance(found, float) and math.isnan(found))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_the_depth_is_bounded() -> None:
    unpack(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
            unpack(nested(depth))


@pytest.mark.parametrize(
    "key",
    [None, True, 1.0, msgpack.Timestamp(1, 0), msgpack.ExtType(5, b"x"), (1, 2)],
    ids=lambda key: type(key).__name__,
)
def test_a_key_is_text_bytes_or_an_integer(key: Any) -> None:
    for value in ({"a": 0, key: 1}, [1, {"inside": {"a": 0, key: 1}}]):
        with pytest.raises(ValueError, match="keys can be text, bytes or integers|map keys must be hashable"):
            unpack(msgpack.packb(value))
        with pytest.raises(ValueError, match="a dict has the key .*; keys can be text, bytes or integers"):
            check_portable(value)
