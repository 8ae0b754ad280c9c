"""The owner of records: its Ed25519 key, its signatures, and the records that it writes. Pure."""

from __future__ import annotations

import logging
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from averaging.common import CLIENT_PREFIX, covers, is_endpoint, parse_address
from averaging.discovery.gossip.record import OWNER_BYTES, Reason, RecordLimits, refusal_reason, signed_bytes
from averaging.errors import DiscoveryError
from averaging.protocol import Record
from averaging.security import EXPIRES_SOON, PrivateKey, Tls, hosts_of, is_issued_by, validity_problem


class Identity(Protocol):
    """Signs this peer's records and verifies all others. All peers of a run use the same kind."""

    @property
    def owner(self) -> bytes:
        """The public key, 32 bytes."""

    def sign(self, run_id: str, record: Record) -> bytes:
        """This peer's signature of `record`; the `signature` field of that is ignored."""

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner, in this run."""

    def holder(self, run_id: str, record: Record) -> str:
        """The certificate with which a verified record was written; empty in a run without certificates."""


class Ed25519Identity:
    """A key pair; a new one unless `private_key` (32 bytes) is given."""

    def __init__(self, private_key: bytes | None = None) -> None:
        if private_key is None:
            self._key = Ed25519PrivateKey.generate()
        else:
            self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self._owner = self._key.public_key().public_bytes_raw()

    @property
    def owner(self) -> bytes:
        return self._owner

    def sign(self, run_id: str, record: Record) -> bytes:
        return self._key.sign(signed_bytes(run_id, record))

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner. False if the owner is not a valid key."""
        try:
            key = Ed25519PublicKey.from_public_bytes(record.owner)
            key.verify(record.signature, signed_bytes(run_id, record))
        except (InvalidSignature, ValueError):
            return False
        return True

    def holder(self, run_id: str, record: Record) -> str:
        return ""


class UnsignedIdentity:
    """Signs nothing and accepts every record: for large simulations, and for peers in one process."""

    def __init__(self, rng: random.Random) -> None:
        self._owner = rng.randbytes(OWNER_BYTES)

    @property
    def owner(self) -> bytes:
        return self._owner

    def sign(self, run_id: str, record: Record) -> bytes:
        return b""

    def verify(self, run_id: str, record: Record) -> bool:
        return True

    def holder(self, run_id: str, record: Record) -> str:
        return ""


class Author:
    """Writes one peer's records: gives them a version and signs them.

    Versions are microseconds since the epoch, and always larger than the last one. So they grow even if the clock is
    set back.

    Args:
        limits: bounds of the records that other peers accept.
    """

    def __init__(self, run_id: str, identity: Identity, limits: RecordLimits) -> None:
        self._run_id, self._identity, self._limits = run_id, identity, limits
        self._last_version = 0

    @property
    def owner(self) -> bytes:
        return self._identity.owner

    def verify(self, record: Record) -> bool:
        return self._identity.verify(self._run_id, record)

    def holder(self, record: Record) -> str:
        return self._identity.holder(self._run_id, record)

    def observe(self, record: Record) -> None:
        """Continues from the version of a record of this owner that another peer has sent back."""
        if record.owner == self.owner:
            self._last_version = max(self._last_version, record.version)

    def write(
        self, key: str, subkey: str, value: bytes, expiration: float, now: float, previous: Record | None
    ) -> Record:
        """A record with `value`; `previous` is this owner's last record there that has not expired, if any.

        Raises:
            DiscoveryError: other peers would refuse it; see `Discovery.store`.
        """
        draft = Record(key, subkey, value, 1, expiration, owner=self.owner, claimed=1)
        reason = refusal_reason(draft, now, self._limits)
        if reason is None and expiration > now + self._limits.lifetime:
            reason = Reason.TOO_FAR
        if reason is not None:
            raise DiscoveryError(f"cannot store {subkey[:64]!r} under {key[:64]!r}: {reason}")
        version = self._next_version(now)
        claimed = version if previous is None or previous.withdrawn else previous.claimed
        return self._signed(replace(draft, version=version, claimed=claimed))

    def withdraw(self, previous: Record, now: float) -> Record:
        """The record that withdraws `previous`, which it outlasts by all clocks."""
        expiration = previous.expiration + self._limits.clock_tolerance
        version = self._next_version(now)
        return self._signed(replace(previous, value=b"", version=version, expiration=expiration, withdrawn=True))

    def _next_version(self, now: float) -> int:
        self._last_version = max(int(now * 1e6), self._last_version + 1)
        return self._last_version

    def _signed(self, record: Record) -> Record:
        return replace(record, signature=self._identity.sign(self._run_id, record))


