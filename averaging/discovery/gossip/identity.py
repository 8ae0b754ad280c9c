"""Who owns records: an Ed25519 key, the signatures made with it, and the records a peer writes with it. Pure."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from averaging.discovery.gossip.record import OWNER_BYTES, Limits, Reason, objection, signed_bytes
from averaging.errors import DiscoveryError
from averaging.protocol.messages import Record


class Identity(Protocol):
    """Signs this peer's records and checks everybody's. All peers of a run use the same kind."""

    @property
    def owner(self) -> bytes:
        """The public key, 32 bytes."""
        ...

    def sign(self, run_id: str, record: Record) -> bytes:
        """This peer's signature of `record`, whose own signature is not looked at."""
        ...

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner, in this run."""
        ...


class Ed25519Identity:
    """A key pair; a fresh one unless `private_key` (32 bytes) is given."""

    def __init__(self, private_key: bytes | None = None) -> None:
        if private_key is None:
            self._key = Ed25519PrivateKey.generate()
        else:
            self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self._owner = self._key.public_key().public_bytes_raw()

    @property
    def owner(self) -> bytes:
        """The public key, 32 bytes."""
        return self._owner

    def sign(self, run_id: str, record: Record) -> bytes:
        """64 bytes."""
        return self._key.sign(signed_bytes(run_id, record))

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner; False as well if that is no key, or there is no signature."""
        try:
            key = Ed25519PublicKey.from_public_bytes(record.owner)
            key.verify(record.signature, signed_bytes(run_id, record))
        except (InvalidSignature, ValueError):
            return False
        return True


class UnsignedIdentity:
    """Signs nothing and believes everybody: for large simulations, and for peers that share one process."""

    def __init__(self, rng: random.Random) -> None:
        self._owner = rng.randbytes(OWNER_BYTES)

    @property
    def owner(self) -> bytes:
        """32 random bytes."""
        return self._owner

    def sign(self, run_id: str, record: Record) -> bytes:
        """Nothing."""
        return b""

    def verify(self, run_id: str, record: Record) -> bool:
        """Always."""
        return True


class Author:
    """Writes one peer's records: numbers and signs them.

    Versions are microseconds of the clock, and always above the last one, so that an owner whose clock was set back, or
    that writes twice in a microsecond, still goes forward.

    Args:
        limits: what others accept.
    """

    def __init__(self, run_id: str, identity: Identity, limits: Limits) -> None:
        self._run_id = run_id
        self._identity = identity
        self._limits = limits
        self._last_version = 0
        self._latest: dict[tuple[str, str], float] = {}  # the latest expiration ever signed for a place

    @property
    def owner(self) -> bytes:
        """The public key, 32 bytes."""
        return self._identity.owner

    def verify(self, record: Record) -> bool:
        """Whether `record` is signed by its owner."""
        return self._identity.verify(self._run_id, record)

    def observe(self, record: Record) -> None:
        """Goes on from a record of this owner's earlier life, come back from another peer."""
        if record.owner == self.owner:
            self._last_version = max(self._last_version, record.version)

    def write(
        self, key: str, subkey: str, value: bytes, expiration: float, now: float, previous: Record | None
    ) -> Record:
        """The record that says `value`; `previous` is this owner's last one there that has not expired, if any.

        Raises:
            DiscoveryError: nobody would take it; see `Discovery.store`.
        """
        draft = Record(key, subkey, value, 1, expiration, owner=self.owner, claimed=1)
        reason = objection(draft, now, self._limits)
        if reason is None and expiration > now + self._limits.lifetime:
            reason = Reason.TOO_FAR
        if reason is not None:
            raise DiscoveryError(f"cannot store {subkey[:64]!r} under {key[:64]!r}: {reason}")
        version = self._next_version(now)
        goes_on = previous is not None and not previous.withdrawn
        claimed = previous.claimed if previous is not None and goes_on else version
        place = (key, subkey)
        self._latest = {p: latest for p, latest in self._latest.items() if latest > now}
        self._latest[place] = max(self._latest.get(place, 0.0), expiration)
        return self._signed(replace(draft, version=version, claimed=claimed))

    def withdraw(self, previous: Record, now: float) -> Record:
        """The record that takes `previous` back.

        It lives a little longer than any record that it could be late to replace.
        """
        latest = max(previous.expiration, self._latest.get((previous.key, previous.subkey), 0.0))
        return self._signed(
            replace(
                previous,
                value=b"",
                version=self._next_version(now),
                expiration=latest + self._limits.clock_tolerance,
                withdrawn=True,
            )
        )

    def _next_version(self, now: float) -> int:
        self._last_version = max(int(now * 1e6), self._last_version + 1)
        return self._last_version

    def _signed(self, record: Record) -> Record:
        return replace(record, signature=self._identity.sign(self._run_id, record))
