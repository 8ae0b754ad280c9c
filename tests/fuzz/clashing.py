"""Keys with colliding hashes, so that a Python dict compares each with many earlier ones."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

import torch
from msgspec import msgpack

_P1, _P2, _P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261  # of CPython's hash of a tuple
_BITS = (1 << 64) - 1


def timestamps(count: int) -> list[bytes]:
    """Packed timestamps with equal hashes: for each number of nanoseconds, the seconds that give the hash."""
    back1, back2, aim = pow(_P1, -1, 1 << 64), pow(_P2, -1, 1 << 64), 12345678901234567
    found: list[bytes] = []
    nanoseconds = 0
    while len(found) < count:
        nanoseconds += 1
        mixed = (aim - nanoseconds * _P2) * back1 & _BITS
        mixed = (mixed >> 31 | mixed << 33) & _BITS
        seconds = (mixed - _P5) * back2 & _BITS
        seconds -= 1 << 64 if seconds >> 63 else 0
        if abs(seconds) < (1 << 61) - 1:  # larger numbers have another hash
            found.append(struct.pack(">BBbIq", 0xC7, 12, -1, nanoseconds, seconds))
    return found


@lru_cache
def integers(slots: int) -> list[int]:
    """Two thirds as many integers as a dict of so many slots has, a power of two.

    The first half of them fills slots that are looked at one after the other; each of the others, which have up to 40
    bits, is led to the first quarter of these and goes along to their end.
    """
    filled, number = [], 1
    for _ in range(slots // 3):
        filled.append(number)
        number = (5 * number + 1) % slots
    place = torch.full((slots,), slots, dtype=torch.int64)
    place[torch.tensor(filled)] = torch.arange(len(filled))
    led: list[int] = []
    first = slots
    while len(led) < slots // 3:
        candidates = torch.arange(first, first + (1 << 20))
        first += 1 << 20
        slot, rest = candidates % slots, candidates.clone()
        clashes = place[slot] < slots
        while rest.any():
            rest >>= 5
            slot = (5 * slot + rest + 1) % slots
            clashes &= place[slot] < slots
        led += candidates[clashes & (place[slot] < len(filled) // 4)].tolist()
    return filled + led[: slots // 3]


def packed_map(keys: Iterable[bytes]) -> bytes:
    """A map with these packed keys and no values."""
    members = list(keys)
    return b"\xdf" + struct.pack(">I", len(members)) + b"".join(key + b"\xc0" for key in members)


def packed(values: Iterable[object]) -> list[bytes]:
    """Each of them packed."""
    return [msgpack.encode(value) for value in values]
