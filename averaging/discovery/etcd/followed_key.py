"""The records under one key, read from etcd and kept up to date by a watch."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing, suppress

from averaging.common import Backoff
from averaging.discovery.etcd.contact import Contact
from averaging.discovery.etcd.layout import RecordSeal, RefusedValueError, name_of, prefix_of, start_of
from averaging.discovery.etcd.own_records import MAX_BACKOFF, MIN_BACKOFF
from averaging.discovery.gossip import RecordStore
from averaging.errors import AveragingError
from averaging.protocol import Record
from averaging.transport import CompactedError, KeyValueStore, StoredChanges, StoredValue

logger = logging.getLogger(__name__)

PAGE = 256
"""Values that are read with one call."""

MIN_POLL = 1.0
"""Seconds between two reads of a key that is not watched."""

FRESH_SECONDS = 1.0
"""Events so soon after a watch began may be old ones that were missed, so they say nothing of their owners' clocks."""

HeldRecord = tuple[str, bytes]
"""Subkey and owner of a record that this peer holds."""


class FollowedKey:
    """Reads one key of the run. Everything that stands there is checked as if a peer had sent it by gossip.

    Args:
        key: the key of discovery.
        endpoint: this peer. If there are more records than `most`, it holds those that come after it in their order.
        most: number of records that it holds.
        on_deletion: callback with each key of etcd that was deleted.
        on_fresh: callback with each record that was written just now.

    Attributes:
        readers: number of present watches.
        pinned: whether the key is followed until this peer leaves.
        used: the loop's time of the last read.
        loaded: event that is set when the records are there.
        complete: whether these are all, as of the last read.
    """

    def __init__(
        self,
        run_id: str,
        key: str,
        endpoint: str,
        store: KeyValueStore,
        records: RecordStore,
        seal: RecordSeal,
        contact: Contact,
        *,
        most: int,
        owner: bytes,
        on_deletion: Callable[[bytes], None],
        on_fresh: Callable[[Record], None],
        rng: random.Random,
    ) -> None:
        self._run_id, self._key, self._owner = run_id, key, owner
        self._prefix, self._start = prefix_of(run_id, key), start_of(run_id, key, endpoint)
        self._store, self._records, self._seal, self._contact = store, records, seal, contact
        self._most, self._rng = most, rng
        self._on_deletion, self._on_fresh = on_deletion, on_fresh
        self._held: dict[bytes, HeldRecord] = {}
        self._revision = 0
        self._advanced, self._soon = asyncio.Event(), asyncio.Event()
        self.readers, self.pinned, self.complete = 0, False, True
        self.used = asyncio.get_running_loop().time()
        self.loaded = asyncio.Event()

    async def until_loaded(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.loaded.wait()
        except TimeoutError:
            return

    async def until_revision(self, revision: int, seconds: float) -> None:
        """Waits until all changes up to a revision in which one of these records was written are seen."""
        try:
            async with asyncio.timeout(seconds):
                while self._revision < revision:
                    self._advanced.clear()
                    await self._advanced.wait()
        except TimeoutError:
            return

    async def run(self) -> None:
        """Reads and watches, until cancelled."""
        backoff = Backoff(MIN_BACKOFF, MAX_BACKOFF, self._rng)
        while True:
            try:
                if self._revision and await self._store_was_reset():
                    self._revision = 0
                if not self._revision:
                    await self.read()
            except AveragingError as error:
                self._contact.note_failure(error)
                await asyncio.sleep(backoff.next_delay())
                continue
            try:
                await self._watch(backoff)
            except CompactedError:
                self._revision = 0
            except AveragingError as error:  # the next call tells whether another member answers
                logger.debug("the watch of %s has ended: %s", self._key, error)
                await asyncio.sleep(backoff.next_delay())

    async def poll(self, seconds: float) -> None:
        """Reads from time to time, sooner after `read_soon`, and does not watch; until cancelled."""
        while True:
            self._soon.clear()
            try:
                await self.read()
            except AveragingError as error:
                self._contact.note_failure(error)
            await asyncio.sleep(min(MIN_POLL, seconds))
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds * self._rng.uniform(0.5, 1.5)):
                    await self._soon.wait()

    def read_soon(self) -> None:
        self._soon.set()

    def forget(self) -> None:
        """Forgets the records of other peers."""
        for subkey, owner in self._held.values():
            if owner != self._owner:
                self._records.forget(self._key, subkey, owner)
        self._held.clear()

    async def read(self) -> None:
        """Reads all records, or at most `most` of them.

        Raises:
            AveragingError: etcd does not answer, or refuses.
        """
        revision, here = 0, set[bytes]()
        # Records from this peer's own place on, and then those before it. What is no record does not count.
        for start, end in ((self._start, self._prefix[:-1] + b"0"), (self._prefix, self._start)):
            while start < end and len(here) < self._most:
                page = await self._store.list_values(self._prefix, PAGE, start)
                revision = revision or page.revision  # the watch brings what changed since
                present = {value.key for value in page.values}
                after = end if page.complete else min(end, page.values[-1].key + b"\0")
                for name in [name for name in self._held if start <= name < after and name not in present]:
                    self._remove(name)
                for value in page.values:
                    if value.key < end and len(here) < self._most:
                        self._take(value, self._most + len(self._held))
                        here.update({value.key} & self._held.keys())
                start = after
        for name in self._held.keys() - here:
            self._remove(name)
        self._contact.note_answer()
        self.complete = len(here) < self._most
        self._advance(revision)
        self.loaded.set()

    async def _store_was_reset(self) -> bool:
        """Whether the store is an earlier one, restored or made anew: a watch from here on would never see a change."""
        revision = (await self._store.list_values(self._prefix, 1)).revision
        self._contact.note_answer()
        return revision < self._revision

    async def _watch(self, backoff: Backoff) -> None:
        began = asyncio.get_running_loop().time()
        async with aclosing(self._store.watch(self._prefix, self._revision)) as changes:
            async for change in changes:
                self._contact.note_answer()
                backoff.reset()
                self._apply(change, fresh=asyncio.get_running_loop().time() - began > FRESH_SECONDS)

    def _apply(self, changes: StoredChanges, *, fresh: bool) -> None:
        for change in changes.changes:
            if isinstance(change, bytes):
                self._remove(change)
                self._on_deletion(change)
            elif (record := self._take(change, self._most)) is not None and fresh:
                self._on_fresh(record)
        self._advance(changes.revision)

    def _advance(self, revision: int) -> None:
        self._revision = max(self._revision, revision)
        self._advanced.set()

    def _take(self, value: StoredValue, most: int) -> Record | None:
        """Merges a record if `most` are not held yet; returns it if it is new."""
        if value.key not in self._held and len(self._held) >= most:
            return None
        try:
            record = self._seal.unpack(value.value)
        except RefusedValueError as refused:
            self._records.count_refusal(refused.args[0], self._key, _subkey_in(value.key), self._contact.name)
            return None
        if value.key != name_of(self._run_id, record):
            return None  # a copy under another name
        merged = self._records.merge(record, self._contact.name, value.created)
        table, owner = self._records.table(), record.owner
        if table.claim(record.key, record.subkey, owner) is None:
            return None
        self._held[value.key] = record.subkey, owner
        table.set_created(record.key, record.subkey, owner, value.created)
        return record if merged.is_new else None

    def _remove(self, name: bytes) -> None:
        held = self._held.pop(name, None)
        if held is not None and held[1] != self._owner:
            self._records.remove(self._key, *held)


def _subkey_in(name: bytes) -> str:
    return name.split(b"/")[-2].decode("ascii", "replace") if name.count(b"/") > 1 else ""
