"""Looking for a group: declare, ask those who wait less long, accept those who wait longer, until a group is there."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable, Container

from averaging.deadlines.fair_timeout import FairTimeout
from averaging.deadlines.learned_deadlines import VERDICT_SECONDS, Deadline, Deadlines
from averaging.discovery.base import Discovery
from averaging.errors import AveragingError
from averaging.matchmaking import rules
from averaging.matchmaking.arrivals import Arrivals
from averaging.matchmaking.exclusions import Exclusions
from averaging.matchmaking.follower_side import FollowerSide
from averaging.matchmaking.response_history import ResponseHistory
from averaging.matchmaking.rules import Declaration, LeaderCandidate
from averaging.matchmaking.schema_differences import SchemaDifferences, Warned
from averaging.matchmaking.search_state import SearchDeadline, SearchState
from averaging.protocol.group import Group, Mode, group_key, next_group_bits, unpack_gather
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.protocol.schema import Schema
from averaging.transport.base import Transport

logger = logging.getLogger(__name__)


WITHOUT_END = Deadline(math.inf, "the search itself sees when its time is over")


class NoGroupError(AveragingError):
    """No group came together in time. The message says who was there and what they answered."""


class Matchmaking:
    """Finds a group for one peer, as leader or as follower.

    Args:
        endpoint: this peer's name.
        group_size: it begins a group that it leads as soon as there are so many members.
        min_group_size: it begins one with so many when its declared time is over. Leaders are told that it takes part
            in no smaller one; those of other software may begin one all the same, so the caller has to check that.
        matchmaking_time: seconds that one declaration lasts.
        only_named: whether a leader may name as members only those whom discovery names. In an open run, which may have
            peers of other implementations, it may name whomever it met.
        over_lifetime: seconds for which the record stays that says that a search is over, where no later search is made
            under its key; if None, as long as the declaration that it replaces would have.
        conduct: who has broken the protocol: such a peer is neither asked nor taken in for a while.
        answers: who answered this peer's requests, from search to search; nothing is known of them if None.
        deadlines: how long others take to answer, from search to search; nothing is known of them if None.
        warned: the differences that were warned of already; none if None.
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
        over_lifetime: float | None = None,
        clock: Callable[[], float],
        rng: random.Random,
        conduct: Exclusions | None = None,
        answers: ResponseHistory | None = None,
        deadlines: Deadlines | None = None,
        warned: Warned | None = None,
    ) -> None:
        self._run_id, self._endpoint = run_id, endpoint
        self.schema = schema
        self._discovery = discovery
        self._group_size, self._min_group_size = group_size, min_group_size
        self._matchmaking_time, self._over_lifetime = matchmaking_time, over_lifetime
        self._clock, self._rng = clock, rng
        self._conduct = conduct or Exclusions()
        self._differences = SchemaDifferences(schema, transport, discovery, warned or Warned())
        self._asking = FollowerSide(
            endpoint,
            schema,
            transport,
            discovery,
            self._differences,
            min_group_size=min_group_size,
            matchmaking_time=matchmaking_time,
            only_named=only_named,
            conduct=self._conduct,
            answers=answers or ResponseHistory(),
            deadlines=Deadlines(VERDICT_SECONDS, VERDICT_SECONDS) if deadlines is None else deadlines,
            clock=clock,
            rng=rng,
        )
        self.group_bits = group_bits
        self._dropped = 0  # leading bits that the present search leaves out
        self._search: SearchState | None = None
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

    def awaited_until(self, by: Container[str]) -> float | None:
        """Until when others, of these, have declared to wait under its key, since the epoch; None if nobody has."""
        waiting = [
            entry.expiration
            for name, entry in self._discovery.get(self.group_key).items()
            if name in by and name != self._endpoint and rules.unpack_looking(entry.value)
        ]
        return max(waiting, default=None)

    @property
    def leader(self) -> str:
        """Whom it follows; empty if nobody."""
        return self._search.state.leader if self._search else ""

    async def find_group(
        self, gather: bytes, deadline: float, enough: int | None = None, arrivals: Arrivals | None = None
    ) -> Group:
        """Looks for a group.

        Args:
            gather: what the group is told of this peer.
            deadline: until when, in seconds since the epoch; this peer's own standstill does not count.
            enough: members that contribute with which a group that this peer leads begins at once, if there are
                `min_group_size` in all; only with `group_size` in all if None.
            arrivals: notes when the others began to look, if it is given.

        Raises:
            NoGroupError: there was none in time.
            SchemaMismatchError: everybody else there averages other tensors.
        """
        member = unpack_gather(self._endpoint, gather)
        state = LeaderCandidate(member, self.schema.hash, self._group_size, enough, self._min_group_size)
        search = SearchState(
            state, gather, arrivals or Arrivals(self._endpoint, asyncio.get_running_loop().time()), self._rng
        )
        self._search = search
        self._dropped = 0  # by the next search its own place may be taken again
        self._over.clear()
        try:
            async with FairTimeout(WITHOUT_END, math.inf) as watch:
                left = SearchDeadline(deadline, self._clock, lambda: watch.waited)
                while (group := await self._search_once(search, left)) is None:
                    search.disband("")
                    if search.seen and search.seen <= search.differing.keys():
                        raise await self._differences.of(next(iter(search.differing)), search.differing)
                    if left.seconds <= 0:
                        outlook = self._discovery.outlook()
                        told = search.explain(self.group_key, self._min_group_size, outlook)
                        raise NoGroupError(told + self._left_out(search))
                    if not search.seen and self._dropped < len(self.group_bits):
                        self._dropped += 1
                        logger.info("nobody was seen; looking under %s now", self.group_key)
                    search.declare_anew()
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

    def has(self, endpoint: str) -> bool:
        """Whether that peer is in the group that this one leads, or is its leader."""
        state = self._search.state if self._search else None
        return state is not None and (endpoint == state.leader or endpoint in state.followers)

    def wait_for(self, enough: int) -> None:
        """From now on the search, if there is one, needs so many, see `find_group`."""
        if self._search is not None:
            self._search.wait_for(enough)

    def move_on(self, group: Group) -> None:
        """After a round: takes the group bits that this peer's place in the group gives."""
        place = group.index(self._endpoint)
        if len(group.members) <= self._group_size:
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
        logger.debug("%s answers %s to %.80r", self._endpoint, code.name, request.endpoint)
        if search is None or code is not MessageCode.ACCEPTED:
            # A stranger's hash says nothing about the run; one that discovery names may be all there is.
            # Under a topic it is one who is in another phase.
            bad_hash = code is MessageCode.BAD_SCHEMA_HASH and not self.schema.topic
            if search and bad_hash and self._discovery.names(request.endpoint):
                search.ask_came(request.endpoint)
                search.differing.setdefault(request.endpoint, None)
            yield MessageFromLeader(code, suggested_leader=suggested_leader)
            return
        fate = search.accept(request)
        try:
            yield MessageFromLeader(MessageCode.ACCEPTED)
            yield await fate
        finally:
            search.release(request.endpoint, fate)

    async def _search_once(self, search: SearchState, left: SearchDeadline) -> Group | None:
        """One declaration: until a group is there, or the declared time is over and too few are there."""
        loop = asyncio.get_running_loop()
        deadline = self._clock() + left.seconds
        seconds = rules.declared_seconds(self._matchmaking_time, search.sent_away)
        expiration = min(self._clock() + seconds, deadline)
        if search.state.member.mode is not Mode.CLIENT:
            search.state.declared = expiration
            await self._declare_looking(search, True)
        elif self._dropped == len(self.group_bits):
            expiration = deadline  # it declares nothing and asks anyone, and there is no other key to look under
        loop_expiration = self._latest_loop_time(expiration)
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(
                self._asking.ask(search, Declaration(expiration, self._endpoint), self.group_key)
            )
            while search.group is None:
                search.changed.clear()
                remaining = min(expiration - self._clock(), loop_expiration - loop.time())
                undecided = bool(search.state.leader) or search.awaits_answer
                if not undecided and remaining <= 0:
                    if search.state.member.mode is not Mode.CLIENT and search.begin(self._min_group_size):
                        continue
                    search.sent_away = bool(search.state.followers)
                    if not search.asking or search.sent_away:
                        break
                    undecided = True  # nobody else is here who would have to wait for late answers too
                try:
                    # While another peer decides about this one, the task that asked it watches the time.
                    async with asyncio.timeout(None if undecided else remaining):
                        await search.changed.wait()
                except TimeoutError:
                    continue
            asking.cancel()
        return search.group

    def _latest_loop_time(self, moment: float) -> float:
        """The loop's time at which `moment` must have come; a clock that is set back would put it off."""
        return asyncio.get_running_loop().time() + moment - self._clock() + rules.CLOCK_TOLERANCE

    async def _declare_looking(self, search: SearchState, looking: bool) -> None:
        if search.state.declared is None or search.state.declared <= self._clock():
            return
        until = search.state.declared
        if self._over_lifetime is not None and not looking:
            # Who averages under a new key in every step would else have all the records that a peer may have.
            until = min(until, self._clock() + self._over_lifetime)
        try:
            await self._discovery.store(self.group_key, self._endpoint, rules.pack_looking(looking), until)
        except AveragingError as error:
            if until > self._clock():  # else it has just run out, and so has what it would replace
                logger.warning("could not declare %s: %s", self._endpoint, error)

    def _left_out(self, search: SearchState) -> str:
        """Who was there and is excluded, for people; empty if nobody."""
        now = self._clock()
        excluded = self._conduct.excluded(now)
        there = search.seen | search.seen_before
        told = [f"{name} for another {excluded[name] - now:.0f} s" for name in sorted(there & excluded.keys())]
        why = "they broke the protocol or gave an address that is not dialled"
        return f"; left out because {why}: {', '.join(told)}" if told else ""
