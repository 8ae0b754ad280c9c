"""Discovery within one process: one table that all peers share, for tests, simulations and peers in threads."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Self

from averaging.common import call_in
from averaging.discovery import Diagnosis, Entry, Watchers
from averaging.discovery.gossip import Author, Reason, RecordLimits, RecordTable, UnsignedIdentity
from averaging.errors import ClosedError, DiscoveryError
from averaging.protocol import Record


class MemoryRegistry:
    """The records of all peers.

    Args:
        clock: seconds since the epoch.
        delay: seconds until other peers see a change; a peer sees its own changes at once.
        limits: bounds of acceptable records.
        rng: source of the random owner ids.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        delay: float = 0.0,
        limits: RecordLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.clock, self.delay = clock, delay
        self.limits = limits or RecordLimits()
        self.rng = rng or random.Random()
        self._table = RecordTable(self.limits, lambda record: True)
        self._views: dict[MemoryDiscovery, asyncio.AbstractEventLoop] = {}
        self.lock = threading.RLock()  # peers may live in several threads

    def table(self) -> RecordTable:
        """The table, without the records that have expired."""
        for change in self._table.expire(self.clock()):
            self._notify(change.key)
        return self._table

    def attach(self, view: MemoryDiscovery) -> None:
        self._views[view] = asyncio.get_running_loop()

    def detach(self, view: MemoryDiscovery) -> None:
        self._views.pop(view, None)

    def publish(self, record: Record) -> None:
        """Merges a record into the table.

        Raises:
            DiscoveryError: the table is full.
        """
        with self.lock:
            merged = self.table().merge(record, self.clock())
        if merged.reason is not None and not merged.is_new:
            raise DiscoveryError(f"cannot store {record.subkey!r} under {record.key!r}: {merged.reason}")
        self._notify(record.key)

    def publish_late(self, record: Record, done: Callable[[], None]) -> None:
        """Does the same after the delay; a record that has expired by then, or does not fit, is dropped."""

        def arrive() -> None:
            with self.lock:
                self.table().merge(record, self.clock())
            done()
            self._notify(record.key)

        asyncio.get_running_loop().call_later(self.delay, arrive)

    def _notify(self, key: str) -> None:
        for view, loop in tuple(self._views.items()):  # a peer in another thread may come or go
            call_in(loop, view.notify, key)


class MemoryDiscovery:
    """One peer's view of a `MemoryRegistry`; implements `discovery.base.Discovery`."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        self._author = Author("", UnsignedIdentity(registry.rng), registry.limits)
        self._watchers = Watchers(registry.clock, self.get, self._next_expiration)
        self._own: dict[tuple[str, str], Record] = {}
        self._in_transit: dict[tuple[str, str], Record] = {}
        self._entered = self._left = False

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ClosedError("a discovery can be entered only once; make another one")
        self._entered = True
        self._registry.attach(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key, subkey in list(self._own):
            await self.withdraw(key, subkey)
        self._left = True
        self._registry.detach(self)
        self._watchers.close()

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        if not self._entered or self._left:
            raise ClosedError("this peer is not in the run: enter its discovery with `async with` first")
        last = self._last(key, subkey)
        if last is None and len(self._own) >= self._registry.limits.records_per_owner:
            raise DiscoveryError(f"cannot store {subkey!r} under {key!r}: {Reason.OWNER_FULL}")
        record = self._author.write(key, subkey, value, expiration, self._registry.clock(), last)
        self._publish(record)
        self._own[key, subkey] = record

    async def withdraw(self, key: str, subkey: str) -> None:
        last = self._last(key, subkey)
        if last is not None:
            del self._own[key, subkey]
            self._publish(self._author.withdraw(last, self._registry.clock()))

    async def follow(self, key: str, *, keep: bool = True) -> None:
        """See `Discovery.follow`; every peer holds all records anyway."""

    def get(self, key: str) -> Mapping[str, Entry]:
        with self._registry.lock:
            return self._read(key)

    def _read(self, key: str) -> dict[str, Entry]:
        table = self._registry.table()
        entries = table.read(key)
        now = self._registry.clock()
        for record in self._in_transit.values():
            holder = table.holder(record.key, record.subkey)
            if record.key == key and (holder is None or holder.owner == self._author.owner):
                entries.pop(record.subkey, None)
                if not record.withdrawn and record.expiration > now:
                    entries[record.subkey] = Entry(record.value, record.expiration)
        return entries

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        return self._watchers.watch(key)

    def knows(self, endpoint: str) -> bool:
        with self._registry.lock:
            return self._registry.table().has_subkey(endpoint) or endpoint in self._own_subkeys()

    def withdrew(self, endpoint: str) -> bool:
        return not self.knows(endpoint)

    def endpoints(self) -> frozenset[str]:
        with self._registry.lock:
            return self._registry.table().subkeys() | self._own_subkeys()

    def diagnose(self) -> Diagnosis:
        own = {subkey for _, subkey in self._own}
        with self._registry.lock:
            return Diagnosis({name: peer for name, peer in self._registry.table().peers().items() if name not in own})

    def _next_expiration(self, key: str) -> float | None:
        return min((entry.expiration for entry in self.get(key).values()), default=None)

    def notify(self, key: str) -> None:
        self._watchers.notify(key)

    def _publish(self, record: Record) -> None:
        if not self._registry.delay:
            self._registry.publish(record)
            return
        place = (record.key, record.subkey)
        self._in_transit[place] = record

        def arrived() -> None:
            if self._in_transit.get(place) is record:
                del self._in_transit[place]

        self._registry.publish_late(record, arrived)
        self.notify(record.key)

    def _last(self, key: str, subkey: str) -> Record | None:
        now = self._registry.clock()
        self._own = {place: record for place, record in self._own.items() if record.expiration > now}
        return self._own.get((key, subkey))

    def _own_subkeys(self) -> frozenset[str]:
        now = self._registry.clock()
        return frozenset(subkey for (_, subkey), record in self._own.items() if record.expiration > now)
