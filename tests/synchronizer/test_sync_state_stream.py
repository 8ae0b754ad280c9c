"""A state as messages: what arrives is what was sent, and anything else is an error."""

import random

import pytest
import torch
from hypothesis import given, strategies as st

from averaging.errors import ProtocolViolationError
from averaging.rl.synchronizer.methods import (
    PIECE_BYTES,
    ModelState,
    StateDict,
    TensorAssembler,
    copy_of,
    meta_of,
    parts_of,
)
from averaging.tensors import DTYPES
from averaging.wire import synchronizer_pb2 as wire

LIMIT = 1 << 26


def received(parts: list[wire.StatePart], limit: int = LIMIT) -> tuple[ModelState, int]:
    assembler = TensorAssembler(limit)
    for part in parts:
        assembler.add(wire.StatePart.FromString(part.SerializeToString()))
    return assembler.result()


def bits(state: ModelState) -> object:
    if not isinstance(state, dict):
        return state
    return [
        (meta, bytes(tensor.reshape(-1).view(torch.uint8).numpy()))
        for meta, tensor in zip(meta_of(state), state.values(), strict=True)
    ]


def drawn(seed: int) -> StateDict:
    rng = random.Random(seed)
    state = {}
    for number in range(rng.randrange(6)):
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        dtype = DTYPES[rng.choice(sorted(DTYPES))]
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = torch.tensor([rng.randrange(2 if dtype is torch.bool else 256) for _ in range(size)], dtype=torch.uint8)
        state[f"t{number}"] = raw.view(dtype).reshape(shape)
    return state


@given(st.integers(0, 10**6), st.integers(0, 10**12))
def test_all_dtypes_and_shapes_arrive_bit_for_bit(seed: int, version: int) -> None:
    state = copy_of(drawn(seed))
    found = received(list(parts_of(state, version)))
    assert (bits(found[0]), found[1]) == (bits(state), version)


@pytest.mark.parametrize("state", [None, "s3://weights", {}])
def test_states_without_tensors(state: ModelState) -> None:
    assert received(list(parts_of(state, 3))) == (state, 3)


def test_a_large_tensor_comes_in_pieces_and_a_strided_one_is_copied() -> None:
    large = torch.arange(3 * PIECE_BYTES // 4, dtype=torch.float32).reshape(3, -1).T
    state = copy_of({"w": large})
    parts = list(parts_of(state))
    assert [len(part.data) for part in parts[1:-1]] == [PIECE_BYTES] * 3
    found, _ = received(parts)
    assert isinstance(found, dict)
    assert torch.equal(found["w"], large)
    large.zero_()
    assert isinstance(state, dict)
    assert state["w"].any(), "the trainer's own tensor may change"


@given(st.integers(0, 10**6), st.data())
def test_one_changed_message_is_an_error(seed: int, data: st.DataObject) -> None:
    state: StateDict = {"a": torch.ones(3), **drawn(seed), "z": torch.ones(2, dtype=torch.int16)}
    parts = list(parts_of(copy_of(state)))
    place = data.draw(st.integers(0, len(parts) - 1))
    match data.draw(st.sampled_from(["missing", "twice", "cut", "flipped", "other"])):
        case "missing":
            del parts[place]
        case "twice":
            parts.insert(place, parts[place])
        case "cut" if parts[place].data:
            parts[place] = wire.StatePart(data=parts[place].data[:-1])
        case "flipped" if parts[place].data:
            raw = bytearray(parts[place].data)
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            parts[place] = wire.StatePart(data=bytes(raw))
        case _:
            parts[place] = wire.StatePart(digest=bytes(32))
    with pytest.raises(ProtocolViolationError):
        received(parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_state_or_an_error(raw: bytes) -> None:
    try:
        part = wire.StatePart.FromString(raw)
    except Exception:
        return  # of protobuf, which the service maps
    try:
        received([part])
    except ProtocolViolationError:
        return


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([wire.Tensor(name="w", dtype="float32", shape=[1 << 30])], "at most 67108864 are accepted"),
        # They have no elements, and their strides overflow.
        ([wire.Tensor(name="w", dtype="float32", shape=[1 << 47, 1 << 47, 0])], "invalid shape"),
        ([wire.Tensor(name="w", dtype="qint8")], "unknown dtype 'qint8'"),
        ([wire.Tensor(name="", dtype="float32")], "a name of 0"),
        ([wire.Tensor(name="w" * 2000, dtype="float32")], "a name of 2000"),
        ([wire.Tensor(name="w", dtype="int8")] * 2, "same name"),
    ],
)
def test_layouts_that_are_refused_before_memory_is_taken(tensors: list[wire.Tensor], reason: str) -> None:
    head = wire.StateHead(has_tensors=True, tensors=tensors)
    with pytest.raises(ProtocolViolationError, match=reason):
        TensorAssembler(LIMIT).add(wire.StatePart(head=head))


def test_a_head_that_contradicts_itself_is_refused() -> None:
    for head in (
        wire.StateHead(has_tensors=True, path="x"),
        wire.StateHead(path="x" * 5000),
        wire.StateHead(tensors=[wire.Tensor(name="w", dtype="int8")]),
    ):
        with pytest.raises(ProtocolViolationError, match="invalid path"):
            TensorAssembler(LIMIT).add(wire.StatePart(head=head))
