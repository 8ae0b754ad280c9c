"""What a record is: its id, the bytes its owner signs, and what makes it unacceptable. Pure."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from averaging.discovery.base import MAX_LIFETIME, MAX_VALUE_BYTES
from averaging.protocol.messages import Record

MAX_NAME_BYTES = 256
"""The longest key, and the longest subkey, in bytes of UTF-8."""

OWNER_BYTES = 32
"""Length of an owner's public key."""

MAX_VERSION = 2**63 - 1
"""Versions are microseconds since the epoch; the largest of them lies some 290,000 years ahead."""

LEAST_KEPT = 15.0
"""Seconds for which a record with a version from the future is kept, however early it seems to expire.

An owner whose clock was set back goes on with its former versions for a while. Its records then look as if they were
written later and lasted less long than they do."""

_SIGNED_DOMAIN = b"averaging.v1.Record"  # so that the signature means nothing in any other protocol
_NUMBERS = struct.Struct("<QQd?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a table of records accepts from whomever.

    Attributes:
        records: in the table, withdrawals included. A full table takes no new record and goes on updating those it
            has. It never drops a live one for a new one: else whoever sends the most could push everybody out.
        records_per_owner: of them by one owner.
        lifetime: seconds from now until the latest expiration.
        clock_tolerance: seconds by which the clocks of two peers may differ.
    """

    records: int = 16384
    records_per_owner: int = 256
    lifetime: float = MAX_LIFETIME
    clock_tolerance: float = 3.0


class Reason(StrEnum):
    """Why a record is refused; these words go to whoever sent it."""

    MALFORMED = "malformed: a key, subkey, owner, version or expiration that cannot be"
    OVERSIZED = "too large: a value may have 1 KiB, a key and a subkey 256 bytes"
    EXPIRED = "expired already: the clocks differ, or it was long on its way"
    TOO_FAR = "expires too far in the future; check the clocks"
    FORGED = "not signed by its owner, or the owner has no certificate for that endpoint, or one that has expired"
    FOREIGN = "held by another owner until that record expires or is withdrawn"
    CLASH = "its id is taken by another record"
    OWNER_FULL = "its owner has too many records"
    FULL = "the table is full"


def record_id(key: str, subkey: str, owner: bytes) -> int:
    """64-bit hash of what makes a record another one rather than a newer version."""
    key_bytes, subkey_bytes = key.encode(), subkey.encode()
    packed = b"%d:%b%d:%b%b" % (len(key_bytes), key_bytes, len(subkey_bytes), subkey_bytes, owner)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def entry_hash(number: int, version: int) -> int:
    """64-bit hash of one line of a digest; the hash of a whole table is the XOR of its lines'."""
    return int.from_bytes(blake2b(struct.pack("<QQ", number, version), digest_size=8).digest(), "little")


def signed_bytes(run_id: str, record: Record) -> bytes:
    """The bytes an owner signs: everything in the record but the signature, and the run, each with its length."""
    fields = (run_id.encode(), record.key.encode(), record.subkey.encode(), record.value, record.owner)
    lengths = struct.pack(f"<{len(fields)}I", *map(len, fields))
    numbers = _NUMBERS.pack(record.version, record.claimed, record.expiration, record.withdrawn)
    return b"".join((_SIGNED_DOMAIN, lengths, *fields, numbers))


def objection(record: Record, now: float, limits: Limits) -> Reason | None:
    """Why nobody should take `record`, as far as can be seen without its signature; None if nothing is wrong."""
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
    # Twice: the owner keeps a withdrawal for that much longer, and its clock may be ahead by as much.
    if record.expiration > now + limits.lifetime + 2 * limits.clock_tolerance:
        return Reason.TOO_FAR
    return None


def kept_until(record: Record, now: float, limits: Limits) -> float:
    """Until when a peer keeps a record that it receives at `now`, in seconds since the epoch by its own clock.

    The expiration is a moment of the owner's clock. If that clock is ahead, the record of a dead owner would stay for
    as many seconds longer. The version tells when the owner wrote the record by the same clock, so the difference is
    the lifetime that it meant, whatever the clock shows. A record is kept for no longer than that after it came.
    """
    written = record.version / 1e6
    if written <= now + limits.clock_tolerance:
        return record.expiration
    lifetime = record.expiration - written
    if lifetime <= 0:  # the owner's clock was set back by more than this record lasts: the version tells no time
        return record.expiration
    return min(record.expiration, now + max(lifetime, LEAST_KEPT) + limits.clock_tolerance)
