"""The history of a run, the progress of its peers, and what that means to one of them. Pure: no clock, no network.

Of two histories the one wins that more peers hold, and of equally many the greater one. So a peer that went on alone,
or has loaded a checkpoint, follows the others however many steps it has made, and all peers decide alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache

from averaging.common import CLIENT_PREFIX, counted, is_count, is_number, listed, pack, unpack
from averaging.errors import StateError
from averaging.receipts import check_rate

MAX_LINEAGE = 64

LINEAGE_BYTES = 8
"""Bytes of a lineage in a trail."""

TRAIL = 16
"""Earlier lineages in a record and in a state. A peer that is fewer steps behind is seen to have the same history."""

MAX_REMEMBERED = 1024
"""Earlier lineages of its own that a peer remembers."""


class Stage(IntEnum):
    """Stage of a peer's training. The numbers are part of its progress record."""

    TRAINING = 0
    """The peer is training."""
    WAITING = 1
    """Its training has ended, and it waits for the other peers to end theirs."""
    CONCLUDING = 2
    """It takes part in a last round with the waiting peers."""
    ENDED = 3
    """It announces the digest of its weights."""
    COMPARED = 4
    """It has the digests of all peers that end with it."""


class Rank(IntEnum):
    """Why a peer began with its own parameters. The greater rank wins."""

    UNSHARED = 0
    """Nobody can download its state, so it yields to every other origin."""
    FOUND_NOBODY = 1
    """It was configured to join peers, and found none with a state."""
    APPOINTED = 2
    """It has no peers to join, so it is the one that begins the run."""


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """The origin of a run: the peer whose parameters all others have taken over.

    Peers of different origins have different parameters, so they never average gradients or changes with each other.
    The greater origin wins: the one with the higher rank, then the earlier one, then the greater id.
    """

    rank: Rank = Rank.UNSHARED  # why the peer began with its own parameters
    earliness: float = 0.0  # negative time at which it began, in seconds since the epoch
    id: str = ""  # random, hexadecimal; empty if nobody can download its state

    def pack(self) -> list[int | float | str]:
        return [int(self.rank), self.earliness, self.id]

    @classmethod
    def unpack(cls, packed: object) -> Origin:
        match packed:
            case [int(rank), float() | int() as earliness, str(id)] if (
                rank in list(Rank) and math.isfinite(earliness) and len(id) <= MAX_LINEAGE
            ):
                return cls(Rank(rank), float(earliness), id)
        raise StateError(f"{str(packed)[:100]!r} is not the origin of a run")


