"""Anti-entropy: two peers compare their tables, and each gets the records that it lacks.

This is the push-pull exchange of Demers et al. (1987).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from averaging.common import CLIENT_PREFIX, Backoff
from averaging.discovery.gossip.clock_offsets import ClockOffsets
from averaging.discovery.gossip.membership import Membership
from averaging.discovery.gossip.record import CALL_FAILURES, GossipSettings, is_refused, why_failed
from averaging.discovery.gossip.record_table import Merged, RecordStore
from averaging.discovery.gossip.rumours import Rumours
from averaging.errors import ProtocolViolationError
from averaging.protocol import Digest, ExchangeReply, Record
from averaging.transport import Transport

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
        merge: Callable[[Record, str], Merged],
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

    async def compare(self, endpoint: str) -> int:
        """Exchanges records with `endpoint`: first the hashes, then, if they differ, the digests.

        Returns:
            The number of records that this peer lacked.

        Raises:
            TransportError, ProtocolViolationError, TimeoutError: the call failed.
        """
        async with asyncio.timeout(self._settings.exchange_timeout):
            received, wanted = await self._ask(endpoint, self.digest(complete=False))
            if wanted is None:
                received, wanted = await self._ask(endpoint, self.digest(complete=True))
            if records := self._store.table().select(wanted or []):
                await self._rumours.push(endpoint, records)
        return received

    async def answer(self, digest: Digest) -> AsyncGenerator[ExchangeReply, None]:
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

    async def _ask(self, endpoint: str, digest: Digest) -> tuple[int, list[int] | None]:
        """Sends a digest and merges the answer."""
        limit = 2 * self._settings.limits.records
        wanted: list[int] = []
        records = new = 0
        time = asyncio.get_running_loop().time
        began: float | None = time()
        async with aclosing(self._transport.exchange(endpoint, digest)) as replies:
            async for reply in replies:
                if began is not None:  # the first reply only: later ones may have waited for this peer to read them
                    self._offsets.note(endpoint, reply.sent, self._clock(), time() - began, time())
                    began = None
                if reply.differs and not digest.complete:
                    return 0, None
                records += len(reply.records)
                wanted += reply.wanted
                if records > limit or len(wanted) > limit:
                    raise ProtocolViolationError("answered with more records than a peer may hold", endpoint)
                new += sum(self._merge(record, endpoint).is_new for record in reply.records)
        return new, wanted


# The background loops of a peer: exchanges, retries of missing peers, and, for a client, reading a stream.


_MAX_TRIES = 3  # members that are asked in a row until one answers

LATE_SECONDS = 1.0
"""Seconds by which the stream of a client may be behind what another member has."""


class Maintenance:
    """The loops of one peer; each runs until it is cancelled.

    Args:
        merge: merges a record from the network; its second argument is the sender.
        clock: seconds since the epoch.
        rng: picks members and intervals.
        on_answer: callback after each answer of a member.
    """

    def __init__(
        self,
        transport: Transport,
        members: Membership,
        anti_entropy: AntiEntropy,
        merge: Callable[[Record, str], Merged],
        settings: GossipSettings,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        on_answer: Callable[[], None],
    ) -> None:
        self._transport, self._members, self._anti_entropy = transport, members, anti_entropy
        self._merge, self._on_answer = merge, on_answer
        self._settings, self._clock, self._rng = settings, clock, rng
        self._silence: asyncio.Timeout | None = None  # of the stream that is read
        self._batches = 0  # that have come on streams

    async def exchange(self) -> None:
        """Compares records with a random member every `exchange_interval`; the first time sooner."""
        wait = self._settings.exchange_interval * self._rng.random()
        while True:
            await asyncio.sleep(wait)
            wait = self._around(self._settings.exchange_interval)
            for _ in range(_MAX_TRIES):
                member = self._members.pick()
                if member is None or await self._try_exchange(member) is not None:
                    break

    async def retry_missing(self) -> None:
        """Calls seeds and members that are missing, so that a run that was partitioned becomes one again."""
        while True:
            await asyncio.sleep(self._around(self._settings.retry_interval))
            async with asyncio.TaskGroup() as tasks:
                for endpoint in self._members.pick_missing(self._clock()):
                    tasks.create_task(self._try_exchange(endpoint))

    async def retry_silent(self) -> None:
        """Calls members that did not answer, so that a peer that was cut off for a moment is not missed for longer."""
        calling: set[str] = set()

        async def call(endpoint: str) -> None:
            calling.add(endpoint)
            try:
                await self._try_exchange(endpoint)
            finally:
                calling.discard(endpoint)

        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(self._around(self._settings.exchange_interval))
                for endpoint in self._members.pick_silent(self._clock()):
                    if endpoint not in calling:
                        tasks.create_task(call(endpoint))

    async def read_streams(self) -> None:
        """Reads the stream of a member, and of another one when it ends. A client gets all records this way."""
        backoff = Backoff(self._settings.initial_backoff, self._settings.max_backoff, self._rng)
        while True:
            endpoint = self._members.pick_stream_source(self._clock())
            if endpoint is not None:
                began = asyncio.get_running_loop().time()
                try:
                    await self._anti_entropy.compare(endpoint)
                    await self._read_stream(endpoint)
                except CALL_FAILURES as error:
                    logger.debug("the stream of %s ended: %s", endpoint, error)
                    self._members.suspect(endpoint, self._clock(), why_failed(error), refused=is_refused(error))
                finally:
                    self._members.stream_source = self._silence = None
                    # The backoff goes on growing while each stream ends as soon as it has begun.
                    if asyncio.get_running_loop().time() - began >= self._settings.max_backoff:
                        backoff.reset()
            await asyncio.sleep(backoff.next_delay())

    async def watch_stream(self) -> None:
        """Compares records with other members, and leaves a member whose stream lacks what these have.

        A stopped process keeps its connections open, so without this a client would hear nothing for two renewals.
        """
        while True:
            await asyncio.sleep(self._around(self._settings.exchange_interval))
            member, source, batches = self._members.pick(), self._members.stream_source, self._batches
            if member is None or member == source or not await self._try_exchange(member):
                continue
            await asyncio.sleep(LATE_SECONDS)
            if batches == self._batches and source == self._members.stream_source and self._silence is not None:
                self._silence.reschedule(asyncio.get_running_loop().time())

    async def _read_stream(self, endpoint: str) -> None:
        """Reads records from `endpoint` until the stream ends, or is silent for two renewals of its presence record."""
        digest = self._anti_entropy.digest(complete=True)
        async with aclosing(self._transport.subscribe(endpoint, digest)) as stream:
            while True:
                async with asyncio.timeout(2 * self._settings.peer_refresh) as self._silence:
                    records = await anext(stream, None)
                if records is None:
                    return
                self._batches += 1
                self._members.stream_source = endpoint
                for record in records:
                    self._merge(record, endpoint)

    async def _try_exchange(self, endpoint: str) -> int | None:
        """Compares records with `endpoint`; returns how many this peer lacked, or None if there was no answer."""
        try:
            received = await self._anti_entropy.compare(endpoint)
        except CALL_FAILURES as error:
            logger.debug("no exchange with %s: %s", endpoint, error)
            self._members.suspect(endpoint, self._clock(), why_failed(error), refused=is_refused(error))
            return None
        self._members.note_answer(endpoint)
        self._on_answer()
        return received

    def _around(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.5)


# Warns if other peers seem unable to reach this one.


WARN_AFTER = 30
"""Answers in a row without a call from another peer. Each peer calls a random one every 2 s, so this is no chance."""


class Reachability:
    """Logs a warning once if other peers answer the calls of this one and never call it.

    Args:
        endpoint: this peer's name.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._answers = 0  # since the last call

    def note_answer(self) -> None:
        self._answers += 1
        if self._answers == WARN_AFTER:
            logger.warning(
                "other peers answered this peer %d times, and none has called it meanwhile: can they reach %s? "
                "Let connections to it through, advertise an address that leads here, or take part in client mode, "
                "which needs none",
                *(WARN_AFTER, self._endpoint),
            )

    def note_call(self) -> None:
        self._answers = 0
