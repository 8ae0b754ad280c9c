"""Anti-entropy: two peers compare their tables, and each gets the records that it lacks.

This is the push-pull exchange of Demers et al. (1987).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from averaging.common.addresses import CLIENT_PREFIX
from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.record_store import RecordStore
from averaging.discovery.gossip.rumours import Rumours
from averaging.discovery.gossip.settings import GossipSettings
from averaging.errors import ProtocolViolationError
from averaging.protocol.messages import Digest, ExchangeReply, Record
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)


class AntiEntropy:
    """Both sides of an exchange of records.

    Args:
        endpoint: this peer's name.
        merge: merges a record from the network; its second argument is the sender.
        rumours: sends the records that the other side lacks.
        offsets: learns the clocks of the peers that answer.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        transport: Transport,
        store: RecordStore,
        merge: Callable[[Record, str], object],
        rumours: Rumours,
        settings: GossipSettings,
        offsets: ClockOffsets,
        clock: Callable[[], float],
    ) -> None:
        self._run_id = run_id
        self._name = "" if endpoint.startswith(CLIENT_PREFIX) else endpoint
        self._transport, self._store, self._merge, self._rumours = transport, store, merge, rumours
        self._settings, self._offsets, self._clock = settings, offsets, clock

    def digest(self, *, complete: bool) -> Digest:
        """The digest of this peer's table; only its hash unless `complete`."""
        table = self._store.table()
        entries = tuple(table.versions().items()) if complete else ()
        return Digest(self._run_id, self._name, table.state_hash, entries, complete, self._clock())

    async def compare(self, endpoint: str) -> None:
        """Exchanges records with `endpoint`: first the hashes, then, if they differ, the digests.

        Raises:
            TransportError, ProtocolViolationError, TimeoutError: the call failed.
        """
        async with asyncio.timeout(self._settings.exchange_timeout):
            wanted = await self._ask(endpoint, self.digest(complete=False))
            if wanted is None:
                wanted = await self._ask(endpoint, self.digest(complete=True)) or []
            records = self._store.table().select(wanted)
            if records:
                await self._rumours.push(endpoint, records)

    async def answer(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """See `GossipService.exchange`."""
        table = self._store.table()
        # A caller with an empty table, whose hash is 0, needs all records.
        if not digest.complete and digest.state_hash != 0:
            yield ExchangeReply(differs=digest.state_hash != table.state_hash, sent=self._clock())
            return
        if len(digest.entries) > 2 * self._settings.limits.records:
            raise ProtocolViolationError(f"a digest of {len(digest.entries)} records is more than any peer may hold")
        lacking, wanted = table.compare(digest.entries)
        size = self._settings.records_per_reply
        while len(lacking) > size:
            yield ExchangeReply(tuple(lacking[:size]), sent=self._clock())
            lacking = lacking[size:]
        yield ExchangeReply(tuple(lacking), tuple(wanted), sent=self._clock())

    async def _ask(self, endpoint: str, digest: Digest) -> list[int] | None:
        """Sends a digest and merges the answer; returns the ids that `endpoint` lacks, or None if the hashes differ."""
        limit = 2 * self._settings.limits.records
        wanted: list[int] = []
        records = 0
        time = asyncio.get_running_loop().time
        began: float | None = time()
        async with aclosing(self._transport.exchange(endpoint, digest)) as replies:
            async for reply in replies:
                if began is not None:  # the first reply only: later ones may have waited for this peer to read them
                    self._offsets.note_answer(endpoint, reply.sent, self._clock(), time() - began, time())
                    began = None
                if reply.differs and not digest.complete:
                    return None
                records += len(reply.records)
                wanted += reply.wanted
                if records > limit or len(wanted) > limit:
                    raise ProtocolViolationError(f"{endpoint} answered with more records than a peer may hold")
                for record in reply.records:
                    self._merge(record, endpoint)
        return wanted
