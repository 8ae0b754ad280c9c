"""What a record is: its id, the bytes that its owner signs, and when it is refused. Pure."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from averaging.discovery import MAX_LIFETIME, MAX_VALUE_BYTES
from averaging.protocol import Record

MAX_NAME_BYTES = 256
"""Longest key and longest subkey, in bytes of UTF-8."""

OWNER_BYTES = 32
"""Length of an owner's public key."""

MAX_VERSION = 2**63 - 1
"""Versions are microseconds since the epoch, so this is some 290,000 years ahead."""

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
    """64-bit hash of the fields that all versions of a record share."""
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
