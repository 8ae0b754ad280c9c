"""The state of one search for a group: whom it follows, who follows it, whom it asked and what they answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from averaging.common.sanitize import counted
from averaging.discovery.base import Entry, Outlook
from averaging.errors import SchemaMismatchError
from averaging.matchmaking import rules
from averaging.matchmaking.arrivals import Arrivals
from averaging.matchmaking.no_group_reasons import explain_absence, explain_faults
from averaging.matchmaking.rules import Attempt, Declaration, LeaderCandidate
from averaging.protocol.group import Group, unpack_gather
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader


@dataclass(slots=True, eq=False)
class Asked:
    """A request to lead this peer.

    Attributes:
        head_start: seconds for which its answer is awaited: no group begins before.
        awaited: whether they are not over, and there is no answer.
        task: waits for the answer, and then follows; None until it is started.
    """

    head_start: float
    awaited: bool = field(init=False)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.awaited = self.head_start > 0


class SearchState:
    """The state of one search, changed in one step each: there is no await between a look at it and its change."""

    def __init__(self, state: LeaderCandidate, gather: bytes, arrivals: Arrivals, rng: random.Random) -> None:
        self.state = state
        self.arrivals = arrivals
        self.gather = gather
        self.group: Group | None = None
        self.asking: dict[str, Asked] = {}  # who was asked to lead and has not answered
        self.leaders: dict[Declaration, Asked] = {}  # who has accepted this peer; it follows the earliest
        self.changed = asyncio.Event()
        self.sent_away = False  # whether its followers were too few in the last declaration
        self.seen: set[str] = set()  # under the key, since the last declaration
        self.seen_before: set[str] = set()  # by then, under any key
        self.met: set[str] = set()  # who looked for a group as well, since the search began
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

    def notice(self, entries: Mapping[str, Entry]) -> None:
        """What is declared under the key now."""
        others = {name: entry for name, entry in entries.items() if name != self.state.member.endpoint}
        looking = {name: rules.unpack_looking(entry.value) for name, entry in others.items()}
        self.arrivals.observe(looking, asyncio.get_running_loop().time())
        self.seen.update(others)
        self.met.update(name for name, looks in looking.items() if looks)

    def ask_came(self, endpoint: str) -> None:
        """That peer has asked this one to lead."""
        self.seen.add(endpoint)
        self.met.add(endpoint)

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
        self.state.least_sizes[request.endpoint] = request.min_group_size
        self._fates[request.endpoint] = fate
        self._gathered[request.endpoint] = request.gather
        self.ask_came(request.endpoint)
        self.begin_if_full()
        self.changed.set()
        return fate

    def wait_for(self, enough: int) -> None:
        """More or fewer are waited for than before, see `LeaderCandidate`."""
        self.state.enough = enough
        if self.state.followers:
            self.begin_if_full()

    @property
    def awaits_answer(self) -> bool:
        """Whether a peer that was asked to lead still has its head start."""
        return any(asked.awaited for asked in self.asking.values())

    @property
    def requests(self) -> tuple[int, int]:
        """How many open requests have their head start, and how many have no longer."""
        awaited = sum(asked.awaited for asked in self.asking.values())
        return awaited, len(self.asking) - awaited

    def forget(self, endpoint: str, asked: Asked) -> None:
        """That request is over."""
        if self.asking.get(endpoint) is asked:
            del self.asking[endpoint]
            self.changed.set()

    def withdraw(self, endpoint: str, asked: Asked) -> None:
        """Ends a request that is open; if it is accepted just then, this peer is one that left."""
        self.forget(endpoint, asked)
        if asked.task is not None:
            asked.task.cancel()

    def go_on_without(self, asked: Asked) -> None:
        """The head start of a request is over, or it is refused: it keeps a complete group from beginning no longer."""
        asked.awaited = False
        self.begin_if_full()
        self.changed.set()

    def begin_if_full(self) -> None:
        """Begins a complete group, but not while another leader may have taken this peer in: it would be in two."""
        if rules.is_complete(self.state) and self.group is None and not self.awaits_answer and not self.begin(2):
            self.disband("")  # nobody has tensors to average

    def release(self, endpoint: str, fate: asyncio.Future[MessageFromLeader]) -> None:
        """Forgets a follower that went away before anything was decided."""
        if self._fates.get(endpoint) is fate:  # whether or not it is done: a cancelled wait cancels it too
            self._drop(endpoint)
            self.changed.set()

    def begin(self, min_group_size: int) -> bool:
        """Begins with those who are there, if they are enough; who is left out is sent away."""
        if self.group is not None or (staying := rules.who_begins(self.state, min_group_size)) is None:
            return False
        for name in self.state.followers.keys() - staying:
            fate = self._fates[name]
            self._drop(name)
            if not fate.done():
                fate.set_result(MessageFromLeader(MessageCode.GROUP_DISBANDED))
        message = rules.assemble(self.state, self._gathered, self._rng)
        endpoint = self.state.member.endpoint
        self.adopt(rules.read_group(message, endpoint, endpoint, self.gather))
        self._decide(message)
        return True

    def disband(self, suggested_leader: str) -> None:
        """Sends all followers away."""
        self._decide(MessageFromLeader(MessageCode.GROUP_DISBANDED, suggested_leader=suggested_leader))
        self.state.followers.clear()
        self.state.least_sizes.clear()
        self._gathered = {self.state.member.endpoint: self.gather}
        self.changed.set()

    def follow(self, leader: Declaration, asked: Asked) -> None:
        """Commits to a leader that has accepted this peer, or to an earlier one that has; own followers are sent there.

        Requests that are overdue are withdrawn. Whoever still has its head start may have accepted this peer just now.
        """
        self.leaders[leader] = asked
        self.forget(leader.endpoint, asked)
        for endpoint, other in list(self.asking.items()):
            if not other.awaited:
                self.withdraw(endpoint, other)
        self.state.leader = min(self.leaders).endpoint
        self.disband(self.state.leader)

    def unfollow(self, leader: Declaration) -> None:
        """That leader has decided, or is left; if no other has accepted this peer, it is free again."""
        del self.leaders[leader]
        self.state.leader = min(self.leaders).endpoint if self.leaders else ""
        self.changed.set()

    def adopt(self, group: Group) -> None:
        """The search is over, with the first group that begins."""
        if self.group is None:
            self.group = group
            self.arrivals.ready(asyncio.get_running_loop().time())
        self.state.assembled = True
        self.changed.set()

    def explain(self, key: str, min_group_size: int, outlook: Outlook) -> str:
        """Why no group came together, for people."""
        if not self.met and not self.answers:
            return explain_absence(key, outlook)
        told = ", ".join(f"{name}: {words:.300}" for name, words in self.answers.items())
        gone = self.seen_before | self.answers.keys()
        seen = f"{counted(len(self.seen), 'other')} seen under {key}"
        if not self.seen:  # in the last declaration, which may have been short
            seen = f"{counted(len(gone), 'other')} seen, but not lately under {key}"
        first = f"{seen}; no group of at least {min_group_size} came together ({told or 'nobody had to be asked'})"
        return "; ".join([first, *explain_faults(outlook, self.answers)])

    def _drop(self, endpoint: str) -> None:
        del self._fates[endpoint], self._gathered[endpoint]
        del self.state.followers[endpoint], self.state.least_sizes[endpoint]

    def _decide(self, message: MessageFromLeader) -> None:
        for fate in self._fates.values():
            if not fate.done():
                fate.set_result(message)
        self._fates.clear()


class SearchDeadline:
    """The seconds of one search that are left.

    They end at a moment by the clock, which others go by as well. Should the clock be set, that hardly changes them,
    and seconds in which this peer itself stood still do not count: when it goes on, the others may be there yet.

    Args:
        deadline: when they end, in seconds since the epoch.
        clock: seconds since the epoch.
        searched: fair seconds since now, see `FairClock`.
    """

    def __init__(self, deadline: float, clock: Callable[[], float], searched: Callable[[], float]) -> None:
        self._deadline, self._clock, self._searched = deadline, clock, searched
        self._seconds = deadline - clock()

    @property
    def seconds(self) -> float:
        """At most 0 when they are over."""
        left = self._seconds - self._searched()
        return min(max(self._deadline - self._clock(), left - rules.CLOCK_TOLERANCE), left + rules.CLOCK_TOLERANCE)
