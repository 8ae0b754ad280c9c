"""Messages with a tensor in them, written and read without copies of the tensor's bytes beyond gRPC's own.

What is written is ordinary protobuf, with the buffer as the last field of the tensor and the tensor as the last field
of the message. What is read may be in any order; a message that is unusual in any way is left to protobuf.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

BUFFER = 1
"""Number of the field `buffer` in a Tensor."""

MOST_FIELDS = 128
"""Of a message, or of a tensor with 64 dimensions; more are left to protobuf, which reads millions in no time."""

LONGEST_HEAD = 512
"""Bytes before a tensor's own; no message of an honest peer has more."""

MOST_HEADS = 256
"""How many are kept: a model has fewer lengths of parts. Beyond, all are forgotten."""

Content = TypeVar("Content")

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def head(field: int, tensor: bytes, nbytes: int) -> bytes:
    """The last field of a message, which is a tensor, up to the tensor's bytes, its own last field.

    Args:
        field: number of the field.
        tensor: the tensor's other fields, encoded.
        nbytes: how many bytes follow.
    """
    inner = tensor + _varint(BUFFER << 3 | _BYTES) + _varint(nbytes)
    return _varint(field << 3 | _BYTES) + _varint(len(inner) + nbytes) + inner


class Pieces(NamedTuple):
    """A message with a tensor in it, taken apart.

    Attributes:
        outer: the message's other fields.
        tensor: the tensor's other fields.
        start: where the tensor's bytes begin.
        buffer: these; it shares the memory of the message.
    """

    outer: bytes
    tensor: bytes
    start: int
    buffer: memoryview


def split(raw: bytes, field: int) -> Pieces | None:
    """Takes a message with a tensor in it apart.

    Returns:
        None if there is no such tensor, more than one, or something that is not seen to be sound at a glance.
    """
    outer = _cut(raw, 0, len(raw), field)
    if outer is None:
        return None
    inside = _cut(raw, outer.start, outer.stop, BUFFER)
    if inside is None:
        return None
    return Pieces(outer.rest, inside.rest, inside.start, memoryview(raw)[inside.start : inside.stop])


class Heads(Generic[Content]):
    """What messages of one kind hold besides their tensor's bytes, each decoded once.

    The parts of a round hold the same but for these. A message as long as a former one, with the same bytes before
    those of its tensor, holds the same besides them.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, Content]] = {}  # by the length of the message

    def find(self, raw: bytes) -> tuple[Content, memoryview] | None:
        """What such a message held, and this one's buffer, which shares the memory of `raw`; None if there was none."""
        known = self._known.get(len(raw))
        if known is None or not raw.startswith(known[0]):
            return None
        return known[1], memoryview(raw)[len(known[0]) :]

    def keep(self, raw: bytes, pieces: Pieces, content: Content) -> None:
        """Remembers what the message `raw`, taken apart, holds, unless something follows the tensor's bytes."""
        if pieces.start > LONGEST_HEAD or pieces.start + len(pieces.buffer) < len(raw):
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[len(raw)] = raw[: pieces.start], content


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
        for _ in range(MOST_FIELDS):
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
                return None  # a kind that is no longer used
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
