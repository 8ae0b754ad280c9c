"""Who leads whom: the decisions of matchmaking, as pure functions of what a peer knows and of `now`. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import msgpack

from averaging.common.addresses import CLIENT_PREFIX, is_endpoint
from averaging.deadlines.learned_deadlines import VERDICT_SECONDS
from averaging.discovery.base import Entry
from averaging.errors import ProtocolViolationError
from averaging.matchmaking.response_history import Standing
from averaging.protocol.group import (
    MAX_GROUP_SIZE,
    NONCE_BYTES,
    Group,
    Member,
    Mode,
    group_digest,
    is_committed,
    make_group_id,
    unpack_gather,
)
from averaging.protocol.messages import JoinRequest, MessageCode, MessageFromLeader

CLOCK_TOLERANCE = 3.0
"""Seconds by which the clocks of two peers may differ."""

MAX_REDIRECTS = 3
"""How many suggestions in a row a follower takes."""

MAX_ASKED = 32
"""Requests of one peer that are open at the same time; the oldest is withdrawn for another one."""

LONGEST_HEAD_START, NEW_HEAD_START, LEAST_HEAD_START = VERDICT_SECONDS, 1.0, 0.1
"""Seconds for which the answer of a peer is awaited at most, as long as no peer is known; of a new peer, to which a
connection has to be made; and at least, since its machine may be busy."""

MOST_GIVEN_WAY = 300.0
"""Seconds by which a declaration is lengthened at most; discovery keeps no record for longer than an hour."""

HOPELESS = 3
"""A peer that has not answered so many requests in a row is asked, but its answer is not awaited."""

_FIRST_RETRY, _LAST_RETRY = 0.1, 2.0  # seconds until a peer that refused is asked again

_NEVER_AGAIN = frozenset({MessageCode.BAD_SCHEMA_HASH, MessageCode.PROTOCOL_VIOLATION})


@dataclass(frozen=True, slots=True, order=True)
class Declaration:
    """A peer that waits for a group until `expiration` (seconds since the epoch); the least one leads."""

    expiration: float
    endpoint: str


@dataclass(slots=True)
class LeaderCandidate:
    """What a peer that looks for a group knows about itself.

    Attributes:
        target_group_size: members with which its group begins at once.
        enough: members that contribute with which it does, too, if there are `min_group_size` in all; None if with the
            former alone.
        declared: until when it has declared to wait; None before it has declared, and always for a client.
        leader: whom it follows; empty if nobody.
        followers: who follows it, by endpoint.
        least_sizes: the `min_group_size` of each of these.
        assembled: its group is complete, so it looks no more.
    """

    member: Member
    schema_hash: bytes
    target_group_size: int
    enough: int | None = None
    min_group_size: int = 2
    declared: float | None = None
    leader: str = ""
    followers: dict[str, Member] = field(default_factory=dict)
    least_sizes: dict[str, int] = field(default_factory=dict)
    assembled: bool = False


def declared_seconds(matchmaking_time: float, sent_away: bool) -> float:
    """How long the next declaration lasts.

    A leader that has just sent its followers away, since they were too few for it, gives way to them: with the same
    time as before it would be the earliest again, and they would never find a leader for whom they are enough.
    """
    return matchmaking_time + (min(matchmaking_time / 2, MOST_GIVEN_WAY) if sent_away else 0.0)


def verdict(
    request: JoinRequest, searching: LeaderCandidate | None, excluded: Container[str] = frozenset()
) -> tuple[MessageCode, str]:
    """The answer to a request to join, and the suggested leader if there is one. The order of checks is the wire's.

    Who is among `excluded` has broken the protocol before.
    """
    if searching is None or searching.assembled:
        return MessageCode.NOT_LOOKING_FOR_GROUP, ""
    if (
        not request.schema_hash
        or not is_endpoint(request.endpoint)
        or not math.isfinite(request.expiration)
        or not _gather_is_sound(request)
        or searching.member.mode is Mode.CLIENT
        or request.endpoint in excluded
    ):
        return MessageCode.PROTOCOL_VIOLATION, ""
    if request.schema_hash != searching.schema_hash:
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
    """A member whose gather nobody can read would spoil the round for the whole group."""
    try:
        member = unpack_gather(request.endpoint, request.gather)
    except ProtocolViolationError:
        return False
    return (member.mode is Mode.CLIENT) == request.client_mode


def who_begins(searching: LeaderCandidate, min_group_size: int) -> dict[str, Member] | None:
    """The followers with which a leader begins now; None if they are too few, or nobody has tensors or can reduce.

    Followers whose own `min_group_size` is above the members that would be left are left out. Otherwise one that
    asks for more members than there are would keep those from averaging who are enough without it.
    """
    followers = dict(searching.followers)
    while True:
        size = 1 + len(followers)
        staying = {name: member for name, member in followers.items() if searching.least_sizes.get(name, 2) <= size}
        if len(staying) == len(followers):
            break
        followers = staying
    members = [searching.member, *followers.values()]
    enough = size >= min_group_size and any(m.sends for m in members) and any(m.reduces for m in members)
    return followers if enough else None


def is_complete(searching: LeaderCandidate) -> bool:
    """Whether nobody more is waited for. An auxiliary among the members stands for none of those who train."""
    if len(searching.followers) + 1 >= searching.target_group_size:
        return True
    if searching.enough is None or (followers := who_begins(searching, searching.min_group_size)) is None:
        return False
    return sum(member.sends for member in (searching.member, *followers.values())) >= searching.enough


def assemble(searching: LeaderCandidate, gathered: Mapping[str, bytes], rng: random.Random) -> MessageFromLeader:
    """The message with which a leader begins: a random id, all members in random order, and what they gathered."""
    endpoints = [searching.member.endpoint, *searching.followers]
    rng.shuffle(endpoints)
    gathers = tuple(gathered[endpoint] for endpoint in endpoints)
    return MessageFromLeader(
        MessageCode.BEGIN_ALLREDUCE,
        group_id=make_group_id(rng.randbytes(NONCE_BYTES), endpoints, gathers),
        ordered_group_endpoints=tuple(endpoints),
        gathered=gathers,
    )


def read_group(message: MessageFromLeader, endpoint: str, leader: str, gather: bytes) -> Group:
    """The group that `leader` announces to `endpoint`, which sent it `gather`.

    Raises:
        ProtocolViolationError: the announcement makes no sense.
    """
    names = message.ordered_group_endpoints
    if not message.group_id or len(message.group_id) > 256:
        raise ProtocolViolationError(f"{leader} began a group whose id has {len(message.group_id)} bytes")
    if not 2 <= len(names) <= MAX_GROUP_SIZE or len(names) != len(message.gathered):
        raise ProtocolViolationError(f"{leader} began a group of {len(names)} with {len(message.gathered)} gathers")
    if len(set(names)) != len(names) or not all(map(is_endpoint, names)):
        raise ProtocolViolationError(f"{leader} began a group with malformed or repeated endpoints")
    if endpoint not in names or leader not in names:
        raise ProtocolViolationError(f"{leader} began a group without this peer or without itself")
    members = tuple(unpack_gather(name, gathered) for name, gathered in zip(names, message.gathered, strict=True))
    own, told = unpack_gather(endpoint, gather), members[names.index(endpoint)]
    if (told.weight, told.mode) != (own.weight, own.mode):
        raise ProtocolViolationError(
            f"{leader} began a group in which this peer has weight {told.weight:g} and mode {told.mode.name}; "
            f"it told {own.weight:g} and {own.mode.name}"
        )
    digest = group_digest(message.group_id, names, message.gathered)
    return Group(message.group_id, members, leader, digest, is_committed(message.group_id, names, message.gathered))


@dataclass(slots=True)
class Attempt:
    """How a peer answered so far. `retry_at` is in seconds since the epoch; None = not again in this search.

    Who was waited for in vain (`silent`) is not asked sooner if it declares itself anew.
    """

    expiration: float
    refusals: int
    retry_at: float | None
    silent: bool = False

    def is_of(self, expiration: float) -> bool:
        """Whether it says something of a declaration until `expiration` too."""
        return self.silent or self.expiration == expiration


def can_lead(endpoint: str) -> bool:
    """Whether a peer of that name can be asked to lead; anybody may have named it, so it is no offence of its own."""
    return is_endpoint(endpoint) and not endpoint.startswith(CLIENT_PREFIX)


def candidates(
    own: Declaration,
    entries: Mapping[str, Entry],
    attempts: Mapping[str, Attempt],
    now: float,
    *,
    standing: Callable[[str], Standing] = lambda _: Standing.SOUND,
    excluded: Container[str] = frozenset(),
    deserters_from: float = math.inf,
    leads: bool = False,
) -> tuple[list[Declaration], float | None]:
    """Whom to ask now: those who declared to wait less long and have not just refused.

    Peers that answer come first, then peers that may not, then those that did not; of each kind the earliest first.

    Args:
        own: the declaration of the peer that asks.
        entries: what others declared.
        attempts: how they answered in this search.
        now: in seconds since the epoch.
        standing: what is known of each from earlier requests.
        excluded: who is not asked in any case.
        deserters_from: from when on deserters are asked too.
        leads: whether others follow the peer that asks, who would be sent to a notorious deserter.

    Returns:
        These peers and, if there is none, when to look again at the latest; None if only at a change.
    """
    found: list[tuple[Standing, Declaration]] = []
    again: float | None = None
    for endpoint, entry in entries.items():
        candidate = Declaration(entry.expiration, endpoint)
        if not unpack_looking(entry.value) or candidate >= own or candidate.expiration <= now - CLOCK_TOLERANCE:
            continue
        if endpoint == own.endpoint or endpoint in excluded or not can_lead(endpoint):
            continue
        attempt = attempts.get(endpoint)
        moment = now  # from which it may be asked
        if attempt is not None and (attempt.is_of(candidate.expiration) or attempt.retry_at is None):
            if attempt.retry_at is None:
                continue
            moment = attempt.retry_at
        if (its_standing := standing(endpoint)) >= Standing.DESERTER:
            moment = math.inf if leads and its_standing is Standing.NOTORIOUS else max(moment, deserters_from)
        if moment <= now:
            found.append((its_standing, candidate))
        elif moment < math.inf:
            again = moment if again is None else min(again, moment)
    return [candidate for _, candidate in sorted(found)], None if found else again


def how_many(awaited: int, overdue: int) -> int:
    """How many peers more to ask now.

    None while the answer of somebody is `awaited`. Else one, or as many as are `overdue`: twice as many each time, so
    that many silent peers take hardly longer than a few.
    """
    return 0 if awaited else min(max(1, overdue), MAX_ASKED)


def head_start(own: float | None, others: float | None, unanswered: int, doubts: int, vain: int = 0) -> float:
    """Seconds for which the answer of a peer is awaited: nobody else is asked, and no full group begins meanwhile.

    Args:
        own: how long it usually takes to answer, with room for variation; None if too little is known.
        others: the median of that over all peers; None if it is known of none.
        unanswered: requests in a row that it did not answer.
        doubts: these, or if it never answered those of the peers that are like it.
        vain: requests in a row whose answers came late and led to no group.
    """
    if unanswered >= HOPELESS:
        return 0.0
    if own is not None:
        return min(max(own / 2.0 ** min(vain, 10), LEAST_HEAD_START), LONGEST_HEAD_START)
    new = LONGEST_HEAD_START if others is None else NEW_HEAD_START
    new /= 2.0 ** min(doubts, 10)
    return min(max(new, others or 0.0, LEAST_HEAD_START), LONGEST_HEAD_START)


def refused(
    previous: Attempt | None, expiration: float, code: MessageCode, now: float, rng: random.Random, waited: float = 0.0
) -> Attempt:
    """Notes a refusal: a peer with other tensors is not asked again, any other after a growing, random pause.

    Who gave no answer is not asked for as long as was `waited` for one, so that others are met in half of the time.
    """
    refusals = 1 + (previous.refusals if previous and previous.expiration == expiration else 0)
    if code in _NEVER_AGAIN:
        return Attempt(expiration, refusals, None)
    pause = min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(refusals, 10)) * rng.uniform(0.5, 1.0)
    silent = code is MessageCode.NO_CODE
    return Attempt(expiration, refusals, now + (max(pause, waited) if silent else pause), silent)


def pack_looking(looking: bool) -> bytes:
    """The value of a declaration."""
    packed: bytes = msgpack.packb(looking)
    return packed


def unpack_looking(value: bytes) -> bool:
    """Whether the peer that stored this value looks for a group; anything unreadable means no."""
    return value == pack_looking(True)
