"""Looking for a group: declare, ask those who wait less long, accept those who wait longer, until a group is there."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from averaging.discovery.base import Discovery
from averaging.errors import (
    AveragingError,
    ProtocolViolationError,
    SchemaMismatchError,
    TransportError,
    UnprovenViolationError,
)
from averaging.group import Group, Mode, digits_per_round, group_key, next_group_bits, unpack_gather
from averaging.matchmaking import rules
from averaging.matchmaking.conduct import Conduct
from averaging.matchmaking.rules import Attempt, Declaration, Searching
from averaging.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.observe.receipts import DropCode
from averaging.schema import Schema, first_difference
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 3.0
"""How long a peer may take to answer a request to join."""


NAMING_SECONDS = 2.0
"""How long a record may take from one member of a group to another, who has been told of the group already."""


class NoGroupError(AveragingError):
    """No group came together in time. The message says who was there and what they answered."""


class Matchmaking:
    """Finds a group for one peer, as leader or as follower.

    Args:
        endpoint: this peer's name.
        matchmaking_time: seconds that one declaration lasts.
        only_named: whether a leader may name as members only those whom discovery names. In an open run, which may have
            peers of other implementations, it may name whomever it met.
        conduct: who has broken the protocol: such a peer is neither asked nor taken in for a while.
        clock: seconds since the epoch.
        rng: shuffles groups, makes their ids, spreads retries.
    """

    def __init__(
        self,
        run_id: str,
        endpoint: str,
        schema: Schema,
        transport: Transport,
        discovery: Discovery,
        *,
        group_size: int,
        min_group_size: int,
        matchmaking_time: float,
        group_bits: str = "",
        only_named: bool = False,
        clock: Callable[[], float],
        rng: random.Random,
        conduct: Conduct | None = None,
    ) -> None:
        self._run_id, self._endpoint = run_id, endpoint
        self.schema = schema
        self._transport, self._discovery = transport, discovery
        self._group_size, self._min_group_size = group_size, min_group_size
        self._matchmaking_time, self._only_named = matchmaking_time, only_named
        self._clock, self._rng = clock, rng
        self._conduct = conduct or Conduct()
        self.group_bits = group_bits
        self._dropped = 0  # leading bits that the present search leaves out
        self._search: _Search | None = None
        self._over = asyncio.Event()  # no search, or it has ended
        self._over.set()

    @property
    def group_key(self) -> str:
        """The discovery key under which this peer looks for others."""
        return group_key(self._run_id, self.group_bits[self._dropped :], self.schema.topic)

    @property
    def looking(self) -> bool:
        """Whether it looks for a group now."""
        return self._search is not None and not self._search.state.assembled

    @property
    def declared_expiration(self) -> float:
        """Until when it has declared to wait, seconds since the epoch; 0 if it has not."""
        return (self._search.state.declared or 0.0) if self._search else 0.0

    @property
    def leader(self) -> str:
        """Whom it follows; empty if nobody."""
        return self._search.state.leader if self._search else ""

    async def find_group(self, gather: bytes, deadline: float, enough: int | None = None) -> Group:
        """Looks for a group.

        Args:
            gather: what the group is told of this peer.
            deadline: until when, in seconds since the epoch.
            enough: members with which a group that this peer leads begins at once; `group_size` if None or above it.

        Raises:
            NoGroupError: there was none in time.
            SchemaMismatchError: everybody else there averages other tensors.
        """
        member = unpack_gather(self._endpoint, gather)
        wanted = self._group_size if enough is None else min(max(enough, self._min_group_size), self._group_size)
        search = _Search(Searching(member, self.schema.hash, wanted), gather, self._rng)
        self._search = search
        self._dropped = 0  # by the next search its own place may be taken again
        self._over.clear()
        try:
            while (group := await self._search_once(search, deadline)) is None:
                search.disband("")
                if search.differing and search.seen <= search.differing.keys():
                    raise await self._difference(search, next(iter(search.differing)))
                if self._clock() >= deadline:
                    raise NoGroupError(search.explain(self.group_key, self._min_group_size) + self._left_out(search))
                if not search.seen and self._dropped < len(self.group_bits):
                    self._dropped += 1
                    logger.info("nobody was seen; looking under %s now", self.group_key)
                search.seen.clear()
        finally:
            search.disband("")
            search.state.assembled = True
            try:
                await self._declare_looking(search, False)
            finally:
                # Last, and without an await behind it: whoever waits in `assembling` finds the caller's round ready.
                self._search = None
                self._over.set()
        return group

    def move_on(self, group: Group) -> None:
        """After a round: takes the group bits that this peer's place in the group gives."""
        place = group.index(self._endpoint)
        if len(group.members) <= self._group_size and digits_per_round(self._group_size):
            self.group_bits = next_group_bits(self.group_bits, group, place, self._group_size)

    async def assembling(self) -> None:
        """Returns as soon as no group with this peer in it is being assembled."""
        while (search := self._search) and search.in_between:
            search.changed.clear()
            waits = [asyncio.create_task(event.wait()) for event in (search.changed, self._over)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        """Answers a request to join: the verdict and, once accepted, what became of the group."""
        search = self._search
        excluded = self._conduct.excluded(self._clock())
        code, suggested_leader = rules.verdict(request, search.state if search else None, excluded)
        logger.debug("%s answers %s to %s", self._endpoint, code.name, request.endpoint)
        if search is None or code is not MessageCode.ACCEPTED:
            # A stranger's hash says nothing about the run; one that discovery names may be all there is.
            # Under a topic it is one who is in another phase.
            bad_hash = code is MessageCode.BAD_SCHEMA_HASH and not self.schema.topic
            if search and bad_hash and self._discovery.names(request.endpoint):
                search.seen.add(request.endpoint)
                search.differing.setdefault(request.endpoint, None)
            yield MessageFromLeader(code, suggested_leader=suggested_leader)
            return
        fate = search.accept(request)
        try:
            yield MessageFromLeader(MessageCode.ACCEPTED)
            yield await fate
        finally:
            search.release(request.endpoint, fate)

    async def _search_once(self, search: _Search, deadline: float) -> Group | None:
        """One declaration: until a group is there, or the declared time is over and too few are there."""
        expiration = min(self._clock() + self._matchmaking_time, deadline)
        if search.state.member.mode is Mode.CLIENT:
            expiration = deadline  # it declares nothing and asks anyone
        else:
            search.state.declared = expiration
            await self._declare_looking(search, True)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask_others(search, Declaration(expiration, self._endpoint)))
            while search.group is None:
                search.changed.clear()
                remaining = expiration - self._clock()
                undecided = bool(search.asking or search.state.leader)
                if not undecided and remaining <= 0:
                    if search.state.member.mode is Mode.CLIENT or not search.begin(self._min_group_size):
                        break
                    continue
                try:
                    # While another peer decides about this one, the task that asked it watches the time.
                    async with asyncio.timeout(None if undecided else remaining):
                        await search.changed.wait()
                except TimeoutError:
                    continue
            asking.cancel()
        return search.group

    async def _declare_looking(self, search: _Search, looking: bool) -> None:
        if search.state.declared is None or search.state.declared <= self._clock():
            return
        try:
            value = rules.pack_looking(looking)
            await self._discovery.store(self.group_key, self._endpoint, value, search.state.declared)
        except AveragingError as error:
            logger.warning("could not declare %s: %s", self._endpoint, error)

    async def _ask_others(self, search: _Search, own: Declaration) -> None:
        """Asks one peer after the other to lead, the earliest first, until cancelled."""
        key = self.group_key
        attempts = search.attempts
        until = own.expiration
        news = asyncio.Event()

        async def watch() -> None:
            async with aclosing(self._discovery.watch(key)) as changes:
                async for entries in changes:
                    search.seen.update(name for name in entries if name != self._endpoint)
                    news.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            while True:
                news.clear()
                now = self._clock()
                if search.group is not None or until <= now:
                    return  # led already, or too late to be
                if search.state.member.mode is Mode.CLIENT:
                    # It cannot lead, so it must be able to follow those who begin to wait only now.
                    own = replace(own, expiration=max(until, now + self._matchmaking_time))
                candidate, again = rules.next_to_ask(
                    own, self._discovery.get(key), attempts, now, self._conduct.excluded(now)
                )
                if candidate is not None:
                    await self._ask_and_follow_suggestions(search, own, candidate, attempts)
                    continue
                try:
                    async with asyncio.timeout(None if again is None else max(0.0, again - now)):
                        await news.wait()
                except TimeoutError:
                    continue

    async def _ask_and_follow_suggestions(
        self, search: _Search, own: Declaration, candidate: Declaration, attempts: dict[str, Attempt]
    ) -> None:
        for _ in range(1 + rules.MAX_REDIRECTS):
            search.asking = candidate.endpoint
            try:
                code, suggested = await self._ask(search, own, candidate)
            finally:
                search.asked()
            if search.group is not None:
                return
            search.answers[candidate.endpoint] = code
            now = self._clock()
            previous = attempts.get(candidate.endpoint)
            attempts[candidate.endpoint] = rules.refused(previous, candidate.expiration, code, now, self._rng)
            following = self._suggestion(own, suggested)
            if following is None:
                return
            tried = attempts.get(following.endpoint)
            if tried and (tried.retry_at is None or tried.retry_at > now) and tried.expiration == following.expiration:
                return  # it has just refused
            candidate = following

    def _suggestion(self, own: Declaration, suggested: str) -> Declaration | None:
        """A suggested leader, if this peer may go there: known to this run's discovery, and due to lead it."""
        if not suggested or suggested == self._endpoint or not self._discovery.names(suggested):
            return None
        if self._conduct.excludes(suggested, self._clock()):
            return None
        entry = self._discovery.get(self.group_key).get(suggested)
        declaration = Declaration(entry.expiration if entry else own.expiration, suggested)
        return declaration if entry is None or declaration < own else None

    async def _ask(self, search: _Search, own: Declaration, candidate: Declaration) -> tuple[MessageCode, str]:
        """Asks one peer and follows it for as long as it leads; returns why that ended and whom it suggests."""
        request = JoinRequest(
            endpoint=self._endpoint,
            schema_hash=self.schema.hash,
            expiration=own.expiration,
            gather=search.gather,
            client_mode=search.state.member.mode is Mode.CLIENT,
        )
        leader = candidate.endpoint
        try:
            async with aclosing(self._transport.join_group(leader, request)) as replies:
                async with asyncio.timeout(VERDICT_SECONDS):
                    answer = await anext(replies)
                if answer.code is MessageCode.BAD_SCHEMA_HASH:
                    logger.warning("%s", await self._difference(search, leader))
                if answer.code is not MessageCode.ACCEPTED:
                    return answer.code, answer.suggested_leader
                search.follow(leader)
                try:
                    # The leader begins or disbands at its declared time, which is not after ours.
                    patience = max(0.0, own.expiration - self._clock()) + rules.CLOCK_TOLERANCE
                    async with asyncio.timeout(patience):
                        answer = await anext(replies)
                    if answer.code is MessageCode.BEGIN_ALLREDUCE:
                        group = rules.read_group(answer, self._endpoint, leader)
                        if self._only_named:
                            await self._check_members(group, leader)
                        search.adopt(group)
                    return answer.code, answer.suggested_leader
                finally:
                    search.unfollow()
        except TimeoutError:
            logger.info("%s did not answer in time", leader)
        except StopAsyncIteration:
            logger.info("%s ended its answer early", leader)
        except TransportError as error:
            logger.debug("could not ask %s: %s", leader, error.reason)
        except ProtocolViolationError as error:
            logger.warning("%s", error)
            if not isinstance(error, UnprovenViolationError):
                self._conduct.note(leader, DropCode.PROTOCOL_VIOLATION, self._clock())
            return MessageCode.PROTOCOL_VIOLATION, ""
        return MessageCode.NO_CODE, ""

    async def _check_members(self, group: Group, leader: str) -> None:
        """Returns once discovery names all members that can be dialled: those are the only ones a leader may name.

        Raises:
            ProtocolViolationError: it does not name one of them in time.
        """
        strange = [member.endpoint for member in group.members if member.mode is not Mode.CLIENT]
        try:
            async with (
                asyncio.timeout(NAMING_SECONDS),
                aclosing(self._discovery.watch(self.group_key)) as changes,
            ):
                async for _ in changes:
                    strange = [name for name in strange if name != self._endpoint and not self._discovery.names(name)]
                    if not strange:
                        return
        except TimeoutError:
            pass
        raise UnprovenViolationError(f"{leader} began a group with {strange[0]}, which discovery does not name")

    def _left_out(self, search: _Search) -> str:
        """Who was there and is excluded, for people; empty if nobody."""
        now = self._clock()
        excluded = self._conduct.excluded(now)
        told = [f"{name} for another {excluded[name] - now:.0f} s" for name in sorted(search.seen & excluded.keys())]
        return f"; left out because they broke the protocol: {', '.join(told)}" if told else ""

    async def _difference(self, search: _Search, endpoint: str) -> SchemaMismatchError:
        """Finds out, once in a search, what `endpoint` averages instead."""
        if known := search.differing.get(endpoint):
            return known
        difference = "its schema hash is another, and it does not tell its schema"
        try:
            if self._discovery.names(endpoint):
                async with asyncio.timeout(VERDICT_SECONDS):
                    theirs = await self._transport.get_schema(endpoint)
                difference = first_difference(self.schema, theirs) or "its schema is the same but its hash is not"
        except (TimeoutError, AveragingError) as error:
            logger.debug("%s does not tell its schema: %s", endpoint, error)
        found = search.differing[endpoint] = SchemaMismatchError(endpoint, difference)
        return found


