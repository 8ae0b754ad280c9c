"""The state of one search for a group: open requests, leaders that accepted this peer, and its followers."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from averaging.common import counted, listed
from averaging.discovery import Diagnosis, Entry, KnownPeer, clock_difference
from averaging.errors import AveragingError
from averaging.matchmaking import rules
from averaging.matchmaking.memory import Arrivals
from averaging.matchmaking.rules import CLOCK_TOLERANCE, Declaration, JoinRefusal, LeaderCandidate, unpack_looking
from averaging.protocol import Group, JoinRequest, MessageCode, MessageFromLeader, Mode, unpack_gather

# Why no other peer joined a group, as far as discovery knows, and what to do about it. Pure.


_MAX_KEYS = 2  # that are listed of those under which one peer looks


def explain_absence(key: str, diagnosis: Diagnosis) -> str:
    """Why no peer was seen that looks for a group under `key`: clocks, silence, peers that are not ready, or none."""
    reasons = explain_faults(diagnosis)
    idle = {
        name: peer
        for name, peer in diagnosis.peers.items()
        if name not in diagnosis.clock_offsets and name not in diagnosis.silent
    }
    if idle:
        activities = [f"{name} ({describe(peer, key)})" for name, peer in sorted(idle.items())]
        reasons.append(
            f"{counted(len(idle), 'other peer')} in the run, none of them ready for a group under {key}: "
            f"{listed(activities)}; let all average at about the same time and with the same options, or wait longer"
        )
    if not reasons:
        why = f" ({diagnosis.isolation})" if diagnosis.isolation else ""
        reasons.append(f"no other peer is in the run: start more peers of it, or wait longer{why}")
    return "; ".join(reasons)


def explain_faults(diagnosis: Diagnosis, known_silent: Container[str] = ()) -> list[str]:
    """What keeps peers apart; those in `known_silent` are not listed again as silent."""
    reasons = []
    if offsets := diagnosis.clock_offsets:
        clocks = [f"that of {name} is {clock_difference(ahead)} this peer's" for name, ahead in offsets.items()]
        reasons.append(
            f"clocks are more than {CLOCK_TOLERANCE:g} s apart: {listed(clocks)}; set them, for example with NTP"
        )
    silent = [f"{name} ({why})" for name, why in sorted(diagnosis.silent.items()) if name not in known_silent]
    if silent:
        reasons.append(
            f"{counted(len(silent), 'peer')} did not answer: {listed(silent)}; check that they are up and that this "
            "machine reaches their addresses"
        )
    return reasons


def describe(peer: KnownPeer, key: str) -> str:
    return f"in the run since {_clock_time(peer.since)}, {_activity(peer.values, key)}"


def _activity(values: Mapping[str, bytes], key: str) -> str:
    keys = sorted(other for other, value in values.items() if other != key and ".0b" in other and unpack_looking(value))
    if keys:
        return f"looks for a group under {' and '.join(keys[:_MAX_KEYS])}"
    if key in values:
        return "has ended its search"
    if any(other.endswith(".progress") for other in values):
        return "trains, and does not look for a group"
    return "does not look for a group"


def _clock_time(since: float) -> str:
    """The time of day; `since` comes from another peer, so it may be any number."""
    try:
        return f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return "an unreadable time"


class NoGroupError(AveragingError):
    """No group came together in time. The message names the peers that were there and what they answered."""


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How one peer looks for groups under one key."""

    run_id: str
    endpoint: str
    group_size: int  # members with which this peer, as a leader, begins a group at once
    min_group_size: int  # and when its declaration expires; leaders of other software may begin a smaller one with it
    group_wait: float  # seconds that one declaration lasts
    clock: Callable[[], float]  # seconds since the epoch
    rng: random.Random
    ended_lifetime: float | None = None  # seconds of the record that a search has ended; None: as long as a declaration
    in_group_lifetime: float = 60.0  # seconds of the record of a group where only one may have the key


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request to lead this peer. It is pending within its head start, and overdue afterwards."""

    head_start: float  # seconds for which no group begins without its answer, see `rules.head_start`
    pending: bool = field(init=False)
    task: asyncio.Task[None] | None = None  # waits for the answer, and then follows

    def __post_init__(self) -> None:
        self.pending = self.head_start > 0


class SearchState:
    """The state of one search. No method awaits, so each change is atomic."""

    def __init__(
        self,
        state: LeaderCandidate,
        gather: bytes,
        arrivals: Arrivals,
        rng: random.Random,
        prepare_lane: Callable[[str], None] = lambda _: None,
        is_gone: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._prepare_lane, self._is_gone = prepare_lane, is_gone
        self.state, self.arrivals, self.gather = state, arrivals, gather
        self.group: Group | None = None
        self.ending = False  # it takes no followers and asks nobody any more; an accepted request may begin a group
        self.key = ""  # under which it declares itself now
        self.declared = False  # in discovery
        self.open_requests: dict[str, OpenRequest] = {}
        self.leaders: dict[Declaration, OpenRequest] = {}  # that accepted this peer, which follows the smallest
        self.changed = asyncio.Event()  # set after every change
        self.had_too_few = False  # followers in the last declaration
        self.seen: set[str] = set()  # under the key since the last declaration
        self.seen_before: set[str] = set()  # in earlier declarations, under any key
        self.looking_too: set[str] = set()
        self.answers: dict[str, str] = {}  # the last one of each peer that was asked
        self.refusals: dict[str, JoinRefusal] = {}
        self.differing: dict[str, NoGroupError | None] = {}  # have another schema; None until that was requested
        self.others_in_group: frozenset[str] = frozenset()  # under this key, which may have no second group
        self._quorum_since: float | None = None
        self._rng = rng
        self._decisions: dict[str, asyncio.Future[MessageFromLeader]] = {}  # by follower

    @property
    def assembling(self) -> bool:
        """Whether a group with this peer in it may begin, or may have begun without this peer knowing it yet."""
        state = self.state
        return bool(self.open_requests or state.leader or state.followers or state.assembled)

    def observe(self, entries: Mapping[str, Entry]) -> None:
        others = {name: entry for name, entry in entries.items() if name != self.state.member.endpoint}
        looking = {name: rules.unpack_looking(entry.value) for name, entry in others.items()}
        self.arrivals.observe(looking, asyncio.get_running_loop().time())
        self.seen.update(others)
        leads_others = self.state.member.mode is Mode.AUXILIARY  # whose quorum it learns from them
        if leads_others or self.state.quorum is not None:
            self.others_in_group = frozenset(
                name
                for name, entry in others.items()
                if rules.unpack_in_group(entry.value) is not None and not self._is_gone(name)
            )
        waiting = [name for name, looks in looking.items() if looks]
        self.looking_too.update(waiting)
        if len(waiting) < self.state.target_group_size:  # of more peers, most would not be in this group
            self._prepare_lanes(waiting)

    def add_seen(self, endpoint: str) -> None:
        self.seen.add(endpoint)
        self.looking_too.add(endpoint)

    def begin_declaration(self) -> None:
        """Starts `seen` anew: the peers that were seen so far may have left."""
        self.seen_before |= self.seen
        self.seen.clear()

    def accept(self, request: JoinRequest) -> asyncio.Future[MessageFromLeader]:
        """Accepts a follower, and begins if that makes the group complete; the future holds the decision."""
        member = unpack_gather(request.endpoint, request.gather)
        loop = asyncio.get_running_loop()
        self.arrivals.add_request(request.endpoint, loop.time())
        decision: asyncio.Future[MessageFromLeader] = loop.create_future()
        self.state.followers[request.endpoint] = member
        if self.state.member.mode is Mode.AUXILIARY:
            self.state.quorum = rules.stated_quorum(self.state.followers.values())
        self.state.requests[request.endpoint] = request
        self._decisions[request.endpoint] = decision
        self.add_seen(request.endpoint)
        self._prepare_lanes([request.endpoint])
        self.begin_if_complete()
        self.changed.set()
        return decision

    def set_target_contributors(self, target: int) -> None:
        self.state.target_contributors = target
        if self.state.followers:
            self.begin_if_complete()

    def grace_left(self, now: float) -> float:
        """Seconds until the group begins without those that are missing; infinite if it does not.

        Called after every change: the grace period begins when the quorum is there, and anew if it was lost meanwhile.
        """
        quorum = self.state.quorum
        over = self.group is not None or self.ending or bool(self.others_in_group)
        there = quorum is not None and rules.followers_for_group(self.state, self.state.min_group_size) is not None
        if quorum is None or over or not self.state.leads or not there:
            self._quorum_since = None
            return math.inf
        if self._quorum_since is None:
            self._quorum_since = now
        return self._quorum_since + quorum.grace - now

    @property
    def has_pending_request(self) -> bool:
        return any(request.pending for request in self.open_requests.values())

    @property
    def request_counts(self) -> tuple[int, int]:
        pending = sum(request.pending for request in self.open_requests.values())
        return pending, len(self.open_requests) - pending

    def close_request(self, endpoint: str, request: OpenRequest) -> None:
        if self.open_requests.get(endpoint) is request:
            del self.open_requests[endpoint]
            self.changed.set()

    def withdraw(self, endpoint: str, request: OpenRequest) -> None:
        """Cancels a request; a leader that accepts it at this moment sees a follower leave."""
        self.close_request(endpoint, request)
        if request.task is not None:
            request.task.cancel()

    def end_head_start(self, request: OpenRequest) -> None:
        request.pending = False
        self.begin_if_complete()
        self.changed.set()

    def begin_if_complete(self) -> None:
        """Begins a complete group, unless a leader may just have accepted this peer: it would be in two groups."""
        complete = rules.is_complete(self.state) and self.group is None and not self.has_pending_request
        complete = complete and not self.ending and not self.others_in_group
        if complete and not self.begin(2):
            self.disband("")  # no member has tensors to average

    def release(self, endpoint: str, decision: asyncio.Future[MessageFromLeader]) -> None:
        if self._decisions.get(endpoint) is decision:  # whether or not it is done: a cancelled wait cancels it too
            self._remove_follower(endpoint)
            self.changed.set()

    def begin(self, min_group_size: int) -> bool:
        """Begins a group with the present followers, if there are enough; those that are left out are disbanded."""
        over = self.group is not None or self.ending or bool(self.others_in_group)
        followers = None if over else rules.followers_for_group(self.state, min_group_size)
        if followers is None:
            return False
        for name in self.state.followers.keys() - followers:
            decision = self._decisions[name]
            self._remove_follower(name)
            if not decision.done():
                decision.set_result(MessageFromLeader(MessageCode.GROUP_DISBANDED))
        endpoint = self.state.member.endpoint
        gathered = {name: request.gather for name, request in self.state.requests.items()} | {endpoint: self.gather}
        message = rules.assemble(self.state, gathered, self._rng)
        self.adopt(rules.read_group(message, endpoint, endpoint, self.gather))
        self._decide(message)
        return True

    def end(self) -> None:
        """Disbands the group that this peer leads; from here on it can only follow a leader that has accepted it."""
        self.ending = True
        if self.group is None:
            self.disband("")

    def disband(self, suggested_leader: str) -> None:
        """Disbands the group that this peer leads: all followers get GROUP_DISBANDED."""
        self._decide(MessageFromLeader(MessageCode.GROUP_DISBANDED, suggested_leader=suggested_leader))
        self.state.followers.clear()
        self.state.requests.clear()
        self.changed.set()

    def follow(self, leader: Declaration, request: OpenRequest) -> None:
        """Adds a leader that has accepted this peer; own followers are sent to the first of these leaders.

        Overdue requests are withdrawn. Pending ones stay open: their peers may have accepted this one just now.
        """
        self.leaders[leader] = request
        self.close_request(leader.endpoint, request)
        for endpoint, other in list(self.open_requests.items()):
            if not other.pending:
                self.withdraw(endpoint, other)
        self.state.leader = min(self.leaders).endpoint
        self._prepare_lanes([leader.endpoint])
        self.disband(self.state.leader)

    def unfollow(self, leader: Declaration) -> None:
        del self.leaders[leader]
        self.state.leader = min(self.leaders).endpoint if self.leaders else ""
        self.changed.set()

    def adopt(self, group: Group) -> None:
        """Ends the search with a group; of several, the first counts."""
        if self.group is None:
            self.group = group
            self.arrivals.set_ready(asyncio.get_running_loop().time())
        self.state.assembled = True
        self.changed.set()

    def explain(self, key: str, min_group_size: int, diagnosis: Diagnosis) -> str:
        if not self.looking_too and not self.answers:
            return explain_absence(key, diagnosis)
        answers = ", ".join(f"{name}: {answer:.300}" for name, answer in self.answers.items())
        seen = f"{counted(len(self.seen), 'other')} seen under {key}"
        if not self.seen:  # in the last declaration, which may have been short
            seen = f"{counted(len(self.seen_before | self.answers.keys()), 'other')} seen, but not lately under {key}"
        reason = f"{seen}; no group of at least {min_group_size} came together ({answers or 'no peer had to be asked'})"
        return "; ".join([reason, *explain_faults(diagnosis, self.answers)])

    def _prepare_lanes(self, names: Iterable[str]) -> None:
        """Begins to open connections for parts, if this peer contributes any."""
        if self.state.member.sends:
            for name in names:
                self._prepare_lane(name)

    def _remove_follower(self, endpoint: str) -> None:
        del self._decisions[endpoint], self.state.followers[endpoint], self.state.requests[endpoint]

    def _decide(self, message: MessageFromLeader) -> None:
        for decision in self._decisions.values():
            if not decision.done():
                decision.set_result(message)
        self._decisions.clear()


class SearchDeadline:
    """The deadline of one search.

    It is a moment of the wall clock, since other peers go by such moments too. A clock that is set moves it by
    `rules.CLOCK_TOLERANCE` at most, and `searched` counts no seconds in which this peer itself stood still.
    """

    def __init__(self, deadline: float, clock: Callable[[], float], searched: Callable[[], float]) -> None:
        self._deadline, self._clock, self._searched = deadline, clock, searched
        self._seconds = deadline - clock()

    @property
    def seconds(self) -> float:
        left = self._seconds - self._searched()
        return min(max(self._deadline - self._clock(), left - rules.CLOCK_TOLERANCE), left + rules.CLOCK_TOLERANCE)
