"""The records of one peer, without a network: its table, the records it writes itself, and the readers that watch."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping

from averaging.discovery.base import Entry
from averaging.discovery.gossip.identity import Author
from averaging.discovery.gossip.record import Limits, Reason
from averaging.discovery.gossip.record_table import Change, Merged, RecordTable
from averaging.discovery.watchers import Watchers
from averaging.errors import DiscoveryError
from averaging.protocol.messages import Record

logger = logging.getLogger(__name__)

_WARNING_PERIOD = 60.0  # s between two warnings of the same kind


class RecordStore:
    """The table of one peer. There is no background task: expired records are removed before each access.

    Args:
        author: writes this peer's records and verifies all signatures.
        limits: which records to accept.
        clock: seconds since the epoch.
        on_change: called with each change for readers, and whether an expiration caused it.

    Attributes:
        refused: number of records that were refused, by reason.
    """

    def __init__(
        self,
        author: Author,
        limits: Limits,
        clock: Callable[[], float],
        on_change: Callable[[Change, bool], None] | None = None,
    ) -> None:
        self._author, self._limits = author, limits
        self._clock, self._on_change = clock, on_change
        self._table = RecordTable(limits, author.verify, author.holder)
        self._watchers = Watchers(
            clock, lambda key: self.table().read(key), lambda key: self.table().next_expiration(key)
        )
        self._warned: dict[Reason, float] = {}
        self._waiting: dict[tuple[str, str], bytes] = {}  # places of this peer that other owners hold
        self.refused: Counter[Reason] = Counter()

    def table(self) -> RecordTable:
        """The table, without the records that have expired."""
        for change in self._table.expire(self._clock()):
            self._changed(change, expired=True)
        return self._table

    def write(self, key: str, subkey: str, value: bytes, expiration: float) -> Record:
        """Writes a record of this peer and returns it.

        Raises:
            DiscoveryError: see `Discovery.store`.
        """
        now, table = self._clock(), self.table()
        record = self._author.write(key, subkey, value, expiration, now, table.claim(key, subkey, self._author.owner))
        merged = table.merge(record, now)
        if merged.reason is not None and not merged.is_new:
            raise DiscoveryError(f"cannot store {subkey!r} under {key!r}: {merged.reason}")
        self._changed(merged.change)
        self._log_waiting(key, subkey)
        return record

    def withdraw(self, key: str, subkey: str) -> Record | None:
        """Withdraws this peer's record and returns the withdrawal; None if there is none."""
        previous = self.table().claim(key, subkey, self._author.owner)
        if previous is None or previous.withdrawn:
            return None
        now = self._clock()
        withdrawal = self._author.withdraw(previous, now)
        self._changed(self._table.merge(withdrawal, now).change)
        self._waiting.pop((key, subkey), None)
        return withdrawal

    def withdraw_all(self) -> list[Record]:
        """Withdraws all records of this peer."""
        own = self.table().claims_of(self._author.owner)
        withdrawals = [self.withdraw(record.key, record.subkey) for record in own]
        return [record for record in withdrawals if record is not None]

    def merge(self, record: Record, sender: str) -> Merged:
        """Merges a record from the network; refusals are counted, and logged once a minute."""
        now, table = self._clock(), self.table()
        merged = table.merge(record, now)
        if merged.is_new:
            self._author.observe(record)
            self._changed(merged.change)
        just_expired = record.expiration > now - self._limits.clock_tolerance  # in transit, or by its owner's clock
        if merged.reason is not None and not (merged.reason is Reason.EXPIRED and just_expired):
            self._count_refusal(merged.reason, record, sender, now)
        return merged

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """See `Discovery.watch`."""
        return self._watchers.watch(key)

    def close(self) -> None:
        """Ends all `watch` generators."""
        self._watchers.close()

    def _changed(self, change: Change | None, expired: bool = False) -> None:
        if change is None:
            return
        self._watchers.notify(change.key)
        self._log_waiting(change.key, change.subkey)
        if self._on_change is not None:
            self._on_change(change, expired)

    def _count_refusal(self, reason: Reason, record: Record, sender: str, now: float) -> None:
        self.refused[reason] += 1
        if now - self._warned.get(reason, float("-inf")) >= _WARNING_PERIOD:
            self._warned[reason] = now
            logger.warning(
                "refused a record of %.64r under %.64r that came from %s: %s (%d of this kind so far)",
                *(record.subkey, record.key, sender, reason.value, self.refused[reason]),
            )

    def _log_waiting(self, key: str, subkey: str) -> None:
        """Logs once that another owner holds a place of this peer, and once that this peer holds it."""
        place = (key, subkey)
        own = self._table.claim(key, subkey, self._author.owner)
        holder = self._table.holder(key, subkey)
        if own is None or own.withdrawn or holder is None or holder is own:
            if self._waiting.pop(place, None) is not None and holder is own and own is not None:
                logger.info("this peer's record of %r under %r is in force now", subkey, key)
        elif self._waiting.get(place) != holder.owner:
            self._waiting[place] = holder.owner
            logger.warning(
                "another owner's record of %r under %r is in force: probably this peer's own, from before it was "
                "restarted. It expires in %.0f s, and then this peer's record takes its place. If another peer "
                "renews it until then, two peers have the same address: advertise another one",
                *(subkey, key, holder.expiration - self._clock()),
            )
