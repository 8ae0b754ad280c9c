"""Encrypts frames: AES-256-GCM with keys of one connection and one direction. SECURITY.md describes it for reviewers.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import Buffer
from averaging.transport.direct.frames import TAG_BYTES

KEY_BYTES = 32
"""Of AES-256, and of X25519."""

CONTEXT = b"averaging.v1.Direct"
"""Separates these keys from those that another protocol would derive from the same secret."""

MAX_SEALED_BYTES = 64 << 30
"""A connection is replaced after this many bytes in one direction. TLS 1.3 replaces keys after about 350 GiB."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one connection."""

    to_callee: bytes = field(repr=False)
    to_caller: bytes = field(repr=False)


def shared_secret(own: X25519PrivateKey, other: bytes) -> bytes:
    """Returns the secret of both sides.

    Args:
        own: this side's private key of this connection.
        other: the other side's public key.

    Raises:
        ProtocolViolationError: `other` is not a public key, or one with which everybody would know the secret.
    """
    if len(other) != KEY_BYTES:
        raise ProtocolViolationError(f"a public key of {len(other)} bytes instead of {KEY_BYTES}")
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise ProtocolViolationError("a public key that makes the secret known to everybody") from None


def derive_keys(secret: bytes, caller: bytes, callee: bytes, proof: bytes) -> Keys:
    """Derives the keys of a connection; both sides get the same.

    Args:
        secret: of both sides.
        caller: the caller's public key.
        callee: the callee's public key.
        proof: of the caller's nonce and the callee's ticket, so that the callee cannot choose the caller's first frame.
    """
    derived = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt=proof, info=CONTEXT + caller + callee).derive(secret)
    return Keys(derived[:KEY_BYTES], derived[KEY_BYTES:])


class Cipher:
    """Seals or opens what is sent in one direction of one connection.

    Every operation has the next nonce, so bytes that are changed, left out, repeated or moved are not accepted.

    Attributes:
        nbytes: bytes that were sealed or opened.
    """

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._count = 0
        self.nbytes = 0

    def seal(self, data: Buffer, header: bytes, room: memoryview) -> None:
        """Encrypts `data` to `room`, which has `TAG_BYTES` more, and authenticates `header` too."""
        self._aead.encrypt_into(self._nonce(len(data)), data, header, room)

    def open(self, sealed: memoryview, header: bytes) -> None:
        """Decrypts in place; the last `TAG_BYTES` are not part of the result.

        Raises:
            ProtocolViolationError: the bytes are not those that were sealed. What is left in their place is not them
                either.
        """
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

    @classmethod
    def of_caller(cls, keys: Keys) -> Ciphers:
        """For the side that opened the connection."""
        return cls(Cipher(keys.to_callee), Cipher(keys.to_caller))

    @classmethod
    def of_callee(cls, keys: Keys) -> Ciphers:
        """For the side that accepted the connection."""
        return cls(Cipher(keys.to_caller), Cipher(keys.to_callee))

    @property
    def nbytes(self) -> int:
        """Bytes in the direction that has carried more."""
        return max(self.sending.nbytes, self.receiving.nbytes)
