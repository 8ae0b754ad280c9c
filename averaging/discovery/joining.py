"""Joins a run: asks all seeds at once, until one has answered."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from averaging.deadlines.fair_timeout import FairTimeout
from averaging.deadlines.learned import Deadline
from averaging.discovery.settings import CALL_FAILURES, GossipSettings
from averaging.errors import NoSeedAnsweredError, TransportError

logger = logging.getLogger(__name__)

SAME_NAME = "it has the name of the peer that asks"
"""What a peer answers that is asked in its own name: by itself, under another address, or by one that took its name."""


class Joining:
    """The seeds and what they said.

    Args:
        ask: exchanges records with a seed; raises one of `CALL_FAILURES` if that fails.
    """

    def __init__(
        self,
        seeds: tuple[str, ...],
        ask: Callable[[str], Awaitable[None]],
        settings: GossipSettings,
        rng: random.Random,
    ) -> None:
        self._ask = ask
        self._settings = settings
        self._rng = rng
        self._reasons = dict.fromkeys(seeds, "no answer")
        self._calls = {seed: asyncio.Event() for seed in seeds}
        self._has_asked_itself = False
        self._own: set[str] = set()  # seeds that are this very peer

    def called_by_itself(self) -> None:
        """This peer was called in its own name: one of the seeds may be another address of its own."""
        self._has_asked_itself = True

    def called_by(self, endpoint: str) -> None:
        """`endpoint` called this peer: if it is a seed, it is up now, and there is no need to wait."""
        if endpoint in self._calls:
            self._calls[endpoint].set()

    async def join(self, timeout: float, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Returns as soon as one seed has answered; the others are asked on by tasks that `spawn` makes.

        Raises:
            NoSeedAnsweredError: none has within `timeout` seconds; this peer's own standstill does not count.
        """
        if not self._reasons:
            return
        answered = asyncio.Event()
        for seed in self._reasons:
            spawn(self._ask_for(seed, timeout, answered))
        try:
            async with _limit(timeout):
                await answered.wait()
        except TimeoutError:
            raise NoSeedAnsweredError(self._reasons, timeout) from None

    async def look_for_namesake(self, endpoint: str) -> None:
        """Asks at this peer's own endpoint, which it was told to join, until somebody answers: it should be itself.

        Two peers that were told the same address by mistake would else be alone, each as the first of its run. Many a
        router leads nobody back to where he came from, so that it need not be answered.
        """
        while True:
            try:
                await self._ask(endpoint)
            except CALL_FAILURES as error:
                if str(error).endswith(SAME_NAME):
                    break
            await asyncio.sleep(self._settings.retry_interval * self._rng.uniform(0.5, 1.5))
        if not self._has_asked_itself:
            logger.warning(
                "this peer is to join %s, its own address, and another peer answers there: two peers have the same "
                "address. Let each advertise one of its own",
                endpoint,
            )

    async def _ask_for(self, seed: str, timeout: float, answered: asyncio.Event) -> None:
        """Asks one seed until it answers or the time is over."""
        try:
            async with _limit(timeout):
                await self._ask_until_answered(seed, answered)
        except TimeoutError:
            return

    async def _ask_until_answered(self, seed: str, answered: asyncio.Event) -> None:
        backoff = self._settings.first_backoff
        while True:
            try:
                await self._ask(seed)
            except CALL_FAILURES as error:
                self._reasons[seed] = error.reason if isinstance(error, TransportError) else str(error) or "no answer"
                if self._has_asked_itself and self._reasons[seed].endswith(SAME_NAME):
                    self._own.add(seed)
                    if self._own == self._reasons.keys():  # as if none had been given
                        answered.set()
                    return
            else:
                answered.set()
                return
            await self._wait(self._calls[seed], backoff * self._rng.uniform(0.5, 1.5))
            backoff = min(2 * backoff, self._settings.last_backoff)

    async def _wait(self, call: asyncio.Event, seconds: float) -> None:
        """Until the seed calls, or so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await call.wait()
        except TimeoutError:
            return
        call.clear()


def _limit(timeout: float) -> FairTimeout:
    return FairTimeout(Deadline(timeout, "join_timeout"), timeout)
