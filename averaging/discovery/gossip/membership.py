"""What the parts of one peer's gossip share: its constants, its calls, and the members of the run.

The members are those of the records, those that did not answer lately, and those to try again.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterable, Set
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

from averaging.common import CLIENT_PREFIX, Backoff, is_endpoint
from averaging.discovery.gossip.record import RecordLimits
from averaging.errors import AveragingError, PeerUnreachableError, ProtocolViolationError, TransportError
from averaging.transport import Transport

CALL_FAILURES = (TransportError, ProtocolViolationError, TimeoutError)
"""The errors of a call that concern only the peer that was called."""


def why_failed(error: Exception) -> str:
    return error.reason if isinstance(error, AveragingError) else str(error) or "no answer"


def is_refused(error: Exception) -> bool:
    return isinstance(error, PeerUnreachableError) and error.refused


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipSettings:
    """Times (in seconds) and sizes of gossip discovery."""

    limits: RecordLimits = field(default_factory=RecordLimits)
    join_timeout: float = 10.0  # within which a seed must answer; time in which this peer stood still does not count
    peer_lifetime: float = 30.0  # of a presence record, and so the time after which a dead peer is no longer a member
    peer_refresh: float = 10.0  # interval of its renewals, which reach all of a thousand peers after ten exchanges
    fanout: int = 4  # branches into which a peer splits a range of the ring, see `membership`
    tick: float = 0.005  # rumours within this time are sent together
    push_timeout: float = 2.0  # of one push; then the next peer of the branch is tried
    rumour_timeout: float = 10.0  # age from which a rumour is no longer sent; exchanges spread the record
    exchange_interval: float = 2.0  # mean time between exchanges with a random member, and calls to silent ones
    exchange_timeout: float = 10.0
    retry_interval: float = 10.0  # mean time between calls to seeds and members that are missing
    look_up_interval: float = 5.0  # mean time between look-ups of seeds while no other peer is known
    retry_lost: float = 600.0  # for which an expired member is tried again
    max_lost: int = 256  # expired members that are remembered
    initial_backoff: float = 0.1  # until a failed seed is called again, or a client looks for another peer to follow
    max_backoff: float = 2.0  # to which it doubles
    leave_timeout: float = 1.0  # for sending the withdrawals when leaving
    rumours_per_push: int = 256
    records_per_reply: int = 128  # in one message of an exchange
    max_streams: int = 256  # clients that may follow one peer
    stream_backlog: int = 1024  # records that may wait for a client; the stream of a slower client ends


@dataclass(frozen=True, slots=True)
class GossipAccess:
    run_id: str
    endpoint: str
    transport: Transport
    settings: GossipSettings
    clock: Callable[[], float]  # seconds since the epoch
    rng: random.Random  # picks members and intervals

    @property
    def is_client(self) -> bool:
        return self.endpoint.startswith(CLIENT_PREFIX)

    def around(self, seconds: float) -> float:
        return seconds * self.rng.uniform(0.5, 1.5)

    def backoff(self) -> Backoff:
        return Backoff(self.settings.initial_backoff, self.settings.max_backoff, self.rng)


# The tree by which a new record reaches every peer exactly once, in log_fanout(N) hops. Pure.
#
# Peers are on a ring, in the order of the hashes of their endpoints. A peer that is to send a record to a range of the
# ring splits the peers that it knows there into `fanout` branches of equal size. It sends the record to the first peer
# of each branch, together with the range of that branch, and that peer does the same for the range.
#
# A range never contains a peer that has received the record already. So there is one message per peer, and the
# broadcast ends even if the peers disagree about who is in the run. The branches depend on the ring alone, so a peer
# always sends to the same few others, to which it has connections. These are the fingers of Chord (Stoica et al. 2001);
# El-Ansary et al. (2003) describe the broadcast over them.


RING = 2**64
"""Hashes are from 1 to RING - 1. No peer has hash 0, so the range (0, 0) is empty."""


@dataclass(frozen=True, slots=True)
class BroadcastBranch:  # a range of the ring, ends included
    start: int
    end: int
    candidates: tuple[str, ...]  # the peers that can serve it, in the order in which to try them


@lru_cache(maxsize=16384)
def peer_hash(endpoint: str) -> int:
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "little") or 1


def all_others(endpoint: str) -> tuple[int, int]:
    own = peer_hash(endpoint)
    return (own + 1) % RING, own - 1


class BroadcastRing:
    """The peers in the order of their hashes; of two with the same hash, only the first is on the ring."""

    def __init__(self, endpoints: Iterable[str] = ()) -> None:
        self._places: list[tuple[int, str]] = []
        self._names: set[str] = set()
        for endpoint in endpoints:
            self.add(endpoint)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, endpoint: object) -> bool:
        return endpoint in self._names

    def __getitem__(self, index: int) -> str:
        return self._places[index][1]

    def add(self, endpoint: str) -> None:
        number = peer_hash(endpoint)
        if not self.within(number, number):
            insort(self._places, (number, endpoint))
            self._names.add(endpoint)

    def discard(self, endpoint: str) -> None:
        if endpoint in self._names:
            self._names.discard(endpoint)
            self._places.remove((peer_hash(endpoint), endpoint))

    def within(self, start: int, end: int) -> list[tuple[int, str]]:
        """The peers with a hash in [start, end], in ring order; if end < start, the range wraps around."""
        if start <= end:
            return self._places[bisect_left(self._places, (start, "")) : bisect_right(self._places, (end + 1, ""))]
        return self.within(start, RING - 1) + self.within(0, end)

    def branches(
        self, endpoint: str, start: int, end: int, fanout: int, avoid: Container[str] = ()
    ) -> list[BroadcastBranch]:
        """The branches by which `endpoint` reaches [start, end]: at most fanout + 1, without its own hash.

        Peers in `avoid`, which did not answer lately, are tried after all others of their branch.
        """
        if (start, end) == (0, 0):
            return []
        own = peer_hash(endpoint)
        if not (start <= own <= end if start <= end else own >= start or own <= end):
            return self._split(start, end, fanout, avoid)
        after = self._split((own + 1) % RING, end, fanout, avoid) if own != end else []
        # Usually this peer is the first of its branch, with none before it. There are some if the sender knows other
        # peers than this one, or if the first peer of the branch did not answer.
        before = self._split(start, own - 1, 1, avoid) if own != start else []
        return after + before

    def _split(self, start: int, end: int, fanout: int, avoid: Container[str]) -> list[BroadcastBranch]:
        """Splits [start, end] into `fanout` branches of equal size, or fewer if there are fewer members."""
        members = self.within(start, end)
        count = min(fanout, len(members))
        bounds = [len(members) * number // count for number in range(count + 1)] if count else []
        starts = [start, *(members[bound][0] for bound in bounds[1:-1])]
        ends = [*((first - 1) % RING for first in starts[1:]), end]
        branches = []
        for number in range(count):
            names = [name for _, name in members[bounds[number] : bounds[number + 1]]]
            names.sort(key=lambda name: name in avoid)  # stable
            branches.append(BroadcastBranch(starts[number], ends[number], tuple(names)))
        return branches


_FAILURE_SECONDS = 60.0  # for which a failed call counts; live members are usually called again sooner
_LATELY_SECONDS = 15.0  # for which a lost member is called as often as a member: it may have been cut off for a moment
_LOST_AT_ONCE = 8  # of many that expired together: enough to find one of them again soon


class Membership:
    """The other members of the run. Clients are not among them, since they accept no connections.

    `on_refused` is called with a member that has refused a connection.
    """

    def __init__(
        self, access: GossipAccess, seeds: Iterable[str], on_refused: Callable[[str], None] = lambda endpoint: None
    ) -> None:
        self._endpoint, self._rng, self._settings = access.endpoint, access.rng, access.settings
        self._is_client, self._on_refused = access.is_client, on_refused
        self.seeds: tuple[str, ...] = ()
        self._ring = BroadcastRing()
        self._suspects: dict[str, None] = {}  # ordered, so that simulations are reproducible
        self._lost: dict[str, float] = {}
        self._failures: dict[str, tuple[float, str]] = {}  # when and why the last call failed
        self._callers: dict[str, float] = {}  # when those whose last call failed have called this peer
        self._refusing: set[str] = set()  # those that have refused a connection, without a sign of life since
        self._joined_seeds: set[str] = set()  # the seeds that have been members
        self.set_seeds(seeds)
        self.stream_source: str | None = None  # the member whose stream this peer reads, if it is a client

    def set_seeds(self, seeds: Iterable[str]) -> None:
        self.seeds = tuple(dict.fromkeys(seed for seed in seeds if seed != self._endpoint))
        self._joined_seeds.intersection_update(self.seeds)

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, endpoint: str) -> None:
        """Adds a member, or notes that it has renewed its record."""
        self._note_life(endpoint)
        if endpoint in self._ring:
            return
        if endpoint in self.seeds:
            self._joined_seeds.add(endpoint)
        self._lost.pop(endpoint, None)
        if endpoint != self._endpoint and is_endpoint(endpoint) and not endpoint.startswith(CLIENT_PREFIX):
            self._ring.add(endpoint)

    def remove(self, endpoint: str, now: float, *, expired: bool) -> None:
        """Removes a member: it left, or its record has `expired`."""
        known = endpoint in self._ring
        self._ring.discard(endpoint)
        self._suspects.pop(endpoint, None)
        if not expired:
            self._failures.pop(endpoint, None)
            self._refusing.discard(endpoint)
        elif known:
            self._lost[endpoint] = now
            if len(self._lost) > self._settings.max_lost:
                del self._lost[next(iter(self._lost))]

    @property
    def expired(self) -> Set[str]:
        """The members whose record has expired lately, as that of a killed peer does. Who leaves withdraws it."""
        return self._lost.keys()

    @property
    def lost(self) -> Set[str]:
        return self._lost.keys() | self._refusing

    def note_call(self, endpoint: str, now: float) -> None:
        self._note_life(endpoint)  # it is up
        if endpoint in self._failures:
            self._callers[endpoint] = now

    def note_answer(self, endpoint: str) -> None:
        self._note_life(endpoint)
        self._failures.pop(endpoint, None)

    def _note_life(self, endpoint: str) -> None:
        self._suspects.pop(endpoint, None)
        self._refusing.discard(endpoint)

    def suspect(self, endpoint: str, now: float, why: str, *, refused: bool = False) -> None:
        """`endpoint` did not answer, or has refused the connection: it is tried after all others, until it is alive."""
        if endpoint in self._ring:
            self._suspects[endpoint] = None
        if not refused:
            self._refusing.discard(endpoint)
        elif endpoint in self._ring or endpoint in self._lost or endpoint in self._joined_seeds:
            self._refusing.add(endpoint)
        if endpoint in self._ring or endpoint in self.seeds or endpoint in self._lost:
            self._failures[endpoint] = now, why
        if refused and endpoint in self._ring:
            self._on_refused(endpoint)

    def silent(self, now: float) -> dict[str, str]:
        """The members and seeds that did not answer within the last minute, and why; not those that are gone.

        One that refuses connections and has called within the last minute is not gone: a firewall may be before it.
        """
        self._failures = {
            name: (when, why)
            for name, (when, why) in self._failures.items()
            if now - when < _FAILURE_SECONDS and (name in self._ring or name in self.seeds or name in self._lost)
        }
        self._callers = {name: when for name, when in self._callers.items() if now - when < _FAILURE_SECONDS}
        gone = {name for name in self._refusing if name not in self._ring and name not in self._callers}
        return {name: why for name, (_, why) in self._failures.items() if name not in gone}

    def pick(self) -> str | None:
        """A random member, if possible one that is not suspected; None if there are no members."""
        if len(self._suspects) < len(self._ring):
            while (choice := self._ring[self._rng.randrange(len(self._ring))]) in self._suspects:
                pass
            return choice
        return self._ring[self._rng.randrange(len(self._ring))] if len(self._ring) else None

    def pick_stream_source(self, now: float) -> str | None:
        if len(self._suspects) < len(self._ring):
            return self.pick()
        others = [*self._suspects, *self.pick_missing(now)]
        return self._rng.choice(others) if others else None

    def pick_silent(self, now: float) -> list[str]:
        """A few of the members that did not answer: `pick` avoids them, or they were lost a moment ago."""
        lost = [name for name, since in self._lost.items() if now - since < _LATELY_SECONDS]
        return self._rng.sample([*self._suspects, *lost], min(len(self._suspects) + len(lost), _LOST_AT_ONCE))

    def pick_missing(self, now: float) -> list[str]:
        self._lost = {name: since for name, since in self._lost.items() if now - since < self._settings.retry_lost}
        known = self._lost.keys() | self._joined_seeds
        self._refusing = {name for name in self._refusing if name in self._ring or name in known}
        lost = self._rng.sample(list(self._lost), min(len(self._lost), _LOST_AT_ONCE))
        return list(dict.fromkeys([*(seed for seed in self.seeds if seed not in self._ring), *lost]))

    def branches(self, start: int, end: int, fanout: int) -> list[BroadcastBranch]:
        """How this peer reaches [start, end], see `BroadcastRing.branches`. A client has one member do it."""
        if not self._is_client:
            return self._ring.branches(self._endpoint, start, end, fanout, self._suspects)
        names = sorted((name for _, name in self._ring.within(1, RING - 1)), key=lambda name: name in self._suspects)
        first = () if self.stream_source is None else (self.stream_source,)
        return [BroadcastBranch(1, RING - 1, tuple(dict.fromkeys((*first, *names, *self.seeds))))]
