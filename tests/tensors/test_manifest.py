"""What all ways of sending tensors share: dtypes, descriptions, pieces, and bytes that arrive in order."""

import tracemalloc

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.errors import ProtocolViolationError
from averaging.protocol import WireTensor
from averaging.tensors import STATE_DTYPES, TensorBuffer, TensorInfo, check_tensors, chunks_of, view_memory


@given(st.binary(max_size=40), st.integers(1, 9))
def test_what_is_cut_into_messages_arrives(raw: bytes, size: int) -> None:
    messages = list(chunks_of(WireTensor(raw, (len(raw),), "uint8"), size))
    assert [(message.size, message.dtype) for message in messages[1:]] == [((), "")] * (len(messages) - 1)
    buffer = TensorBuffer(len(raw), bytearray(), messages[0].chunks)
    assert [buffer.add(message.buffer) for message in messages] == [False] * (len(messages) - 1) + [True]
    assert bytes(buffer.data or b"") == raw


@pytest.mark.parametrize(("chunks", "lengths"), [(None, [4, 1]), (2, [5]), (1, [3]), (2, [2, 1]), (1, [2, 2])])
def test_more_or_fewer_bytes_or_messages_are_refused(chunks: int | None, lengths: list[int]) -> None:
    buffer = TensorBuffer(4, bytearray(), chunks)
    with pytest.raises(ProtocolViolationError, match="takes 4 bytes, but"):
        list(map(buffer.add, map(bytes, lengths)))


def test_memory_is_taken_as_bytes_arrive() -> None:
    tracemalloc.start()
    try:
        buffer = TensorBuffer(1 << 40, bytearray())
        assert not buffer.add(bytes(1 << 10))
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_single_element_has_its_bytes_whatever_its_stride() -> None:
    element = torch.ones((), dtype=torch.bfloat16).expand(1)
    assert element.stride() == (0,)
    assert bytes(view_memory(element)) == b"\x80\x3f"


def test_descriptions_from_strangers_are_checked() -> None:
    check_tensors([TensorInfo("a", "int8", (2,)), TensorInfo("b", "float32", ())], STATE_DTYPES)
    for tensors, reason in (
        ([TensorInfo("a", "int8", (1,))] * 2, "the same name"),
        ([TensorInfo("a", "complex64", (1,))], "unknown dtype 'complex64'"),
        ([TensorInfo("a", "int8", (-1,))], "invalid shape"),
        ([TensorInfo(str(number), "int8", ()) for number in range(100_001)], "100001 tensors"),
    ):
        with pytest.raises(ProtocolViolationError, match=reason):
            check_tensors(tensors, STATE_DTYPES)
