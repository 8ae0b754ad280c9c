"""Joins a run: asks all seeds at once, until one has answered or all have refused."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from averaging.deadlines.fair_timeout import FairTimeout
from averaging.deadlines.learned_deadlines import Deadline
from averaging.discovery.gossip.settings import CALL_FAILURES, GossipSettings, why_failed
from averaging.errors import JoinRefusedError, NoSeedAnsweredError, TransportError

logger = logging.getLogger(__name__)

FIRST_REPORT, LAST_REPORT = 1.0, 60.0
"""Seconds until the first line about who is waited for, doubled until the next one each time; and the most."""

DEFINITE_SECONDS = 0.5
"""For so long a seed must have refused this peer, each time it was asked, before that counts as its last word."""

SAME_NAME = "it has the name of the peer that asks"
"""What a peer answers that is asked in its own name: by itself, under another address, or by one that took its name."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A peer that still waits for the first seed to answer.

    Attributes:
        seconds: since it began.
        timeout: seconds after which it gives up.
        reasons: for each seed, why it has not answered.
    """

    seconds: float
    timeout: float
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        told = "; ".join(f"{seed}: {reason}" for seed, reason in self.reasons.items())
        return f"no peer to join has answered for {self.seconds:.0f} s ({told}); giving up after {self.timeout:g} s"


class Bootstrap:
    """The seeds and what they said.

    Args:
        ask: exchanges records with a seed; raises one of `CALL_FAILURES` if that fails.
        hint: asked, when no seed has answered, for a further sentence about the cause; empty if there is none.
        on_waiting: called now and then while no seed has answered.

    Attributes:
        alone: whether all seeds turned out to be this very peer.
    """

    def __init__(
        self,
        seeds: tuple[str, ...],
        ask: Callable[[str], Awaitable[None]],
        settings: GossipSettings,
        rng: random.Random,
        *,
        hint: Callable[[], str],
        on_waiting: Callable[[Waiting], None] | None = None,
    ) -> None:
        self._ask = ask
        self._settings = settings
        self._rng = rng
        self._hint = hint
        self._on_waiting = on_waiting
        self.alone = False
        self._answered = False
        self._settled = asyncio.Event()  # one has answered, or all refuse
        self._refusing: dict[str, float] = {}  # since when each seed has refused whenever it was asked
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
            JoinRefusedError: all have refused, and would do so again.
            NoSeedAnsweredError: none has answered within `timeout` seconds; this peer's own standstill does not count.
        """
        if not self._reasons:
            return
        for seed in self._reasons:
            spawn(self._ask_for(seed, timeout))
        time = asyncio.get_running_loop().time
        began, pause = time(), FIRST_REPORT
        try:
            async with _limit(timeout):
                while not await _is_set_within(pause, self._settled):
                    self._report(Waiting(time() - began, timeout, dict(self._reasons)))
                    pause = min(2 * pause, LAST_REPORT)
        except TimeoutError:
            raise NoSeedAnsweredError(self._reasons, timeout, self._hint()) from None
        if not self._answered:
            raise JoinRefusedError(self._reasons, self._hint())

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

    def _report(self, waiting: Waiting) -> None:
        logger.info("%s", waiting)
        if self._on_waiting is not None:
            self._on_waiting(waiting)

    async def _ask_for(self, seed: str, timeout: float) -> None:
        """Asks one seed until it answers or the time is over."""
        try:
            async with _limit(timeout):
                await self._ask_until_answered(seed)
        except TimeoutError:
            return

    async def _ask_until_answered(self, seed: str) -> None:
        backoff = self._settings.first_backoff
        while True:
            try:
                await self._ask(seed)
            except CALL_FAILURES as error:
                self._reasons[seed] = why_failed(error)
                if self._has_asked_itself and self._reasons[seed].endswith(SAME_NAME):
                    self._own.add(seed)
                    self.alone = self._own == self._reasons.keys()
                    self._settle(answered=self.alone)  # as if none had been given
                    return
                self._note_refusal(seed, isinstance(error, TransportError) and error.definite)
            else:
                self._settle(answered=True)
                return
            await self._wait(self._calls[seed], backoff * self._rng.uniform(0.5, 1.5))
            backoff = min(2 * backoff, self._settings.last_backoff)

    def _note_refusal(self, seed: str, definite: bool) -> None:
        if definite:
            self._refusing.setdefault(seed, asyncio.get_running_loop().time())
            self._settle(answered=False)
        else:
            self._refusing.pop(seed, None)

    def _settle(self, *, answered: bool) -> None:
        """Ends the waiting if it is in vain, or if a seed has `answered`."""
        self._answered |= answered
        if self._answered or all_refuse(self._reasons, self._own, self._refusing, asyncio.get_running_loop().time()):
            self._settled.set()

    async def _wait(self, call: asyncio.Event, seconds: float) -> None:
        """Until the seed calls, or so many seconds."""
        if await _is_set_within(seconds, call):
            call.clear()


def all_refuse(seeds: Collection[str], own: Collection[str], refusing: Mapping[str, float], now: float) -> bool:
    """Whether no seed may answer any more.

    Args:
        seeds: those who are asked.
        own: the seeds that turned out to be this very peer.
        refusing: since when each of the others has refused whenever it was asked; the rest may answer yet.
        now: on the same clock.
    """
    others = [seed for seed in seeds if seed not in own]
    return bool(others) and all(now - refusing.get(seed, now) >= DEFINITE_SECONDS for seed in others)


async def _is_set_within(seconds: float, event: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _limit(timeout: float) -> FairTimeout:
    return FairTimeout(Deadline(timeout, "join_timeout"), timeout)
