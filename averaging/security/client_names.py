"""The endpoints of clients, `client::<uuid>`. With TLS, the UUID is bound to the key of the client's certificate.

A client has no host that its certificate could name. Without this, another member could use its endpoint.
"""

from __future__ import annotations

import hashlib
import hmac
import uuid

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from averaging.common import CLIENT_PREFIX

_DOMAIN = b"averaging.v1.ClientName"

_NONCE_BYTES = 5
"""Random bytes at the start of a bound name. The other 11 are a hash, except the 6 bits that every UUID fixes."""


def unbound_name(random_bytes: bytes) -> str:
    """An endpoint for a client without a certificate: a UUID of version 4.

    Args:
        random_bytes: 16 bytes.
    """
    return f"{CLIENT_PREFIX}{uuid.UUID(bytes=random_bytes, version=4)}"


def bound_name(certificate: x509.Certificate, random_bytes: bytes) -> str:
    """An endpoint that is bound to the public key of `certificate`: a UUID of version 8 (RFC 9562).

    Args:
        certificate: certificate of the client. A renewed one with the same key gives the same endpoint.
        random_bytes: at least 5 bytes, so that two clients with one certificate have different endpoints.
    """
    nonce = random_bytes[:_NONCE_BYTES]
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(_DOMAIN + nonce + key).digest()
    # The uuid module of Python 3.11 creates versions 1 to 5 only.
    value = int.from_bytes(nonce + digest[: 16 - _NONCE_BYTES])
    value = value & ~(0xF << 76) | 8 << 76  # version
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant
    return f"{CLIENT_PREFIX}{uuid.UUID(int=value)}"


def is_bound(endpoint: str) -> bool:
    """Whether `endpoint` is that of a client and bound to one key. Other implementations may use unbound ones."""
    return _version_of(endpoint) == 8


def fits(endpoint: str, certificate: x509.Certificate) -> bool:
    """Whether the holder of `certificate` may use the client endpoint `endpoint`; any holder may use an unbound one."""
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
    # Other spellings of the UUID would be further endpoints of the same owner.
    return found.version if str(found) == text else None
