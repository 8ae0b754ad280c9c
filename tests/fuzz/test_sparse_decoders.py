"""The decoders of sparse parts: any bytes are a valid part or are refused, and take memory only by what is received."""

import struct
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from averaging.errors import ProtocolViolationError
from averaging.protocol import CompressionType, MeanOver, TopK, WireTensor
from averaging.tensors import (
    BlockLayout,
    Contribution,
    SparsePart,
    SparseTensor,
    VisibleTensor,
    decode_top_k,
    decode_union,
    decode_visible,
    encode_union,
    top_k_nbytes,
)
from tests.fuzz.material import damaged
from tests.support.selection import examples

MANY = settings(max_examples=examples(800), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

SIZE = 128
"""Elements of a block: 64 rows of two columns."""

MEMBERS = 3

top_ks = st.builds(
    TopK, st.sampled_from([1e-3, 1 / 24, 0.3, 1.0]), st.sampled_from([2, 4, 8]), st.sampled_from(MeanOver)
)


def sent(blocks: int, top_k: TopK, seed: int = 0) -> WireTensor:
    """A contribution of random values."""
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(blocks * SIZE).astype(np.float32))
    return SparseTensor.of(values, BlockLayout((64 * blocks, 2)), top_k).wire(0, blocks * SIZE)


def replied(blocks: int, top_k: TopK, members: int = MEMBERS, alike: bool = False) -> WireTensor:
    """The average of several of them."""
    wires = [sent(blocks, top_k, 0 if alike else seed) for seed in range(members)]
    parts = [Contribution(decode_top_k(wire, SIZE, top_k), wire.buffer, 1 + n) for n, wire in enumerate(wires)]
    return encode_union(parts, SIZE, top_k).wire


def check(part: SparsePart, wire: WireTensor) -> None:
    """It is what its class promises."""
    assert (part.numel,) == wire.size
    assert part.indices.dtype is torch.int64
    assert part.values.dtype is torch.float32
    assert part.indices.shape == part.values.shape == (len(part.indices),)
    assert torch.isfinite(part.values).all()
    assert (part.indices.diff() > 0).all()
    if len(part.indices):
        assert part.indices[0] >= 0
        assert part.indices[-1] < part.numel
    assert len(part.dense()) == part.numel


def decode_any(wire: WireTensor, top_k: TopK) -> list[SparsePart]:
    """What the decoders accept of it."""
    found = []
    with suppress(ProtocolViolationError):
        found.append(decode_top_k(wire, SIZE, top_k))
    with suppress(ProtocolViolationError):
        found.append(decode_union(wire, SIZE, top_k, MEMBERS))
    with suppress(ProtocolViolationError):
        found.append(decode_visible(wire, SIZE))
    with suppress(ProtocolViolationError):
        found.append(decode_union(wire, SIZE, None, MEMBERS))
    for part in found:
        check(part, wire)
    return found


@MANY
@given(data=st.data(), blocks=st.integers(1, 3), top_k=top_ks, alike=st.booleans())
def test_damaged_replies(data: st.DataObject, blocks: int, top_k: TopK, alike: bool) -> None:
    sound = replied(blocks, top_k, alike=alike)
    raw = data.draw(damaged([bytes(sound.buffer)]))
    decode_any(replace(sound, buffer=raw), top_k)
    length = len(sound.buffer)
    padded = raw[:length] + bytes(max(0, length - len(raw)))
    decode_any(replace(sound, buffer=padded), top_k)
    decode_any(replace(sound, buffer=bytes([data.draw(st.integers(0, 5))]) + padded[1:]), top_k)


@MANY
@given(data=st.data(), blocks=st.integers(1, 3), lr=st.sampled_from([1e-3, 1e-1]))
def test_damaged_visible_parts(data: st.DataObject, blocks: int, lr: float) -> None:
    layout, random = BlockLayout((64 * blocks, 2)), np.random.default_rng(0)
    change, weights = (torch.from_numpy(random.standard_normal((2, blocks * SIZE)).astype(np.float32))).unbind()
    sound = VisibleTensor.of(change * lr, layout, weights).wire(0, blocks * SIZE)
    reply = encode_union([Contribution(decode_visible(sound, SIZE), sound.buffer)], SIZE, None).wire
    for wire in (sound, reply):
        raw = data.draw(damaged([bytes(wire.buffer)]))
        length = len(wire.buffer)
        padded = raw[:length] + bytes(max(0, length - len(raw)))
        for buffer in (raw, padded, bytes([data.draw(st.integers(0, 5))]) + padded[1:]):
            decode_any(replace(wire, buffer=buffer), TopK())


