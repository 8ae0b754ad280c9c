"""Asking others to lead, one after the other, and following the one that takes this peer in."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from averaging.deadlines.fair_timeout import FairTimeout, learned_timeout
from averaging.deadlines.learned import Deadline, Deadlines, Phase
from averaging.discovery.base import Discovery
from averaging.errors import ProtocolViolationError, TransportError, UnprovenViolationError
from averaging.group import Group, Mode
from averaging.matchmaking import rules
from averaging.matchmaking.conduct import Conduct
from averaging.matchmaking.differences import Differences
from averaging.matchmaking.rules import Declaration
from averaging.matchmaking.search import Search
from averaging.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.observe.receipts import DropCode
from averaging.schema import Schema
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

NAMING_SECONDS = 2.0
"""How long a record may take from one member of a group to another, who has been told of the group already."""


class Asking:
    """The follower's side of one peer's matchmaking.

    Args:
        endpoint: this peer's name.
        differences: asked about those who average other tensors.
        matchmaking_time: see `Matchmaking`.
        only_named: see `Matchmaking`.
        conduct: who has broken the protocol, and is not asked.
        deadlines: how long others take to answer; learned further here.
        clock: seconds since the epoch.
        rng: spreads retries.
    """

    def __init__(
        self,
        endpoint: str,
        schema: Schema,
        transport: Transport,
        discovery: Discovery,
        differences: Differences,
        *,
        matchmaking_time: float,
        only_named: bool,
        conduct: Conduct,
        deadlines: Deadlines,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._endpoint, self._schema = endpoint, schema
        self._transport, self._discovery, self._differences = transport, discovery, differences
        self._matchmaking_time, self._only_named = matchmaking_time, only_named
        self._conduct, self._deadlines, self._clock, self._rng = conduct, deadlines, clock, rng

    async def ask(self, search: Search, own: Declaration, key: str) -> None:
        """Asks one peer after the other under `key` to lead, the earliest first, until cancelled."""
        attempts = search.attempts
        until = own.expiration
        news = asyncio.Event()

        async def watch() -> None:
            async with aclosing(self._discovery.watch(key)) as changes:
                async for entries in changes:
                    declared = {name: rules.unpack_looking(entry.value) for name, entry in entries.items()}
                    search.arrivals.observe(declared, asyncio.get_running_loop().time())
                    search.seen.update(name for name in entries if name != self._endpoint)
                    news.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            while True:
                news.clear()
                now = self._clock()
                if search.group is not None or until <= now:
                    search.changed.set()  # if the clock was set forward, the declared time is over before its wait
                    return  # led already, or too late to be
                if search.state.member.mode is Mode.CLIENT:
                    # It cannot lead, so it must be able to follow those who begin to wait only now.
                    own = replace(own, expiration=max(until, now + self._matchmaking_time))
                candidate, again = rules.next_to_ask(
                    own, self._discovery.get(key), attempts, now, self._conduct.excluded(now)
                )
                if candidate is not None:
                    await self._ask_and_follow_suggestions(search, own, candidate, key, until)
                    continue
                try:
                    async with asyncio.timeout(None if again is None else max(0.0, again - now)):
                        await news.wait()
                except TimeoutError:
                    continue

    async def _ask_and_follow_suggestions(
        self, search: Search, own: Declaration, candidate: Declaration, key: str, until: float
    ) -> None:
        attempts = search.attempts
        for _ in range(1 + rules.MAX_REDIRECTS):
            search.asking = candidate.endpoint
            began = asyncio.get_running_loop().time()
            try:
                code, suggested = await self._ask(search, own, candidate, key)
            finally:
                search.asked()
            if search.group is not None:
                return
            now = self._clock()
            previous = attempts.get(candidate.endpoint)
            waited = asyncio.get_running_loop().time() - began
            attempts[candidate.endpoint] = rules.refused(previous, candidate.expiration, code, now, self._rng, waited)
            following = self._suggestion(own, suggested, key)
            if following is None or until <= now:  # each one more may take seconds to answer
                return
            tried = attempts.get(following.endpoint)
            if tried and (tried.retry_at is None or tried.retry_at > now) and tried.is_of(following.expiration):
                return  # it has just refused
            candidate = following

    def _suggestion(self, own: Declaration, suggested: str, key: str) -> Declaration | None:
        """A suggested leader, if this peer may go there: known to this run's discovery, and due to lead it."""
        if not suggested or suggested == self._endpoint or not self._discovery.names(suggested):
            return None
        if self._conduct.excludes(suggested, self._clock()) or not rules.can_lead(suggested):
            return None
        entry = self._discovery.get(key).get(suggested)
        declaration = Declaration(entry.expiration if entry else own.expiration, suggested)
        return declaration if entry is None or declaration < own else None

    async def _ask(self, search: Search, own: Declaration, asked: Declaration, key: str) -> tuple[MessageCode, str]:
        """Asks one peer and follows it for as long as it leads; returns why that ended and whom it suggests.

        `search.answers` has it in words, also where it is no answer but how the call went.
        """
        leader = asked.endpoint
        request = JoinRequest(
            endpoint=self._endpoint,
            schema_hash=self._schema.hash,
            expiration=own.expiration,
            gather=search.gather,
            client_mode=search.state.member.mode is Mode.CLIENT,
        )
        try:
            async with aclosing(self._transport.join_group(leader, request)) as replies:
                async with learned_timeout(self._deadlines, leader, Phase.VERDICT):
                    answer = await anext(replies)
                if answer.code is MessageCode.BAD_SCHEMA_HASH:
                    await self._differences.warn(leader, search.differing)
                search.answers[leader] = answer.code.name
                if answer.code is MessageCode.ACCEPTED:
                    answer = await self._follow(search, own, asked, key, replies)
                return answer.code, answer.suggested_leader
        except TimeoutError as error:
            search.answers[leader] = str(error)
            logger.info("%s did not answer in time: %s", leader, error)
        except StopAsyncIteration:
            search.answers[leader] = "ended its answer early"
            logger.info("%s ended its answer early", leader)
        except TransportError as error:
            search.answers[leader] = error.reason
            logger.debug("could not ask %s: %s", leader, error.reason)
        except ProtocolViolationError as error:
            search.answers[leader] = str(error).removeprefix(f"{leader} ")
            logger.warning("%s", error)
            if not isinstance(error, UnprovenViolationError):
                self._conduct.note(leader, DropCode.PROTOCOL_VIOLATION, self._clock())
            return MessageCode.PROTOCOL_VIOLATION, ""
        return MessageCode.NO_CODE, ""

    async def _follow(
        self,
        search: Search,
        own: Declaration,
        asked: Declaration,
        key: str,
        replies: AsyncGenerator[MessageFromLeader, None],
    ) -> MessageFromLeader:
        """Follows a leader that has taken this peer in until it begins or disbands; returns what it says then.

        Raises:
            TimeoutError: it does neither.
        """
        leader = asked.endpoint
        search.follow(leader)
        patience = self._patience(search, own, asked)
        try:
            try:
                async with FairTimeout(Deadline(patience, "its declared time"), patience):
                    answer = await anext(replies)
            except TimeoutError:
                raise TimeoutError("accepted this peer, but neither began a group nor disbanded it") from None
            search.answers[leader] = answer.code.name
            if answer.code is MessageCode.BEGIN_ALLREDUCE:
                group = rules.read_group(answer, self._endpoint, leader, search.gather)
                if self._only_named:
                    await self._check_members(group, leader, key)
                search.adopt(group)
            return answer
        finally:
            search.unfollow()

    def _patience(self, search: Search, own: Declaration, asked: Declaration) -> float:
        """Seconds that a leader may take to decide: it begins or disbands at its declared time, not after ours."""
        now = self._clock()
        if search.state.member.mode is Mode.CLIENT:  # whose own time may be far off
            left = min(own.expiration, asked.expiration) - now
        else:  # if the clock was set back, the time until ours is no guide
            left = min(own.expiration - now, self._matchmaking_time)
        return max(0.0, left) + rules.CLOCK_TOLERANCE

    async def _check_members(self, group: Group, leader: str, key: str) -> None:
        """Returns once discovery names all members that can be dialled: those are the only ones a leader may name.

        Raises:
            ProtocolViolationError: it does not name one of them in time.
        """
        strange = [member.endpoint for member in group.members if member.mode is not Mode.CLIENT]
        try:
            async with (
                asyncio.timeout(NAMING_SECONDS),
                aclosing(self._discovery.watch(key)) as changes,
            ):
                async for _ in changes:
                    strange = [name for name in strange if name != self._endpoint and not self._discovery.names(name)]
                    if not strange:
                        return
        except TimeoutError:
            pass
        raise UnprovenViolationError(f"{leader} began a group with {strange[0]}, which discovery does not name")
