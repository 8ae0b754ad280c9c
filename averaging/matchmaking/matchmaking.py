"""Looks for a group: declares itself, asks peers before it to lead and accepts peers after it until a group begins."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import suppress

from averaging.discovery import Discovery
from averaging.errors import AveragingError
from averaging.matchmaking import rules
from averaging.matchmaking.follower_side import FollowerSide
from averaging.matchmaking.memory import LEAD_SECONDS, QUIET_SECONDS, Arrivals, Conduct, LastGroup
from averaging.matchmaking.rules import Declaration, LeaderCandidate, Quorum
from averaging.matchmaking.search_state import NoGroupError, SearchConfig, SearchDeadline, SearchState
from averaging.protocol import (
    Group,
    JoinRequest,
    MessageCode,
    MessageFromLeader,
    group_key,
    next_group_bits,
    unpack_gather,
)
from averaging.tensors import Schema
from averaging.timing import Deadline, FairTimeout, is_set_within
from averaging.transport import Transport

logger = logging.getLogger(__name__)

_TOO_LATE = frozenset({MessageCode.NOT_LOOKING_FOR_GROUP, MessageCode.GROUP_IS_FULL})

_NO_DEADLINE = Deadline(math.inf, "none: the search has its own")


class Matchmaking:
    """Finds a group for one peer, as leader or as follower; no group waits for a peer that `is_gone`."""

    def __init__(
        self,
        config: SearchConfig,
        schema: Schema,
        transport: Transport,
        discovery: Discovery,
        *,
        group_bits: str = "",
        conduct: Conduct | None = None,
        is_gone: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._config, self._endpoint, self._clock = config, config.endpoint, config.clock
        self.schema = schema
        self._transport, self._discovery = transport, discovery
        self._conduct = conduct or Conduct()
        self._is_gone = is_gone
        self._last = LastGroup(self._endpoint)
        self._early: set[str] = set()  # members of it that ask before this peer looks
        self._accepting = asyncio.Event()  # this peer looks, and has a declaration
        self._yields_until = 0.0  # loop's time at which members of it may follow this peer again
        self._follower_side = FollowerSide(config, schema, transport, discovery, self._last, self._conduct)
        self.group_bits = group_bits
        self._in_group = ""  # the key under which its record says that it is in a group
        self._dropped_bits = 0  # leading group bits that the present search leaves out
        self._search: SearchState | None = None
        self._idle = asyncio.Event()  # there is no search
        self._idle.set()

    @property
    def group_key(self) -> str:
        return group_key(self._config.run_id, self.group_bits[self._dropped_bits :], self.schema.topic)

    @property
    def looking(self) -> bool:
        return self._search is not None and not self._search.state.assembled

    @property
    def declared_expiration(self) -> float:
        return (self._search.state.declared or 0.0) if self._search else 0.0

    def latest_declaration(self, of: Container[str]) -> float | None:
        """The latest expiration that the peers in `of` declared under its key, in seconds since the epoch, if any."""
        waiting = [
            entry.expiration
            for name, entry in self._last.read(self._discovery.get(self.group_key)).items()
            if name in of and name != self._endpoint and rules.unpack_looking(entry.value)
        ]
        return max(waiting, default=None)

    def group_began(self, of: Container[str]) -> float | None:
        """When a group of peers in `of` began, in seconds since the epoch, if only one may have the key; else None."""
        entries = self._discovery.get(self.group_key).items()
        began = [rules.unpack_in_group(entry.value) for name, entry in entries if name in of]
        return min((moment for moment in began if moment is not None), default=None)

    @property
    def leader(self) -> str:
        return self._search.state.leader if self._search else ""

    async def find_group(
        self,
        gather: bytes,
        deadline: float,
        target_contributors: int | None = None,
        arrivals: Arrivals | None = None,
        *,
        quorum: Quorum | None = None,
        follows: bool = False,
    ) -> Group:
        """Looks for a group until `deadline`, in seconds since the epoch; else raises a NoGroupError.

        The other members receive `gather` about this peer, packed. `arrivals` notes when the other peers began to look;
        `LeaderCandidate` has the other options.
        """
        member = unpack_gather(self._endpoint, gather)
        schema, size = self.schema, self._config.group_size
        state = LeaderCandidate(
            member,
            schema.hash,
            size,
            target_contributors,
            self._config.min_group_size,
            names=schema.names if member.sends else "",
            large_parts=self._conduct.deadlines.fast,
            quorum=quorum,
            follows=follows,
        )
        search = SearchState(
            state,
            gather,
            arrivals or Arrivals(self._endpoint, asyncio.get_running_loop().time()),
            self._config.rng,
            self._transport.prepare_lane,
            self._is_gone,
        )
        self._search = search
        self._dropped_bits = 0
        self._idle.clear()
        try:
            async with FairTimeout(_NO_DEADLINE, math.inf) as watch:
                left = SearchDeadline(deadline, self._clock, lambda: watch.waited)
                while (group := await self._search_once(search, left)) is None:
                    search.disband("")
                    if search.seen and search.seen <= search.differing.keys():
                        raise await self._follower_side.difference(next(iter(search.differing)), search.differing)
                    if left.seconds <= rules.LEAST_SEARCH:
                        reason = search.explain(self.group_key, self._config.min_group_size, self._discovery.diagnose())
                        raise NoGroupError(reason + self._explain_exclusions(search))
                    if not search.seen and self._dropped_bits < len(self.group_bits):
                        self._dropped_bits += 1
                        logger.info("no other peer was seen; looking under %s now", self.group_key)
                    search.begin_declaration()
        finally:
            search.disband("")
            search.state.assembled = True
            self._accepting.clear()
            if search.group is not None:
                self._last.note_begin(search.group, self._discovery.get(self.group_key))
            try:
                if search.declared and not self._all_know_the_end(search):
                    await self._declare_looking(search, False)
            finally:
                # Last, with no await after it: a caller of `assembling` continues only when the round has been made.
                self._search = None
                self._idle.set()
        return group

    def is_member(self, endpoint: str) -> bool:
        """Whether that peer is the leader of this one, or one of its followers, in the present search."""
        state = self._search.state if self._search else None
        return state is not None and (endpoint == state.leader or endpoint in state.followers)

    def set_target_contributors(self, target: int) -> None:
        if self._search is not None:
            self._search.set_target_contributors(target)

    def update_group_bits(self, group: Group) -> None:
        """Takes the group bits for the next search, which follow from this peer's place in the last group."""
        place = group.index(self._endpoint)
        if len(group.members) <= self._config.group_size:
            self.group_bits = next_group_bits(self.group_bits, group, place, self._config.group_size)

    def note_end(self, whole: bool) -> None:
        self._last.note_end(self._discovery.get(self.group_key), whole)

    async def withdraw(self) -> bool:
        """Takes back that this peer is in a group, so that another one may begin; returns whether it had said so."""
        key, self._in_group = self._in_group, ""
        if key:
            await self._discovery.withdraw(key, self._endpoint)
        return bool(key)

    async def assembling(self) -> None:
        """Waits until no group with this peer in it is being assembled."""
        while (search := self._search) and search.assembling:
            await self._next_change(search)

    async def _next_change(self, search: SearchState) -> None:
        search.changed.clear()
        waits = [asyncio.create_task(event.wait()) for event in (search.changed, self._idle)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def end_search(self, seconds: float) -> bool:
        """Has the present search begin no group, unless a leader has accepted this peer already.

        It waits at most `seconds` for that leader's decision. Returns whether the search can be cancelled now; False if
        it has found a group, or is over.
        """
        search = self._search
        if search is None:
            return False
        search.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._search is search and not search.state.assembled and search.assembling:
                    await self._next_change(search)
        return self._search is search and not search.state.assembled

    async def join_group(self, request: JoinRequest) -> AsyncGenerator[MessageFromLeader, None]:
        await self._until_accepting(request)
        search, now = self._search, asyncio.get_running_loop().time()
        excluded = self._conduct.excluded(now)
        takes_part = search is not None and not search.ending and request.endpoint not in excluded
        code, suggested_leader = rules.verdict(request, search.state if search and takes_part else None)
        if code is MessageCode.ACCEPTED and self._yields_to_others(request.endpoint):
            code = MessageCode.NOT_DECLARED
        if code in _TOO_LATE and request.schema_hash == self.schema.hash and request.endpoint not in excluded:
            self._last.note_asked(request.endpoint)
        logger.debug("%s answers %s to %.80r", self._endpoint, code.name, request.endpoint)
        if search is None or code is not MessageCode.ACCEPTED:
            # Peers that discovery does not know say nothing about the run. With a topic, another hash is another phase.
            bad_hash = code is MessageCode.BAD_SCHEMA_HASH and not self.schema.topic
            if search and bad_hash and self._discovery.knows(request.endpoint):
                search.add_seen(request.endpoint)
                search.differing.setdefault(request.endpoint, None)
            yield MessageFromLeader(code, suggested_leader=suggested_leader)
            return
        decision = search.accept(request)
        try:
            yield MessageFromLeader(MessageCode.ACCEPTED)
            yield await decision
        finally:
            search.release(request.endpoint, decision)

    async def _until_accepting(self, request: JoinRequest) -> None:
        """Has a member of the group that this peer led last wait a moment, if this peer does not look for one yet."""
        if self._accepting.is_set() or not self._last.may_return(request.endpoint) or request.endpoint in self._early:
            return
        self._early.add(request.endpoint)
        try:
            await is_set_within(QUIET_SECONDS, self._accepting)
        finally:
            self._early.discard(request.endpoint)

    def _yields_to_others(self, endpoint: str) -> bool:
        return asyncio.get_running_loop().time() < self._yields_until and self._last.is_member(endpoint)

    async def _search_once(self, search: SearchState, left: SearchDeadline) -> Group | None:
        """Searches for one declaration; None if it expired and there were too few peers."""
        deadline, first = self._clock() + left.seconds, not search.key
        key = search.key = self.group_key
        leader = self._last_leader(search) if first else ""
        seconds = rules.declaration_seconds(self._config.group_wait, search.had_too_few)
        seconds += LEAD_SECONDS if leader not in ("", self._endpoint) else 0.0
        expiration = min(self._clock() + seconds, deadline)
        if not search.state.leads and self._dropped_bits == len(self.group_bits):
            expiration = deadline  # a client has no record to renew, and there is no other key to look under
        wake_up = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            if leader:
                await self._form_again(search, leader, expiration, tasks, wake_up)
            if search.group is None:
                own = await self._declare(search, expiration)
                asking = tasks.create_task(self._follower_side.ask(search, own, key, wake_up))
                await self._until_group(search, expiration)
                asking.cancel()
        return search.group

    def _last_leader(self, search: SearchState) -> str:
        """The leader of the last group, if that forms again; empty if this peer searches."""
        quorum, now = search.state.quorum, asyncio.get_running_loop().time()
        if self._last.take_asked():
            self._yields_until = now + QUIET_SECONDS
            return ""
        if self.group_bits or quorum is not None:
            return ""
        leader = self._last.leader(self._discovery.get(search.key), self._discovery.endpoints(), self._clock())
        if leader == self._endpoint:
            return leader if search.state.leads else ""
        good = leader and self._follower_side.trusts(leader)
        return leader if good and leader not in self._conduct.excluded(now) else ""

    async def _form_again(
        self, search: SearchState, leader: str, expiration: float, tasks: asyncio.TaskGroup, wake_up: asyncio.Event
    ) -> None:
        """Waits a moment for the last group, to which this peer does not declare itself.

        The order of declarations holds all the same: this peer sends, or accepts, the expiration that it declares if
        the search goes on. So no two peers can follow each other, even while a request is still open.
        """
        loop = asyncio.get_running_loop()
        if leader == self._endpoint:
            self._accept(search, expiration)
        else:
            own = Declaration(expiration, self._endpoint)
            self._follower_side.ask_last_leader(search, own, leader, tasks, wake_up)
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                while search.group is None and search.grace_left(loop.time()) > 0:
                    if leader != self._endpoint and not search.open_requests and not search.state.leader:
                        return  # it refused
                    search.changed.clear()
                    await search.changed.wait()

    def _accept(self, search: SearchState, expiration: float) -> None:
        search.state.declared = expiration
        self._accepting.set()

    async def _declare(self, search: SearchState, expiration: float) -> Declaration:
        self._last.note_declaration(min(expiration, self._clock() + self._config.group_wait))
        if search.state.leads:
            self._accept(search, expiration)
            search.declared = True
            await self._declare_looking(search, True)
        return Declaration(expiration, self._endpoint)

    async def _until_group(self, search: SearchState, expiration: float) -> None:
        """Waits for a group, which this peer begins itself if its followers are enough, until `expiration`."""
        loop = asyncio.get_running_loop()
        loop_expiration = loop.time() + expiration - self._clock() + rules.CLOCK_TOLERANCE
        while search.group is None:
            search.changed.clear()
            remaining = min(expiration - self._clock(), loop_expiration - loop.time())
            undecided = bool(search.state.leader) or search.has_pending_request
            grace = search.grace_left(loop.time())
            if not undecided and grace <= 0 and search.begin(self._config.min_group_size):
                continue
            if not undecided and remaining <= 0:
                if search.state.leads and search.begin(self._config.min_group_size):
                    continue
                search.had_too_few = bool(search.state.followers)
                if not search.open_requests or search.had_too_few:
                    break
                undecided = True  # without followers, only this peer waits for late answers
            try:
                # While another peer decides about this one, the task that asked it has the timeout.
                async with asyncio.timeout(None if undecided else min(remaining, max(0.0, grace))):
                    await search.changed.wait()
            except TimeoutError:
                continue

    async def _declare_looking(self, search: SearchState, looking: bool) -> None:
        if search.state.declared is None or search.state.declared <= self._clock():
            return
        until = search.state.declared
        if self._config.ended_lifetime is not None and not looking:
            # A peer that averages under a new key in every step would otherwise reach the limit of records per owner.
            until = min(until, self._clock() + self._config.ended_lifetime)
        value = rules.pack_looking(looking)
        if not looking and search.group is not None and search.state.quorum is not None:
            # As long as the group may average: a peer that comes meanwhile must know it.
            value, until = rules.pack_in_group(self._clock()), self._clock() + self._config.in_group_lifetime
            self._in_group = search.key
        try:
            await self._discovery.store(search.key, self._endpoint, value, until)
        except AveragingError as error:
            if until > self._clock():  # otherwise the declaration that it would replace has expired as well
                logger.warning("could not store the declaration of %s in discovery: %s", self._endpoint, error)

    def _all_know_the_end(self, search: SearchState) -> bool:
        """Whether nobody has to be told that the search is over: discovery knows only members of the group.

        Under the key of a single phase it is said in any case, since that record is kept for less time.
        """
        if search.group is None or search.state.quorum is not None or self._config.ended_lifetime is not None:
            return False
        return self._last.is_all(self._discovery.get(search.key), self._discovery.endpoints())

    def _explain_exclusions(self, search: SearchState) -> str:
        now = asyncio.get_running_loop().time()
        excluded = self._conduct.excluded(now)
        seen = search.seen | search.seen_before
        left_out = [f"{name} for another {excluded[name] - now:.0f} s" for name in sorted(seen & excluded.keys())]
        why = "they broke the protocol or cannot be called"
        return f"; left out because {why}: {', '.join(left_out)}" if left_out else ""
