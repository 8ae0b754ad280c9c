"""The records in etcd: those under one key, kept up to date by a watch, and those of this peer, under one lease.

A record stands under `averaging/runs/RUN/KEY/SUBKEY/OWNER`, so `etcdctl get --prefix averaging/runs/RUN/` lists a run.
In a run with tokens each value begins with a MAC by a token: who may write into etcd need not be a member of the run.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import islice
from urllib.parse import quote

from averaging.common import Backoff
from averaging.discovery.gossip import Reason, RecordLimits, RecordStore
from averaging.errors import AveragingError, ProtocolViolationError, printable
from averaging.protocol import Record
from averaging.timing import is_set_within
from averaging.transport import CompactedError, KeyValueStore, LeaseEndedError, StoredValue, parse
from averaging.transport.grpc import RECORD

logger = logging.getLogger(__name__)

ROOT = "averaging/runs"

MAX_VALUE = 2048
"""Longest value in bytes: a record with a value of 1 KiB and names of 256 bytes is shorter, also with a MAC."""

_MAC_BYTES = 32
_DOMAIN = b"averaging.v1.EtcdRecord"  # so that the MAC is valid for nothing else
_PLAIN, _SEALED = b"\0", b"\1"


class RefusedValueError(Exception):
    """What stands in etcd is no record of this run; its argument is the `Reason`."""


class RecordLayout:
    """Names and encodes the records of one run. Its first token seals, all are accepted; without any nothing is."""

    def __init__(self, run_id: str, tokens: Sequence[str] = ()) -> None:
        self._run_id = run_id
        self._keys = tuple(token.encode() for token in tokens)

    def prefix(self, *names: str) -> bytes:
        quoted = [quote(name, safe=":.[]@+~", errors="surrogatepass") for name in (self._run_id, *names)]
        return "/".join([ROOT, *quoted, ""]).encode()

    def name(self, record: Record) -> bytes:
        return self.prefix(record.key, record.subkey) + record.owner.hex().encode()

    def pack(self, record: Record) -> bytes:
        body = RECORD.SerializeToString(record)
        return _SEALED + _mac(self._keys[0], body) + body if self._keys else _PLAIN + body

    def unpack(self, value: bytes) -> Record:
        """The record in a value, whose signature is not checked; or raises a RefusedValueError."""
        if len(value) > MAX_VALUE:
            raise RefusedValueError(Reason.OVERSIZED)
        kind, body = value[:1], value[1:]
        if kind not in (_PLAIN, _SEALED):
            raise RefusedValueError(Reason.MALFORMED)
        if bool(self._keys) != (kind == _SEALED):
            raise RefusedValueError(Reason.UNSEALED)
        if kind == _SEALED:
            mac, body = body[:_MAC_BYTES], body[_MAC_BYTES:]
            if not any(hmac.compare_digest(mac, _mac(key, body)) for key in self._keys):
                raise RefusedValueError(Reason.UNSEALED)
        try:
            return parse(RECORD, body)
        except ProtocolViolationError:
            raise RefusedValueError(Reason.MALFORMED) from None


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, _DOMAIN + body, "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """Times (in seconds) and sizes of discovery in etcd."""

    name: str = "etcd"  # the cluster as its user wrote it, for errors
    limits: RecordLimits = field(default_factory=RecordLimits)
    join_timeout: float = 10.0  # within which etcd must answer; time in which this peer stood still does not count
    lease: float = 30.0  # after which the records of a dead peer go
    renew: float = 8.0  # interval of the renewals of the lease
    presence: float = 60.0  # interval of the renewals of the record that shows that this peer is in the run
    # Other peers that this peer knows although it reads none of their records. Together the peers know all, so
    # `averaging top` finds the whole run through any of them.
    neighbours: int = 32
    look: float = 20.0  # mean time between two looks for neighbours
    most: int = 1024  # records of one key that it holds
    lapse: float = 60.0  # after which a key is no longer followed that nobody reads
    hold: float = 600.0  # for which expired records stay while etcd does not answer, since nobody can renew them
    wait: float = 3.0  # for the first read of a key
    leave: float = 1.0  # for the withdrawal of this peer's records when it leaves


class EtcdAccess:
    """One peer's access to etcd. It logs once that etcd does not answer, and once that it answers again."""

    def __init__(self, store: KeyValueStore, settings: EtcdSettings, rng: random.Random) -> None:
        self.store, self.settings, self.rng = store, settings, rng
        self._reason = ""  # why the last call failed
        self._lost_at: float | None = None

    @property
    def lost_seconds(self) -> float | None:
        return None if self._lost_at is None else asyncio.get_running_loop().time() - self._lost_at

    def backoff(self) -> Backoff:
        return Backoff(0.1, 3.0, self.rng)

    def note_answer(self) -> None:
        if (seconds := self.lost_seconds) is not None:
            logger.warning("%s answers again after %.0f s", self.settings.name, seconds)
        self._lost_at = None

    def note_failure(self, error: AveragingError) -> None:
        self._reason = printable(error.reason, 300)
        if self._lost_at is None:
            self._lost_at = asyncio.get_running_loop().time()
            logger.warning(
                "%s does not answer: %s. This peer goes on with the peers that it knows, and finds no others until it "
                "answers again",
                *(self.settings.name, self._reason),
            )

    def explain(self) -> str:
        if (seconds := self.lost_seconds) is None:
            return ""
        return f"has not answered for {seconds:.0f} s ({self._reason}); check that a majority of it is up"


