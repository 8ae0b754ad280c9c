"""The state of one search for a group: whom it follows, who follows it, whom it asked and what they answered."""

from __future__ import annotations

import asyncio
import random

from averaging.errors import SchemaMismatchError
from averaging.group import Group, unpack_gather
from averaging.matchmaking import rules
from averaging.matchmaking.arrivals import Arrivals
from averaging.matchmaking.rules import Attempt, Searching
from averaging.messages import JoinRequest, MessageCode, MessageFromLeader
from averaging.observe.plain import counted


class Search:
    """The state of one search, changed in one step each: there is no await between a look at it and its change."""

    def __init__(self, state: Searching, gather: bytes, arrivals: Arrivals, rng: random.Random) -> None:
        self.state = state
        self.arrivals = arrivals
        self.gather = gather
        self.group: Group | None = None
        self.asking = ""  # who was asked to lead and has not decided
        self.changed = asyncio.Event()
        self.seen: set[str] = set()  # under the key, since the last declaration
        self.seen_before: set[str] = set()  # by then, under any key
        self.answers: dict[str, str] = {}  # of those who were asked, in words
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

    def declare_anew(self) -> None:
        """Those who were seen so far may be gone."""
        self.seen_before |= self.seen
        self.seen.clear()

    def accept(self, request: JoinRequest) -> asyncio.Future[MessageFromLeader]:
        """Takes a follower in; begins if that makes the group full."""
        member = unpack_gather(request.endpoint, request.gather)
        loop = asyncio.get_running_loop()
        self.arrivals.asked(request.endpoint, loop.time())
        fate: asyncio.Future[MessageFromLeader] = loop.create_future()
        self.state.followers[request.endpoint] = member
        self._fates[request.endpoint] = fate
        self._gathered[request.endpoint] = request.gather
        self.seen.add(request.endpoint)
        self._begin_if_full()
        self.changed.set()
        return fate

    def wait_for(self, enough: int) -> None:
        """More or fewer are waited for than before, see `Searching`."""
        self.state.enough = enough
        if self.state.followers:
            self._begin_if_full()

    def asked(self) -> None:
        """The peer that was asked has decided."""
        self.asking = ""
        self._begin_if_full()
        self.changed.set()

    def _begin_if_full(self) -> None:
        """Begins a complete group, but not while another leader may have taken this peer in: it would be in two."""
        if rules.is_complete(self.state) and self.group is None and not self.asking and not self.begin(2):
            self.disband("")  # nobody has tensors to average

    def release(self, endpoint: str, fate: asyncio.Future[MessageFromLeader]) -> None:
        """Forgets a follower that went away before anything was decided."""
        if self._fates.get(endpoint) is fate:  # whether or not it is done: a cancelled wait cancels it too
            del self._fates[endpoint], self.state.followers[endpoint], self._gathered[endpoint]
            self.changed.set()

    def begin(self, min_group_size: int) -> bool:
        """Begins with those who are there, if they are enough."""
        if self.group is not None or not rules.can_begin(self.state, min_group_size):
            return False
        message = rules.assemble(self.state, self._gathered, self._rng)
        endpoint = self.state.member.endpoint
        self.adopt(rules.read_group(message, endpoint, endpoint, self.gather))
        self._decide(message)
        return True

    def disband(self, suggested_leader: str) -> None:
        """Sends all followers away."""
        self._decide(MessageFromLeader(MessageCode.GROUP_DISBANDED, suggested_leader=suggested_leader))
        self.state.followers.clear()
        self._gathered = {self.state.member.endpoint: self.gather}
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
        self.arrivals.ready(asyncio.get_running_loop().time())
        self.state.assembled = True
        self.changed.set()

    def explain(self, key: str, min_group_size: int) -> str:
        """Why no group came together, for people."""
        told = ", ".join(f"{name}: {words:.300}" for name, words in self.answers.items())
        gone = self.seen_before | self.answers.keys()
        if not self.seen and not gone:
            return f"nobody else was seen under {key}; start more peers of this run, or wait longer"
        seen = f"{counted(len(self.seen), 'other')} seen under {key}"
        if not self.seen:  # in the last declaration, which may have been short
            seen = f"{counted(len(gone), 'other')} seen, but not lately under {key}"
        return f"{seen}; no group of at least {min_group_size} came together ({told or 'nobody had to be asked'})"

    def _decide(self, message: MessageFromLeader) -> None:
        for fate in self._fates.values():
            if not fate.done():
                fate.set_result(message)
        self._fates.clear()
