"""The layout of frames and of the first bytes of a connection, and their encryption. Pure.

A frame is a header of 8 bytes and a payload. The header has the kind, a zero byte, the length of the head (2 bytes) and
that of the body (4 bytes), little-endian. The payload is the body, then the head. The body comes first, so that it is
aligned in the receiver's buffer. If the connection is sealed, a tag of 16 bytes follows the body, unless it is empty,
and another one follows the head.

A connection begins with the hello of the caller: which protocol this is, and the ticket with which it was granted.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from averaging.errors import ProtocolViolationError
from averaging.protocol import Buffer

HEADER = struct.Struct("<BBHI")  # kind, zero, bytes of the head, bytes of the body
MAX_HEAD_BYTES = 4096  # maximum size of a head. A group id, an endpoint and a shape take less.

TAG_BYTES = 16

VERSION = 3  # version of the opening and of this layout. Peers with different versions have no direct connection.

MAGIC = b"AVGD" + bytes([VERSION])  # first bytes of a connection. The ticket follows
TICKET_BYTES = 32

HELLO_BYTES = len(MAGIC) + TICKET_BYTES


class FrameKind(IntEnum):
    READY = 1  # the caller's first frame: it holds the keys of the ticket
    WELCOME = 2  # the callee's first frame: the connection can be used
    PART = 3  # of a stream of parts: AveragingData without the buffer as the head, and the buffer as the body
    END = 4  # the sender of this frame has sent all messages of this stream
    ERROR = 5  # the callee ends the stream with an error; the head is a `DirectError`


FROM_CALLER = frozenset({FrameKind.READY, FrameKind.PART, FrameKind.END})
FROM_CALLEE = frozenset({FrameKind.WELCOME, FrameKind.PART, FrameKind.END, FrameKind.ERROR})

_HEADS = frozenset({FrameKind.PART, FrameKind.ERROR})
_BODIES = frozenset({FrameKind.PART})


class Sizes(NamedTuple):
    kind: FrameKind
    head: int
    body: int

    def payload(self, *, sealed: bool) -> int:
        return self.head + self.body + (TAG_BYTES * (1 + bool(self.body)) if sealed else 0)


class Frame(NamedTuple):
    """A received frame. The body is in a buffer that is used again when nothing refers to it any more."""

    kind: FrameKind
    head: bytes
    body: Buffer


def pack_header(kind: FrameKind, head: int, body: int) -> bytes:
    return HEADER.pack(kind, 0, head, body)


def read_header(raw: bytes | bytearray | memoryview, max_body: int, accepted: frozenset[FrameKind]) -> Sizes:
    kind, zero, head, body = HEADER.unpack(raw)
    if zero or not FrameKind.READY <= kind <= FrameKind.ERROR:
        raise ProtocolViolationError("something on the direct connection that is not a frame")
    if kind not in accepted:
        raise ProtocolViolationError(f"a frame {FrameKind(kind).name}, which this side may not send")
    if head > (MAX_HEAD_BYTES if kind in _HEADS else 0) or body > (max_body if kind in _BODIES else 0):
        raise ProtocolViolationError(
            f"a frame with {head} and {body} bytes; at most {MAX_HEAD_BYTES} and {max_body} are accepted"
        )
    return Sizes(FrameKind(kind), head, body)


def read_hello(raw: bytes | bytearray) -> bytes:
    if len(raw) != HELLO_BYTES or not raw.startswith(MAGIC):
        raise ProtocolViolationError("something on the direct port that is not a peer")
    return bytes(raw[len(MAGIC) :])


# Buffers in which frames are received, used again when nothing refers to them any more. Pure.


KEPT_BYTES = 16 << 20
"""Bytes of buffers that are kept for further frames. The first use of fresh memory costs more than a copy."""

_UNUSED = 2  # `sys.getrefcount` of an idle buffer: the list's reference and the argument's

Room: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"
"""Memory for a frame. A `bytearray` would be filled with zeros first, which took 4 % of a round."""

_KEPT_FROM = 64 << 10  # smaller ones are not: memory for them is not fresh, and to search among many would cost more
_STEP = 4096  # sizes are multiples of it, so that parts with heads of different lengths share buffers


class BufferPool:
    """The buffers of one transport, of which at most `KEPT_BYTES` are kept.

    A view of a buffer, and a tensor that shares its memory, refer to it. So it is free when only this object does. The
    holder of a view may write to it.
    """

    def __init__(self) -> None:
        self._kept: list[Room] = []
        self._nbytes = 0
        self._next = 0  # where the search begins: buffers mostly become free in the order in which they were taken

    def take(self, nbytes: int) -> Room:
        if nbytes < _KEPT_FROM:  # whatever it holds is arbitrary
            return np.empty(nbytes, np.uint8)
        kept = self._kept
        for place in range(self._next, self._next + len(kept)):
            index = place % len(kept)
            if nbytes <= len(kept[index]) <= 2 * nbytes and sys.getrefcount(kept[index]) == _UNUSED:
                self._next = index + 1
                return kept[index]
        buffer: Room = np.empty(-(-nbytes // _STEP) * _STEP, np.uint8)
        if self._make_room(len(buffer)):
            kept.append(buffer)
            self._nbytes += len(buffer)
        return buffer

    def _make_room(self, nbytes: int) -> bool:
        """Forgets unused buffers of other sizes until `nbytes` more fit; returns whether they do."""
        kept = self._kept
        for index in reversed(range(len(kept))):
            if self._nbytes + nbytes <= KEPT_BYTES:
                break
            if sys.getrefcount(kept[index]) == _UNUSED:
                self._nbytes -= len(kept[index])
                del kept[index]
        return self._nbytes + nbytes <= KEPT_BYTES


KEY_BYTES = 32  # of AES-256, and of X25519

CONTEXT = b"averaging.v1.Direct"
"""Separates these keys from those that another protocol would derive from the same secret."""

MAX_SEALED_BYTES = 64 << 30
"""A connection is replaced after this many bytes in one direction. TLS 1.3 replaces keys after about 350 GiB."""


def shared_secret(own: X25519PrivateKey, other: bytes) -> bytes:
    if len(other) != KEY_BYTES:
        raise ProtocolViolationError(f"a public key of {len(other)} bytes instead of {KEY_BYTES}")
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise ProtocolViolationError("a public key that makes the secret known to everybody") from None


def derive_keys(secret: bytes, caller: bytes, callee: bytes, ticket: bytes) -> tuple[bytes, bytes]:
    derived = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt=ticket, info=CONTEXT + caller + callee).derive(secret)
    return derived[:KEY_BYTES], derived[KEY_BYTES:]


class Cipher:
    """Seals or opens what is sent in one direction of one connection.

    Every operation has the next nonce, so bytes that are changed, left out, repeated or moved are not accepted.
    """

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0
        self.nbytes = 0

    def seal(self, data: Buffer, header: bytes, room: memoryview) -> None:
        self._aead.encrypt_into(self._nonce(len(data)), data, header, room)

    def open(self, sealed: memoryview, header: bytes) -> None:
        # Decrypts in place, without the last `TAG_BYTES`.
        try:
            self._aead.decrypt_into(self._nonce(len(sealed)), sealed, header, sealed[:-TAG_BYTES])
        except InvalidTag:
            raise ProtocolViolationError("a frame that was changed on its way, or sealed with another key") from None

    def _nonce(self, nbytes: int) -> bytes:
        self.nbytes += nbytes
        self._count += 1
        return self._count.to_bytes(12, "big")


@dataclass(frozen=True, slots=True)
class Ciphers:
    sending: Cipher
    receiving: Cipher

    @property
    def nbytes(self) -> int:
        return max(self.sending.nbytes, self.receiving.nbytes)


@dataclass(frozen=True, slots=True)
class Admission:
    """What the holder of a ticket may do."""

    check: Callable[[str], None]  # raises a ProtocolViolationError if the holder may not use an endpoint as its own
    ciphers: Ciphers | None  # of the connection; None for plain text
