"""Messages with a large tensor in them, written and read without copies of the tensor's bytes beyond gRPC's own.

What is written is ordinary protobuf, with the buffer as the last field of the tensor and the tensor as the last field
of the message. What is read may be in any order; a message that is unusual in any way is left to protobuf.
"""

from __future__ import annotations

from typing import NamedTuple

from averaging.messages import Buffer

BUFFER = 1
"""Number of the field `buffer` in a Tensor."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def join(outer: bytes, field: int, tensor: bytes, buffer: Buffer) -> bytes:
    """A message with a tensor in it.

    Args:
        outer: the message's other fields, encoded.
        field: number of the tensor's field.
        tensor: the tensor's other fields, encoded.
        buffer: its bytes.
    """
    head = tensor + _varint(BUFFER << 3 | _BYTES) + _varint(len(buffer))
    return b"".join((outer, _varint(field << 3 | _BYTES), _varint(len(head) + len(buffer)), head, buffer))


def split(raw: bytes, field: int) -> tuple[bytes, bytes, memoryview] | None:
    """Takes such a message apart.

    Returns:
        The message's other fields, the tensor's other fields, and the buffer, which shares the memory of `raw`; None if
        there is no such tensor, more than one, or something that is not seen to be sound at a glance.
    """
    outer = _cut(raw, 0, len(raw), field)
    if outer is None:
        return None
    inside = _cut(raw, outer.start, outer.stop, BUFFER)
    if inside is None:
        return None
    return outer.rest, inside.rest, memoryview(raw)[inside.start : inside.stop]


class _Cut(NamedTuple):
    """Where the content of a field lies, and the bytes of all others."""

    start: int
    stop: int
    rest: bytes


def _cut(raw: bytes, place: int, stop: int, wanted: int) -> _Cut | None:
    """Takes one field out of the message in `raw[place:stop]`; None if it is not there exactly once."""
    start, rest = place, b""
    found: tuple[int, int] | None = None
    try:
        while place < stop:
            begin = place
            key, place = _read_varint(raw, place)
            kind, content = key & 7, place
            if kind == _VARINT:
                _, place = _read_varint(raw, place)
            elif kind == _BYTES:
                size, content = _read_varint(raw, place)
                place = content + size
            elif kind in _SIZES:
                place += _SIZES[kind]
            else:
                return None  # a kind that is no longer used
            if place > stop or key < 8:
                return None
            if key >> 3 == wanted:
                if found is not None or kind != _BYTES:
                    return None
                found = content, place
                rest += raw[start:begin]
                start = place
    except IndexError:
        return None
    return None if found is None else _Cut(*found, rest + raw[start:stop])


def _read_varint(raw: bytes, place: int) -> tuple[int, int]:
    """The number that begins at `place`, and where it ends.

    Raises:
        IndexError: `raw` ends before it does, or it is longer than numbers are.
    """
    byte = raw[place]
    if byte < 0x80:
        return byte, place + 1
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        place += 1
        byte = raw[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
    raise IndexError(place)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
