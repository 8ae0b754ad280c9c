"""What this peer writes into etcd, and the lease with which it goes when the peer dies."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import islice

from averaging.discovery.etcd.access import EtcdAccess
from averaging.errors import AveragingError
from averaging.transport import LeaseEndedError

logger = logging.getLogger(__name__)

MAX_CHANGES = 64
"""Changes that are written in one step; etcd's limit is 128."""


class OwnRecords:
    """Keeps the values of this peer in etcd as they should be.

    `put` and `delete` note only what should be there. One task writes it, again and again until it is there: when etcd
    has not answered, and under another lease when that has ended.
    """

    def __init__(self, access: EtcdAccess) -> None:
        self._access, self._store = access, access.store
        self._kept: dict[bytes, tuple[bytes, float]] = {}  # values, and when they expire
        self._pending: dict[bytes, None] = {}  # keys whose value in etcd is another one, or may be
        self._lease: int | None = None
        self._wake = asyncio.Event()

    def put(self, key: bytes, value: bytes, expiration: float) -> None:
        self._kept[key] = value, expiration
        self._note_pending(key)

    def delete(self, key: bytes) -> None:
        if self._kept.pop(key, None) is not None:
            self._note_pending(key)

    def delete_expired(self, now: float) -> None:
        for key in [key for key, (_, expiration) in self._kept.items() if expiration < now]:
            self.delete(key)

    async def connect(self) -> None:
        """Gets the first lease.

        Raises:
            AveragingError: etcd does not answer, or refuses.
        """
        self._lease = await self._store.grant(self._access.settings.lease)

    async def write(self) -> None:
        """Writes what is pending, until cancelled."""
        backoff = self._access.backoff()
        while True:
            self._wake.clear()
            if not self._pending:
                await self._wake.wait()
                continue
            try:
                await self._write_some()
            except LeaseEndedError:
                self._note_lease_end()
            except AveragingError as error:
                self._access.note_failure(error)
                await asyncio.sleep(backoff.next_delay())
            else:
                self._access.note_answer()
                backoff.reset()

    async def renew(self) -> None:
        """Renews the lease, until cancelled."""
        while True:
            await asyncio.sleep(self._access.settings.renew * self._access.rng.uniform(0.8, 1.0))
            if self._lease is None:
                continue
            try:
                alive = await self._store.keep_alive(self._lease)
            except AveragingError as error:
                self._access.note_failure(error)
                continue
            self._access.note_answer()
            if not alive:
                self._note_lease_end()

    async def withdraw_all(self) -> None:
        """Ends the lease, with all that was written, if etcd answers in time."""
        self._kept.clear()
        self._pending.clear()
        lease, self._lease = self._lease, None
        if lease is not None:
            with suppress(AveragingError, TimeoutError):
                async with asyncio.timeout(self._access.settings.leave):
                    await self._store.revoke(lease)

    def _note_lease_end(self) -> None:
        """Nothing of this peer is in etcd any more: all is written again, under another lease."""
        if self._lease is not None:
            logger.info("the lease in %s has ended; this peer writes its records again", self._access.settings.name)
        self._lease = None
        for key in self._kept:
            self._note_pending(key)

    async def _write_some(self) -> None:
        if self._lease is None:
            self._lease = await self._store.grant(self._access.settings.lease)
        wanted = {key: self._kept.get(key) for key in islice(self._pending, MAX_CHANGES)}
        # If the answer is lost, the same is written again. Should the first try take effect even later than the next
        # value of a key, its readers keep the later version, and the next renewal of the record corrects etcd.
        await self._store.change({key: kept and kept[0] for key, kept in wanted.items()}, self._lease)
        for key, kept in wanted.items():
            if self._kept.get(key) is kept:
                self._pending.pop(key, None)  # it may be leaving

    def _note_pending(self, key: bytes) -> None:
        self._pending[key] = None
        self._wake.set()
