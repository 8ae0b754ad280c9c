"""Messages cut by hand against protobuf's own reading and writing of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import AveragingData, MessageCode, WireTensor
from averaging.transport.grpc import bulk_messages, conversion
from averaging.wire import averaging_pb2

LARGE = 4096

tensors = st.builds(
    WireTensor,
    buffer=st.integers(0, 3).map(lambda n: random.Random(n).randbytes(LARGE + n)),
    size=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    dtype=st.sampled_from(["", "float32", "bfloat16"]),
    compression=st.integers(0, 20),
    chunks=st.integers(0, 2**31 - 1),
    requires_grad=st.booleans(),
)
messages = st.builds(
    AveragingData,
    code=st.sampled_from(list(MessageCode)),
    group_id=st.binary(max_size=20),
    endpoint=st.text(max_size=20),
    tensor_part=tensors,
)


@given(messages)
def test_protobuf_reads_what_was_written_and_so_do_we(message: AveragingData) -> None:
    raw = conversion.encode_averaging_data(message)
    wire = averaging_pb2.AveragingData.FromString(raw)
    assert message.tensor_part is not None
    assert wire.tensor_part.buffer == message.tensor_part.buffer
    assert tuple(wire.tensor_part.size) == message.tensor_part.size
    assert (int(wire.code), wire.group_id, wire.endpoint) == (int(message.code), message.group_id, message.endpoint)
    assert conversion.decode_averaging_data(raw) == message
    assert conversion.decode_averaging_data(wire.SerializeToString()) == message


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, LARGE, (1 << 14) - 1, 1 << 14, 1 << 21])
def test_the_buffer_is_not_copied(nbytes: int) -> None:
    """Its length takes one byte to four."""
    raw = conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * nbytes)))
    data = conversion.decode_averaging_data(raw)
    assert data.tensor_part is not None
    assert isinstance(data.tensor_part.buffer, memoryview)
    assert data.tensor_part.buffer.obj is raw
    assert data.tensor_part.buffer == b"x" * nbytes


def test_a_message_for_several_is_encoded_once() -> None:
    part = AveragingData(tensor_part=WireTensor(b"x" * LARGE))
    assert conversion.encode_averaging_data(part) is conversion.encode_averaging_data(part)
    assert len(part.encoded) == 1


@given(st.binary(max_size=200), st.integers(0, 199), st.integers(0, 255))
def test_any_bytes_are_a_message_or_a_violation_as_protobuf_says(prefix: bytes, place: int, byte: int) -> None:
    """Random bytes before, and one changed byte within, a proper message."""
    proper = bytearray(
        conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * LARGE, (4,), "float32")))
    )
    proper[place] = byte
    raw = prefix + bytes(proper)
    try:
        expected = averaging_pb2.AveragingData.FromString(raw)
    except Exception:
        expected = None
    try:
        data = conversion.decode_averaging_data(raw)
    except ProtocolViolationError:
        return  # protobuf may be more generous: unknown codes and negative chunks are refused
    assert expected is not None
    if expected.HasField("tensor_part"):
        assert data.tensor_part is not None
        assert data.tensor_part.buffer == expected.tensor_part.buffer
        assert data.tensor_part.size == tuple(expected.tensor_part.size)
    assert data.group_id == expected.group_id


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x22",
        b"\x22\xff\xff\xff\xff\x0f",
        b"\x22\x02\x0a\x05",
        b"\x23\x24",
        b"\x00\x01",
        b"\x22\x00",
        b"\xff" * 12,
    ],
)
def test_what_is_unusual_is_left_to_protobuf(raw: bytes) -> None:
    assert bulk_messages.split(raw, 4) is None


@pytest.mark.parametrize(
    "unknown",
    [
        b"\x78\xac\x02",
        b"\x78" + b"\xff" * 9 + b"\x01",
        b"\x79" + b"\x22" * 8,
        b"\x7a\x04" + b"\x22" * 4,
        b"\x7d" + b"\x22" * 4,
    ],
    ids=["varint", "negative", "fixed64", "bytes", "fixed32"],
)
def test_fields_of_later_versions_are_stepped_over(unknown: bytes) -> None:
    """Field 15 of every kind, before the tensor and after it; the bytes in it would begin a tensor."""
    part = conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * LARGE)))
    pieces = bulk_messages.split(unknown + part + unknown, 4)
    assert pieces is not None
    assert pieces.buffer == b"x" * LARGE
    assert pieces.outer == unknown + unknown


def test_a_number_longer_than_numbers_are_is_left_to_protobuf() -> None:
    part = conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * LARGE)))
    raw = b"\x78" + b"\xff" * 10 + b"\x01" + part
    assert bulk_messages.split(raw, 4) is None
    with pytest.raises(ProtocolViolationError):
        conversion.decode_averaging_data(raw)


def test_two_tensors_in_a_message_are_left_to_protobuf() -> None:
    once = conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * LARGE)))
    assert bulk_messages.split(once, 4) is not None
    assert bulk_messages.split(once + once, 4) is None


@given(messages, st.data())
def test_messages_that_begin_alike_are_read_as_protobuf_reads_them(message: AveragingData, data: st.DataObject) -> None:
    """Of one length, so that each could be taken for the one before: other values, other fields, fields behind."""
    raw = conversion.encode_averaging_data(message)
    conversion.decode_averaging_data(raw)
    for _ in range(3):
        changed = bytearray(raw)
        for place in data.draw(st.lists(st.integers(-60, 59), max_size=3)):
            changed[place] = data.draw(st.integers(0, 255))
        try:
            decoded = conversion.decode_averaging_data(bytes(changed))
        except ProtocolViolationError:
            continue  # protobuf may be more generous, as above
        wire = averaging_pb2.AveragingData.FromString(bytes(changed))
        assert (int(decoded.code), decoded.group_id, decoded.endpoint) == (int(wire.code), wire.group_id, wire.endpoint)
        if decoded.tensor_part is None:
            assert not wire.HasField("tensor_part")
            continue
        assert decoded.tensor_part == WireTensor(
            wire.tensor_part.buffer,
            tuple(wire.tensor_part.size),
            wire.tensor_part.dtype,
            wire.tensor_part.compression,
            wire.tensor_part.chunks,
            wire.tensor_part.requires_grad,
        )


def test_a_part_like_the_last_one_is_not_taken_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (AveragingData(tensor_part=WireTensor(bytes([n]) * LARGE, (7,), "float32")) for n in (1, 2))
    conversion.decode_averaging_data(conversion.encode_averaging_data(one))
    monkeypatch.delattr(bulk_messages, "split")
    assert conversion.decode_averaging_data(conversion.encode_averaging_data(other)) == other


def test_fields_behind_the_tensor_are_read_in_each_message() -> None:
    part = conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * LARGE, (7,), "float32")))
    for endpoint in ("a:1", "b:2"):
        data = conversion.decode_averaging_data(
            part + averaging_pb2.AveragingData(endpoint=endpoint).SerializeToString()
        )
        assert data.endpoint == endpoint
        assert data.tensor_part is not None
        assert data.tensor_part.buffer == b"x" * LARGE


def test_what_is_remembered_of_messages_is_bounded() -> None:
    heads: bulk_messages.MessageCache[int] = bulk_messages.MessageCache()
    for length in range(3 * bulk_messages.MAX_HEADS):
        raw = b"head" + bytes(length)
        heads.keep(raw, bulk_messages.Pieces(b"", b"", 4, memoryview(raw)[4:]), length)
        if length < bulk_messages.MAX_HEADS:
            assert heads.find(b"head") is not None  # the first of all
    found = [heads.find(b"head" + bytes(length)) is not None for length in range(3 * bulk_messages.MAX_HEADS)]
    assert 0 < sum(found) <= bulk_messages.MAX_HEADS
    assert found[-1]
    long = bytes(bulk_messages.MAX_HEAD_BYTES + 1) + b"buffer"
    heads.keep(long, bulk_messages.Pieces(b"", b"", bulk_messages.MAX_HEAD_BYTES + 1, memoryview(long)[-6:]), 0)
    assert heads.find(long) is None


def test_a_message_of_countless_fields_is_left_to_protobuf() -> None:
    """Cut by hand, 32 MiB of them would hold the event loop up for seconds."""
    once = conversion.encode_averaging_data(AveragingData(tensor_part=WireTensor(b"x" * LARGE)))
    code = averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED).SerializeToString()
    assert bulk_messages.split(code * (bulk_messages.MAX_FIELDS - 2) + once, 4) is not None
    for many in (code * bulk_messages.MAX_FIELDS + once, once + code * bulk_messages.MAX_FIELDS):
        assert bulk_messages.split(many, 4) is None
        data = conversion.decode_averaging_data(many)
        assert data.code is MessageCode.CANCELLED
        assert data.tensor_part is not None
        assert data.tensor_part.buffer == b"x" * LARGE
