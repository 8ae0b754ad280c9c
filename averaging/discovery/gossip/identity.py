"""The owner of records: its Ed25519 key, its signatures, and the records that it writes. Pure."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from averaging.discovery.gossip.record import OWNER_BYTES, Reason, RecordLimits, refusal_reason, signed_bytes
from averaging.errors import DiscoveryError
from averaging.protocol import Record


class Identity(Protocol):
    """Signs this peer's records and verifies all others. All peers of a run use the same kind."""

    @property
    def owner(self) -> bytes:
        """The public key, 32 bytes."""

    def sign(self, run_id: str, record: Record) -> bytes:
        """This peer's signature of `record`; the `signature` field of that is ignored."""

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner, in this run."""


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
