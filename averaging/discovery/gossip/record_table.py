"""All records a peer holds, and how they merge. Pure: `now` is passed in.

The table is a last-writer-wins map from (key, subkey, owner) to that owner's newest record, so any set of records gives
the same table whatever the order in which they arrive, and however often. What is read under (key, subkey) is a
function of that map: of the owners whose record has neither expired nor been withdrawn, the one that claimed the place
first holds it (equal claims: the smaller key). Records of the others are kept but nobody reads them; when the holder's
goes, the next one takes the place at every peer at the same moment, without a message. `claimed` is the owner's word:
one that lies about it takes a place that it was not first to claim, see docs/decisions/0001-gossip.md.

A record whose owner's clock is ahead is dropped before it expires (`records.kept_until`). Peers received it at
different times, so those that still hold it would give it back to those that do not. Its version is therefore
remembered until it expires, and no record of that version or an earlier one is taken.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from averaging.common.addresses import is_endpoint
from averaging.discovery.base import Entry, Sighting
from averaging.discovery.gossip.record import Limits, Reason, entry_hash, kept_until, objection, record_id
from averaging.protocol.messages import Record


class Change(NamedTuple):
    """What is read under (key, subkey) became another record; None: nothing is read there."""

    key: str
    subkey: str
    after: Record | None


class Merged(NamedTuple):
    """What became of a record that was offered to the table.

    Attributes:
        news: it was taken, and others may want to hear of it.
        reason: why it was refused. With `news`, that is `FOREIGN`: it was taken but waits for the place.
        change: what its arrival changed for readers, if anything.
    """

    news: bool = False
    reason: Reason | None = None
    change: Change | None = None


_NOTHING_NEW = Merged()

_FEW = 1024  # records that were dropped early and are remembered without a look at which have expired


class RecordTable:
    """The newest record of every owner under every (key, subkey).

    Args:
        limits: what to accept.
        verify: whether a record carries its owner's signature.
    """

    def __init__(self, limits: Limits, verify: Callable[[Record], bool]) -> None:
        self._limits = limits
        self._verify = verify
        self._places: dict[tuple[str, str], dict[bytes, Record]] = {}
        # Who claims each place and has not withdrawn, the holder first: thousands of owners may want the same.
        self._claims: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
        self._readable: dict[str, dict[str, Record]] = {}
        self._subkeys: Counter[str] = Counter()
        self._by_id: dict[int, Record] = {}
        self._versions: dict[int, int] = {}
        self._by_owner: Counter[bytes] = Counter()
        self._ends: dict[tuple[str, str, bytes], float] = {}  # until when each record is kept
        self._expirations: list[tuple[float, int]] = []  # heap of (end, id), some outdated
        self._dropped: dict[int, tuple[float, int]] = {}  # expiration and version of what was dropped before it expired
        self._prune_at = _FEW
        self._hash = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def state_hash(self) -> int:
        """Equal for equal tables; 0 if it is empty."""
        return self._hash

    def merge(self, record: Record, now: float) -> Merged:
        """Takes `record` if it is newer than what its owner had there and nothing is wrong with it.

        Call `expire(now)` before.
        """
        known = self._places.get((record.key, record.subkey), {}).get(record.owner)
        if known is not None and not _supersedes(record, known):
            return _NOTHING_NEW
        reason = objection(record, now, self._limits)
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
        self._put(number, record, known, kept_until(record, now, self._limits))
        change = self._reread(record.key, record.subkey)
        waits = not record.withdrawn and self.holder(record.key, record.subkey) is not record
        return Merged(news=True, reason=Reason.FOREIGN if waits else None, change=change)

    def expire(self, now: float) -> list[Change]:
        """Forgets what has expired, and returns what that changed for readers."""
        changes = []
        while self._expirations and self._expirations[0][0] <= now:
            _, number = heapq.heappop(self._expirations)
            record = self._by_id.get(number)
            if record is None or self._ends[_identity(record)] > now:
                continue  # outdated: a newer record took its place
            self._remove(number, record)
            if record.expiration > now:
                self._remember(number, record, now)
            change = self._reread(record.key, record.subkey)
            if change is not None:
                changes.append(change)
        return changes

    def holder(self, key: str, subkey: str) -> Record | None:
        """The record that is read there."""
        return self._readable.get(key, {}).get(subkey)

    def claim(self, key: str, subkey: str, owner: bytes) -> Record | None:
        """What `owner` said last about (key, subkey), be it read, waiting or a withdrawal."""
        return self._places.get((key, subkey), {}).get(owner)

    def claims_of(self, owner: bytes) -> list[Record]:
        """All that `owner` said, withdrawals included."""
        return [record for record in self._by_id.values() if record.owner == owner]

    def read(self, key: str) -> dict[str, Entry]:
        """The entries under `key`, by subkey."""
        return {s: Entry(record.value, record.expiration) for s, record in self._readable.get(key, {}).items()}

    def next_end(self, key: str) -> float | None:
        """When the first of the records that are read under `key` will be gone; None if there are none."""
        return min((self._ends[_identity(record)] for record in self._readable.get(key, {}).values()), default=None)

    def listing(self, key: str) -> tuple[Record, ...]:
        """The records that are read under `key`, or under any key if it is empty."""
        keys = (key,) if key else tuple(self._readable)
        return tuple(record for k in keys for record in self._readable.get(k, {}).values())

    def names(self, subkey: str) -> bool:
        """Whether anything is read under `subkey`, whatever the key."""
        return subkey in self._subkeys

    def subkeys(self) -> frozenset[str]:
        """All subkeys under which something is read."""
        return frozenset(self._subkeys)

    def sightings(self) -> dict[str, Sighting]:
        """What is known of each subkey that is an endpoint."""
        values: dict[str, dict[str, bytes]] = {}
        since: dict[str, int] = {}
        for key, records in self._readable.items():
            for subkey, record in records.items():
                values.setdefault(subkey, {})[key] = record.value
                since[subkey] = min(since.get(subkey, record.claimed), record.claimed)
        return {name: Sighting(since[name] / 1e6, stored) for name, stored in values.items() if is_endpoint(name)}

    def versions(self) -> Mapping[int, int]:
        """The digest: version by record id."""
        return self._versions

    def compare(self, theirs: Iterable[tuple[int, int]]) -> tuple[list[Record], list[int]]:
        """The records that a peer with the digest `theirs` lacks, and the ids of those it could send here."""
        theirs, here = tuple(theirs), self._versions
        # Of ids that are not here no dict is made: they may be chosen so that each clashes with all before it.
        there = {number: version for number, version in theirs if number in here}
        lacking = [self._by_id[number] for number, version in here.items() if there.get(number, 0) < version]
        wanted = [
            number
            for number, version in theirs
            if here.get(number, 0) < version and not self._was_dropped(number, version)
        ]
        return lacking, wanted

    def select(self, numbers: Iterable[int]) -> list[Record]:
        """The records with these ids; ids of none are passed over."""
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
        """Whether this version of a record, or a later one, was here and was dropped before it expired."""
        return version <= self._dropped.get(number, (0.0, 0))[1]

    def _remember(self, number: int, record: Record, now: float) -> None:
        self._dropped[number] = record.expiration, record.version
        if len(self._dropped) > self._prune_at:
            self._dropped = {n: dropped for n, dropped in self._dropped.items() if dropped[0] > now}
            for number in list(self._dropped)[: max(0, len(self._dropped) - self._limits.records)]:
                del self._dropped[number]
            self._prune_at = max(_FEW, 2 * len(self._dropped))

    def _put(self, number: int, record: Record, known: Record | None, end: float) -> None:
        if known is None:
            self._by_owner[record.owner] += 1
        else:
            self._hash ^= entry_hash(number, known.version)
            self._unclaim(known)
        if not record.withdrawn:
            insort(self._claims.setdefault((record.key, record.subkey), []), _precedence(record))
        self._places.setdefault((record.key, record.subkey), {})[record.owner] = record
        self._by_id[number] = record
        self._versions[number] = record.version
        self._hash ^= entry_hash(number, record.version)
        self._dropped.pop(number, None)
        self._ends[_identity(record)] = end
        heapq.heappush(self._expirations, (end, number))
        if len(self._expirations) > 2 * len(self._by_id) + 64:  # mostly outdated
            self._expirations = [(self._ends[_identity(r)], n) for n, r in self._by_id.items()]
            heapq.heapify(self._expirations)

    def _remove(self, number: int, record: Record) -> None:
        place = (record.key, record.subkey)
        del self._by_id[number], self._versions[number], self._ends[_identity(record)]
        del self._places[place][record.owner]
        if not self._places[place]:
            del self._places[place]
        self._unclaim(record)
        self._by_owner[record.owner] -= 1
        if not self._by_owner[record.owner]:
            del self._by_owner[record.owner]
        self._hash ^= entry_hash(number, record.version)

    def _unclaim(self, record: Record) -> None:
        if record.withdrawn:
            return
        place = (record.key, record.subkey)
        claims = self._claims[place]
        del claims[bisect_left(claims, _precedence(record))]
        if not claims:
            del self._claims[place]

    def _reread(self, key: str, subkey: str) -> Change | None:
        """Works out anew what is read under (key, subkey)."""
        claims = self._claims.get((key, subkey))
        before = self.holder(key, subkey)
        after = self._places[key, subkey][claims[0][1]] if claims else None
        if after is before:
            return None
        if after is not None:
            self._readable.setdefault(key, {})[subkey] = after
            if before is None:
                self._subkeys[subkey] += 1
        else:
            del self._readable[key][subkey]
            if not self._readable[key]:
                del self._readable[key]
            self._subkeys[subkey] -= 1
            if not self._subkeys[subkey]:
                del self._subkeys[subkey]
        return Change(key, subkey, after)


def _identity(record: Record) -> tuple[str, str, bytes]:
    """What its id is the hash of."""
    return record.key, record.subkey, record.owner


def _precedence(record: Record) -> tuple[int, bytes]:
    """The owner for whom this is lowest holds the place."""
    return record.claimed, record.owner


def _supersedes(record: Record, known: Record) -> bool:
    """Whether `record` replaces `known`, of the same owner; one that signs two of one version gets one of them."""
    if record.version != known.version:
        return record.version > known.version
    return record is not known and _content(record) > _content(known)


def _content(record: Record) -> tuple[bool, bytes, float, int, bytes]:
    return record.withdrawn, record.value, record.expiration, record.claimed, record.signature