@MANY
@given(data=st.data(), blocks=st.integers(0, 3), top_k=top_ks)
def test_any_bytes_of_a_right_length(data: st.DataObject, blocks: int, top_k: TopK) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kept = blocks * top_k.kept(SIZE)
    length = top_k_nbytes(blocks * SIZE, SIZE, top_k)
    wire = WireTensor(random.bytes(length), (blocks * SIZE,), "top_k_float32", CompressionType.TOP_K)
    decode_any(wire, top_k)
    counts, packed = np.full(blocks, top_k.kept(SIZE), "<u2").tobytes(), -(-kept * 3 // 2)
    bodies = [
        struct.pack("<BH", 0, 2) + np.ones(4, "<f4").tobytes() + random.bytes(2 * length),
        b"\1" + counts + random.bytes(packed + 1024 + kept),
        b"\2" + counts + random.bytes(packed + 2 * kept),
        b"\3" + random.bytes(blocks * SIZE // 8 + 1024 + kept),
        b"\4" + random.bytes(blocks * SIZE // 8 + 2 * kept),
    ]
    for body in bodies:
        for code in (CompressionType.TOP_K_UNION, CompressionType.VISIBLE):
            decode_any(replace(wire, buffer=body, compression=code), top_k)


# --- what is refused ------------------------------------------------------------------------------

TOP_K = TopK(4 / SIZE, 2)
"""Four elements of each block."""


def indices_of(*numbers: int) -> bytes:
    """Indices within blocks, two in three bytes."""
    pairs = zip(numbers[0::2], (*numbers[1::2], 0), strict=False)
    packed = b"".join((low | high << 12).to_bytes(3, "little") for low, high in pairs)
    return packed[: -(-len(numbers) * 3 // 2)]


def reply_of(form: int, *pieces: bytes) -> WireTensor:
    return WireTensor(bytes([form]) + b"".join(pieces), (SIZE,), "top_k_float32", CompressionType.TOP_K_UNION)


CAME = struct.pack("<4f", 1, 2, 3, 4) + indices_of(0, 5, 64, 127) + b"\xe4"
ONE = struct.pack("<2f", 1.0, 1.0)
HALF = torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
BITS = (1 | 1 << 5 | 1 << 127).to_bytes(SIZE // 8, "little")
TABLE = np.ones(256, "<f4").tobytes()


@pytest.mark.parametrize(
    ("wire", "indices"),
    [
        (reply_of(0, struct.pack("<H", 1), ONE, CAME), [0, 5, 64, 127]),
        (reply_of(0, struct.pack("<H", 3), ONE * 3, CAME * 3), [0, 5, 64, 127]),
        (reply_of(1, struct.pack("<H", 3), indices_of(0, 5, 127), TABLE, b"\0\1\xff"), [0, 5, 127]),
        (reply_of(2, struct.pack("<H", 3), indices_of(0, 5, 127), HALF), [0, 5, 127]),
        (reply_of(3, BITS, TABLE, b"\0\1\xff"), [0, 5, 127]),
        (reply_of(4, BITS, HALF), [0, 5, 127]),
    ],
)
def test_the_layouts_of_a_reply(wire: WireTensor, indices: list[int]) -> None:
    assert decode_union(wire, SIZE, TOP_K, MEMBERS).indices.tolist() == indices


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (reply_of(5), "unknown form 5"),
        (reply_of(0, struct.pack("<H", 4), ONE * 4, CAME * 4), "4 contributions; there are 3 members"),
        (reply_of(0, struct.pack("<H2f", 1, 0.0, 1.0), CAME), "weight that is not above 0"),
        (reply_of(0, struct.pack("<H2f", 1, float("nan"), 1.0), CAME), "NaN or infinity"),
        (reply_of(0, struct.pack("<H2f", 1, 1.0, -0.1), CAME), "scale outside 0 to 1"),
        (reply_of(2, struct.pack("<H", 13), indices_of(*range(13)), bytes(26)), "13 elements .* at most 12"),
        (reply_of(2, struct.pack("<H", 3), indices_of(0, 5, 127)[:-1] + b"\xff", HALF), "more bits than indices"),
        (reply_of(4, b"\xff" * (SIZE // 8), bytes(2 * SIZE)), "128 elements; at most 12 of 128"),
    ],
)
def test_replies_that_are_refused(wire: WireTensor, reason: str) -> None:
    with pytest.raises(ProtocolViolationError, match=reason):
        decode_union(wire, SIZE, TOP_K, MEMBERS)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        *((reply_of(form), f"unknown form {form}") for form in (0, 1, 3, 5)),
        (reply_of(2, struct.pack("<H", 129), indices_of(*range(128), 127), bytes(258)), "129 elements .* at most 128"),
        (reply_of(2, struct.pack("<H", 3), indices_of(0, 5, 5), HALF), "come twice"),
        (reply_of(2, struct.pack("<H", 3), indices_of(0, 5, 128), HALF), "out of range"),
        (reply_of(2, struct.pack("<H", 3), indices_of(0, 5, 127), HALF[:-1]), "takes 14 bytes, but 13"),
        (reply_of(4, BITS, HALF + HALF), "takes 23 bytes, but 29"),
        (reply_of(4, BITS, HALF[:4] + b"\x80\x7f"), "NaN or infinity"),
        (reply_of(4, BITS[:-1]), "ends before the end of its bitmap"),
    ],
)
def test_visible_parts_that_are_refused(wire: WireTensor, reason: str) -> None:
    with pytest.raises(ProtocolViolationError, match=reason):
        decode_visible(replace(wire, compression=CompressionType.VISIBLE), SIZE)
    with pytest.raises(ProtocolViolationError, match=reason):
        decode_union(wire, SIZE, None, MEMBERS)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [CompressionType.TOP_K, CompressionType.TOP_K_UNION, CompressionType.VISIBLE])
@pytest.mark.parametrize("raw", [b"", *(bytes([form]) + b"\xff" * 4000 for form in range(6))])
def test_claims_take_no_memory(code: CompressionType, raw: bytes) -> None:
    wire = WireTensor(raw, (SIZE << 32,), "top_k_float32", code)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolationError):
            decode_top_k(wire, SIZE, TOP_K)
        with pytest.raises(ProtocolViolationError):
            decode_union(wire, SIZE, TOP_K, 4096)
        with pytest.raises(ProtocolViolationError):
            decode_visible(wire, SIZE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
