"""The gathers of members, and their group bits after a round."""

import random

import pytest
from hypothesis import given, strategies as st
from msgspec import msgpack

from averaging.errors import ProtocolViolationError
from averaging.protocol.group import Group, Member, Mode, group_key, next_group_bits, pack_gather, unpack_gather


@given(
    weight=st.floats(0, 1e12),
    bandwidth=st.none() | st.floats(0, 1e12),
    mode=st.sampled_from([Mode.NODE, Mode.AUXILIARY]),
    user=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ),
)
def test_gather_round_trip(weight: float, bandwidth: float | None, mode: Mode, user: object) -> None:
    packed = pack_gather(weight, bandwidth, mode, user)
    assert unpack_gather("h:1", packed) == Member("h:1", weight, bandwidth, mode, user)
    wrapped = msgpack.encode(msgpack.Ext(0x40, packed))
    assert unpack_gather("h:1", wrapped) == unpack_gather("h:1", packed)


@pytest.mark.parametrize("user", [b"\xc1", b"\x92\x01", b"\xff\xff", 7, "text", None])
def test_an_unreadable_user_value_leaves_the_other_fields(user: object) -> None:
    member = unpack_gather("h:1", msgpack.encode([2, None, 0, user]))
    assert member.weight == 2.0


def test_an_empty_gather_means_weight_one() -> None:
    assert unpack_gather("h:1", b"") == Member("h:1", 1.0, None, Mode.NODE, None)
    assert unpack_gather("client::1", b"").mode is Mode.CLIENT


def test_a_member_with_the_name_of_a_client_cannot_reduce() -> None:
    member = unpack_gather("client::1", pack_gather(1.0, None, Mode.NODE))
    assert not member.reduces


@pytest.mark.parametrize(
    "gather",
    [
        b"\xc1",
        msgpack.encode({}),
        msgpack.encode([1.0, None, 0]),
        msgpack.encode([-1.0, None, 0, b""]),
        msgpack.encode([float("nan"), None, 0, b""]),
        msgpack.encode([float("inf"), None, 0, b""]),
        msgpack.encode([True, None, 0, b""]),
        msgpack.encode([1.0, None, True, b""]),
        msgpack.encode(["1", None, 0, b""]),
        msgpack.encode([1.0, -2.0, 0, b""]),
        msgpack.encode([1.0, None, 3, b""]),
        msgpack.encode([1.0, None, None, b""]),
        msgpack.encode([1.0, None, 0, b"x" * (64 << 10)]),
        msgpack.encode(msgpack.Ext(0x41, msgpack.encode([1.0, None, 0, b""]))),
    ],
)
def test_an_invalid_gather_is_refused(gather: bytes) -> None:
    with pytest.raises(ProtocolViolationError):
        unpack_gather("h:1", gather)


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (object(), "must consist of numbers"),
        ([{"names": {1}}], "must consist of numbers, strings, bytes, lists and dicts: can not serialize 'set' object"),
        (b"x" * (64 << 10), "bytes packed"),
        ({1.5: 2}, "refused by other peers: a dict has the key 1.5; keys can be text, bytes or integers"),
        ([{"a": {None: 2}}], "a dict has the key None"),
        ({(1, 2): 3}, r"a dict has the key \(1, 2\)"),
    ],
)
def test_the_error_for_a_bad_gather_gives_the_reason(user: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_gather(1.0, None, Mode.NODE, user)


def test_group_bits_follow_the_published_rule() -> None:
    group = Group(b"\x01" * 20, tuple(Member(f"h:{port}") for port in range(1, 5)))
    places = random.Random(b"\x01" * 20).sample(range(8), 4)
    for index in range(4):
        assert next_group_bits("010110", group, index, 8) == "110" + format(places[index], "03b")
        assert next_group_bits("", group, index, 8) == ""
        assert next_group_bits("1", group, index, 8) == format(places[index], "03b")[-1:]
    assert group_key("run", "01") == "run.0b01"
    assert group_key("run", "") == "run.0b"
