"""The layout of frames and of the first bytes of a connection. Pure.

A frame is a header of 8 bytes and a payload. The header has the kind, a zero byte, the length of the head (2 bytes) and
that of the body (4 bytes), little-endian. The payload is the body, then the head. The body comes first, so that it is
aligned in the receiver's buffer. If the connection is sealed, a tag of 16 bytes follows the body, unless it is empty,
and another one follows the head.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import Buffer

HEADER = struct.Struct("<BBHI")
"""Kind, zero, bytes of the head, bytes of the body."""

MAX_HEAD_BYTES = 4096
"""Maximum size of a head. A group id, an endpoint, 1 KiB of metadata and a shape take less."""

TAG_BYTES = 16

MAGIC = b"AVGD\x01"
"""First bytes of a connection: a name and the version of this layout. The ticket follows."""

TICKET_BYTES = 32

HELLO_BYTES = len(MAGIC) + TICKET_BYTES


class Kind(IntEnum):
    """What a frame is."""

    READY = 1
    """The caller's first frame: it holds the keys of the ticket."""
    WELCOME = 2
    """The callee's first frame: the connection can be used."""
    PART = 3
    """A message of a stream of parts: AveragingData without the buffer as the head, and the buffer as the body."""
    END = 4
    """The sender of this frame has sent all messages of this stream."""
    ERROR = 5
    """The callee ends the stream with an error; the head is a `DirectError`."""
    ALIVE = 6
    """From the callee, when the caller asks with `Echo`; between any two other frames."""


_BODIES = frozenset({Kind.PART})


class Sizes(NamedTuple):
    """The content of a header."""

    kind: Kind
    head: int
    body: int

    def payload(self, *, sealed: bool) -> int:
        """Bytes after the header."""
        return self.head + self.body + (TAG_BYTES * (1 + bool(self.body)) if sealed else 0)


class Frame(NamedTuple):
    """A received frame. The body is in a buffer that is used again when nothing refers to it any more."""

    kind: Kind
    head: bytes
    body: Buffer


def pack_header(kind: Kind, head: int, body: int) -> bytes:
    """Returns the header of a frame."""
    return HEADER.pack(kind, 0, head, body)


def read_header(raw: bytes | bytearray | memoryview, max_body: int) -> Sizes:
    """Reads a header.

    Raises:
        ProtocolViolationError: it is malformed, or the frame is larger than any that a peer sends.
    """
    kind, zero, head, body = HEADER.unpack(raw)
    if zero or not Kind.READY <= kind <= Kind.ALIVE:
        raise ProtocolViolationError("something on the direct connection that is not a frame")
    if head > MAX_HEAD_BYTES or body > (max_body if kind in _BODIES else 0):
        raise ProtocolViolationError(
            f"a frame with {head} and {body} bytes; at most {MAX_HEAD_BYTES} and {max_body} are accepted"
        )
    return Sizes(Kind(kind), head, body)


def pack_hello(ticket: bytes) -> bytes:
    """Returns the first bytes of a connection."""
    return MAGIC + ticket


def read_hello(raw: bytes | bytearray) -> bytes:
    """Returns the ticket in the first bytes of a connection.

    Raises:
        ProtocolViolationError: they are not those of a peer.
    """
    if len(raw) != HELLO_BYTES or not raw.startswith(MAGIC):
        raise ProtocolViolationError("something on the direct port that is not a peer")
    return bytes(raw[len(MAGIC) :])
