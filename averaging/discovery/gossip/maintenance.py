"""The background loops of a peer: exchanges, retries of missing peers, and, for a client, reading a stream."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing

from averaging.discovery.gossip.anti_entropy import AntiEntropy
from averaging.discovery.gossip.membership import Membership
from averaging.discovery.gossip.settings import CALL_FAILURES, GossipSettings, is_refused, why_failed
from averaging.protocol.messages import Record
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

_MAX_TRIES = 3  # members that are asked in a row until one answers


class Maintenance:
    """The loops of one peer; each runs until it is cancelled.

    Args:
        merge: merges a record from the network; its second argument is the sender.
        clock: seconds since the epoch.
        rng: picks members and intervals.
        on_answer: called whenever a member has answered.
    """

    def __init__(
        self,
        transport: Transport,
        members: Membership,
        anti_entropy: AntiEntropy,
        merge: Callable[[Record, str], object],
        settings: GossipSettings,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        on_answer: Callable[[], None],
    ) -> None:
        self._transport, self._members, self._anti_entropy = transport, members, anti_entropy
        self._merge, self._on_answer = merge, on_answer
        self._settings, self._clock, self._rng = settings, clock, rng

    async def exchange(self) -> None:
        """Compares records with a random member every `exchange_interval`; the first time sooner."""
        wait = self._settings.exchange_interval * self._rng.random()
        while True:
            await asyncio.sleep(wait)
            wait = self._around(self._settings.exchange_interval)
            for _ in range(_MAX_TRIES):
                member = self._members.pick()
                if member is None or await self._try_exchange(member):
                    break

    async def retry_missing(self) -> None:
        """Calls seeds and members that are missing, so that a run that was partitioned becomes one again."""
        while True:
            await asyncio.sleep(self._around(self._settings.retry_interval))
            async with asyncio.TaskGroup() as tasks:
                for endpoint in self._members.pick_missing(self._clock()):
                    tasks.create_task(self._try_exchange(endpoint))

    async def read_streams(self) -> None:
        """Reads the stream of a member, and of another one when it ends. A client gets all records this way."""
        backoff = self._settings.initial_backoff
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
                    self._members.stream_source = None
                    # The backoff goes on growing while each stream ends as soon as it has begun.
                    if asyncio.get_running_loop().time() - began >= self._settings.max_backoff:
                        backoff = self._settings.initial_backoff
            await asyncio.sleep(self._around(backoff))
            backoff = min(2 * backoff, self._settings.max_backoff)

    async def _read_stream(self, endpoint: str) -> None:
        """Reads records from `endpoint` until the stream ends, or is silent for two renewals of its presence record."""
        digest = self._anti_entropy.digest(complete=True)
        async with aclosing(self._transport.subscribe(endpoint, digest)) as stream:
            while True:
                async with asyncio.timeout(2 * self._settings.peer_refresh):
                    records = await anext(stream, None)
                if records is None:
                    return
                self._members.stream_source = endpoint
                for record in records:
                    self._merge(record, endpoint)

    async def _try_exchange(self, endpoint: str) -> bool:
        """Compares records with `endpoint`; returns whether it answered."""
        try:
            await self._anti_entropy.compare(endpoint)
        except CALL_FAILURES as error:
            logger.debug("no exchange with %s: %s", endpoint, error)
            self._members.suspect(endpoint, self._clock(), why_failed(error), refused=is_refused(error))
            return False
        self._members.note_answer(endpoint)
        self._on_answer()
        return True

    def _around(self, seconds: float) -> float:
        """Adds jitter, so that peers that started together do not call at the same times."""
        return seconds * self._rng.uniform(0.5, 1.5)
