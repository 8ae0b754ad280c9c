"""A model of etcd 3 in one event loop: revisions, leases, watches, compaction. For simulations of many peers.

`tests/etcd/test_key_value_store.py` holds it and a real etcd to the same behaviour.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left, insort
from collections.abc import AsyncGenerator, Mapping
from itertools import takewhile

from averaging.errors import PeerUnreachableError
from averaging.transport import CompactedError, LeaseEndedError, StoredChanges, StoredValue, StoredValues

Change = tuple[int, StoredValue | bytes]
"""The revision of a change, and the new value; the key alone if it was deleted."""


class MemoryEtcd:
    """The cluster. Its clients are `MemoryEtcdClient`s.

    Args:
        latency: bounds of the seconds that a message takes in each direction.
        rng: source of the latencies.

    Attributes:
        down: whether it answers nobody, and tells nobody of changes.
    """

    def __init__(self, latency: tuple[float, float] = (0.0, 0.0), rng: random.Random | None = None) -> None:
        self.latency, self.rng = latency, rng or random.Random(0)
        self.down = False
        self.revision, self.compacted = 1, 0
        self._values: dict[bytes, StoredValue] = {}
        self._sorted: list[bytes] = []
        self._lease_of: dict[bytes, int] = {}
        self._leases: dict[int, tuple[float, asyncio.TimerHandle, set[bytes]]] = {}  # seconds, end, keys
        self._history: list[Change] = []
        self._watches: dict[bytes, dict[asyncio.Queue[Change | None], None]] = {}
        self._lengths: dict[int, int] = {}  # of the watched prefixes, and how many have it

    def client(self) -> MemoryEtcdClient:
        return MemoryEtcdClient(self)

    def compact(self) -> None:
        self._history.clear()
        self.compacted = self.revision

    def end_all_watches(self) -> None:
        for queues in self._watches.values():
            for queue in queues:
                queue.put_nowait(None)

    # Leases

    def grant(self, seconds: float) -> int:
        lease = self.rng.getrandbits(62) + 1
        self._leases[lease] = seconds, self._timer(lease, seconds), set()
        return lease

    def keep_alive(self, lease: int) -> bool:
        if lease not in self._leases:
            return False
        seconds, timer, keys = self._leases[lease]
        timer.cancel()
        self._leases[lease] = seconds, self._timer(lease, seconds), keys
        return True

    def revoke(self, lease: int) -> None:
        if lease in self._leases:
            _, timer, keys = self._leases.pop(lease)
            timer.cancel()
            if keys:
                self._apply(dict.fromkeys(sorted(keys)), 0)

    def revoke_all(self) -> None:
        for lease in list(self._leases):
            self.revoke(lease)

    def _timer(self, lease: int, seconds: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, self.revoke, lease)

    # Values

    def change(self, changes: Mapping[bytes, bytes | None], lease: int) -> int:
        if lease not in self._leases and any(value is not None for value in changes.values()):
            raise LeaseEndedError("requested lease not found")
        return self._apply(changes, lease)

    def list_values(self, prefix: bytes, limit: int, start: bytes) -> StoredValues:
        first = bisect_left(self._sorted, max(prefix, start))
        found: list[StoredValue] = []
        for key in self._sorted[first : first + limit + 1]:
            if not key.startswith(prefix):
                break
            found.append(self._values[key])
        return StoredValues(tuple(found[:limit]), self.revision, len(found) <= limit)

    def _apply(self, changes: Mapping[bytes, bytes | None], lease: int) -> int:
        revision = self.revision + 1
        done: list[Change] = []
        for key, value in changes.items():
            before = self._values.get(key)
            if value is None:
                if before is not None:
                    self._delete(key)
                    done.append((revision, key))
                continue
            if before is None:
                insort(self._sorted, key)
            self._attach(key, lease)
            stored = self._values[key] = StoredValue(key, value)
            done.append((revision, stored))
        if done:
            self.revision = revision
            self._tell(done)
        return self.revision

    def _delete(self, key: bytes) -> None:
        del self._values[key]
        del self._sorted[bisect_left(self._sorted, key)]
        self._attach(key, 0)

    def _attach(self, key: bytes, lease: int) -> None:
        before = self._lease_of.pop(key, 0)
        if before in self._leases:
            self._leases[before][2].discard(key)
        if lease:
            self._lease_of[key] = lease
            self._leases[lease][2].add(key)

    # Watches

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            self._history.append(change)
            key = change[1] if isinstance(change[1], bytes) else change[1].key
            for length in self._lengths:
                for queue in self._watches.get(key[:length], ()):
                    queue.put_nowait(change)

    def open_watch(self, prefix: bytes, after: int) -> asyncio.Queue[Change | None]:
        """Returns a queue with all changes under `prefix` since the revision `after`; None ends it."""
        if after < self.compacted:
            raise CompactedError(f"the changes before revision {self.compacted} are forgotten")
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        missed = list(takewhile(lambda change: change[0] > after, reversed(self._history)))
        for change in reversed(missed):
            key = change[1] if isinstance(change[1], bytes) else change[1].key
            if key.startswith(prefix):
                queue.put_nowait(change)
        self._watches.setdefault(prefix, {})[queue] = None
        self._lengths[len(prefix)] = self._lengths.get(len(prefix), 0) + 1
        return queue

    def close_watch(self, prefix: bytes, queue: asyncio.Queue[Change | None]) -> None:
        """Ends a watch."""
        self._watches[prefix].pop(queue, None)
        if not self._watches[prefix]:
            del self._watches[prefix]
        self._lengths[len(prefix)] -= 1
        if not self._lengths[len(prefix)]:
            del self._lengths[len(prefix)]


class MemoryEtcdClient:
    """One client; implements `averaging.transport.KeyValueStore`.

    Attributes:
        etcd: the cluster that it calls.
        cut: whether it reaches the cluster no more.
    """

    def __init__(self, etcd: MemoryEtcd) -> None:
        self.etcd = etcd
        self.cut = False

    async def grant(self, seconds: float) -> int:
        await self._way()
        lease = self.etcd.grant(seconds)
        await self._way()
        return lease

    async def keep_alive(self, lease: int) -> bool:
        await self._way()
        alive = self.etcd.keep_alive(lease)
        await self._way()
        return alive

    async def revoke(self, lease: int) -> None:
        await self._way()
        self.etcd.revoke(lease)
        await self._way()

    async def change(self, changes: Mapping[bytes, bytes | None], lease: int) -> int:
        await self._way()
        revision = self.etcd.change(changes, lease)
        await self._way()
        return revision

    async def list_values(self, prefix: bytes, limit: int, start: bytes = b"") -> StoredValues:
        await self._way()
        values = self.etcd.list_values(prefix, limit, start)
        await self._way()
        return values

    async def watch(self, prefix: bytes, after: int) -> AsyncGenerator[StoredChanges, None]:
        await self._way()
        etcd = self.etcd
        queue = etcd.open_watch(prefix, after)
        try:
            ended = False
            while not ended and (change := await queue.get()) is not None:
                await self._way()
                changes = [change]
                while not queue.empty() and not ended:
                    more = queue.get_nowait()
                    ended = more is None
                    changes += [] if more is None else [more]
                yield StoredChanges(tuple(each for _, each in changes), changes[-1][0])
        finally:
            etcd.close_watch(prefix, queue)
        raise PeerUnreachableError("etcd", "connection lost")

    async def close(self) -> None:
        """The model has no connections."""

    async def _way(self) -> None:
        if self.etcd.latency[1]:
            await asyncio.sleep(self.etcd.rng.uniform(*self.etcd.latency))
        if self.cut or self.etcd.down:
            raise PeerUnreachableError("etcd", "connection refused", refused=True)
