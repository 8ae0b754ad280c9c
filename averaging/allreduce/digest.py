"""A fingerprint of the averages of a shard, by which members see whether they got the same.

It finds errors and disagreement, not forgery. A cryptographic hash, at 0.6 to 1.5 GB/s on one core, would cost a good
part of what averaging itself does. So a part is first folded: its words are added up in `COLUMNS` columns, which goes
at the speed of memory (about 7 GB/s on one core: 0.04 s for 256 MiB), and the CRC-32 is taken of the sums.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import numpy as np

from averaging.messages import Buffer

COLUMNS = 1024
"""64-bit words to which a part is folded."""

_ROW_BYTES = 8 * COLUMNS


class ShardDigest:
    """The fingerprint of a shard's averages, taken in order as they are on the wire.

    Attributes:
        parts: how many were taken.
    """

    def __init__(self) -> None:
        self.parts = 0
        self._crc = 0

    def add(self, buffer: Buffer) -> None:
        """Takes the next part's average."""
        whole = len(buffer) // _ROW_BYTES * _ROW_BYTES
        if whole > _ROW_BYTES:
            words = np.frombuffer(buffer, "<u8", whole // 8)
            self._crc = zlib.crc32(words.reshape(-1, COLUMNS).sum(axis=0, dtype="<u8"), self._crc)
        else:
            whole = 0
        self._crc = zlib.crc32(memoryview(buffer)[whole:], self._crc)
        self.parts += 1

    def __str__(self) -> str:
        return f"{self._crc:08x}"


def digest_of(shards: Iterable[str]) -> str:
    """One fingerprint, 16 hex digits, of those of all shards in the group's order."""
    return hashlib.blake2b(" ".join(shards).encode(), digest_size=8).hexdigest()