# The owner of records in a closed run: its certificate proves that the endpoint of its records belongs to it.
#
# A signature is that of `Ed25519Identity`, followed by a proof: the owner's certificate, and a signature of the run id
# and the owner by the key of the certificate. So every reader of a record knows that a holder of a certificate for its
# endpoint has written it, whichever peer it came from.


logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 64
"""Length of an Ed25519 signature."""

MAX_PROOF_BYTES = 4096
"""Longest proof. An RSA certificate with many names, and a signature by it, are shorter."""

_MAX_CACHED = 16384  # results of proofs; as many as records in a table
_DOMAIN = b"averaging.v1.Owner"  # so that the signature is valid in no other protocol
_LENGTH = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class _Holder:
    """A certificate, and the hosts for which it was issued."""

    certificate: x509.Certificate
    hosts: tuple[str, ...]


class CertifiedIdentity:
    """A new key for records, and the proof that it belongs to the holder of a certificate.

    Args:
        tls: this peer's certificate, and the trusted authorities. An authority must have issued it directly.
        clock: seconds since the epoch.
    """

    def __init__(self, tls: Tls, clock: Callable[[], float]) -> None:
        self._tls, self._clock = tls, clock
        self._plain = Ed25519Identity()
        self._proofs: dict[str, bytes] = {}  # of this peer, by run
        self._holder = lru_cache(_MAX_CACHED)(self._check)
        self._warned = self._age()  # `read_credentials` warns at the start

    @property
    def owner(self) -> bytes:
        return self._plain.owner

    def sign(self, run_id: str, record: Record) -> bytes:
        """The signature and the proof. Logs a warning when the certificate expires soon, and when it has expired."""
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
        proof = record.signature[SIGNATURE_BYTES:]
        plain = replace(record, signature=record.signature[:SIGNATURE_BYTES])
        if not proof or len(proof) > MAX_PROOF_BYTES or not self._plain.verify(run_id, plain):
            return False
        holder = self._holder(run_id, record.owner, proof)
        if holder is None or validity_problem(holder.certificate, self._clock()):
            return False
        if record.subkey.startswith(CLIENT_PREFIX) or not is_endpoint(record.subkey):
            return True  # such subkeys are open to all owners
        return covers(holder.hosts, parse_address(record.subkey)[0])

    def holder(self, run_id: str, record: Record) -> str:
        """Digest of the public key of the certificate with which a verified record was written."""
        holder = self._holder(run_id, record.owner, record.signature[SIGNATURE_BYTES:])
        if holder is None:
            return ""
        key = holder.certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return sha256(key).hexdigest()[:16]

    def _age(self) -> int:
        """The age of this peer's certificate: 1 if it expires soon, 2 if it has expired, 0 otherwise."""
        now = self._clock()
        return sum(validity_problem(self._tls.certificate, moment) is not None for moment in (now, now + EXPIRES_SOON))

    def _warn(self, age: int) -> None:
        when = f"{self._tls.certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        problem = f"expires on {when}" if age == 1 else f"expired on {when}, so other peers let this one into no group"
        logger.warning(
            "%s %s; issue another one (averaging ca issue) and restart this peer with it, since it reads certificates "
            "at its start only",
            *(self._tls.source, problem),
        )

    def _check(self, run_id: str, owner: bytes, proof: bytes) -> _Holder | None:
        """The holder whose certificate is in `proof`; None if the proof is not valid."""
        try:
            (length,) = _LENGTH.unpack_from(proof)
            certificate = x509.load_der_x509_certificate(proof[_LENGTH.size : _LENGTH.size + length])
            _verify(certificate, proof[_LENGTH.size + length :], _statement(run_id, owner))
        except (struct.error, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            return None
        if not any(is_issued_by(certificate, authority) for authority in self._tls.authorities):
            return None
        return _Holder(certificate, hosts_of(certificate))


def _statement(run_id: str, owner: bytes) -> bytes:
    return b"".join((_DOMAIN, owner, run_id.encode()))


def _sign(key: PrivateKey, statement: bytes) -> bytes:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(statement, ec.ECDSA(hashes.SHA256()))
    return key.sign(statement, padding.PKCS1v15(), hashes.SHA256())


def _verify(certificate: x509.Certificate, signature: bytes, statement: bytes) -> None:
    """Raises InvalidSignature or TypeError if the certificate's key has not signed `statement`."""
    key = certificate.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, RSAPublicKey):
        key.verify(signature, statement, padding.PKCS1v15(), hashes.SHA256())
    else:
        raise TypeError(type(key))
