"""Encrypts frames: AES-256-GCM with keys of one connection and one direction. SECURITY.md describes it for reviewers.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from averaging.errors import ProtocolViolationError
from averaging.protocol import Buffer
from averaging.transport.direct.frames import TAG_BYTES

KEY_BYTES = 32
"""Of AES-256, and of X25519."""

CONTEXT = b"averaging.v1.Direct"
"""Separates these keys from those that another protocol would derive from the same secret."""

MAX_SEALED_BYTES = 64 << 30
"""A connection is replaced after this many bytes in one direction. TLS 1.3 replaces keys after about 350 GiB."""


def shared_secret(own: X25519PrivateKey, other: bytes) -> bytes:
    """Returns the secret of both sides; raises a ProtocolViolationError if `other` is no key or gives no secret."""
    if len(other) != KEY_BYTES:
        raise ProtocolViolationError(f"a public key of {len(other)} bytes instead of {KEY_BYTES}")
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise ProtocolViolationError("a public key that makes the secret known to everybody") from None


def derive_keys(secret: bytes, caller: bytes, callee: bytes, ticket: bytes) -> tuple[bytes, bytes]:
    """Derives the keys of a connection, to the callee and to the caller, from both public keys and the ticket."""
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
        """Decrypts in place, without the last `TAG_BYTES`; raises a ProtocolViolationError if a bit has changed."""
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
    """Both directions of one connection, as one side sees them."""

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
