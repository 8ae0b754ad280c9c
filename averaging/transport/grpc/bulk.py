"""Messages with a large tensor in them, written and read without copies of the tensor's bytes beyond gRPC's own.

What is written is ordinary protobuf, with the buffer as the last field of the tensor and the tensor as the last field
of the message. What is read may be in any order; a message that is unusual in any way is left to protobuf.
"""

from __future__ import annotations

from collections.abc import Iterator

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
    view = memoryview(raw)
    found = _cut(view, field)
    if found is None:
        return None
    outer, tensor = found
    inside = _cut(tensor, BUFFER)
    if inside is None:
        return None
    return outer, inside[0], inside[1]


def _cut(message: memoryview, wanted: int) -> tuple[bytes, memoryview] | None:
    """The fields of a message but for one, and that one's bytes; None if it is not there exactly once."""
    rest: list[memoryview] = []
    found: memoryview | None = None
    try:
        for number, kind, start, content, end in _fields(message):
            if number != wanted:
                rest.append(message[start:end])
            elif found is not None or kind != _BYTES:
                return None
            else:
                found = message[content:end]
    except ValueError:
        return None
    return None if found is None else (b"".join(rest), found)


def _fields(message: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, wire type, start, start of the content, and end of each field.

    Raises:
        ValueError: it is cut short, or has a wire type that is no longer used.
    """
    place, length = 0, len(message)
    while place < length:
        start = place
        key, place = _read_varint(message, place)
        kind, content = key & 7, place
        if kind == _VARINT:
            _, place = _read_varint(message, place)
        elif kind == _BYTES:
            size, content = _read_varint(message, place)
            place = content + size
        elif kind in _SIZES:
            place += _SIZES[kind]
        else:
            raise ValueError(kind)
        if place > length or key < 8:
            raise ValueError(place)
        yield key >> 3, kind, start, content, place


def _read_varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(place)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
