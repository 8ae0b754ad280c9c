"""One peer's side of discovery, without a network: its table of records, those it wrote itself, and who watches."""

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
    """The records as this peer sees them.

    Nothing runs in the background: what has expired is forgotten before anything is read or merged.

    Args:
        author: writes this peer's records and checks everybody's signatures.
        limits: what to accept.
        clock: seconds since the epoch.
        on_change: is told what became readable, was replaced or went, and whether it went because it expired.

    Attributes:
        refused: how many records were refused, by reason.
    """

    def __init__(
        self,
        author: Author,
        limits: Limits,
        clock: Callable[[], float],
        on_change: Callable[[Change, bool], None] | None = None,
    ) -> None:
        self._author = author
        self._limits = limits
        self._clock = clock
        self._on_change = on_change
        self._table = RecordTable(limits, author.verify)
        self._watchers = Watchers(clock, lambda key: self.table().read(key), lambda key: self.table().next_end(key))
        self._warned: dict[Reason, float] = {}
        self._waiting: dict[tuple[str, str], bytes] = {}
        self.refused: Counter[Reason] = Counter()

    def table(self) -> RecordTable:
        """The table, freed of what has expired."""
        for change in self._table.expire(self._clock()):
            self._changed(change, expired=True)
        return self._table

    def write(self, key: str, subkey: str, value: bytes, expiration: float) -> Record:
        """Writes a record of this peer's own and returns it.

        Raises:
            DiscoveryError: see `Discovery.store`.
        """
        now, table = self._clock(), self.table()
        record = self._author.write(key, subkey, value, expiration, now, table.claim(key, subkey, self._author.owner))
        merged = table.merge(record, now)
        if merged.reason is not None and not merged.news:
            raise DiscoveryError(f"cannot store {subkey!r} under {key!r}: {merged.reason}")
        self._changed(merged.change)
        self._notice_waiting(key, subkey)
        return record

    def withdraw(self, key: str, subkey: str) -> Record | None:
        """Takes this peer's own record back and returns the withdrawal; None if there is nothing to withdraw."""
        previous = self.table().claim(key, subkey, self._author.owner)
        if previous is None or previous.withdrawn:
            return None
        now = self._clock()
        withdrawal = self._author.withdraw(previous, now)
        self._changed(self._table.merge(withdrawal, now).change)
        self._waiting.pop((key, subkey), None)
        return withdrawal

    def withdraw_all(self) -> list[Record]:
        """Takes back everything this peer wrote."""
        own = self.table().claims_of(self._author.owner)
        withdrawals = [self.withdraw(record.key, record.subkey) for record in own]
        return [record for record in withdrawals if record is not None]

    def merge(self, record: Record, sender: str) -> Merged:
        """Takes a record from the network, counting and now and then reporting those that are refused."""
        now, table = self._clock(), self.table()
        merged = table.merge(record, now)
        if merged.news:
            self._author.observe(record)
            self._changed(merged.change)
        just_expired = record.expiration > now - self._limits.clock_tolerance  # on the way, or by its owner's clock
        if merged.reason is not None and not (merged.reason is Reason.EXPIRED and just_expired):
            self._refused(merged.reason, record, sender, now)
        return merged

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """See `Discovery.watch`."""
        return self._watchers.watch(key)

    def close(self) -> None:
        """Ends all watching."""
        self._watchers.close()

    def _changed(self, change: Change | None, expired: bool = False) -> None:
        if change is None:
            return
        self._watchers.notify(change.key)
        self._notice_waiting(change.key, change.subkey)
        if self._on_change is not None:
            self._on_change(change, expired)

    def _refused(self, reason: Reason, record: Record, sender: str, now: float) -> None:
        self.refused[reason] += 1
        if now - self._warned.get(reason, float("-inf")) >= _WARNING_PERIOD:
            self._warned[reason] = now
            logger.warning(
                "refused a record of %.64r under %.64r that came from %s: %s (%d of this kind so far)",
                *(record.subkey, record.key, sender, reason.value, self.refused[reason]),
            )

    def _notice_waiting(self, key: str, subkey: str) -> None:
        """Says once that somebody else holds a place that this peer wants, and that it has got it at last."""
        place = (key, subkey)
        own = self._table.claim(key, subkey, self._author.owner)
        holder = self._table.holder(key, subkey)
        if own is None or own.withdrawn or holder is None or holder is own:
            if self._waiting.pop(place, None) is not None and holder is own and own is not None:
                logger.info("this peer's record of %r under %r is in force now", subkey, key)
        elif self._waiting.get(place) != holder.owner:
            self._waiting[place] = holder.owner
            logger.warning(
                "somebody else's record of %r under %r is in force: probably this peer's own, from before it was "
                "restarted. It expires in %.0f s unless its owner is alive and renews it; this peer's record takes its "
                "place then. If that does not happen, two peers have the same address",
                *(subkey, key, holder.expiration - self._clock()),
            )
