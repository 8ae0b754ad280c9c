"""Records and their owner: the id, the signed bytes and the refusals of a record, and the key that signs them. Pure."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from averaging.discovery import MAX_LIFETIME, MAX_VALUE_BYTES
from averaging.errors import DiscoveryError
from averaging.protocol import Record

MAX_NAME_BYTES = 256  # longest key and longest subkey, in bytes of UTF-8
OWNER_BYTES = 32  # length of an owner's public key
MAX_VERSION = 2**63 - 1  # versions are microseconds since the epoch, so this is some 290,000 years ahead
_SIGNED_DOMAIN = b"averaging.v1.Record"  # so that the signature is valid in no other protocol
_NUMBERS = struct.Struct("<QQd?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """What a table of records accepts. A full table refuses new records, updates those it has, and evicts none."""

    records: int = 16384  # withdrawals included
    records_per_owner: int = 256
    lifetime: float = MAX_LIFETIME  # seconds from now until the latest expiration
    clock_tolerance: float = 3.0  # seconds by which the clocks of two peers may differ


class Reason(StrEnum):
    """Why a record is refused. These texts travel to its sender, which compares them, so they must not change."""

    MALFORMED = "malformed: a key, subkey, owner, version or expiration that cannot be"
    OVERSIZED = "too large: a value may have 1 KiB, a key and a subkey 256 bytes"
    EXPIRED = "expired already: the clocks differ, or it was long on its way"
    TOO_FAR = "expires too far in the future; check the clocks"
    FORGED = "not signed by its owner"
    FOREIGN = "held by another owner until that record expires or is withdrawn"
    CLASH = "its id is taken by another record"
    OWNER_FULL = "its owner has too many records"
    FULL = "the table is full"
    UNSEALED = "not sealed with a token of the run, or sealed with one that this peer does not have; check token_file"


def record_id(key: str, subkey: str, owner: bytes) -> int:
    # All versions of a record share these fields.
    key_bytes, subkey_bytes = key.encode(), subkey.encode()
    packed = b"%d:%b%d:%b%b" % (len(key_bytes), key_bytes, len(subkey_bytes), subkey_bytes, owner)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def entry_hash(number: int, version: int) -> int:
    return int.from_bytes(blake2b(struct.pack("<QQ", number, version), digest_size=8).digest(), "little")


def signed_bytes(run_id: str, record: Record) -> bytes:
    """The bytes that an owner signs: the run id and all fields but the signature, with their lengths."""
    fields = (run_id.encode(), record.key.encode(), record.subkey.encode(), record.value, record.owner)
    lengths = struct.pack(f"<{len(fields)}I", *map(len, fields))
    numbers = _NUMBERS.pack(record.version, record.claimed, record.expiration, record.withdrawn)
    return b"".join((_SIGNED_DOMAIN, lengths, *fields, numbers))


def refusal_reason(record: Record, now: float, limits: RecordLimits) -> Reason | None:
    """Why `record` must be refused; None if it is acceptable. Does not check the signature."""
    try:
        longest_name = max(len(record.key.encode()), len(record.subkey.encode()))
    except UnicodeEncodeError:  # half of a surrogate pair
        return Reason.MALFORMED
    if len(record.value) > MAX_VALUE_BYTES or longest_name > MAX_NAME_BYTES:
        return Reason.OVERSIZED
    readable = record.key.isprintable() and record.subkey.isprintable()
    named = bool(record.key and record.subkey) and readable and len(record.owner) == OWNER_BYTES
    numbered = 1 <= record.claimed <= record.version <= MAX_VERSION and math.isfinite(record.expiration)
    if not named or not numbered or (record.withdrawn and record.value):
        return Reason.MALFORMED
    if record.expiration <= now:
        return Reason.EXPIRED
    # Twice: a withdrawal lasts longer by one tolerance, and its owner's clock may be ahead by another.
    if record.expiration > now + limits.lifetime + 2 * limits.clock_tolerance:
        return Reason.TOO_FAR
    return None


class Identity(Protocol):
    """Signs this peer's records and verifies all others. All peers of a run use the same kind."""

    owner: bytes  # the public key, 32 bytes

    def sign(self, run_id: str, record: Record) -> bytes:
        """This peer's signature of `record`; the `signature` field of that is ignored."""

    def verify(self, run_id: str, record: Record) -> bool:
        """Whether `record` is signed by its owner, in this run."""


class Ed25519Identity:
    def __init__(self, private_key: bytes | None = None) -> None:
        generate, load = Ed25519PrivateKey.generate, Ed25519PrivateKey.from_private_bytes
        self._key = generate() if private_key is None else load(private_key)
        self.owner = self._key.public_key().public_bytes_raw()

    def sign(self, run_id: str, record: Record) -> bytes:
        return self._key.sign(signed_bytes(run_id, record))

    def verify(self, run_id: str, record: Record) -> bool:
        try:  # the owner may be no valid key
            key = Ed25519PublicKey.from_public_bytes(record.owner)
            key.verify(record.signature, signed_bytes(run_id, record))
        except (InvalidSignature, ValueError):
            return False
        return True


class UnsignedIdentity:
    """Signs nothing and accepts every record: for large simulations, and for peers in one process."""

    def __init__(self, rng: random.Random) -> None:
        self.owner = rng.randbytes(OWNER_BYTES)

    def sign(self, run_id: str, record: Record) -> bytes:
        return b""

    def verify(self, run_id: str, record: Record) -> bool:
        return True


class Author:
    """Writes one peer's records: gives them a version and signs them.

    Versions are microseconds since the epoch, and always larger than the last one. So they grow even if the clock is
    set back.
    """

    def __init__(self, run_id: str, identity: Identity, limits: RecordLimits) -> None:
        self._run_id, self._identity, self._limits, self.owner = run_id, identity, limits, identity.owner
        self._last_version = 0

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

        A DiscoveryError says that other peers would refuse it; see `Discovery.store`.
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
