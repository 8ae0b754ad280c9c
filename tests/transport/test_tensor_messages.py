"""Tensors in messages of rooms above the core."""

from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, strategies as st

from averaging.errors import ConfigError, ProtocolViolationError
from averaging.rpc import TensorMessage, TensorReader, tensor_messages
from averaging.tensors import STATE_DTYPES
from averaging.wire.runtime_pb2 import FLOAT16, CompressionType


def sent(tensor: torch.Tensor, compression: str = "none", chunk_bytes: int = 4 << 20) -> torch.Tensor:
    """The tensor after its way through bytes."""
    reader = TensorReader()
    found = [
        reader.read(TensorMessage.FromString(message.SerializeToString()))
        for message in tensor_messages(tensor, compression, chunk_bytes)
    ]
    assert reader.complete
    assert all(one is None for one in found[:-1])
    assert found[-1] is not None
    return found[-1]


@pytest.mark.parametrize("name", STATE_DTYPES)
@pytest.mark.parametrize("shape", [(), (2, 0, 5), (17, 5)])
@pytest.mark.parametrize("chunk_bytes", [7, 1 << 20])
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...], chunk_bytes: int) -> None:
    tensor = (torch.randn(shape) * 10).to(STATE_DTYPES[name])
    found = sent(tensor, chunk_bytes=chunk_bytes)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    found += torch.ones_like(found)  # it can be written


def test_only_floating_tensors_are_compressed() -> None:
    tensor = torch.randn(1000)
    assert sent(tensor, "int8").dtype is torch.float32
    assert torch.allclose(sent(tensor, "int8"), tensor, atol=0.1)
    assert not torch.equal(sent(tensor, "int8"), tensor)
    tokens = torch.arange(1000)
    assert torch.equal(sent(tokens, "int8"), tokens)
    assert sum(len(message.buffer) for message in tensor_messages(tensor, "int8")) < 1200


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ConfigError, match="complex64 cannot be sent; float16"):
        next(tensor_messages(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ConfigError, match="compression must be one of"):
        next(tensor_messages(torch.zeros(2), "zip"))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (TensorMessage(size=[3], dtype="int64", buffer=bytes(23)), "takes 24 bytes, but 23"),
        (TensorMessage(size=[3], dtype="int128", buffer=bytes(3)), "dtype must be"),
        (TensorMessage(size=[3], dtype="int64", buffer=bytes(24), compression=FLOAT16), "dtype must be"),
        (TensorMessage(size=[3], dtype="int64", chunks=-1), "in -1 chunks"),
        (TensorMessage(size=[1 << 31] * 8, dtype="int8"), "more than the .* elements"),
        (TensorMessage(size=[1] * 65, dtype="int8", buffer=b"1"), "65 dimensions"),
    ],
)
def test_malformed_tensors(message: TensorMessage, error: str) -> None:
    with pytest.raises(ProtocolViolationError, match=error):
        TensorReader().read(message)


def test_chunks_out_of_order_and_large_tensors() -> None:
    first, second, *_ = tensor_messages(torch.zeros(10), chunk_bytes=8)
    reader = TensorReader()
    assert reader.read(first) is None
    with pytest.raises(ProtocolViolationError, match="before the last chunk"):
        reader.read(first)
    with pytest.raises(ProtocolViolationError, match="of 40 bytes, more than 39 bytes"):
        TensorReader(max_bytes=39).read(first)
    exact = TensorReader(max_bytes=40)
    assert [exact.read(one) is None for one in (first, second)] == [True, True]


@pytest.mark.parametrize(
    ("announced", "buffers", "error"),
    [
        (4, [b"12", b"", b"34"], "of 4 bytes with an empty chunk"),
        (4, [b"12", b"345"], "takes 4 bytes, but 5"),
        (4, [b""], "of 4 bytes with an empty chunk"),
        (2, [b"1"] * 3, "of 2 bytes in 3 chunks"),
        (0, [b""] * 2, "of 0 bytes in 2 chunks"),
    ],
)
def test_chunks_that_do_not_fit_the_tensor(announced: int, buffers: list[bytes], error: str) -> None:
    reader = TensorReader()
    messages = [TensorMessage(buffer=one) for one in buffers]
    messages[0].MergeFrom(TensorMessage(size=[announced], dtype="int8", chunks=len(buffers)))
    with pytest.raises(ProtocolViolationError, match=error):
        list(map(reader.read, messages))


def test_bools_of_strangers_are_bools() -> None:
    found = TensorReader().read(TensorMessage(size=[3], dtype="bool", buffer=b"\x00\x02\xff"))
    assert found is not None
    assert found.tolist() == [False, True, True]


extents = st.integers(0, 4) | st.sampled_from([1 << 30, (1 << 31) - 1])
messages = st.builds(
    TensorMessage,
    size=st.lists(extents, max_size=3),
    dtype=st.sampled_from([*STATE_DTYPES, "", "uint64", "rounded_float32", "clamped_float32"]),
    buffer=st.binary(max_size=9) | st.sampled_from([b"", bytes(4), bytes(8)]),
    chunks=extents | st.sampled_from([-1, -(1 << 31)]),
    compression=st.sampled_from([*CompressionType.values(), 99]),
)


@given(st.lists(messages, max_size=5))
@example([TensorMessage(size=[1 << 30] * 3, dtype="int8", chunks=1 << 30)])
def test_messages_of_strangers_are_tensors_or_refused(found: list[TensorMessage]) -> None:
    reader, received = TensorReader(), 0
    with suppress(ProtocolViolationError):
        for message in found:
            received += len(message.buffer)
            tensor = reader.read(message)
            assert reader.complete == (tensor is not None)
            if tensor is not None:
                assert tensor.nbytes <= 8 * received  # at most a byte for each float64
                received = 0
