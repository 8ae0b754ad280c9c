"""Asking others to lead, and following the first that takes this peer in."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from averaging.deadlines.fair_clock import TICKS
from averaging.deadlines.fair_timeout import FairTimeout, learned_timeout
from averaging.deadlines.learned_deadlines import VERDICT_SECONDS, Deadline, Deadlines, Phase
from averaging.discovery.base import Discovery
from averaging.errors import ProtocolViolationError, TransportError, UnprovenViolationError
from averaging.matchmaking import rules
from averaging.matchmaking.exclusions import Exclusions
from averaging.matchmaking.response_history import ResponseHistory, Standing
from averaging.matchmaking.rules import Declaration
from averaging.matchmaking.schema_differences import SchemaDifferences
from averaging.matchmaking.search_state import Asked, SearchState
from averaging.observe.receipts import DropCode
from averaging.protocol.group import Group, Mode
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.protocol.schema import Schema
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

NAMING_SECONDS = 2.0
"""How long a record may take from one member of a group to another, who has been told of the group already."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """What all requests have in common that are made during one declaration.

    Attributes:
        own: this peer's declaration; a client's goes on with the time.
        key: of discovery.
        until: when it ends, in seconds since the epoch.
        tasks: owns the requests.
        news: set when it may be time to ask others.
    """

    search: SearchState
    own: Declaration
    key: str
    until: float
    tasks: asyncio.TaskGroup
    news: asyncio.Event


class FollowerSide:
    """The follower's side of one peer's matchmaking.

    Args:
        endpoint: this peer's name.
        differences: asked about those who average other tensors.
        min_group_size: see `Matchmaking`; leaders are told of it.
        matchmaking_time: see `Matchmaking`.
        only_named: see `Matchmaking`.
        conduct: who has broken the protocol, and is not asked.
        answers: who answered earlier requests; learned further here.
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
        differences: SchemaDifferences,
        *,
        min_group_size: int,
        matchmaking_time: float,
        only_named: bool,
        conduct: Exclusions,
        answers: ResponseHistory,
        deadlines: Deadlines,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._endpoint, self._schema = endpoint, schema
        self._transport, self._discovery, self._differences = transport, discovery, differences
        self._min_group_size = min_group_size
        self._matchmaking_time, self._only_named = matchmaking_time, only_named
        self._conduct, self._answers, self._deadlines = conduct, answers, deadlines
        self._clock, self._rng = clock, rng

    async def ask(self, search: SearchState, own: Declaration, key: str) -> None:
        """Asks peers under `key` to lead, the earliest first, several at once where they are slow, until cancelled."""
        until, began = own.expiration, self._clock()
        news = asyncio.Event()

        async def watch() -> None:
            async with aclosing(self._discovery.watch(key)) as changes:
                async for entries in changes:
                    search.notice(entries)
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
                again = None
                if number := 0 if search.state.leader else rules.how_many(*search.requests):
                    found, again = self._candidates(search, own, key, now, began + self._matchmaking_time / 2)
                    declared = _Declared(search, own, key, until, tasks, news)
                    for candidate in found[:number]:
                        self._make_room(search)
                        asked = self._note(search, candidate)
                        asked.task = tasks.create_task(self._ask_and_follow_suggestions(declared, candidate, asked))
                    if found:
                        continue
                try:
                    async with asyncio.timeout(None if again is None else max(0.0, again - now)):
                        await news.wait()
                except TimeoutError:
                    continue

    def _candidates(
        self, search: SearchState, own: Declaration, key: str, now: float, deserters_from: float
    ) -> tuple[list[Declaration], float | None]:
        """Whom to ask now, see `rules.candidates`: nobody twice at once."""
        moment = asyncio.get_running_loop().time()
        return rules.candidates(
            own,
            {name: entry for name, entry in self._discovery.get(key).items() if name not in search.asking},
            search.attempts,
            now,
            standing=lambda name: self._answers.standing(name, moment),
            excluded=self._conduct.excluded(now),
            deserters_from=deserters_from,
            leads=bool(search.state.followers),
        )

    def _make_room(self, search: SearchState) -> None:
        """Withdraws the oldest request if there are too many; whom it was for is asked again as late as if it ended."""
        if len(search.asking) < rules.MAX_ASKED:
            return
        endpoint, asked = next(iter(search.asking.items()))
        search.withdraw(endpoint, asked)
        search.attempts[endpoint] = rules.refused(
            None, 0.0, MessageCode.NO_CODE, self._clock(), self._rng, VERDICT_SECONDS
        )

    def _note(self, search: SearchState, candidate: Declaration) -> Asked:
        """A request to `candidate` begins."""
        own, others = self._deadlines.usual(candidate.endpoint, Phase.VERDICT, 0)
        known, name = self._answers, candidate.endpoint
        head_start = rules.head_start(own, others, known.unanswered(name), known.doubts(name), known.vain(name))
        asked = search.asking[name] = Asked(head_start)
        return asked

    async def _ask_and_follow_suggestions(self, declared: _Declared, candidate: Declaration, asked: Asked) -> None:
        search, attempts = declared.search, declared.search.attempts
        loop = asyncio.get_running_loop()
        answers: dict[str, tuple[float, bool]] = {}  # after so many seconds, and whether a group was disbanded
        try:
            for _ in range(1 + rules.MAX_REDIRECTS):
                began = loop.time()
                try:
                    code, suggested = await self._ask(declared, candidate, asked)
                finally:
                    search.forget(candidate.endpoint, asked)
                search.begin_if_full()
                if search.group is not None:
                    return
                now, waited = self._clock(), loop.time() - began
                if code is not MessageCode.NO_CODE:
                    answers[candidate.endpoint] = waited, code is MessageCode.GROUP_DISBANDED
                previous = attempts.get(candidate.endpoint)
                attempts[candidate.endpoint] = rules.refused(
                    previous, candidate.expiration, code, now, self._rng, waited
                )
                following = self._suggestion(declared, suggested)
                if following is None or declared.until <= now:  # each one more may take seconds to answer
                    return
                tried = attempts.get(following.endpoint)
                if tried and (tried.retry_at is None or tried.retry_at > now) and tried.is_of(following.expiration):
                    return  # it has just refused
                candidate, task = following, asked.task
                asked = self._note(search, candidate)
                asked.task = task
        finally:
            search.forget(candidate.endpoint, asked)
            if search.group is None:
                for name, (seconds, disbanded) in answers.items():
                    self._answers.in_vain(name, seconds, loop.time(), disbanded=disbanded)
            declared.news.set()

    def _suggestion(self, declared: _Declared, suggested: str) -> Declaration | None:
        """A suggested leader, if this peer may go there: known to this run's discovery, and due to lead it."""
        search, own = declared.search, declared.own
        if not suggested or suggested == self._endpoint or not self._discovery.names(suggested):
            return None
        if self._conduct.excludes(suggested, self._clock()) or not rules.can_lead(suggested):
            return None
        if search.state.leader or suggested in search.asking:
            return None
        if self._answers.standing(suggested, asyncio.get_running_loop().time()) is Standing.NOTORIOUS:
            return None
        entry = self._discovery.get(declared.key).get(suggested)
        declaration = Declaration(entry.expiration if entry else own.expiration, suggested)
        return declaration if entry is None or declaration < own else None

    async def _ask(self, declared: _Declared, candidate: Declaration, asked: Asked) -> tuple[MessageCode, str]:
        """Asks one peer and follows it for as long as it leads; returns why that ended and whom it suggests.

        `search.answers` has it in words, also where it is no answer but how the call went.
        """
        search, leader = declared.search, candidate.endpoint
        request = JoinRequest(
            endpoint=self._endpoint,
            schema_hash=self._schema.hash,
            expiration=declared.own.expiration,
            gather=search.gather,
            client_mode=search.state.member.mode is Mode.CLIENT,
            min_group_size=self._min_group_size,
        )
        try:
            async with aclosing(self._transport.join_group(leader, request)) as replies:
                with self._awaited(declared, leader, asked):
                    async with learned_timeout(self._deadlines, leader, Phase.VERDICT):
                        answer = await anext(replies)
                self._answers.answered(leader)
                if answer.code is not MessageCode.ACCEPTED:
                    search.go_on_without(asked)
                elif search.group is not None:
                    return MessageCode.NO_CODE, ""  # a moment too late; the end of this call tells it so
                search.answers[leader] = answer.code.name
                if answer.code is MessageCode.BAD_SCHEMA_HASH:
                    await self._differences.warn(leader, search.differing)
                if answer.code is MessageCode.ACCEPTED:
                    answer = await self._follow(declared, candidate, asked, replies)
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

    @contextmanager
    def _awaited(self, declared: _Declared, leader: str, asked: Asked) -> Iterator[None]:
        """Around the wait for the answer of `leader`: notes when its head start is over."""
        search = declared.search

        async def count_down() -> None:
            for _ in range(TICKS):  # not all at once: a time in which this peer stood still counts as one of them
                await asyncio.sleep(asked.head_start / TICKS)
            self._answers.unanswered_by(leader)
            search.answers.setdefault(leader, "has not answered yet")
            search.go_on_without(asked)
            if search.state.leader:
                search.withdraw(leader, asked)
            declared.news.set()

        if not asked.awaited:
            self._answers.unanswered_by(leader)
            yield
            return
        counting = declared.tasks.create_task(count_down())
        try:
            yield
        except TimeoutError:
            if asked.awaited:
                self._answers.unanswered_by(leader)
            raise
        finally:
            counting.cancel()

    async def _follow(
        self,
        declared: _Declared,
        candidate: Declaration,
        asked: Asked,
        replies: AsyncGenerator[MessageFromLeader, None],
    ) -> MessageFromLeader:
        """Follows a leader that has taken this peer in until it begins or disbands; returns what it says then.

        Raises:
            TimeoutError: it does neither.
        """
        search, leader = declared.search, candidate.endpoint
        search.follow(candidate, asked)
        for other in search.leaders:
            if other.endpoint != search.state.leader:
                declared.tasks.create_task(self._leave(search, other))
        patience = self._patience(search, declared.own, candidate)
        try:
            try:
                async with FairTimeout(Deadline(patience, "its declared time"), patience):
                    answer = await anext(replies)
            except TimeoutError:
                self._answers.deserted_by(leader, asyncio.get_running_loop().time())
                raise TimeoutError("accepted this peer, but neither began a group nor disbanded it") from None
            search.answers[leader] = answer.code.name
            if answer.code is MessageCode.BEGIN_ALLREDUCE:
                group = rules.read_group(answer, self._endpoint, leader, search.gather)
                if self._only_named:
                    await self._check_members(group, leader, declared.key)
                search.adopt(group)
                self._answers.led(leader)
            return answer
        finally:
            search.unfollow(candidate)

    async def _leave(self, search: SearchState, other: Declaration) -> None:
        """Leaves a leader, since an earlier one has accepted this peer too.

        Not at once: if this peer has made its group complete, it begins just now, and its members would wait for this
        peer. And if the earlier one disbands its group just now, it can lead all the same.
        """
        asked = search.leaders.get(other)
        await asyncio.sleep(rules.LEAST_HEAD_START)
        if asked is not None and search.leaders.get(other) is asked and search.state.leader != other.endpoint:
            search.withdraw(other.endpoint, asked)

    def _patience(self, search: SearchState, own: Declaration, asked: Declaration) -> float:
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