PAGE = 256  # values that are read with one call
MIN_POLL = 1.0  # seconds between two reads of a key that is not watched

FRESH_SECONDS = 1.0
"""Events so soon after a watch began may be old ones that were missed, so they say nothing of their owners' clocks."""


class FollowedKey:
    """Reads one key of the run. Everything that stands there is checked as if a peer had sent it by gossip.

    If there are more records than `most`, it holds those that come after this peer's own in their order. `on_fresh` is
    called with each record that was written just now.
    """

    def __init__(
        self,
        access: EtcdAccess,
        layout: RecordLayout,
        records: RecordStore,
        key: str,
        endpoint: str,
        most: int,
        on_fresh: Callable[[Record], None],
    ) -> None:
        self._access, self._store, self._layout, self._records = access, access.store, layout, records
        self._key, self._most, self._on_fresh = key, most, on_fresh
        self._prefix, self._own_place = layout.prefix(key), layout.prefix(key, endpoint)
        self._held: dict[bytes, Record] = {}
        self._revision = 0
        self.soon = asyncio.Event()  # `poll` reads again
        self.readers = 0  # present watches
        self.pinned = False  # it is followed until this peer leaves
        self.used = asyncio.get_running_loop().time()  # for the last time
        self.loaded = asyncio.Event()

    async def until_loaded(self) -> None:
        await is_set_within(self._access.settings.wait, self.loaded)

    async def run(self) -> None:
        backoff = self._access.backoff()
        while True:
            try:
                # A watch of a store that was restored or made anew would wait for a revision that is far off.
                if self._revision and (await self._store.list_values(self._prefix, 1)).revision < self._revision:
                    self._revision = 0
                if not self._revision:
                    await self._read()
                self._access.note_answer()
            except AveragingError as error:
                self._access.note_failure(error)
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
        """Reads from time to time, sooner if `soon` is set, and does not watch; until cancelled."""
        while True:
            self.soon.clear()
            try:
                await self._read()
                self._access.note_answer()
            except AveragingError as error:
                self._access.note_failure(error)
            await asyncio.sleep(min(MIN_POLL, seconds))
            await is_set_within(seconds * self._access.rng.uniform(0.5, 1.5), self.soon)

    def forget(self) -> None:
        for record in self._held.values():
            self._records.forget(record, notify=False)
        self._held.clear()

    async def _read(self) -> None:
        """Reads the records from this peer's own place on and then those before it, `most` of them."""
        revision, here = 0, set[bytes]()
        for start, end in ((self._own_place, self._prefix[:-1] + b"0"), (self._prefix, self._own_place)):
            while start < end and len(here) < self._most:
                page = await self._store.list_values(self._prefix, PAGE, start)
                revision = revision or page.revision  # the watch brings what has changed since
                for value in page.values:
                    if value.key < end and len(here) < self._most:
                        self._take(value)
                        here |= {value.key} & self._held.keys()  # what is no record does not count
                start = end if page.complete else page.values[-1].key + b"\0"
        for name in self._held.keys() - here:
            self._remove(name)
        self._revision = max(self._revision, revision)
        self.loaded.set()

    async def _watch(self, backoff: Backoff) -> None:
        time = asyncio.get_running_loop().time
        began = time()
        async with aclosing(self._store.watch(self._prefix, self._revision)) as batches:
            async for batch in batches:
                self._access.note_answer()
                backoff.reset()
                for change in batch.changes:
                    if isinstance(change, bytes):
                        self._remove(change)
                    elif change.key in self._held or len(self._held) < self._most:
                        record = self._take(change)
                        if record is not None and time() - began > FRESH_SECONDS:
                            self._on_fresh(record)
                self._revision = max(self._revision, batch.revision)

    def _take(self, value: StoredValue) -> Record | None:
        """Merges a record and returns it if it is new."""
        name = self._access.settings.name
        try:
            record = self._layout.unpack(value.value)
        except RefusedValueError as refused:
            self._records.count_refusal(refused.args[0], self._key, value.key.decode("ascii", "replace"), name)
            return None
        if value.key != self._layout.name(record):
            return None  # a copy under another name
        is_new = self._records.merge(record, name).is_new
        held = self._records.table().claim(record.key, record.subkey, record.owner)
        if held is not None:
            self._held[value.key] = held
        return record if is_new else None

    def _remove(self, name: bytes) -> None:
        if (record := self._held.pop(name, None)) is not None:
            self._records.forget(record)


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
        self._lease = await self._store.grant(self._access.settings.lease)

    async def write(self) -> None:
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
