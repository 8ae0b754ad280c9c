"""What a peer does for its records as long as it is in the run: exchanges, searches, and as a client, following."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing

from averaging.discovery.gossip.anti_entropy import AntiEntropy
from averaging.discovery.gossip.membership import Membership
from averaging.discovery.gossip.settings import CALL_FAILURES, GossipSettings, why_failed
from averaging.protocol.messages import Record
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # members asked in a row until one answers


class Maintenance:
    """The loops of one peer; each runs until it is cancelled.

    Args:
        take: merges a record from the network; its second argument is the sender.
        clock: seconds since the epoch.
        rng: picks whom to talk to, and when.
        on_answer: called whenever a member has answered.
    """

    def __init__(
        self,
        transport: Transport,
        members: Membership,
        exchange: AntiEntropy,
        take: Callable[[Record, str], object],
        settings: GossipSettings,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        on_answer: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._members = members
        self._exchange = exchange
        self._take = take
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._on_answer = on_answer

    async def exchange(self) -> None:
        """Compares records with a random member every now and then; the first time soon."""
        wait = self._settings.exchange_interval * self._rng.random()
        while True:
            await asyncio.sleep(wait)
            wait = self._around(self._settings.exchange_interval)
            for _ in range(_ATTEMPTS):
                member = self._members.pick()
                if member is None or await self._try_exchange(member):
                    break

    async def look_for_missing(self) -> None:
        """Tries seeds and members that are not there, so that a run that was cut in two becomes one again."""
        while True:
            await asyncio.sleep(self._around(self._settings.retry_interval))
            async with asyncio.TaskGroup() as tasks:
                for endpoint in self._members.pick_missing(self._clock()):
                    tasks.create_task(self._try_exchange(endpoint))

    async def follow(self) -> None:
        """A client's only source: the stream of some member, and of another one if that breaks."""
        backoff = self._settings.first_backoff
        while True:
            endpoint = self._members.pick_to_follow(self._clock())
            if endpoint is not None:
                began = asyncio.get_running_loop().time()
                try:
                    await self._exchange.compare(endpoint)
                    await self._read_stream(endpoint)
                except CALL_FAILURES as error:
                    logger.debug("the stream of %s broke: %s", endpoint, error)
                    self._members.suspect(endpoint, self._clock(), why_failed(error))
                finally:
                    self._members.followed = None
                    # Not where a member answers all but that, or ends each stream as soon as it has begun.
                    if asyncio.get_running_loop().time() - began >= self._settings.last_backoff:
                        backoff = self._settings.first_backoff
            await asyncio.sleep(self._around(backoff))
            backoff = min(2 * backoff, self._settings.last_backoff)

    async def _read_stream(self, endpoint: str) -> None:
        """Takes what `endpoint` hears, until it has missed its own sign of life twice."""
        digest = self._exchange.digest(complete=True)
        async with aclosing(self._transport.subscribe(endpoint, digest)) as stream:
            while True:
                async with asyncio.timeout(2 * self._settings.peer_refresh):
                    records = await anext(stream, None)
                if records is None:
                    return
                self._members.followed = endpoint
                for record in records:
                    self._take(record, endpoint)

    async def _try_exchange(self, endpoint: str) -> bool:
        """Whether it succeeded."""
        try:
            await self._exchange.compare(endpoint)
        except CALL_FAILURES as error:
            logger.debug("no exchange with %s: %s", endpoint, error)
            self._members.suspect(endpoint, self._clock(), why_failed(error))
            return False
        self._members.answered(endpoint)
        self._on_answer()
        return True

    def _around(self, seconds: float) -> float:
        """So that peers that started together do not stay in step."""
        return seconds * self._rng.uniform(0.5, 1.5)
