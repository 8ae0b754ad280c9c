"""Weights in memory: pieces, digests, what is shared between versions, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from averaging.errors import ProtocolViolationError, TensorError
from averaging.weights.differences import Coding, encode
from averaging.weights.layout import (
    PIECE_BYTES,
    WeightLayout,
    WeightSpec,
    check_layout,
    indices_of,
    read_version,
    version_message,
)
from averaging.weights.snapshot import Incoming, WeightSnapshot, begin_copy, seal

STATE = {
    "big": torch.arange(700_000, dtype=torch.float32).reshape(7, -1),
    "half": torch.randn(3, 5).bfloat16(),
    "count": torch.tensor(3),
    "flags": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
    "small": torch.randn(9).to(torch.float8_e4m3fn),
    "turned": torch.arange(12.0).reshape(3, 4).T,
}


def snapshot(version: int = 1, before: WeightSnapshot | None = None, **changed: torch.Tensor) -> WeightSnapshot:
    return seal(begin_copy(STATE | changed), version, before)


def test_a_snapshot_has_the_values_of_all_dtypes_and_layouts() -> None:
    taken = snapshot()
    for name, tensor in taken.tensors().items():
        assert tensor.dtype == STATE[name].dtype
        assert tensor.shape == STATE[name].shape
        assert torch.equal(tensor.float(), STATE[name].float())
    pieces = taken.manifest.layout.pieces
    assert [piece.stop - piece.start for piece in pieces if piece.bucket == 0] == [PIECE_BYTES, PIECE_BYTES, 702848]
    assert len(pieces) == 3 + 5, "an empty tensor has no piece"


def test_versions_share_the_memory_of_equal_tensors() -> None:
    first = snapshot()
    second = snapshot(2, first, half=STATE["half"] + 1)
    shared = [a is b for a, b in zip(first.buffers, second.buffers, strict=True)]
    assert shared == [True, False, True, True, True, True, True]
    incoming = Incoming(second.manifest, first)
    assert incoming.missing() == [3]
    incoming.add(3, *encode(second.piece(3), first.piece(3), 2))
    received = incoming.finish()
    assert [a is b for a, b in zip(first.buffers, received.buffers, strict=True)] == shared
    assert torch.equal(received.tensors()["half"], STATE["half"] + 1)


def test_equal_pieces_are_received_once() -> None:
    tied = torch.randn(600_000)
    whole = seal(begin_copy({"in": tied, "out": tied, "zeros": torch.zeros(1 << 20)}), 1, None)
    incoming = Incoming(whole.manifest, None)
    assert incoming.missing() == [0, 1, 2, 6], "of `out` nothing, of `zeros` the first piece"
    assert incoming.left == 2_400_000 + PIECE_BYTES
    for index in incoming.missing():
        incoming.add(index, Coding.RAW, whole.piece(index).tobytes())
    assert incoming.complete
    assert incoming.left == 0
    assert all(np.array_equal(a, b) for a, b in zip(incoming.finish().buffers, whole.buffers, strict=True))


def test_what_cannot_be_published_is_named() -> None:
    with pytest.raises(TensorError, match="'w' is torch.complex64"):
        begin_copy({"w": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(TensorError, match="'w' has no dense values"):
        begin_copy({"w": torch.zeros(2, 2).to_sparse()})
    assert [spec.name for spec in begin_copy({"w": torch.zeros(1), "extra": None}).layout.tensors] == ["w"]  # type: ignore[dict-item]


def test_a_manifest_that_does_not_fit_together_is_refused() -> None:
    manifest = snapshot().manifest
    message = version_message(manifest)
    with pytest.raises(ProtocolViolationError, match="more than max_bytes=1000"):
        read_version(message, 1000)
    message.tensors[1].name = "renamed"
    with pytest.raises(ProtocolViolationError, match="does not match its pieces"):
        read_version(message, 1 << 30)
    message = version_message(manifest)
    message.piece_digests += bytes(32)
    with pytest.raises(ProtocolViolationError, match="digests for 8 pieces"):
        read_version(message, 1 << 30)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (WeightSpec("w", "float31", (1,)), "unknown dtype"),
        (WeightSpec("w", "float32", (1 << 62, 1 << 62)), "more than"),
        (WeightSpec("w", "float32", (1,) * 65), "65 dimensions"),
        (WeightSpec("w", "float32", (2,), (4,), (3,)), "outside"),
        (WeightSpec("w", "float32", (2,), (4, 4), (0,)), "outside"),
    ],
)
def test_a_layout_from_another_peer_is_checked(spec: WeightSpec, match: str) -> None:
    with pytest.raises(ProtocolViolationError, match=match):
        check_layout([spec], PIECE_BYTES, 1 << 40)
    with pytest.raises(ProtocolViolationError, match="two tensors have the same name"):
        check_layout([WeightSpec("w", "int8", (1,))] * 2, PIECE_BYTES, 100)
    for size in (0, 100, 4097, 1 << 30):
        with pytest.raises(ProtocolViolationError, match="pieces of"):
            check_layout([], size, 100)


@pytest.mark.parametrize("ranges", [[(0, 0)], [(3, 2), (4, 1)], [(9, 2)], [(5, 1), (0, 1)]])
def test_ranges_from_another_peer_are_checked(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ProtocolViolationError):
        indices_of(ranges, 10)


@given(
    st.lists(st.tuples(st.sampled_from(["float32", "int32", "bfloat16", "bool"]), st.integers(0, 6000)), max_size=40)
)
def test_buckets_have_each_tensor_once_and_fit_in_a_piece(kinds: list[tuple[str, int]]) -> None:
    specs = tuple(WeightSpec(str(number), dtype, (size,)) for number, (dtype, size) in enumerate(kinds))
    layout = WeightLayout(specs, 4096)
    assert [number for bucket in layout.buckets for number in range(bucket.first, bucket.stop)] == [*range(len(specs))]
    for bucket in layout.buckets:
        inside = specs[bucket.first : bucket.stop]
        assert {spec.torch_dtype.itemsize for spec in inside} == {bucket.itemsize}
        assert bucket.nbytes == sum(spec.nbytes for spec in inside)
        assert len(inside) == 1 or bucket.nbytes <= 4096
    assert all(stop - start == spec.nbytes for spec, (_, start, stop) in zip(specs, layout.places, strict=True))
