"""Owners of records who prove with their certificate that the endpoints they write about are theirs.

A signature is that of `identity.Ed25519Identity`, followed by the owner's certificate and, by the certificate's key, a
signature of the run and of the owner. So whoever reads a record, from whomever it came, knows that a holder of a
certificate for its endpoint has written it.

Pure.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from averaging.common.addresses import CLIENT_PREFIX, covers, is_endpoint, parse_address
from averaging.discovery.gossip.identity import Ed25519Identity
from averaging.protocol.messages import Record
from averaging.security.client_names import fits
from averaging.security.credentials import EXPIRES_SOON, PrivateKey, Tls, hosts_of, is_issued_by, validity_problem

logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 64
"""Length of a signature of Ed25519."""

MAX_PROOF_BYTES = 4096
"""A certificate of two kilobytes, of RSA with many names, and its signature are shorter."""

_MOST_KNOWN = 16384  # proofs that need no second check; as many as records in a table
_DOMAIN = b"averaging.v1.Owner"  # so that the signature means nothing in any other protocol
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class _Proven:
    """Whose certificate it is."""

    certificate: x509.Certificate
    hosts: tuple[str, ...]


class CertifiedIdentity:
    """A fresh key for records, and the proof that it belongs to the holder of a certificate.

    Args:
        tls: this peer's certificate, and the authorities whose certificates are believed. They must have issued it
            themselves.
        clock: seconds since the epoch.
    """

    def __init__(self, tls: Tls, clock: Callable[[], float]) -> None:
        self._tls, self._clock = tls, clock
        self._plain = Ed25519Identity()
        self._proofs: dict[str, bytes] = {}  # of this peer, by run
        self._known: OrderedDict[bytes, _Proven | None] = OrderedDict()
        self._warned = self._age()  # at the start others look at the certificate

    @property
    def owner(self) -> bytes:
        """The public key, 32 bytes."""
        return self._plain.owner

    def sign(self, run_id: str, record: Record) -> bytes:
        """The signature, and the proof. Warns, once each, when the certificate expires soon and when it has expired."""
        if (age := self._age()) > self._warned:
            self._warned = age
            self._warn(age)
        if run_id not in self._proofs:
            certificate = self._tls.certificate.public_bytes(Encoding.DER)
            signature = _sign(self._tls.key, _statement(run_id, self.owner))
            self._proofs[run_id] = _LENGTH.pack(len(certificate)) + certificate + signature
        return self._plain.sign(run_id, record) + self._proofs[run_id]

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner, who has a valid certificate for the host of its endpoint."""
        signature, proof = record.signature[:SIGNATURE_BYTES], record.signature[SIGNATURE_BYTES:]
        if not proof or len(proof) > MAX_PROOF_BYTES:
            return False
        if not self._plain.verify(run_id, replace(record, signature=signature)):
            return False
        proven = self._prove(run_id, record.owner, proof)
        if proven is None or validity_problem(proven.certificate, self._clock()):
            return False
        if record.subkey.startswith(CLIENT_PREFIX):
            return fits(record.subkey, proven.certificate)
        if not is_endpoint(record.subkey):
            return True  # a name that belongs to nobody in particular
        return covers(proven.hosts, parse_address(record.subkey)[0])

    def _age(self) -> int:
        """Of this peer's certificate: 0 while there is time, 1 shortly before its end, 2 after that."""
        now = self._clock()
        return sum(validity_problem(self._tls.certificate, moment) is not None for moment in (now, now + EXPIRES_SOON))

    def _warn(self, age: int) -> None:
        when = f"{self._tls.certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        told = f"expires on {when}" if age == 1 else f"has expired on {when}, and others let this peer into no group"
        logger.warning(
            "%s %s; issue another one (averaging ca issue) and start this peer again with it, since certificates are "
            "read once",
            *(self._tls.source, told),
        )

    def _prove(self, run_id: str, owner: bytes, proof: bytes) -> _Proven | None:
        digest = sha256(owner + proof + run_id.encode()).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return self._known[digest]
        proven = self._known[digest] = self._read(run_id, owner, proof)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return proven

    def _read(self, run_id: str, owner: bytes, proof: bytes) -> _Proven | None:
        try:
            (length,) = _LENGTH.unpack_from(proof)
            certificate = x509.load_der_x509_certificate(proof[_LENGTH.size : _LENGTH.size + length])
            _verify(certificate, proof[_LENGTH.size + length :], _statement(run_id, owner))
        except (struct.error, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            return None
        if not any(is_issued_by(certificate, authority) for authority in self._tls.authorities):
            return None
        return _Proven(certificate, hosts_of(certificate))


def _statement(run_id: str, owner: bytes) -> bytes:
    return b"".join((_DOMAIN, owner, run_id.encode()))


def _sign(key: PrivateKey, statement: bytes) -> bytes:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(statement, ec.ECDSA(hashes.SHA256()))
    return key.sign(statement, padding.PKCS1v15(), hashes.SHA256())


def _verify(certificate: x509.Certificate, signature: bytes, statement: bytes) -> None:
    """Raises `InvalidSignature` or `TypeError` if the certificate's key has not signed `statement`."""
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, RSAPublicKey):
        key.verify(signature, statement, padding.PKCS1v15(), hashes.SHA256())
    else:
        raise TypeError(type(key))
