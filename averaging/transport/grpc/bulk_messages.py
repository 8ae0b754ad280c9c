"""Encodes and decodes messages that contain a tensor, without copies of the tensor's bytes beyond gRPC's own.

The output is ordinary protobuf, with the buffer as the last field of the tensor and the tensor as the last field of the
message. The fields of the input may have any order; unusual messages are left to the protobuf parser.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

BUFFER = 1
"""Number of the field `buffer` in a Tensor."""

MAX_FIELDS = 128
"""Maximum number of fields in a message, or in a tensor with 64 dimensions. Protobuf parses messages with more."""

MAX_HEAD_BYTES = 512
"""Maximum bytes before the tensor's buffer. Messages of honest peers have fewer."""

MAX_HEADS = 256
"""Heads kept in the cache: more than the number of part sizes in a model. A full cache is cleared."""

Content = TypeVar("Content")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def head(field: int, tensor: bytes, nbytes: int) -> bytes:
    """Encodes the tensor field of a message up to the tensor's buffer, which must follow as the last bytes.

    Args:
        field: number of the tensor field in the message.
        tensor: the tensor's other fields, encoded.
        nbytes: length of the buffer.
    """
    inner = tensor + _varint(BUFFER << 3 | _BYTES) + _varint(nbytes)
    return _varint(field << 3 | _BYTES) + _varint(len(inner) + nbytes) + inner


class Pieces(NamedTuple):
    """The pieces of a message that contains a tensor.

    Attributes:
        outer: the message's other fields, encoded.
        tensor: the tensor's other fields, encoded.
        start: offset of the tensor's buffer in the message.
        buffer: the tensor's buffer; it shares the memory of the message.
    """

    outer: bytes
    tensor: bytes
    start: int
    buffer: memoryview


def split(raw: bytes, field: int) -> Pieces | None:
    """Splits a message that contains one tensor.

    Returns:
        The pieces; None if there is not exactly one tensor, or if the message is unusual or malformed.
    """
    outer = _cut(raw, 0, len(raw), field)
    if outer is None:
        return None
    inside = _cut(raw, outer.start, outer.stop, BUFFER)
    if inside is None:
        return None
    return Pieces(outer.rest, inside.rest, inside.start, memoryview(raw)[inside.start : inside.stop])


class MessageCache(Generic[Content]):
    """A cache of decoded messages without their tensor's buffer.

    The parts of a round differ only in the buffer. A message that has the length of an earlier one, and the same bytes
    before the buffer, therefore has the same other content.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, Content]] = {}  # by the length of the message

    def find(self, raw: bytes) -> tuple[Content, memoryview] | None:
        """Returns the content of an equal earlier message, and the buffer of this one as a view of `raw`; or None."""
        known = self._known.get(len(raw))
        if known is None or not raw.startswith(known[0]):
            return None
        return known[1], memoryview(raw)[len(known[0]) :]

    def keep(self, raw: bytes, pieces: Pieces, content: Content) -> None:
        """Caches the content of the message `raw`, unless other bytes follow the buffer."""
        if pieces.start > MAX_HEAD_BYTES or pieces.start + len(pieces.buffer) < len(raw):
            return
        if len(self._known) >= MAX_HEADS:
            self._known.clear()
        self._known[len(raw)] = raw[: pieces.start], content


class _Cut(NamedTuple):
    """The range of a field's content, and the bytes of all other fields."""

    start: int
    stop: int
    rest: bytes


def _cut(raw: bytes, place: int, stop: int, wanted: int) -> _Cut | None:
    """Finds one field of the message in `raw[place:stop]`; None if it does not occur exactly once."""
    start, rest = place, b""
    found: tuple[int, int] | None = None
    try:
        for _ in range(MAX_FIELDS):
            if place >= stop:
                break
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
                return None  # deprecated groups
            if place > stop or key < 8:
                return None
            if key >> 3 == wanted:
                if found is not None or kind != _BYTES:
                    return None
                found = content, place
                rest += raw[start:begin]
                start = place
        else:
            return None
    except IndexError:
        return None
    return None if found is None else _Cut(*found, rest + raw[start:stop])


def _read_varint(raw: bytes, place: int) -> tuple[int, int]:
    """Decodes the number at `place`; returns it and the offset behind it.

    Raises:
        IndexError: the number is truncated or longer than 64 bits.
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
