"""What this peer writes into etcd, and the lease with which it goes when the peer dies."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from averaging.common import Backoff
from averaging.discovery.etcd.contact import Contact
from averaging.errors import AveragingError
from averaging.transport import KeyValueStore, LeaseEndedError

logger = logging.getLogger(__name__)

MAX_CHANGES = 64
"""Changes that are written in one step; etcd's limit is 128."""

MIN_BACKOFF, MAX_BACKOFF = 0.1, 3.0
"""Seconds between two tries while etcd does not answer."""


class OwnRecords:
    """Keeps the values of this peer in etcd as they should be.

    `put` and `delete` note only what should be there. One task writes it, again and again until it is there: when etcd
    has not answered, when the lease has ended, when somebody else has deleted it.

    Args:
        lease_seconds: time after which the values go when this peer has died.
        renew_seconds: interval of the renewals of the lease.
        on_created: callback with a key and the revision in which it was created.
        renewed: returns the value with which a key is written again that was deleted: readers that have seen that
            accept only a later version of the record. None if it is not needed any more.
    """

    def __init__(
        self,
        store: KeyValueStore,
        contact: Contact,
        *,
        lease_seconds: float,
        renew_seconds: float,
        on_created: Callable[[bytes, int], None],
        renewed: Callable[[bytes], bytes | None],
        rng: random.Random,
    ) -> None:
        self._store, self._contact, self._rng = store, contact, rng
        self._lease_seconds, self._renew_seconds = lease_seconds, renew_seconds
        self._on_created, self._renewed = on_created, renewed
        self._kept: dict[bytes, bytes] = {}
        self._pending: dict[bytes, None] = {}  # keys whose value in etcd is another one, or may be
        self._created: set[bytes] = set()  # keys that are in etcd
        self._gone: set[bytes] = set()  # keys that somebody else has deleted
        self._lease: int | None = None
        self._revision = 0
        self._wake, self._written = asyncio.Event(), asyncio.Event()

    @property
    def lease(self) -> int:
        return self._lease or 0

    def put(self, key: bytes, value: bytes) -> None:
        self._kept[key] = value
        self._note_pending(key)

    def delete(self, key: bytes) -> None:
        if self._kept.pop(key, None) is not None:
            self._note_pending(key)

    def note_deletion(self, key: bytes) -> None:
        """A key was deleted in etcd. If not by this peer, it is written again with the next renewal of the lease."""
        if key in self._kept:
            self._gone.add(key)

    async def until_written(self, key: bytes, seconds: float) -> int:
        """Waits until a value is in etcd, at most for this time; returns a revision that has it, or 0."""
        try:
            async with asyncio.timeout(seconds):
                while key in self._pending:
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            return 0
        return self._revision

    async def connect(self) -> None:
        """Gets the first lease.

        Raises:
            AveragingError: etcd does not answer, or refuses.
        """
        self._lease = await self._store.grant(self._lease_seconds)

    async def write(self) -> None:
        """Writes what is pending, until cancelled."""
        backoff = Backoff(MIN_BACKOFF, MAX_BACKOFF, self._rng)
        while True:
            self._wake.clear()
            if not self._pending:
                await self._wake.wait()
                continue
            try:
                await self._write_some()
            except LeaseEndedError:
                self.note_lease_end()
            except AveragingError as error:
                self._contact.note_failure(error)
                await asyncio.sleep(backoff.next_delay())
            else:
                self._contact.note_answer()
                backoff.reset()

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds * self._rng.uniform(0.8, 1.0))
            for key in self._gone & self._kept.keys():
                self._write_again(key)
            self._gone.clear()
            if self._lease is None:
                continue
            try:
                alive = await self._store.keep_alive(self._lease)
            except AveragingError as error:
                self._contact.note_failure(error)
                continue
            self._contact.note_answer()
            if not alive:
                self.note_lease_end()

    async def withdraw_all(self, seconds: float) -> None:
        """Ends the lease, with all that was written, if etcd answers within this time."""
        self._kept.clear()
        self._pending.clear()
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(AveragingError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._store.revoke(lease)

    def note_lease_end(self) -> None:
        """The lease has ended, and nothing of this peer is in etcd any more: all is written again under another one."""
        if self._lease is not None:
            logger.info("the lease in %s has ended; this peer writes its records again", self._contact.name)
        self._lease = None
        self._created.clear()
        for key in list(self._kept):
            self._write_again(key)

    async def _write_some(self) -> None:
        if self._lease is None:
            self._lease = await self._store.grant(self._lease_seconds)
        changes = {key: self._kept.get(key) for key in islice(self._pending, MAX_CHANGES)}
        # If the answer is lost, the same is written again. Should the first try take effect even later than the next
        # value of a key, its readers keep the later version, and the next renewal of the record corrects etcd.
        revision = await self._store.change(changes, self._lease)
        self._revision = max(self._revision, revision)
        for key, value in changes.items():
            if self._kept.get(key) is value:
                self._pending.pop(key, None)  # it may be leaving
            if value is None:
                self._created.discard(key)
            elif key not in self._created:
                self._created.add(key)
                self._on_created(key, revision)
        self._written.set()

    def _write_again(self, key: bytes) -> None:
        self._created.discard(key)
        value = self._renewed(key)
        if value is None:
            del self._kept[key]
        else:
            self._kept[key] = value
        self._note_pending(key)

    def _note_pending(self, key: bytes) -> None:
        self._pending[key] = None
        self._wake.set()
