"""All records that a peer holds, and how they merge. Pure: `now` is passed in.

The table is a last-writer-wins map from (key, subkey, owner) to the newest record of that owner. So a set of records
gives the same table in whatever order the records arrive, and however often.

Several owners may claim one place, that is, one (key, subkey). Of those whose record has neither expired nor been
withdrawn, the one that claimed the place first holds it; of equal claims, the smaller public key. Only its record is
read. The others are kept, and when the holder's record goes, all peers read the next one without a message. Owners set
the time of their claim themselves; docs/design/decisions/discovery.md has the consequences.

The presence record of a peer whose port refuses connections is dropped before it expires. Peers do so at different
times, and those that still hold it send it to the others, so neither that version nor an earlier one is accepted again.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from averaging.common import is_endpoint
from averaging.discovery import Entry, KnownPeer, Watchers
from averaging.discovery.gossip.record import Author, Reason, RecordLimits, entry_hash, record_id, refusal_reason
from averaging.errors import DiscoveryError
from averaging.protocol import Record


class Change(NamedTuple):
    """The record that is read under (key, subkey) has changed; `after` is None if there is none now."""

    key: str
    subkey: str
    after: Record | None


class Merged(NamedTuple):
    """The result of merging a record into the table."""

    is_new: bool = False  # it was accepted, so other peers may lack it
    reason: Reason | None = None  # of a refusal. If `is_new`, this can only be `FOREIGN`: another owner holds the place
    change: Change | None = None  # for readers, if there is any


_NOTHING_NEW = Merged()


class RecordTable:
    """The newest record of every owner under every (key, subkey); `verify` tells whether a signature is valid."""

    def __init__(self, limits: RecordLimits, verify: Callable[[Record], bool]) -> None:
        self._limits, self._verify = limits, verify
        self._places: dict[tuple[str, str], dict[bytes, Record]] = {}
        self._readable: dict[str, dict[str, Record]] = {}
        self._by_id: dict[int, Record] = {}
        self._by_owner: Counter[bytes] = Counter()
        self._expirations: list[tuple[float, int]] = []  # heap of (expiration, id), some outdated
        self._dropped: dict[int, Record] = {}
        self.state_hash = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def merge(self, record: Record, now: float) -> Merged:
        """Accepts `record` if it is valid and newer than the one its owner has there. Call `expire(now)` first."""
        known = self.claim(record.key, record.subkey, record.owner)
        if known is not None and not _supersedes(record, known):
            return _NOTHING_NEW
        reason = refusal_reason(record, now, self._limits)
        if reason is not None:
            return Merged(reason=reason)
        number = record_id(record.key, record.subkey, record.owner)
        if self._was_dropped(number, record.version):
            return _NOTHING_NEW
        reason = self._no_room(number, record, known)
        if reason is None and not self._verify(record):
            reason = Reason.FORGED
        if reason is not None:
            return Merged(reason=reason)
        self._put(number, record, known)
        change = self._update_readable(record.key, record.subkey)
        waits = not record.withdrawn and self.holder(record.key, record.subkey) is not record
        return Merged(is_new=True, reason=Reason.FOREIGN if waits else None, change=change)

    def expire(self, now: float) -> list[Change]:
        """Removes expired records; returns what that changed for readers."""
        changes = []
        while self._expirations and self._expirations[0][0] <= now:
            _, number = heapq.heappop(self._expirations)
            record = self._by_id.get(number)
            if record is not None and record.expiration <= now:  # otherwise a newer record took its place
                changes.append(self.forget(record))
        return [change for change in changes if change is not None]

    def drop(self, key: str, subkey: str, now: float) -> Change | None:
        """Removes the record that is read there before it expires: only a later version of it is accepted again."""
        record = self.holder(key, subkey)
        if record is None:
            return None
        self._dropped = {number: dropped for number, dropped in self._dropped.items() if dropped.expiration > now}
        self._dropped[record_id(key, subkey, record.owner)] = record
        return self.forget(record)

    def forget(self, record: Record) -> Change | None:
        """Removes what its owner has there, which may come back."""
        place, owner = (record.key, record.subkey), record.owner
        present = self.claim(*place, owner)
        if present is None:
            return None
        number = record_id(*place, owner)
        del self._by_id[number], self._places[place][owner]
        if not self._places[place]:
            del self._places[place]
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        self.state_hash ^= entry_hash(number, present.version)
        return self._update_readable(*place)

    def holder(self, key: str, subkey: str) -> Record | None:
        return self._readable.get(key, {}).get(subkey)

    def claim(self, key: str, subkey: str, owner: bytes) -> Record | None:
        return self._places.get((key, subkey), {}).get(owner)

    def claims_of(self, owner: bytes) -> list[Record]:
        return [record for record in self._by_id.values() if record.owner == owner]

    def read(self, key: str) -> dict[str, Entry]:
        records = self._readable.get(key, {}).items()
        return {subkey: Entry(record.value, record.expiration) for subkey, record in records}

    def next_expiration(self, key: str) -> float | None:
        return min((record.expiration for record in self._readable.get(key, {}).values()), default=None)

    def list_records(self, key: str) -> tuple[Record, ...]:
        keys = (key,) if key else tuple(self._readable)
        return tuple(record for k in keys for record in self._readable.get(k, {}).values())

    def has_subkey(self, subkey: str) -> bool:
        return any(subkey in records for records in self._readable.values())

    def subkeys(self) -> frozenset[str]:
        return frozenset().union(*self._readable.values())

    def peers(self) -> dict[str, KnownPeer]:
        values: dict[str, dict[str, bytes]] = {}
        since: dict[str, int] = {}
        for record in self.list_records(""):
            values.setdefault(record.subkey, {})[record.key] = record.value
            since[record.subkey] = min(since.get(record.subkey, record.claimed), record.claimed)
        return {name: KnownPeer(since[name] / 1e6, stored) for name, stored in values.items() if is_endpoint(name)}

    def versions(self) -> Mapping[int, int]:
        return {number: record.version for number, record in self._by_id.items()}

    def compare(self, theirs: Iterable[tuple[int, int]]) -> tuple[list[Record], list[int]]:
        """The records that a peer with the digest `theirs` lacks, and the ids of those that this table lacks."""
        here, there = self.versions(), dict(theirs)
        lacking = [self._by_id[number] for number, version in here.items() if there.get(number, 0) < version]
        wanted = [
            number
            for number, version in there.items()
            if here.get(number, 0) < version and not self._was_dropped(number, version)
        ]
        return lacking, wanted

    def select(self, numbers: Iterable[int]) -> list[Record]:
        return [record for number in numbers if (record := self._by_id.get(number)) is not None]

    def _no_room(self, number: int, record: Record, known: Record | None) -> Reason | None:
        if known is not None:
            return None
        if number in self._by_id:
            return Reason.CLASH
        if self._by_owner[record.owner] >= self._limits.records_per_owner:
            return Reason.OWNER_FULL
        return Reason.FULL if len(self._by_id) >= self._limits.records else None

    def _was_dropped(self, number: int, version: int) -> bool:
        return number in self._dropped and version <= self._dropped[number].version

    def _put(self, number: int, record: Record, known: Record | None) -> None:
        if known is None:
            self._by_owner[record.owner] += 1
        else:
            self.state_hash ^= entry_hash(number, known.version)
        self._places.setdefault((record.key, record.subkey), {})[record.owner] = record
        self._by_id[number] = record
        self.state_hash ^= entry_hash(number, record.version)
        heapq.heappush(self._expirations, (record.expiration, number))
        if len(self._expirations) > 2 * len(self._by_id) + 64:  # mostly outdated
            self._expirations = [(each.expiration, place) for place, each in self._by_id.items()]
            heapq.heapify(self._expirations)

    def _update_readable(self, key: str, subkey: str) -> Change | None:
        claims = [record for record in self._places.get((key, subkey), {}).values() if not record.withdrawn]
        before = self.holder(key, subkey)
        after = min(claims, key=lambda record: (record.claimed, record.owner), default=None)
        if after is before:
            return None
        if after is not None:
            self._readable.setdefault(key, {})[subkey] = after
        else:
            del self._readable[key][subkey]
            if not self._readable[key]:
                del self._readable[key]
        return Change(key, subkey, after)


def _supersedes(record: Record, known: Record) -> bool:
    if record.version != known.version:  # of two with one version, all peers keep the same one
        return record.version > known.version
    return record is not known and _content(record) > _content(known)


def _content(record: Record) -> tuple[bool, bytes, float, int, bytes]:
    return record.withdrawn, record.value, record.expiration, record.claimed, record.signature


# The records of one peer, without a network: its table, the records it writes itself, and the readers that watch.


logger = logging.getLogger(__name__)

_WARNING_PERIOD = 60.0  # s between two warnings of the same kind


class RecordStore:
    """The table of one peer. There is no background task: expired records are removed before each access.

    `on_change` is called with each change for readers, and whether an expiration caused it. While `holds()`, expired
    records stay, since their owners cannot renew them.
    """

    def __init__(
        self,
        author: Author,
        limits: RecordLimits,
        clock: Callable[[], float],
        on_change: Callable[[Change, bool], None],
        holds: Callable[[], bool],
    ) -> None:
        self._author, self._limits, self._holds = author, limits, holds
        self._clock, self._on_change = clock, on_change
        self._table = RecordTable(limits, author.verify)
        self.watchers = Watchers(clock, lambda key: self.table().read(key), self._next_expiration)
        self._warned: dict[Reason, float] = {}
        self._waiting: dict[tuple[str, str], bytes] = {}  # places of this peer that other owners hold
        self.refused: Counter[Reason] = Counter()

    def table(self) -> RecordTable:
        """The table, without the records that have expired."""
        if not self._holds():
            for change in self._table.expire(self._clock()):
                self._changed(change, expired=True)
        return self._table

    def _next_expiration(self, key: str) -> float | None:
        return None if self._holds() else self.table().next_expiration(key)

    def write(self, key: str, subkey: str, value: bytes, expiration: float) -> Record:
        now, table = self._clock(), self.table()
        record = self._author.write(key, subkey, value, expiration, now, table.claim(key, subkey, self._author.owner))
        merged = table.merge(record, now)
        if merged.reason is not None and not merged.is_new:
            raise DiscoveryError(f"cannot store {subkey!r} under {key!r}: {merged.reason}")
        self._changed(merged.change)
        self._log_waiting(key, subkey)
        return record

    def withdraw(self, key: str, subkey: str) -> Record | None:
        previous = self.table().claim(key, subkey, self._author.owner)
        if previous is None or previous.withdrawn:
            return None
        now = self._clock()
        withdrawal = self._author.withdraw(previous, now)
        self._changed(self._table.merge(withdrawal, now).change)
        return withdrawal

    def withdraw_all(self) -> list[Record]:
        own = self.table().claims_of(self._author.owner)
        withdrawals = [self.withdraw(record.key, record.subkey) for record in own]
        return [record for record in withdrawals if record is not None]

    def drop(self, key: str, subkey: str) -> None:
        self._changed(self.table().drop(key, subkey, self._clock()), expired=True)

    def forget(self, record: Record, *, notify: bool = True) -> None:
        """Removes a record of another peer, which may come back; its readers are not told unless `notify`."""
        if record.owner != self._author.owner:
            change = self.table().forget(record)
            self._changed(change if notify else None)

    def merge(self, record: Record, sender: str) -> Merged:
        """Merges a record from the network; refusals are counted, and logged once a minute. `sender` is for the log."""
        now, table = self._clock(), self.table()
        merged = table.merge(record, now)
        if merged.is_new:
            self._author.observe(record)
            self._changed(merged.change)
        just_expired = record.expiration > now - self._limits.clock_tolerance  # in transit, or by its owner's clock
        if merged.reason is not None and not (merged.reason is Reason.EXPIRED and just_expired):
            self.count_refusal(merged.reason, record.key, record.subkey, sender)
        return merged

    def _changed(self, change: Change | None, expired: bool = False) -> None:
        if change is None:
            return
        self.watchers.notify(change.key)
        self._log_waiting(change.key, change.subkey)
        self._on_change(change, expired)

    def count_refusal(self, reason: Reason, key: str, subkey: str, sender: str) -> None:
        now = self._clock()
        self.refused[reason] += 1
        if now - self._warned.get(reason, float("-inf")) >= _WARNING_PERIOD:
            self._warned[reason] = now
            logger.warning(
                "refused a record of %.64r under %.64r that came from %s: %s (%d of this kind so far)",
                *(subkey, key, sender, reason.value, self.refused[reason]),
            )

    def _log_waiting(self, key: str, subkey: str) -> None:
        place = (key, subkey)
        own = self._table.claim(key, subkey, self._author.owner)
        holder = self._table.holder(key, subkey)
        if own is None or own.withdrawn or holder is None or holder is own:
            self._waiting.pop(place, None)
        elif self._waiting.get(place) != holder.owner:
            self._waiting[place] = holder.owner
            logger.warning(
                "another owner's record of %r under %r is in force: probably this peer's own, from before it was "
                "restarted. It expires in %.0f s, and then this peer's record takes its place. If another peer "
                "renews it until then, two peers have the same address: advertise another one",
                *(subkey, key, holder.expiration - self._clock()),
            )
