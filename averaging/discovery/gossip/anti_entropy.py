"""Anti-entropy: two peers compare what they hold, and each gets what it lacks (Demers et al. 1987, push-pull)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from averaging.common.addresses import CLIENT_PREFIX
from averaging.discovery.gossip.clock_offsets import Clocks
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
        take: merges a record from the network; its second argument is the sender.
        rumours: sends what the other side wants.
        clocks: told what the clocks of those who answer show.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        transport: Transport,
        board: RecordStore,
        take: Callable[[Record, str], object],
        rumours: Rumours,
        settings: GossipSettings,
        clocks: Clocks,
        clock: Callable[[], float],
    ) -> None:
        self._run_id = run_id
        self._name = "" if endpoint.startswith(CLIENT_PREFIX) else endpoint
        self._transport = transport
        self._board = board
        self._take = take
        self._rumours = rumours
        self._settings = settings
        self._clocks = clocks
        self._clock = clock

    def digest(self, *, complete: bool) -> Digest:
        """What this peer holds; only the hash of it unless `complete`."""
        table = self._board.table()
        entries = tuple(table.versions().items()) if complete else ()
        return Digest(self._run_id, self._name, table.state_hash, entries, complete, self._clock())

    async def compare(self, endpoint: str) -> None:
        """Exchanges records with `endpoint`: the hashes first, and the digests if they differ.

        Raises:
            TransportError, ProtocolViolationError, TimeoutError: the call failed.
        """
        async with asyncio.timeout(self._settings.exchange_timeout):
            wanted = await self._ask(endpoint, self.digest(complete=False))
            if wanted is None:
                wanted = await self._ask(endpoint, self.digest(complete=True)) or []
            records = self._board.table().select(wanted)
            if records:
                await self._rumours.push(endpoint, records)

    async def answer(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
        """See `GossipService.exchange`."""
        table = self._board.table()
        # The hash of an empty table is 0: such a caller needs everything.
        if not digest.complete and digest.state_hash != 0:
            yield ExchangeReply(differs=digest.state_hash != table.state_hash, sent=self._clock())
            return
        lacking, wanted = table.compare(self._checked(digest.entries))
        size = self._settings.records_per_reply
        while len(lacking) > size:
            yield ExchangeReply(tuple(lacking[:size]), sent=self._clock())
            lacking = lacking[size:]
        yield ExchangeReply(tuple(lacking), tuple(wanted), sent=self._clock())

    def _checked(self, entries: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        if len(entries) > 2 * self._settings.limits.records:
            raise ProtocolViolationError(f"a digest of {len(entries)} records is more than any peer may hold")
        return entries

    async def _ask(self, endpoint: str, digest: Digest) -> list[int] | None:
        """Sends a digest and takes what comes; returns the ids wanted there, None if the hashes differ."""
        most = 2 * self._settings.limits.records
        wanted: list[int] = []
        records = 0
        time = asyncio.get_running_loop().time
        began: float | None = time()
        async with aclosing(self._transport.exchange(endpoint, digest)) as replies:
            async for reply in replies:
                if began is not None:  # a later one may have waited for this peer to read it
                    self._clocks.answered(endpoint, reply.sent, self._clock(), time() - began, time())
                    began = None
                if reply.differs and not digest.complete:
                    return None
                records += len(reply.records)
                wanted += reply.wanted
                if records > most or len(wanted) > most:
                    raise ProtocolViolationError(f"{endpoint} answers with more records than a peer may hold")
                for record in reply.records:
                    self._take(record, endpoint)
        return wanted