class _Search:
    """The state of one search, changed in one step each: there is no await between a look at it and its change."""

    def __init__(self, state: Searching, gather: bytes, rng: random.Random) -> None:
        self.state = state
        self.gather = gather
        self.group: Group | None = None
        self.asking = ""  # who was asked to lead and has not decided
        self.changed = asyncio.Event()
        self.seen: set[str] = set()  # under the key, since the last declaration
        self.answers: dict[str, MessageCode] = {}
        self.attempts: dict[str, Attempt] = {}
        self.differing: dict[str, SchemaMismatchError | None] = {}  # by endpoint; None until it was asked
        self._rng = rng
        self._fates: dict[str, asyncio.Future[MessageFromLeader]] = {}
        self._gathered = {state.member.endpoint: gather}

    @property
    def in_between(self) -> bool:
        """Whether a group with this peer in it may have begun, or may begin, without its knowing yet."""
        state = self.state
        return bool(self.asking or state.leader or state.followers or state.assembled)

    def accept(self, request: JoinRequest) -> asyncio.Future[MessageFromLeader]:
        """Takes a follower in; begins if that makes the group full."""
        member = unpack_gather(request.endpoint, request.gather)
        fate: asyncio.Future[MessageFromLeader] = asyncio.get_running_loop().create_future()
        self.state.followers[request.endpoint] = member
        self._fates[request.endpoint] = fate
        self._gathered[request.endpoint] = request.gather
        self.seen.add(request.endpoint)
        self._begin_if_full()
        self.changed.set()
        return fate

    def asked(self) -> None:
        """The peer that was asked has decided."""
        self.asking = ""
        self._begin_if_full()
        self.changed.set()

    def _begin_if_full(self) -> None:
        """Begins a full group, but not while another leader may have taken this peer in: it would be in two groups."""
        full = len(self.state.followers) + 1 >= self.state.target_group_size
        if full and self.group is None and not self.asking and not self.begin(2):
            self.disband("")  # nobody has tensors to average

    def release(self, endpoint: str, fate: asyncio.Future[MessageFromLeader]) -> None:
        """Forgets a follower that went away before anything was decided."""
        if self._fates.get(endpoint) is fate:  # whether or not it is done: a cancelled wait cancels it too
            del self._fates[endpoint], self.state.followers[endpoint]
            self.changed.set()

    def begin(self, min_group_size: int) -> bool:
        """Begins with those who are there, if they are enough."""
        if self.group is not None or not rules.can_begin(self.state, min_group_size):
            return False
        message = rules.assemble(self.state, self._gathered, self._rng)
        endpoint = self.state.member.endpoint
        self.adopt(rules.read_group(message, endpoint, endpoint))
        self._decide(message)
        return True

    def disband(self, suggested_leader: str) -> None:
        """Sends all followers away."""
        self._decide(MessageFromLeader(MessageCode.GROUP_DISBANDED, suggested_leader=suggested_leader))
        self.state.followers.clear()
        self.changed.set()

    def follow(self, leader: str) -> None:
        """Commits to a leader; the own followers are sent there."""
        self.disband(leader)
        self.state.leader = leader

    def unfollow(self) -> None:
        """Is free again."""
        self.state.leader = ""
        self.changed.set()

    def adopt(self, group: Group) -> None:
        """The search is over."""
        self.group = group
        self.state.assembled = True
        self.changed.set()

    def explain(self, key: str, min_group_size: int) -> str:
        """Why no group came together, for people."""
        told = ", ".join(f"{name}: {'no answer' if not code else code.name}" for name, code in self.answers.items())
        if not self.seen and not told:
            return f"nobody else was seen under {key}; start more peers of this run, or wait longer"
        seen = f"{len(self.seen)} others were seen under {key}"
        return f"{seen}, but no group of at least {min_group_size} came together ({told or 'nobody had to be asked'})"

    def _decide(self, message: MessageFromLeader) -> None:
        for fate in self._fates.values():
            if not fate.done():
                fate.set_result(replace(message))
        self._fates.clear()
