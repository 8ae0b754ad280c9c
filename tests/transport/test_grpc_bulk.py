"""Messages with a tensor, which are joined from pieces, against protobuf's own reading of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.protocol.messages import AveragingData, MessageCode, WireTensor
from averaging.transport import parse
from averaging.transport.grpc.conversion import AVERAGING_DATA
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
    raw = AVERAGING_DATA.SerializeToString(message)
    wire = averaging_pb2.AveragingData.FromString(raw)
    assert message.tensor_part is not None
    assert wire.tensor_part.buffer == message.tensor_part.buffer
    assert tuple(wire.tensor_part.size) == message.tensor_part.size
    assert (int(wire.code), wire.group_id, wire.endpoint) == (int(message.code), message.group_id, message.endpoint)
    assert parse(AVERAGING_DATA, raw) == message
    assert parse(AVERAGING_DATA, wire.SerializeToString()) == message


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, LARGE, (1 << 14) - 1, 1 << 14, 1 << 21])
def test_the_length_of_a_buffer_takes_one_byte_to_four(nbytes: int) -> None:
    message = AveragingData(tensor_part=WireTensor(memoryview(b"x" * nbytes)))
    assert parse(AVERAGING_DATA, AVERAGING_DATA.SerializeToString(message)) == message


def test_a_message_for_several_is_encoded_once() -> None:
    part = AveragingData(tensor_part=WireTensor(b"x" * LARGE))
    assert AVERAGING_DATA.SerializeToString(part) is AVERAGING_DATA.SerializeToString(part)
    assert len(part.encoded) == 1


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
    part = AVERAGING_DATA.SerializeToString(AveragingData(tensor_part=WireTensor(b"x" * LARGE)))
    data = parse(AVERAGING_DATA, unknown + part + unknown)
    assert data == AveragingData(tensor_part=WireTensor(b"x" * LARGE))
