"""Joins a run: calls all seeds at the same time, until one has answered or all have refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from averaging.common import Backoff
from averaging.discovery.gossip.membership import CALL_FAILURES, GossipAccess, Membership, why_failed
from averaging.errors import JoinError, RefusalCause, TransportError, refusal_cause
from averaging.seeds import Seeds
from averaging.timing import Deadline, FairTimeout, is_set_within

logger = logging.getLogger(__name__)

FIRST_REPORT, LAST_REPORT = 1.0, 60.0
"""Seconds until the first report that no seed has answered, doubled each time; and the longest such time."""

DEFINITE_SECONDS = 0.5
"""Seconds for which a seed must have refused all calls of this peer before the refusal counts as final."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(frozen=True, slots=True)
class Waiting:  # for an answer of a seed
    seconds: float  # since it began
    timeout: float  # seconds after which it fails
    reasons: Mapping[str, str]  # for each seed, why it has not answered

    def __str__(self) -> str:
        reasons = "; ".join(f"{seed}: {reason}" for seed, reason in self.reasons.items())
        return f"no peer to join has answered for {self.seconds:.0f} s ({reasons}); giving up after {self.timeout:g} s"


class Bootstrap:
    """The seeds and their answers.

    `compare` exchanges records with a seed, and raises one of `CALL_FAILURES` if that fails; `hint` returns a sentence
    about the cause, for the error if no seed answers.
    """

    def __init__(
        self,
        access: GossipAccess,
        members: Membership,
        seeds: Seeds,
        compare: Callable[[str], Awaitable[object]],
        hint: Callable[[], str],
    ) -> None:
        self._access, self._members, self._seeds = access, members, seeds
        self._compare, self._hint = compare, hint
        self.joined_itself = False  # all seeds turned out to be this peer, or the sources name no other
        self._answered = False
        self._done = asyncio.Event()  # a seed has answered, or all refuse
        self._refusing: dict[str, float] = {}  # since when each seed has refused all calls
        self._reasons: dict[str, str] = {}  # of each seed, why it has not answered
        self._has_called: dict[str, asyncio.Event] = {}
        self.called_itself = False
        self._own: set[str] = set()  # seeds that are this peer
        for seed in members.seeds:
            self._add(seed)

    def note_call(self, endpoint: str) -> None:
        """`endpoint` called this peer: if it is a seed, it is up, and the next call to it need not wait."""
        if endpoint in self._has_called:
            self._has_called[endpoint].set()

    async def join(self, spawn: Spawn, on_waiting: Callable[[Waiting], None] | None) -> None:
        """Returns as soon as one seed has answered; tasks that `spawn` creates go on calling the others.

        A JoinError says that all have refused, and would do so again; or that none has answered in time, in which this
        peer itself did not stand still.
        """
        if self._seeds.sources:
            spawn(self._look_up_until_done(spawn))
        elif not self._reasons:
            return
        for seed in self._reasons:
            spawn(self._call_in_time(seed))
        time, timeout = asyncio.get_running_loop().time, self._access.settings.join_timeout
        began, pauses = time(), Backoff(FIRST_REPORT, LAST_REPORT)
        try:
            async with self._limit():
                while not await is_set_within(pauses.next_delay(), self._done):
                    waiting = Waiting(time() - began, timeout, self._open_reasons)
                    logger.info("%s", waiting)
                    if on_waiting is not None:
                        on_waiting(waiting)
        except TimeoutError:
            raise JoinError(self._open_reasons, timeout, self._hint()) from None
        if not self._answered:
            raise JoinError(self._open_reasons, None, self._hint())

    async def look_up_while_alone(self) -> None:
        """Asks the sources again while no other peer is known. `Maintenance` calls what they name."""
        while True:
            await asyncio.sleep(self._access.around(self._access.settings.look_up_interval))
            if not len(self._members):
                await self._look_up()

    async def _look_up(self) -> None:
        await self._seeds.look_up()
        self._members.set_seeds(self._seeds.addresses)

    @property
    def _open_reasons(self) -> dict[str, str]:
        return self._reasons | dict(self._seeds.failures)

    def _add(self, seed: str) -> None:
        self._reasons[seed], self._has_called[seed] = "no answer", asyncio.Event()

    async def _look_up_until_done(self, spawn: Spawn) -> None:
        """Asks the sources until `join` ends, has new seeds called, and forgets those that are no longer named."""
        backoff = self._access.backoff()
        while not self._done.is_set():
            await self._look_up()
            for seed in self._reasons.keys() - self._members.seeds:
                del self._reasons[seed]  # which ends the calls to it
                self._refusing.pop(seed, None)
            for seed in self._members.seeds:
                if seed not in self._reasons:
                    self._add(seed)
                    spawn(self._call_in_time(seed))
            self._note_own()
            await is_set_within(backoff.next_delay(), self._done)

    def _note_own(self) -> None:
        # If this peer alone is named, `join` ends as if it had been given no seeds.
        named_alone = not self._seeds.failures and self._own >= self._reasons.keys()
        self.joined_itself = named_alone and not self._access.is_client
        self._finish_if_settled(answered=self.joined_itself)

    async def _call_in_time(self, seed: str) -> None:
        with suppress(TimeoutError):
            async with self._limit():
                await self._call_until_answered(seed)

    async def _call_until_answered(self, seed: str) -> None:
        backoff = self._access.backoff()
        while seed in self._reasons:
            try:
                await self._compare(seed)
            except CALL_FAILURES as error:
                if seed not in self._reasons:
                    return
                self._reasons[seed] = why_failed(error)
                if self.called_itself and refusal_cause(error) is RefusalCause.SAME_NAME:
                    self._own.add(seed)
                    self._note_own()
                    return
                if isinstance(error, TransportError) and error.definite:
                    self._refusing.setdefault(seed, asyncio.get_running_loop().time())
                    self._finish_if_settled(answered=False)
                else:
                    self._refusing.pop(seed, None)
            else:
                self._finish_if_settled(answered=True)
                return
            if await is_set_within(backoff.next_delay(), self._has_called[seed]):
                self._has_called[seed].clear()

    def _finish_if_settled(self, *, answered: bool) -> None:
        """Ends `join` if a seed has `answered`, or if none may answer any more: all have refused for a while."""
        self._answered |= answered
        latest = asyncio.get_running_loop().time() - DEFINITE_SECONDS
        others = [seed for seed in self._reasons if seed not in self._own]
        refused = others and all(self._refusing.get(seed, latest + 1) <= latest for seed in others)
        if self._answered or (refused and not self._seeds.failures):
            self._done.set()

    def _limit(self) -> FairTimeout:
        timeout = self._access.settings.join_timeout
        return FairTimeout(Deadline(timeout, "join_timeout"), timeout)
