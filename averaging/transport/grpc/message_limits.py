"""How much of everything a message may hold.

It is looked at before Python makes an object of each item: a message of 30 MiB has room for 15 million empty ones,
which would hold a peer up for half a minute and take gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from averaging.errors import ProtocolViolationError

Items = TypeVar("Items", bound=Sequence[object])

MAX_RECORDS = 1 << 15
"""Records of discovery, and lines of a digest: twice as many as a peer holds."""

MAX_RUMOURS = 1 << 10
"""Records in a push."""

MAX_MEMBERS = 1 << 14
"""Members of a group: no more peers have records."""

MAX_DIMENSIONS = 64
"""Dimensions of a tensor: PyTorch computes with no more."""

MAX_TENSORS = 1 << 18
"""Tensors of a schema."""

SMALL_BYTES = 64 << 10
"""A request that says next to nothing."""

JOIN_BYTES = 128 << 10
"""A request to join, with 64 KiB of `gather`."""

DIGEST_BYTES = 1 << 20
"""`MAX_RECORDS` lines of 22 bytes, and two names."""

RECORDS_BYTES = 6 << 20
"""`MAX_RUMOURS` records as large as they may be: 1 KiB of value, 4 KiB of signature, two names."""

REFUSALS_BYTES = 1 << 20
"""`MAX_RUMOURS` times two names and a reason."""


def few(items: Items, most: int, what: str) -> Items:
    """Returns `items`.

    Raises:
        ProtocolViolationError: they are more than `most`.
    """
    if len(items) > most:
        raise ProtocolViolationError(f"a message with {len(items)} {what}; at most {most} are taken")
    return items


def short(raw: bytes, most: int | None, path: str) -> bytes:
    """Returns `raw`, a message of the method at `path`; None as `most` leaves it to the connection's limit.

    Raises:
        ProtocolViolationError: it is longer than `most` bytes.
    """
    if most is not None and len(raw) > most:
        raise ProtocolViolationError(f"a message of {len(raw)} bytes in {path}; at most {most} are taken")
    return raw