@dataclass(frozen=True, slots=True, order=True)
class History:
    """The origin of a run and its global steps. Peers with equal histories hold equal parameters.

    The greater of two histories wins: the one with more steps, then the one with more samples in the last step, then
    the greater lineage; before the first step the greater origin. A peer with the lesser history takes over the state
    of a peer with the greater one.
    """

    step: int = 0  # number of global steps
    samples: float = 0.0  # samples of the whole group in the last step
    lineage: str = ""  # hash of the origin and the groups of all steps, hexadecimal; empty before the first step
    origin: Origin = field(default_factory=Origin)  # origin of the run
    # the lineages of the steps before, the last one last, as far as they are known. Not compared.
    trail: tuple[str, ...] = field(default=(), compare=False)

    def after(self, group_id: bytes, samples: float) -> History:
        """The history after one more step, made with that group."""
        chained = hashlib.sha256(f"{self.origin.id}{self.lineage}".encode() + group_id).hexdigest()
        trail = (*self.trail, self.lineage)[-MAX_REMEMBERED:] if self.lineage else ()
        return History(self.step + 1, samples, chained[: 2 * LINEAGE_BYTES], self.origin, trail)

    def includes(self, other: History) -> bool:
        """Whether a peer with this history has made the steps of the other one, as far as the trail shows."""
        if self == other:
            return True
        if self.origin.id != other.origin.id or self.step < other.step:
            return False
        if not other.lineage:  # no step was made together yet, or this strategy makes none
            return not other.step or not self.lineage
        behind = self.step - other.step
        return 0 < behind <= len(self.trail) and self.trail[-behind] == other.lineage

    def may_follow(self, other: History) -> bool:
        """Whether this history includes the other one, or is too far ahead of it for its trail to show that."""
        same = self.origin.id == other.origin.id
        return self.includes(other) or (same and self.step - other.step > len(self.trail))

    @property
    def phase(self) -> str:
        return f"{self.step}-{self.lineage or self.origin.id}"

    def pack(self) -> list[int | float | str | list[int | float | str]]:
        return [self.step, self.samples, self.lineage, self.origin.pack()]

    def pack_trail(self) -> bytes:
        return b"".join(map(bytes.fromhex, self.trail[-TRAIL:]))

    @classmethod
    def unpack(cls, packed: object, trail: object = b"") -> History:
        """Unpacks `pack`, or raises StateError, and `pack_trail`, of which a malformed one is ignored."""
        match packed:
            case [step, float() | int() as samples, str(lineage), origin] if (
                is_count(step) and math.isfinite(samples) and len(lineage) <= MAX_LINEAGE
            ):
                return cls(step, float(samples), lineage, Origin.unpack(origin), _unpack_trail(trail))
        raise StateError(f"{str(packed)[:100]!r} is not the history of a run")

    def yields_to(self, other: History, *, donates: bool) -> bool:
        """Whether a peer with this history takes over the state of a peer with the other one.

        A peer whose own state cannot be downloaded yields to every other history with as many steps.
        """
        return other > self or (not donates and other.step == self.step and other != self)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one peer announces."""

    history: History  # origin of the run, and its steps
    samples: float = 0.0  # gathered for the next step
    computing: float = 0.0  # samples in the batch that it computes now; 0 while it waits
    donates: bool = True  # whether its state can be downloaded
    stage: Stage = Stage.TRAINING  # stage of its training
    digest: str = ""  # digest of its weights, once the training has ended
    rate: float | None = None  # local steps or samples per second, see `Pace`; None if unknown
    # digests of the parts of its model, see `ModelParts`; while it trains only of what does not change
    parts: Mapping[str, str] = field(default_factory=dict)
    # moment of the run's clock at which it expects to average next, in seconds since the epoch; 0 if it has made no
    # step yet, so that nobody waits for it; None if it counts steps
    moment: float | None = None
    # options that all peers of a run must have alike, by name, as text; see `Strategy.terms`
    terms: Mapping[str, str] = field(default_factory=dict)
    # step of the round to which it waits to contribute although it has missed rounds; None if it does not. Without a
    # quorum, the step whose state it downloads, having been behind after its last download, too: the others put off
    # their next step.
    late: int | None = None

    def pack(self) -> bytes:
        """For a record in discovery; `receipts.status.INDEX` is the place of the rate in it."""
        history, trail = self.history.pack(), self.history.pack_trail()
        work = [history, self.samples, self.computing, self.donates, int(self.stage), self.digest, self.rate, trail]
        terms = ",".join(f"{name}={value}" for name, value in self.terms.items())
        # The 1 stands where earlier releases read what a peer had made of its history.
        return pack([*work, 1, dict(self.parts), self.moment, terms, self.late])

    @classmethod
    def unpack(cls, packed: bytes) -> Progress | None:
        """Unpacks what `pack` returned; an implausible rate is ignored. Returns None if `packed` is malformed."""
        try:
            items = unpack(packed)
            match items:
                case [history, samples, computing, bool(donates), stage, str(digest), rate, trail, _, *more]:
                    parts, moment, terms, late, *_ = more
                case _:
                    return None
            numbers = (samples, computing, 0.0 if moment is None else moment, 0 if late is None else late)
            if not all(is_number(number) and number >= 0 for number in numbers) or len(digest) > MAX_LINEAGE:
                return None
            return cls(
                History.unpack(history, trail),
                *(float(samples), float(computing), donates, Stage(stage), digest, check_rate(rate)),
                parts=_read_parts(parts),
                moment=moment,
                terms=dict(term.split("=", 1) for term in terms.split(",") if term),
                late=late,
            )
        except (StateError, ValueError, TypeError, AttributeError):
            return None


def _unpack_trail(packed: object) -> tuple[str, ...]:
    if isinstance(packed, str) and len(packed) <= 2 * TRAIL * LINEAGE_BYTES:
        try:
            packed = bytes.fromhex(packed)
        except ValueError:
            return ()
    if not isinstance(packed, bytes) or len(packed) > TRAIL * LINEAGE_BYTES or len(packed) % LINEAGE_BYTES:
        return ()
    return tuple(packed[place : place + LINEAGE_BYTES].hex() for place in range(0, len(packed), LINEAGE_BYTES))


def _read_parts(packed: object) -> dict[str, str]:
    if not isinstance(packed, dict) or not all(isinstance(text, str) for pair in packed.items() for text in pair):
        raise StateError(f"{packed!r:.100} are not the digests of a model")
    return packed


def coming_at(announcements: Mapping[str, bytes], moment: float, interval: float) -> frozenset[str]:
    return frozenset(
        name
        for name, progress in read_progress(announcements).items()
        if progress.moment is not None and abs(progress.moment - moment) <= interval / 2
    )


def compare_terms(own: Mapping[str, str], announcements: Mapping[str, bytes]) -> tuple[dict[str, str], set[str]]:
    """The peers that have other terms, by endpoint, with the first difference as text; and those that have the same."""
    differing: dict[str, str] = {}
    alike = set()
    for name, progress in read_progress(announcements).items():
        known = [(term, here, progress.terms[term]) for term, here in own.items() if term in progress.terms]
        others = [
            f"{term} is {here} at this peer, but {there} at {name}" for term, here, there in known if there != here
        ]
        if others:
            differing[name] = others[0]
        elif known:
            alike.add(name)
    return differing, alike


def find_late(own: History, announcements: Mapping[str, bytes]) -> tuple[str, ...]:
    return tuple(
        name
        for name, progress in read_progress(announcements).items()
        if progress.late == own.step
        and progress.stage is Stage.TRAINING
        and progress.history.origin.id == own.origin.id
        and progress.history.step <= own.step
    )


def find_behind(own: History, announcements: Mapping[str, bytes]) -> dict[str, bool]:
    return {
        name: progress.late is not None
        for name, progress in read_progress(announcements).items()
        if progress.stage is Stage.TRAINING and progress.history.step < own.step and own.may_follow(progress.history)
    }


def any_advanced(target: History, names: Collection[str], announcements: Mapping[str, bytes]) -> bool:
    return any(
        name in names and progress.history.origin.id == target.origin.id and progress.history.step > target.step
        for name, progress in read_progress(announcements).items()
    )


# Each record is read several times in a step, and changes seldom.
_read = lru_cache(maxsize=4096)(Progress.unpack)


def read_progress(announcements: Mapping[str, bytes]) -> dict[str, Progress]:
    """The progress of each peer by endpoint, in order; a malformed one is left out."""
    read = {name: _read(packed) for name, packed in sorted(announcements.items())}
    return {name: progress for name, progress in read.items() if progress is not None}


def same_origin(own: History, announcements: Mapping[str, bytes]) -> frozenset[str]:
    """The peers whose run has the same origin, and those whose progress is malformed."""
    others = {
        name for name, progress in read_progress(announcements).items() if progress.history.origin.id != own.origin.id
    }
    return frozenset(announcements.keys() - others)


def still_training(announcements: Mapping[str, bytes]) -> frozenset[str]:
    return frozenset(announcements.keys() - done_training(announcements))


def done_training(announcements: Mapping[str, bytes], stage: Stage = Stage.WAITING) -> frozenset[str]:
    return frozenset(name for name, progress in read_progress(announcements).items() if progress.stage >= stage)


@dataclass(frozen=True, slots=True)
class HistoryStanding:
    """What a peer knows about its own part in its run."""

    made: bool = False  # whether it has made the last step of its present history, or has begun or loaded it
    rounds: int = 0  # made together with other peers of this origin

    def after_round(self, members: Collection[str], *, averaged: bool) -> HistoryStanding:
        return HistoryStanding(True, self.rounds + 1) if averaged and len(members) > 1 else self

    def after_step(self) -> HistoryStanding:
        return replace(self, made=True)

    def after_loading(self, history: History, before: History, *, made: bool) -> HistoryStanding:
        """The standing after the state of a peer was taken over, or a checkpoint was loaded (`made`)."""
        same = history.includes(before) and (not history.lineage or history.step == before.step)
        rounds = self.rounds if history.origin.id == before.origin.id else 0
        return HistoryStanding(made or (self.made and same), rounds)


@dataclass(frozen=True, slots=True)
class Own:
    """A peer that looks at the others."""

    history: History
    donates: bool = True  # whether its state can be downloaded, see `History.yields_to`
    quorum: int = 0  # peers that may make a step without the others, see `QuorumOptions`; 0 if none may
    absent: Collection[str] = ()  # peers that its last round lacked and that announce nothing since; they may have died


@dataclass(frozen=True, slots=True)
class Others:
    """What the progress of the other peers means to one peer."""

    together: tuple[str, ...]  # peers with the same history, and partners that have not announced it yet
    samples: float  # gathered for the next step by all peers with the same history
    computing: float  # samples in the batches that these peers compute now
    ahead: Mapping[str, History]  # peers whose state this peer wants to take over, with their history


def compare_progress(
    own: Own,
    announcements: Mapping[str, bytes],
    partners: Collection[str] = (),
    *,
    ignored: Collection[str] = (),
    trains: bool = True,
) -> Others:
    """Compares the announced progress of the other peers with a peer's own history.

    `partners` are the members of its last group, whose progress may be a few steps old; `ignored` peers are not
    followed. A peer is together only with peers that train (`trains`) if it does.
    """
    progress = read_progress(announcements)
    present = {name: packed for name, packed in announcements.items() if name not in own.absent}
    alike = [
        peer
        for name, peer in progress.items()
        if name in present and peer.history == own.history and _trains(peer) is trains
    ]
    return Others(
        together=find_together(own.history, present, partners, trains=trains),
        samples=sum(peer.samples for peer in alike),
        computing=sum(peer.computing for peer in alike),
        ahead=_ahead(own, progress, progress, ignored),
    )


def find_together(
    own: History, announcements: Mapping[str, bytes], partners: Collection[str] = (), *, trains: bool = True
) -> tuple[str, ...]:
    """The `together` of `compare_progress`."""
    return tuple(
        name
        for name, peer in read_progress(announcements).items()
        if _trains(peer) is trains and (peer.history == own or (name in partners and peer.history < own))
    )


def _trains(peer: Progress) -> bool:
    return peer.stage is Stage.TRAINING


def look_for_greater_origin(own: Own, announcements: Mapping[str, bytes], *, ignored: Collection[str] = ()) -> Others:
    """Like `compare_progress`, for strategies whose peers may differ: only a peer of another origin can be ahead."""
    progress = read_progress(announcements)
    strangers = {name: peer for name, peer in progress.items() if peer.history.origin.id != own.history.origin.id}
    ahead = _ahead(own, strangers, progress, ignored)
    return Others(tuple(name for name in progress if name not in strangers), 0.0, 0.0, ahead)


def _ahead(
    own: Own, candidates: Mapping[str, Progress], peers: Mapping[str, Progress], ignored: Collection[str]
) -> dict[str, History]:
    mine = own.history
    offered = {
        name: peer.history
        for name, peer in candidates.items()
        if peer.donates
        and name not in ignored
        and not name.startswith(CLIENT_PREFIX)
        and peer.history != mine
        and not (peer.history < mine and mine.includes(peer.history))
    }
    wins = {history: takes_over(own, history, peers) for history in set(offered.values())}
    return {name: history for name, history in offered.items() if wins[history]}


def takes_over(own: Own, theirs: History, peers: Mapping[str, Progress]) -> bool:
    """Whether a peer leaves its own history for another one, given the progress of all other peers.

    With a quorum, peers that have missed a step are no argument against it: if as many hold it as may make a step, and
    it follows the peer's own history, the peer takes it over.
    """
    sides = [_side(own, theirs, name, peer) for name, peer in peers.items()]
    here, there = 1 + sides.count(own.history), sides.count(theirs)
    follows = theirs.step > own.history.step and theirs.may_follow(own.history)
    if here == there:
        return own.history.yields_to(theirs, donates=own.donates)
    return there > here or (own.quorum > 0 and follows and there >= own.quorum)


def _side(own: Own, theirs: History, name: str, peer: Progress) -> History | None:
    """The history for which another peer counts; None if for neither. Seen from the other side it is the same."""
    mine, its = own.history, peer.history
    if _holds(its, theirs):
        return theirs
    if mine.may_follow(its) and theirs.may_follow(its):
        # Steps that both have speak for neither: that peer is behind, has ended its training, or may have died. Only
        # peers that train at this peer's own step keep it there, if others went on without them.
        return mine if its == mine and _trains(peer) and name not in own.absent else None
    if _holds(its, mine) or mine.includes(its):
        return mine
    if theirs.includes(its):
        return theirs
    if mine.origin.id == theirs.origin.id:
        return None  # a third one
    return {mine.origin.id: mine, theirs.origin.id: theirs}.get(its.origin.id)


def _holds(history: History, other: History) -> bool:
    """Whether a peer with `history` has made the steps of the other one; without global steps the origin decides."""
    without_steps = history.step > 0 and not history.lineage and not other.lineage
    return history.includes(other) or (without_steps and history.origin.id == other.origin.id)


@dataclass(frozen=True, slots=True)
class RunClaim:
    """One of several origins that a newcomer sees."""

    history: History  # the greatest one of it that a donor offers
    endpoints: tuple[str, ...]  # the peers of it
    given: bool  # whether the newcomer was told to join one of them

    def __str__(self) -> str:
        return f"step {self.history.step} of {counted(len(self.endpoints), 'peer')} ({listed(self.endpoints)})"


def rank_donors(
    offered: Collection[tuple[float, str]], peers: Mapping[str, Progress], given: Collection[str] = ()
) -> tuple[list[str], list[RunClaim]]:
    """The peers that a newcomer asks for their state, the best first, and what was announced for each origin, likewise.

    The donors of the origin that most peers have come first; of equally many, those of the origin of a peer that it was
    told to join (`given`), then of the greatest history. Of these, the donors whose own history at least half of these
    peers hold come first, then those with the highest priority.
    """
    donors = {name for _, name in offered} & peers.keys()
    claims = []
    for origin in {peers[name].history.origin.id for name in donors}:
        behind = sorted(name for name, peer in peers.items() if peer.history.origin.id == origin)
        greatest = max(peers[name].history for name in donors.intersection(behind))
        claims.append(RunClaim(greatest, tuple(behind), not {*given}.isdisjoint(behind)))
    claims.sort(key=lambda claim: (len(claim.endpoints), claim.given, claim.history), reverse=True)
    place = {claim.history.origin.id: number for number, claim in enumerate(claims)}

    def order(donor: tuple[float, str]) -> tuple[int, bool, float, str]:
        priority, name = donor
        if name not in peers:
            return len(claims), False, -priority, name
        history = peers[name].history
        number = place[history.origin.id]
        holders = sum(_holds(peers[other].history, history) for other in claims[number].endpoints)
        return number, 2 * holders <= len(claims[number].endpoints) > 1, -priority, name

    return [name for _, name in sorted(offered, key=order)], claims
