"""Joins a run: calls all seeds at the same time, until one has answered or all have refused."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from averaging.common import Backoff
from averaging.discovery.gossip.record import CALL_FAILURES, GossipSettings, why_failed
from averaging.errors import JoinError, RefusalCause, TransportError, refusal_cause
from averaging.timing import Deadline, FairTimeout

logger = logging.getLogger(__name__)

FIRST_REPORT, LAST_REPORT = 1.0, 60.0
"""Seconds until the first report that no seed has answered, doubled each time; and the longest such time."""

DEFINITE_SECONDS = 0.5
"""Seconds for which a seed must have refused all calls of this peer before the refusal counts as final."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The state of joining while no seed has answered.

    Attributes:
        seconds: time since it began.
        timeout: time after which it fails, in seconds.
        reasons: for each seed, the reason why it has not answered.
    """

    seconds: float
    timeout: float
    reasons: Mapping[str, str]

    def __str__(self) -> str:
        reasons = "; ".join(f"{seed}: {reason}" for seed, reason in self.reasons.items())
        return f"no peer to join has answered for {self.seconds:.0f} s ({reasons}); giving up after {self.timeout:g} s"


class SeedSources(Protocol):
    """Where further seeds are looked up, see `averaging.seeds.Seeds`."""

    @property
    def failures(self) -> Mapping[str, str]: ...

    @property
    def findings(self) -> str: ...


class Bootstrap:
    """The seeds and their answers.

    Args:
        seeds: the seeds that are known from the start.
        sources: the state of the look-ups.
        look_up: asks the sources and returns all seeds that are known then; None if there are no sources.
        may_start: whether this peer starts a run if the sources name no other peer.
        compare: exchanges records with a seed; raises one of `CALL_FAILURES` if that fails.
        hint: returns a sentence about the cause, for the error if no seed answers; empty if there is none.
        on_waiting: callback for each report while no seed has answered.

    Attributes:
        joined_itself: whether all seeds turned out to be this peer, or the sources name no other.
    """

    def __init__(
        self,
        seeds: Collection[str],
        compare: Callable[[str], Awaitable[object]],
        settings: GossipSettings,
        rng: random.Random,
        *,
        sources: SeedSources,
        look_up: Callable[[], Awaitable[Collection[str]]] | None = None,
        may_start: bool = True,
        hint: Callable[[], str],
        on_waiting: Callable[[Waiting], None] | None = None,
    ) -> None:
        self._compare, self._settings, self._rng = compare, settings, rng
        self._sources, self._look_up, self._may_start = sources, look_up, may_start
        self._hint, self._on_waiting = hint, on_waiting
        self.joined_itself = False
        self._answered = False
        self._done = asyncio.Event()  # a seed has answered, or all refuse
        self._refusing: dict[str, float] = {}  # since when each seed has refused all calls
        self._reasons: dict[str, str] = {}  # of each seed, why it has not answered
        self._has_called: dict[str, asyncio.Event] = {}
        self._called_itself = False
        self._own: set[str] = set()  # seeds that are this peer
        for seed in seeds:
            self._add(seed)

    def note_call_from_itself(self) -> None:
        self._called_itself = True

    def note_call(self, endpoint: str) -> None:
        """`endpoint` called this peer: if it is a seed, it is up, and the next call to it need not wait."""
        if endpoint in self._has_called:
            self._has_called[endpoint].set()

    async def join(self, timeout: float, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Returns as soon as one seed has answered; tasks that `spawn` creates go on calling the others.

        Raises:
            JoinError: all have refused, and would do so again; or none has answered within `timeout` seconds, in which
                this peer itself did not stand still.
        """
        if self._look_up is not None:
            spawn(self._look_up_until_done(self._look_up, lambda seed: spawn(self._call_with_timeout(seed, timeout))))
        elif not self._reasons:
            return
        for seed in self._reasons:
            spawn(self._call_with_timeout(seed, timeout))
        time = asyncio.get_running_loop().time
        began, pauses = time(), Backoff(FIRST_REPORT, LAST_REPORT)
        try:
            async with _limit(timeout):
                while not await _is_set_within(pauses.next_delay(), self._done):
                    self._report(Waiting(time() - began, timeout, self._open_reasons))
        except TimeoutError:
            raise JoinError(self._open_reasons, timeout, self._hint()) from None
        if not self._answered:
            raise JoinError(self._open_reasons, None, self._hint())

    @property
    def _open_reasons(self) -> dict[str, str]:
        return self._reasons | dict(self._sources.failures)

    def _add(self, seed: str) -> None:
        self._reasons[seed], self._has_called[seed] = "no answer", asyncio.Event()

    async def _look_up_until_done(
        self, look_up: Callable[[], Awaitable[Collection[str]]], call: Callable[[str], object]
    ) -> None:
        """Asks the sources until `join` ends, has new seeds called, and forgets those that are no longer named."""
        backoff = Backoff(self._settings.initial_backoff, self._settings.max_backoff, self._rng)
        while not self._done.is_set():
            seeds = await look_up()
            for seed in self._reasons.keys() - seeds:
                del self._reasons[seed]  # which ends the calls to it
                self._refusing.pop(seed, None)
            for seed in seeds:
                if seed not in self._reasons:
                    self._add(seed)
                    call(seed)
            self._note_own()
            await _is_set_within(backoff.next_delay(), self._done)

    def _note_own(self) -> None:
        """Ends `join` as if this peer had been given no seeds, if it alone is named."""
        named_alone = not self._sources.failures and self._own >= self._reasons.keys()
        self.joined_itself = self._may_start and named_alone
        self._finish_if_settled(answered=self.joined_itself)

    async def check_own_address(self, endpoint: str) -> None:
        """Calls this peer's own endpoint, which is one of its seeds, until it answers; warns if another peer does.

        Otherwise two peers with the same address by mistake would each start a run. There may never be an answer, since
        many routers do not lead a connection back to its origin.
        """
        while True:
            try:
                await self._compare(endpoint)
            except CALL_FAILURES as error:
                if refusal_cause(error) is RefusalCause.SAME_NAME:
                    break
            await asyncio.sleep(self._settings.retry_interval * self._rng.uniform(0.5, 1.5))
        if not self._called_itself:
            logger.warning(
                "this peer is to join %s, its own address, and another peer answers there: two peers have the same "
                "address. Let each advertise an address of its own",
                endpoint,
            )

    def _report(self, waiting: Waiting) -> None:
        logger.info("%s", waiting)
        if self._on_waiting is not None:
            self._on_waiting(waiting)

    async def _call_with_timeout(self, seed: str, timeout: float) -> None:
        try:
            async with _limit(timeout):
                await self._call_until_answered(seed)
        except TimeoutError:
            return

    async def _call_until_answered(self, seed: str) -> None:
        backoff = Backoff(self._settings.initial_backoff, self._settings.max_backoff, self._rng)
        while seed in self._reasons:
            try:
                await self._compare(seed)
            except CALL_FAILURES as error:
                if seed not in self._reasons:
                    return
                self._reasons[seed] = why_failed(error)
                if self._called_itself and refusal_cause(error) is RefusalCause.SAME_NAME:
                    self._own.add(seed)
                    self._note_own()
                    return
                self._note_refusal(seed, isinstance(error, TransportError) and error.definite)
            else:
                self._finish_if_settled(answered=True)
                return
            if await _is_set_within(backoff.next_delay(), self._has_called[seed]):
                self._has_called[seed].clear()

    def _note_refusal(self, seed: str, definite: bool) -> None:
        if definite:
            self._refusing.setdefault(seed, asyncio.get_running_loop().time())
            self._finish_if_settled(answered=False)
        else:
            self._refusing.pop(seed, None)

    def _finish_if_settled(self, *, answered: bool) -> None:
        """Ends `join` if a seed has `answered`, or if none may answer any more."""
        self._answered |= answered
        now = asyncio.get_running_loop().time()
        refused = not self._sources.failures and all_refuse(self._reasons, self._own, self._refusing, now)
        if self._answered or refused:
            self._done.set()


def all_refuse(seeds: Collection[str], own: Collection[str], refusing: Mapping[str, float], now: float) -> bool:
    """Whether no seed may answer any more.

    Args:
        seeds: all seeds.
        own: the seeds that turned out to be this peer.
        refusing: time since which each seed has refused all calls; seeds that are not in it may still answer.
        now: the time on the same clock.
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
