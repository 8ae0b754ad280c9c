"""Anti-entropy: two peers compare their tables, and each gets the records that it lacks.

This is the push-pull exchange of Demers et al. (1987).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.membership import CALL_FAILURES, GossipAccess, Membership, is_refused, why_failed
from averaging.discovery.gossip.record_table import Merged, RecordStore
from averaging.discovery.gossip.rumours import Rumours
from averaging.errors import ProtocolViolationError
from averaging.protocol import Digest, ExchangeReply, Record

logger = logging.getLogger(__name__)


class AntiEntropy:
    """Both sides of an exchange of records. `merge` takes a record from the network, and the sender for the log."""

    def __init__(
        self,
        access: GossipAccess,
        store: RecordStore,
        merge: Callable[[Record, str], Merged],
        rumours: Rumours,
        offsets: ClockOffsets,
    ) -> None:
        self._access, self._settings = access, access.settings
        self._store, self._merge, self._rumours, self._offsets = store, merge, rumours, offsets

    def digest(self, *, complete: bool) -> Digest:
        table, name = self._store.table(), "" if self._access.is_client else self._access.endpoint
        entries = tuple(table.versions().items()) if complete else ()
        return Digest(self._access.run_id, name, table.state_hash, entries, complete, self._access.clock())

    async def compare(self, endpoint: str) -> None:
        """Exchanges records with `endpoint`: first the hashes, then, if they differ, the digests."""
        async with asyncio.timeout(self._settings.exchange_timeout):
            wanted = await self._ask(endpoint, self.digest(complete=False))
            if wanted is None:
                wanted = await self._ask(endpoint, self.digest(complete=True))
            if records := self._store.table().select(wanted or []):
                await self._rumours.push(endpoint, records)

    async def answer(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        table, clock = self._store.table(), self._access.clock
        # A caller with an empty table, whose hash is 0, needs all records.
        if not digest.complete and digest.state_hash != 0:
            yield ExchangeReply(differs=digest.state_hash != table.state_hash, sent=clock())
            return
        if len(digest.entries) > 2 * self._settings.limits.records:
            raise ProtocolViolationError(f"a digest of {len(digest.entries)} records is more than any peer may hold")
        lacking, wanted = table.compare(digest.entries)
        size = self._settings.records_per_reply
        while len(lacking) > size:
            yield ExchangeReply(tuple(lacking[:size]), sent=clock())
            lacking = lacking[size:]
        yield ExchangeReply(tuple(lacking), tuple(wanted), sent=clock())

    async def _ask(self, endpoint: str, digest: Digest) -> list[int] | None:
        """Sends a digest and merges the answer; returns the ids of the records that the other side lacks."""
        limit = 2 * self._settings.limits.records
        wanted: list[int] = []
        records, time = 0, asyncio.get_running_loop().time
        began: float | None = time()
        async with aclosing(self._access.transport.exchange(endpoint, digest)) as replies:
            async for reply in replies:
                if began is not None:  # the first reply only: later ones may have waited for this peer to read them
                    self._offsets.note(endpoint, reply.sent, self._access.clock(), time() - began, time())
                    began = None
                if reply.differs and not digest.complete:
                    return None
                records += len(reply.records)
                wanted += reply.wanted
                if records > limit or len(wanted) > limit:
                    raise ProtocolViolationError("answered with more records than a peer may hold", endpoint)
                for record in reply.records:
                    self._merge(record, endpoint)
        return wanted


_MAX_TRIES = 3  # members that are asked in a row until one answers


class Maintenance:
    """The background loops of one peer; each runs until it is cancelled."""

    def __init__(
        self,
        access: GossipAccess,
        members: Membership,
        anti_entropy: AntiEntropy,
        merge: Callable[[Record, str], Merged],
        on_answer: Callable[[], None],
    ) -> None:
        self._access, self._settings = access, access.settings
        self._members, self._anti_entropy = members, anti_entropy
        self._merge, self._on_answer = merge, on_answer

    async def exchange(self) -> None:
        """Compares records with a random member every `exchange_interval`; the first time sooner.

        A client does so too. Its stream may be that of a stopped process, which keeps its connections open.
        """
        wait = self._settings.exchange_interval * self._access.rng.random()
        while True:
            await asyncio.sleep(wait)
            wait = self._access.around(self._settings.exchange_interval)
            for _ in range(_MAX_TRIES):
                member = self._members.pick()
                if member is None or await self._try_exchange(member):
                    break

    async def retry(self) -> None:
        """Calls members that did not answer; at longer intervals also seeds and members that are missing.

        So a peer that was cut off for a moment is not missed for longer, and a run that was split becomes one again.
        """
        calling: set[str] = set()

        async def call(endpoint: str) -> None:
            calling.add(endpoint)
            try:
                await self._try_exchange(endpoint)
            finally:
                calling.discard(endpoint)

        time = asyncio.get_running_loop().time
        missing_at = time() + self._access.around(self._settings.retry_interval)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._access.around(self._settings.exchange_interval))
                names = self._members.pick_silent(self._access.clock())
                if time() >= missing_at:
                    missing_at = time() + self._access.around(self._settings.retry_interval)
                    names += self._members.pick_missing(self._access.clock())
                for endpoint in dict.fromkeys(names):
                    if endpoint not in calling:
                        tasks.create_task(call(endpoint))

    async def read_streams(self) -> None:
        """Reads the stream of a member, and of another one when it ends. A client gets new records this way."""
        backoff, time = self._access.backoff(), asyncio.get_running_loop().time
        while True:
            endpoint = self._members.pick_stream_source(self._access.clock())
            if endpoint is not None:
                began = time()
                try:
                    await self._anti_entropy.compare(endpoint)
                    await self._read_stream(endpoint)
                except CALL_FAILURES as error:
                    logger.debug("the stream of %s ended: %s", endpoint, error)
                    self._suspect(endpoint, error)
                finally:
                    self._members.stream_source = None
                # The backoff goes on growing while each stream ends as soon as it has begun.
                if time() - began >= self._settings.max_backoff:
                    backoff.reset()
            await asyncio.sleep(backoff.next_delay())

    async def _read_stream(self, endpoint: str) -> None:
        """Reads records from `endpoint` until the stream ends, or is silent for two renewals of its presence record."""
        digest = self._anti_entropy.digest(complete=True)
        async with aclosing(self._access.transport.subscribe(endpoint, digest)) as stream:
            while True:
                async with asyncio.timeout(2 * self._settings.peer_refresh):
                    records = await anext(stream, None)
                if records is None:
                    return
                self._members.stream_source = endpoint
                for record in records:
                    self._merge(record, endpoint)

    async def _try_exchange(self, endpoint: str) -> bool:
        try:
            await self._anti_entropy.compare(endpoint)
        except CALL_FAILURES as error:
            logger.debug("no exchange with %s: %s", endpoint, error)
            self._suspect(endpoint, error)
            return False
        self._members.note_answer(endpoint)
        self._on_answer()
        return True

    def _suspect(self, endpoint: str, error: Exception) -> None:
        self._members.suspect(endpoint, self._access.clock(), why_failed(error), refused=is_refused(error))
