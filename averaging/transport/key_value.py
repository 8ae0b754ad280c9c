"""The contract of a key-value store with revisions, leases and watches, as etcd 3 has them.

`transport/grpc/etcd.py` calls a cluster; `averaging.testing` has a model in memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from averaging.errors import AveragingError


class CompactedError(AveragingError):
    """A watch cannot go on, because the store has forgotten the changes since its revision: read all keys again."""


class LeaseEndedError(AveragingError):
    """The lease has ended, and with it all that was written under it."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class StoredValues:
    """What a range of keys held at one revision."""

    values: tuple[StoredValue, ...]
    revision: int
    complete: bool = True  # whether these are all; False if there are more than the limit


@dataclass(frozen=True, slots=True)
class StoredChanges:
    """Changes under a prefix, in their order."""

    changes: tuple[StoredValue | bytes, ...]  # for each change the new value, or the key alone if it was deleted
    revision: int  # revision of the store; a watch that goes on begins after it


class KeyValueStore(Protocol):
    """One client's access to the store. Reads are linearizable.

    Raises:
        PeerUnreachableError: any method: nobody answers; a write may have taken effect.
        CallRefusedError: any method: the store refuses the call.
    """

    async def grant(self, seconds: float) -> int:
        """Returns a new lease, which ends this long after its last renewal; the store may make it longer."""

    async def keep_alive(self, lease: int) -> bool:
        """Renews a lease; returns False if it has ended."""

    async def revoke(self, lease: int) -> None:
        """Ends a lease, with all that was written under it."""

    async def change(self, changes: Mapping[bytes, bytes | None], lease: int) -> int:
        """Writes values under a lease, and deletes the keys whose value is None, in one step; returns its revision.

        Raises:
            LeaseEndedError: there is no such lease any more; nothing was changed.
        """

    async def list_values(self, prefix: bytes, limit: int, start: bytes = b"") -> StoredValues:
        """Returns at most `limit` values whose keys begin with `prefix`, in the order of their keys.

        Args:
            prefix: what the keys begin with.
            limit: maximum number of values.
            start: the first key that is returned, if it exists; empty for the first of all.
        """

    def watch(self, prefix: bytes, after: int) -> AsyncGenerator[StoredChanges, None]:
        """Yields each change under `prefix` since the revision `after`, without end. May yield no changes at times.

        Raises:
            CompactedError: the store has forgotten changes since then.
        """

    async def close(self) -> None:
        """Ends the connections to the store."""
