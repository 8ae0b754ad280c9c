"""Asks other peers to lead, and follows the first that accepts this peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace

from averaging.discovery import Discovery
from averaging.errors import AveragingError, ProtocolViolationError, TransportError, ViolationKind
from averaging.matchmaking import rules
from averaging.matchmaking.memory import Conduct, LastGroup
from averaging.matchmaking.rules import Declaration
from averaging.matchmaking.search_state import NoGroupError, OpenRequest, SearchConfig, SearchState
from averaging.protocol import JoinRequest, MessageCode, MessageFromLeader, Mode
from averaging.tensors import Schema, first_difference
from averaging.timing import TICKS, VERDICT_SECONDS, Deadline, FairTimeout, Phase, is_set_within, learned_timeout
from averaging.transport import Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Context:
    """What all requests of one declaration have in common."""

    search: SearchState
    own: Declaration  # the expiration of a client's moves on with the time
    key: str  # of discovery, under which this peer looks
    until: float  # when the declaration ends, in seconds since the epoch
    tasks: asyncio.TaskGroup  # owns the requests
    wake_up: asyncio.Event  # set when it may be time to ask other peers


class FollowerSide:
    """The follower's side of one peer's matchmaking. It updates `conduct` by how peers answer requests."""

    def __init__(
        self,
        config: SearchConfig,
        schema: Schema,
        transport: Transport,
        discovery: Discovery,
        last: LastGroup,
        conduct: Conduct,
    ) -> None:
        self._config, self._schema = config, schema
        self._endpoint, self._clock, self._rng = config.endpoint, config.clock, config.rng
        self._transport, self._discovery = transport, discovery
        self._last, self._conduct = last, conduct

    async def difference(self, endpoint: str, known: dict[str, NoGroupError | None]) -> NoGroupError:
        """Asks `endpoint` for its schema and returns the first difference; `known` caches it."""
        if mismatch := known.get(endpoint):
            return mismatch
        difference = "the shapes or names of its tensors differ, and it did not send its schema"
        try:
            if self._discovery.knows(endpoint):
                async with asyncio.timeout(VERDICT_SECONDS):
                    theirs = await self._transport.get_schema(endpoint)
                difference = first_difference(self._schema, theirs) or "a member of its group has other names for them"
        except (TimeoutError, AveragingError) as error:
            logger.debug("%s did not send its schema: %s", endpoint, error)
        mismatch = known[endpoint] = NoGroupError(
            f"{endpoint} averages something else: {difference}; give both the same tensors and options"
        )
        return mismatch

    def trusts(self, leader: str) -> bool:
        """Whether the leader of the last group may be asked without a search."""
        good = self._conduct.standing(leader, asyncio.get_running_loop().time()) is rules.LeaderStanding.GOOD
        return good and self._discovery.knows(leader) and rules.can_lead(leader)

    def ask_last_leader(
        self, search: SearchState, own: Declaration, leader: str, tasks: asyncio.TaskGroup, wake_up: asyncio.Event
    ) -> None:
        """Asks the leader of the last group, whose declaration this peer does not know."""
        candidate = Declaration(own.expiration, leader)
        request = self._open_request(search, candidate)
        context = _Context(search, own, search.key, own.expiration, tasks, wake_up)
        request.task = tasks.create_task(self._ask_and_follow_suggestions(context, candidate, request))

    async def ask(self, search: SearchState, own: Declaration, key: str, wake_up: asyncio.Event) -> None:
        """Asks peers under `key` to lead, in the order of `rules.candidates`, until cancelled.

        While peers do not answer, it asks more and more of them at the same time. It looks again when `wake_up` is set.
        """
        until, began = own.expiration, self._clock()

        async def watch() -> None:
            async with aclosing(self._discovery.watch(key)) as changes:
                async for entries in changes:
                    search.observe(self._last.read(entries))
                    wake_up.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            while True:
                wake_up.clear()
                now = self._clock()
                if search.group is not None or until <= now:
                    search.changed.set()  # a clock that was set forward ends the declaration before `_search_once` does
                    return
                if not search.state.leads:
                    # It cannot lead, so it must be able to follow peers that declare themselves only now.
                    own = replace(own, expiration=max(until, now + self._config.group_wait))
                again = None
                if (
                    number := 0
                    if search.state.leader or search.ending
                    else rules.requests_to_start(*search.request_counts)
                ):
                    candidates, again = self._candidates(search, own, key, now, began + self._config.group_wait / 2)
                    context = _Context(search, own, key, until, tasks, wake_up)
                    for candidate in candidates[:number]:
                        self._make_room(search)
                        request = self._open_request(search, candidate)
                        request.task = tasks.create_task(self._ask_and_follow_suggestions(context, candidate, request))
                    if candidates:
                        continue
                await is_set_within(None if again is None else max(0.0, again - now), wake_up)

    def _candidates(
        self, search: SearchState, own: Declaration, key: str, now: float, deserters_from: float
    ) -> tuple[list[Declaration], float | None]:
        moment = asyncio.get_running_loop().time()
        declared = self._last.read(self._discovery.get(key), surely=True)
        return rules.candidates(
            own,
            {name: entry for name, entry in declared.items() if name not in search.open_requests},
            search.refusals,
            now,
            standing=lambda name: self._conduct.standing(name, moment),
            excluded=self._conduct.excluded(moment),
            deserters_from=deserters_from,
        )

    def _make_room(self, search: SearchState) -> None:
        if len(search.open_requests) < rules.MAX_OPEN_REQUESTS:
            return
        endpoint, request = next(iter(search.open_requests.items()))
        search.withdraw(endpoint, request)
        search.refusals[endpoint] = rules.next_join_refusal(
            None, 0.0, MessageCode.NO_CODE, self._clock(), self._rng, VERDICT_SECONDS
        )

    def _open_request(self, search: SearchState, candidate: Declaration) -> OpenRequest:
        endpoint = candidate.endpoint
        typical = self._conduct.deadlines.typical(endpoint, Phase.VERDICT, 0)
        request = OpenRequest(rules.head_start(*typical, self._conduct.unanswered(endpoint)))
        search.open_requests[endpoint] = request
        return request

    async def _ask_and_follow_suggestions(
        self, context: _Context, candidate: Declaration, request: OpenRequest
    ) -> None:
        search, refusals = context.search, context.search.refusals
        loop = asyncio.get_running_loop()
        try:
            for _ in range(1 + rules.MAX_REDIRECTS):
                began = loop.time()
                try:
                    code, suggested = await self._ask(context, candidate, request)
                finally:
                    search.close_request(candidate.endpoint, request)
                search.begin_if_complete()
                if search.group is not None:
                    return
                now, waited = self._clock(), loop.time() - began
                previous = refusals.get(candidate.endpoint)
                refusals[candidate.endpoint] = rules.next_join_refusal(
                    previous, candidate.expiration, code, now, self._rng, waited
                )
                following = self._suggestion(context, suggested)
                if following is None or context.until <= now:  # each further peer may take seconds to answer
                    return
                last = refusals.get(following.endpoint)
                if last and (last.retry_at is None or last.retry_at > now) and last.applies_to(following.expiration):
                    return
                candidate, task = following, request.task
                request = self._open_request(search, candidate)
                request.task = task
        finally:
            search.close_request(candidate.endpoint, request)
            context.wake_up.set()

    def _suggestion(self, context: _Context, suggested: str) -> Declaration | None:
        """A suggested leader, if this peer may ask it: discovery knows it, and it is not due to follow this peer."""
        search, own = context.search, context.own
        if not suggested or suggested == self._endpoint or not self._discovery.knows(suggested):
            return None
        if suggested in self._conduct.excluded(asyncio.get_running_loop().time()) or not rules.can_lead(suggested):
            return None
        if search.state.leader or suggested in search.open_requests:
            return None
        entry = self._discovery.get(context.key).get(suggested)
        declaration = Declaration(entry.expiration if entry else own.expiration, suggested)
        return declaration if entry is None or declaration < own else None

    async def _ask(self, context: _Context, candidate: Declaration, request: OpenRequest) -> tuple[MessageCode, str]:
        """Asks one peer, and follows it if it accepts; returns its last answer and the leader that it suggests."""
        search, leader = context.search, candidate.endpoint
        message = JoinRequest(
            endpoint=self._endpoint,
            schema_hash=self._schema.hash,
            # In discovery's order a peer may lead whose declaration expires later. Its rule is that of the wire.
            expiration=max(context.own.expiration, candidate.expiration),
            gather=search.gather,
            client_mode=search.state.member.mode is Mode.CLIENT,
            min_group_size=self._config.min_group_size,
            names=search.state.names,
            joins_parts=True,
            large_parts=search.state.large_parts,
        )
        try:
            async with aclosing(self._transport.join_group(leader, message)) as replies:
                with self._head_start(context, leader, request):
                    async with learned_timeout(self._conduct.deadlines, leader, Phase.VERDICT):
                        answer = await anext(replies)
                self._conduct.note_answer(leader)
                if answer.code is not MessageCode.ACCEPTED:
                    search.end_head_start(request)
                elif search.group is not None:
                    return MessageCode.NO_CODE, ""  # too late; the leader sees the end of this call
                search.answers[leader] = answer.code.name
                if answer.code is MessageCode.BAD_SCHEMA_HASH:
                    difference = str(await self.difference(leader, search.differing))
                    logger.log(logging.WARNING if self._conduct.is_new(difference) else logging.DEBUG, "%s", difference)
                if answer.code is MessageCode.ACCEPTED:
                    answer = await self._follow(context, candidate, request, replies)
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
            search.answers[leader] = error.reason
            logger.warning("%s", error)
            if error.kind is not ViolationKind.UNPROVEN:
                self._conduct.note_fault(leader, asyncio.get_running_loop().time())
            return MessageCode.PROTOCOL_VIOLATION, ""
        return MessageCode.NO_CODE, ""

    @contextmanager
    def _head_start(self, context: _Context, leader: str, request: OpenRequest) -> Iterator[None]:
        """Ends the head start of a request while its answer is awaited inside this context."""
        search = context.search

        async def count_down() -> None:
            for _ in range(TICKS):  # in pieces: a time in which this peer stood still counts as one of them
                await asyncio.sleep(request.head_start / TICKS)
            self._conduct.note_silence(leader)
            search.answers.setdefault(leader, "has not answered yet")
            search.end_head_start(request)
            if search.state.leader:
                search.withdraw(leader, request)
            context.wake_up.set()

        if not request.pending:
            self._conduct.note_silence(leader)
            yield
            return
        countdown = context.tasks.create_task(count_down())
        try:
            yield
        except TimeoutError:
            if request.pending:
                self._conduct.note_silence(leader)
            raise
        finally:
            countdown.cancel()

    async def _follow(
        self,
        context: _Context,
        candidate: Declaration,
        request: OpenRequest,
        replies: AsyncGenerator[MessageFromLeader, None],
    ) -> MessageFromLeader:
        """Follows a leader that has accepted this peer; returns the message with which it begins or disbands."""
        search, leader = context.search, candidate.endpoint
        search.follow(candidate, request)
        for other in search.leaders:
            if other.endpoint != search.state.leader:
                context.tasks.create_task(self._leave(search, other))
        timeout = self._decision_timeout(search, context.own, candidate)
        try:
            try:
                async with FairTimeout(Deadline(timeout, "its declared time"), timeout):
                    answer = await anext(replies)
            except TimeoutError:
                self._conduct.note_desertion(leader, asyncio.get_running_loop().time())
                raise TimeoutError("accepted this peer, but neither began a group nor disbanded it") from None
            search.answers[leader] = answer.code.name
            if answer.code is MessageCode.BEGIN_ALLREDUCE:
                group = rules.read_group(answer, self._endpoint, leader, search.gather)
                search.adopt(group)
                self._conduct.note_group(leader)
            return answer
        finally:
            search.unfollow(candidate)

    async def _leave(self, search: SearchState, other: Declaration) -> None:
        """Leaves a leader because one with a smaller declaration has accepted this peer too.

        It waits a moment first. If this peer has made the other group complete, that group begins now, and its members
        would wait for this peer. If the preferred leader disbands its group now, the other one can still lead.
        """
        request = search.leaders.get(other)
        await asyncio.sleep(rules.MIN_HEAD_START)
        if request is not None and search.leaders.get(other) is request and search.state.leader != other.endpoint:
            search.withdraw(other.endpoint, request)

    def _decision_timeout(self, search: SearchState, own: Declaration, leader: Declaration) -> float:
        # A leader begins or disbands when its own declaration expires, which is before this peer's.
        now = self._clock()
        if not search.state.leads:  # its own expiration may be far ahead
            left = min(own.expiration, leader.expiration) - now
        else:  # if the clock was set back, the own expiration may be too far ahead
            left = min(own.expiration - now, self._config.group_wait)
        return max(0.0, left) + rules.CLOCK_TOLERANCE
