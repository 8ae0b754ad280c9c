"""Limits on the content of messages, checked before Python objects are made of the items.

A message of 30 MiB can contain 15 million empty items, which would block a peer for half a minute and use gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from averaging.errors import ProtocolViolationError

Items = TypeVar("Items", bound=Sequence[object])

MAX_RECORDS = 1 << 15
"""Records of discovery, or entries of a digest: twice the number that a peer holds."""

MAX_RUMOURS = 1 << 10
"""Records in a push."""

MAX_MEMBERS = 1 << 14
"""Members of a group: the maximum number of peers with records."""

MAX_DIMENSIONS = 64
"""Dimensions of a tensor: PyTorch's limit."""

MAX_TENSORS = 1 << 18
"""Tensors of a schema."""

SMALL_BYTES = 64 << 10
"""A request with few or no fields."""

JOIN_BYTES = 128 << 10
"""A join request, with 64 KiB of `gather`."""

DIGEST_BYTES = 1 << 20
"""`MAX_RECORDS` entries of 22 bytes, and two names."""

RECORDS_BYTES = 6 << 20
"""`MAX_RUMOURS` records of maximum size: 1 KiB of value, 4 KiB of signature, two names."""

REFUSALS_BYTES = 1 << 20
"""`MAX_RUMOURS` times two names and a reason."""


def check_count(items: Items, most: int, what: str) -> Items:
    """Returns `items`.

    Raises:
        ProtocolViolationError: there are more than `most` items.
    """
    if len(items) > most:
        raise ProtocolViolationError(f"a message with {len(items)} {what}; at most {most} are accepted")
    return items


def short(raw: bytes, most: int | None, path: str) -> bytes:
    """Returns `raw`, a message of the method at `path`.

    Raises:
        ProtocolViolationError: it is longer than `most` bytes, if that is not None.
    """
    if most is not None and len(raw) > most:
        raise ProtocolViolationError(f"a message of {len(raw)} bytes in {path}; at most {most} are accepted")
    return raw
