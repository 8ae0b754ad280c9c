"""Names of peers in client mode, `client::<uuid>`. With TLS the name fits the key of its owner's certificate only.

A client has no host for which its certificate could stand, so another member could otherwise use its name.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from averaging.common.addresses import CLIENT_PREFIX

_DOMAIN = b"averaging.v1.ClientName"

_NONCE_BYTES = 5
"""Random bytes at the start of a bound name. The other 11 are a hash, less the 6 bits that every UUID fixes."""


def unbound_name(random_bytes: bytes) -> str:
    """A name for a client without a certificate: a UUID of version 4.

    Args:
        random_bytes: 16 of them.
    """
    return f"{CLIENT_PREFIX}{uuid.UUID(bytes=random_bytes, version=4)}"


def bound_name(certificate: x509.Certificate, random_bytes: bytes) -> str:
    """A name that fits the public key of `certificate` only: a UUID of version 8 (RFC 9562).

    Args:
        certificate: of the client. Another one with the same key fits too, so renewing it changes no name.
        random_bytes: at least 5 of them, so that two clients with one certificate have different names.
    """
    nonce = random_bytes[:_NONCE_BYTES]
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(_DOMAIN + nonce + key).digest()
    # The standard library of Python 3.11 makes UUIDs of versions 1 to 5 only.
    value = int.from_bytes(nonce + digest[: 16 - _NONCE_BYTES])
    value = value & ~(0xF << 76) | 8 << 76  # version
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return f"{CLIENT_PREFIX}{uuid.UUID(int=value)}"


def is_bound(endpoint: str) -> bool:
    """Whether `endpoint` is a client's name that fits one key only. Other software may use names that do not."""
    return _version_of(endpoint) == 8


def fits(endpoint: str, certificate: x509.Certificate) -> bool:
    """Whether the holder of `certificate` may use the client's name `endpoint`; any holder may use an unbound one."""
    if not is_bound(endpoint):
        return True
    nonce = uuid.UUID(endpoint.removeprefix(CLIENT_PREFIX)).bytes[:_NONCE_BYTES]
    return hmac.compare_digest(bound_name(certificate, nonce), endpoint)


def _version_of(endpoint: str) -> int | None:
    if not endpoint.startswith(CLIENT_PREFIX):
        return None
    text = endpoint.removeprefix(CLIENT_PREFIX)
    try:
        found = uuid.UUID(text)
    except ValueError:
        return None
    # Other spellings of one UUID would be other names of one owner.
    return found.version if str(found) == text else None
