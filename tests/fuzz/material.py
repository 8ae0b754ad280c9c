"""Untrusted input: random bytes, damaged valid messages, and messages with unusual values."""

import struct
from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec import msgpack

from averaging.protocol.messages import COMPRESSIONS, DownloadData, WireTensor
from averaging.tensors.compression import encode

ENDPOINTS = ["", "peer:1", "peer:2", "peer:3", "client::1", "no endpoint", "h:0", "h:99999", "\x00:1", "ü" * 300]

odd_numbers = st.one_of(
    st.sampled_from([0, 1, 2, 5, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -1, -(2**63)]),
    st.floats(),
    st.integers(0, 50),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), odd_numbers, st.binary(max_size=9), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(0, 9)), inner, max_size=4),
    ),
    max_leaves=12,
)
"""Any value that msgpack can pack."""

packed = st.one_of(st.binary(max_size=80), values.map(msgpack.encode))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@st.composite
def protobufs(draw: st.DrawFn, depth: int = 2) -> bytes:
    """Encoded nested fields with numbers that messages use, so that decoders read most of them."""
    out = b""
    for _ in range(draw(st.integers(0, 6))):
        number, kind = draw(st.integers(1, 22)), draw(st.sampled_from([0, 1, 2, 2, 2, 5]))
        out += _varint(number << 3 | kind)
        if kind == 0:
            out += _varint(draw(st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1))))
        elif kind == 2:
            inner = st.one_of(st.binary(max_size=30), st.sampled_from([e.encode() for e in ENDPOINTS]))
            content = draw(st.one_of(inner, protobufs(depth - 1)) if depth else inner)
            out += _varint(len(content)) + content
        else:
            out += struct.pack("<d" if kind == 1 else "<f", draw(st.floats(width=32)))
    return out


@st.composite
def damaged(draw: st.DrawFn, sound: Sequence[bytes]) -> bytes:
    """One of `sound` with up to four changes: bytes replaced, removed, repeated or inserted."""
    raw = draw(st.sampled_from(sound))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(raw)))
        end = min(len(raw), place + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(["cut", "double", "put", "end"]))
        put = draw(st.binary(max_size=6)) if kind == "put" else raw[place:end] * 2 if kind == "double" else b""
        raw = raw[:place] + put + (b"" if kind == "end" else raw[end:])
    return raw


DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "clamped_float32", "rounded_float32"]
DTYPES += ["compressed_float32", "blockwise_float32", "", "object"]

sizes = st.lists(st.one_of(st.integers(0, 20), st.sampled_from([2**31, 2**32 - 1])), max_size=4).map(tuple)


@st.composite
def wire_tensors(draw: st.DrawFn, numels: Sequence[int] = (0, 1, 5)) -> WireTensor:
    """A tensor of any kind, often of the right length."""
    import torch

    if draw(st.booleans()):
        special = draw(st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -3e38]))
        tensor = torch.full((draw(st.sampled_from(numels)),), special)
        whole = encode(tensor, draw(st.sampled_from(list(COMPRESSIONS.values()))))
        if draw(st.booleans()):
            return whole
        return WireTensor(draw(damaged([bytes(whole.buffer)])), whole.size, whole.dtype, whole.compression)
    return WireTensor(
        draw(st.binary(max_size=200)),
        draw(sizes),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 20)),
        draw(st.sampled_from([0, 0, 1, 2, 2**31 - 1])),
    )


@st.composite
def states(draw: st.DrawFn, sound: Sequence[DownloadData]) -> list[DownloadData]:
    """The messages of a download: other metadata, or some messages left out, doubled, swapped or changed."""
    messages = list(sound)
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, max(0, len(messages) - 1)))
        match draw(st.sampled_from(["metadata", "cut", "double", "odd", "fields"])):
            case "metadata":
                metadata = draw(st.one_of(packed, damaged([sound[0].metadata])))
                messages[:1] = [DownloadData(metadata, sound[0].tensor_part)]
            case "fields":
                fields = msgpack.decode(sound[0].metadata)
                field = draw(st.sampled_from(sorted([*fields, "skipped"])))
                given = draw(values)
                if isinstance(fields.get(field), list) and draw(st.booleans()):
                    inside = fields[field][0]
                    if isinstance(inside, list):
                        inside[draw(st.integers(0, 2))] = given
                    else:
                        fields[field][0] = given
                else:
                    fields[field] = given
                messages[:1] = [DownloadData(msgpack.encode(fields), sound[0].tensor_part)]
            case "cut":
                del messages[place : place + 1]
            case "double":
                messages[place:place] = messages[place : place + 1]
            case _:
                odd = DownloadData(draw(packed), draw(st.one_of(st.none(), wire_tensors())))
                messages[place : place + 1] = [odd]
    return messages
