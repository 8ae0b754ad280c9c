"""Which peer leads which: the decisions of matchmaking, as functions of what a peer knows and of `now`. Pure.

All peers under a key are ordered by their declarations: the one whose declaration expires first leads. Each peer asks
those before it in that order, and accepts those after it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from averaging.common import CLIENT_PREFIX, backoff_delay, contradict, is_endpoint, pack, unpack
from averaging.discovery import Entry
from averaging.errors import ProtocolViolationError
from averaging.protocol import (
    MAX_GROUP_SIZE,
    NONCE_BYTES,
    Group,
    JoinRequest,
    Member,
    MessageCode,
    MessageFromLeader,
    Mode,
    Statement,
    id_says,
    make_group_id,
    unpack_gather,
)
from averaging.timing import VERDICT_SECONDS

CLOCK_TOLERANCE = 3.0  # seconds by which the clocks of two peers may differ

LEAST_SEARCH = 1e-6
"""Seconds below which no search begins: a deadline since the epoch, a float64, is rounded to 0.24 microseconds."""

MAX_REDIRECTS = 3  # suggested leaders that a follower asks in a row
MAX_OPEN_REQUESTS = 32  # requests of one peer that are open at the same time; for one more, the oldest is withdrawn

MAX_HEAD_START, NEW_PEER_HEAD_START, MIN_HEAD_START = VERDICT_SECONDS, 1.0, 0.1
"""Bounds of a head start in seconds, see `head_start`. The middle one is for a peer to which a connection must be made
first. The last one leaves time to a peer whose machine is busy."""

MAX_YIELD_SECONDS = 300.0  # longest extension of a declaration; discovery keeps no record for longer than an hour
MAX_UNANSWERED = 3  # A peer that left this many requests in a row unanswered has no head start
_MIN_RETRY_PAUSE, _MAX_RETRY_PAUSE = 0.1, 2.0  # seconds until a peer that refused is asked again

_FINAL_REFUSALS = frozenset({MessageCode.BAD_SCHEMA_HASH, MessageCode.PROTOCOL_VIOLATION})


class LeaderStanding(IntEnum):
    """Why a peer should rather not be asked to lead. Peers of a lower standing are asked first."""

    GOOD = 0
    """Nothing is known against it."""
    SILENT = 1
    """It did not answer the last request in time."""
    DESERTER = 2
    """It accepted this peer as its follower, and then neither began nor disbanded the group in time."""


@dataclass(frozen=True, slots=True, order=True)
class Declaration:
    """A peer that waits for a group until `expiration` (seconds since the epoch); the smallest declaration leads."""

    expiration: float
    endpoint: str


@dataclass(frozen=True, slots=True)
class Quorum:
    """When a group begins although expected members are missing.

    Only one group has the key then: none begins while the members of another one average, since two groups would make
    two different steps of the run.
    """

    count: int  # members without which no group begins, see `counts_for_quorum`
    grace: float  # seconds for which the group waits for further ones once these are there

    @property
    def stated(self) -> tuple[int, float, bool]:
        return self.count, self.grace, True


@dataclass(slots=True)
class LeaderCandidate:
    member: Member
    schema_hash: bytes
    target_group_size: int  # members with which its group begins at once
    target_contributors: int | None = None  # contributing ones with which it begins, too, if `min_group_size` are there
    min_group_size: int = 2
    declared: float | None = None  # expiration of its declaration; None before it has declared, and for a client
    leader: str = ""  # the peer that it follows
    followers: dict[str, Member] = field(default_factory=dict)
    requests: dict[str, JoinRequest] = field(default_factory=dict)  # of the followers
    assembled: bool = False  # its search is over
    names: str = ""  # digest of the names of its tensors, see `Schema.names`; empty if it contributes none
    large_parts: bool = False  # whether it wants parts that are larger than the schema's
    quorum: Quorum | None = None
    follows: bool = False  # it only follows, as a client does: it declares nothing, and leads nobody

    @property
    def leads(self) -> bool:
        return self.member.mode is not Mode.CLIENT and not self.follows

    def names_fit(self, names: str) -> bool:
        others = [self.names, *(request.names for request in self.requests.values())]
        return not any(contradict(names, other) for other in others)


def declaration_seconds(group_wait: float, had_too_few: bool) -> float:
    """How long the next declaration lasts.

    A leader that `had_too_few` followers extends it, so that one of them leads next. With the same duration it would
    come first again, and they would never find a leader for which they are enough.
    """
    return group_wait + (min(group_wait / 2, MAX_YIELD_SECONDS) if had_too_few else 0.0)


def verdict(request: JoinRequest, searching: LeaderCandidate | None) -> tuple[MessageCode, str]:
    """The answer to a request to join, and the suggested leader. The wire contract fixes the order of the checks."""
    if searching is None or searching.assembled:
        return MessageCode.NOT_LOOKING_FOR_GROUP, ""
    if (
        not request.schema_hash
        or not is_endpoint(request.endpoint)
        or not math.isfinite(request.expiration)
        or not _gather_is_sound(request)
        or searching.member.mode is Mode.CLIENT
    ):
        return MessageCode.PROTOCOL_VIOLATION, ""
    if request.schema_hash != searching.schema_hash or not searching.names_fit(request.names):
        return MessageCode.BAD_SCHEMA_HASH, ""
    if searching.declared is None:
        return MessageCode.NOT_DECLARED, ""
    if searching.declared > request.expiration:
        return MessageCode.BAD_EXPIRATION_TIME, ""
    if searching.leader:
        return MessageCode.NOT_A_LEADER, searching.leader
    if request.endpoint == searching.member.endpoint or request.endpoint in searching.followers:
        return MessageCode.DUPLICATE_ENDPOINT, ""
    if max(len(searching.followers) + 2, request.min_group_size) > searching.target_group_size:
        return MessageCode.GROUP_IS_FULL, ""
    return MessageCode.ACCEPTED, ""


def _gather_is_sound(request: JoinRequest) -> bool:
    try:
        member = unpack_gather(request.endpoint, request.gather)
    except ProtocolViolationError:
        return False  # it would make the round fail for the whole group
    return (member.mode is Mode.CLIENT) == request.client_mode


def followers_for_group(searching: LeaderCandidate, min_group_size: int) -> dict[str, Member] | None:
    """The followers with which a leader begins a group now.

    None if there are too few, or if no member contributes tensors or none can reduce. A follower whose own
    `min_group_size` is larger than the group is left out, so that it does not keep the others from averaging.
    """
    followers = dict(searching.followers)
    while True:
        size = 1 + len(followers)
        too_large = {name for name, request in searching.requests.items() if request.min_group_size > size}
        staying = {name: member for name, member in followers.items() if name not in too_large}
        if len(staying) == len(followers):
            break
        followers = staying
    members = [searching.member, *followers.values()]
    enough = size >= min_group_size and any(m.sends for m in members) and any(m.reduces for m in members)
    if searching.quorum is not None:
        enough = enough and sum(map(counts_for_quorum, members)) >= searching.quorum.count
    return followers if enough else None


def counts_for_quorum(member: Member) -> bool:
    """Whether a member is one of those without which no group begins.

    An auxiliary is not, since it contributes nothing, nor is a member that says in its `gather` that it does not hold
    the state that the group changes: it contributes, but cannot keep the result.
    """
    return member.sends and Statement.read(member.user).holds


def stated_quorum(followers: Iterable[Member]) -> Quorum | None:
    """The quorum that followers state in their `gather`, to which a leader without one of its own keeps.

    Of different ones it is the (lower) median, so a single peer can neither switch it off nor block all groups.
    """
    quorums = [Statement.read(member.user).quorum for member in followers if member.sends]
    stated = sorted(quorum for quorum in quorums if quorum is not None)
    return Quorum(*stated[(len(stated) - 1) // 2][:2]) if stated else None


def is_complete(searching: LeaderCandidate) -> bool:
    """Whether the group of a leader can begin at once. An auxiliary is not a contributor."""
    if len(searching.followers) + 1 >= searching.target_group_size:
        return True
    if searching.target_contributors is None:
        return False
    followers = followers_for_group(searching, searching.min_group_size)
    if followers is None:
        return False
    return sum(member.sends for member in (searching.member, *followers.values())) >= searching.target_contributors


def assemble(searching: LeaderCandidate, gathered: Mapping[str, bytes], rng: random.Random) -> MessageFromLeader:
    """The message with which a leader begins: a random id, all members in random order, and their gathers."""
    endpoints = [searching.member.endpoint, *searching.followers]
    rng.shuffle(endpoints)
    gathers = tuple(gathered[endpoint] for endpoint in endpoints)
    requests = searching.requests.values()
    joins = all(request.joins_parts for request in requests)
    large = joins and searching.large_parts and all(request.large_parts for request in requests)
    nonce = rng.randbytes(NONCE_BYTES)
    return MessageFromLeader(
        MessageCode.BEGIN_ALLREDUCE,
        group_id=make_group_id(nonce, endpoints, gathers, joins_parts=joins, large_parts=large),
        ordered_group_endpoints=tuple(endpoints),
        gathered=gathers,
    )


def read_group(message: MessageFromLeader, endpoint: str, leader: str, gather: bytes) -> Group:
    """The group that `leader` announces to `endpoint`, which sent it `gather`; or raises a ProtocolViolationError."""
    names = message.ordered_group_endpoints
    if not message.group_id or len(message.group_id) > 256:
        raise ProtocolViolationError(f"began a group whose id has {len(message.group_id)} bytes", leader)
    if not 2 <= len(names) <= MAX_GROUP_SIZE or len(names) != len(message.gathered):
        raise ProtocolViolationError(f"began a group of {len(names)} with {len(message.gathered)} gathers", leader)
    if len(set(names)) != len(names) or not all(map(is_endpoint, names)):
        raise ProtocolViolationError("began a group with malformed or repeated endpoints", leader)
    if endpoint not in names or leader not in names:
        raise ProtocolViolationError("began a group without this peer or without itself", leader)
    members = tuple(unpack_gather(name, gathered) for name, gathered in zip(names, message.gathered, strict=True))
    own, announced = unpack_gather(endpoint, gather), members[names.index(endpoint)]
    if (announced.weight, announced.mode) != (own.weight, own.mode):
        raise ProtocolViolationError(
            f"{leader} began a group in which this peer has weight {announced.weight:g} and mode "
            f"{announced.mode.name}; it sent {own.weight:g} and {own.mode.name}"
        )
    large = id_says(message.group_id, names, message.gathered, large_parts=True)
    joins = large or id_says(message.group_id, names, message.gathered, joins_parts=True)
    return Group(message.group_id, members, leader, joins, large)


@dataclass(slots=True)
class JoinRefusal:
    """The last refusal of a peer in this search."""

    expiration: float  # of the declaration under which it was asked
    count: int  # of its refusals under that declaration
    retry_at: float | None  # when it may be asked again, in seconds since the epoch; None: not in this search
    silent: bool = False  # it did not answer at all: then a new declaration makes it no candidate sooner

    def applies_to(self, expiration: float) -> bool:
        return self.silent or self.expiration == expiration


def can_lead(endpoint: str) -> bool:
    return is_endpoint(endpoint) and not endpoint.startswith(CLIENT_PREFIX)


def candidates(
    own: Declaration,
    entries: Mapping[str, Entry],
    refusals: Mapping[str, JoinRefusal],
    now: float,
    *,
    standing: Callable[[str], LeaderStanding] = lambda _: LeaderStanding.GOOD,
    excluded: Container[str] = frozenset(),
    deserters_from: float = math.inf,
) -> tuple[list[Declaration], float | None]:
    """The peers to ask now: those whose declarations come before `own`, without those that have just refused.

    They are ordered by standing, and those of one standing by declaration. Deserters may be asked from `deserters_from`
    on; times are in seconds since the epoch. If there is none, the second result is when to look again at the latest;
    None if only at a change.
    """
    ranked: list[tuple[LeaderStanding, Declaration]] = []
    again: float | None = None
    for endpoint, entry in entries.items():
        candidate = Declaration(entry.expiration, endpoint)
        if not unpack_looking(entry.value) or candidate >= own or candidate.expiration <= now - CLOCK_TOLERANCE:
            continue
        if endpoint == own.endpoint or endpoint in excluded or not can_lead(endpoint):
            continue
        refusal = refusals.get(endpoint)
        ask_from = now
        if refusal is not None and (refusal.applies_to(candidate.expiration) or refusal.retry_at is None):
            if refusal.retry_at is None:
                continue
            ask_from = refusal.retry_at
        if (its_standing := standing(endpoint)) >= LeaderStanding.DESERTER:
            ask_from = max(ask_from, deserters_from)
        if ask_from <= now:
            ranked.append((its_standing, candidate))
        elif ask_from < math.inf:
            again = ask_from if again is None else min(again, ask_from)
    return [candidate for _, candidate in sorted(ranked)], None if ranked else again


def requests_to_start(pending: int, overdue: int) -> int:
    """The number of peers to ask now.

    0 while a request is `pending`, that is, within its head start. Otherwise as many as are `overdue`, but at least
    one. The number of open requests so doubles each time, and many silent peers take hardly longer than a few.
    """
    return 0 if pending else min(max(1, overdue), MAX_OPEN_REQUESTS)


def head_start(own: float | None, others: float | None, unanswered: int) -> float:
    """The head start of a request in seconds: until it is over, no other peer is asked and no complete group begins.

    `own` is how long the peer usually takes to answer, with room for variation, `others` the median of that over all
    peers, each None if too little is known. `unanswered` requests in a row did not get an answer from it.
    """
    if unanswered >= MAX_UNANSWERED:
        return 0.0
    if own is None:
        own = MAX_HEAD_START if others is None else max(NEW_PEER_HEAD_START, others)
    return min(max(own, MIN_HEAD_START), MAX_HEAD_START)


def next_join_refusal(
    previous: JoinRefusal | None,
    expiration: float,
    code: MessageCode,
    now: float,
    rng: random.Random,
    waited: float = 0.0,
) -> JoinRefusal:
    """The refusal that follows `previous`. A peer with other tensors is not asked again in this search.

    All others are asked again after a growing, random pause. After no answer (`NO_CODE`) the pause is at least the
    seconds that were `waited` for one, so that half of the time is left for other peers.
    """
    count = 1 + (previous.count if previous and previous.expiration == expiration else 0)
    if code in _FINAL_REFUSALS:
        return JoinRefusal(expiration, count, None)
    pause = backoff_delay(_MIN_RETRY_PAUSE, _MAX_RETRY_PAUSE, count) * rng.uniform(0.5, 1.0)
    silent = code is MessageCode.NO_CODE
    return JoinRefusal(expiration, count, now + (max(pause, waited) if silent else pause), silent)


def pack_looking(looking: bool) -> bytes:
    return pack(looking)


def pack_in_group(began: float) -> bytes:
    """The value of a record that says that a group began, in seconds since the epoch, where only one may have the key.

    For peers that do not know it the search is over, as with `pack_looking(False)`.
    """
    return pack({"in_group": began})


def unpack_in_group(value: bytes) -> float | None:
    try:
        match unpack(value):
            case {"in_group": float() as began} if math.isfinite(began):
                return began
    except ValueError:
        pass
    return None


def unpack_looking(value: bytes) -> bool:
    return value == pack_looking(True)
