"""What the progress of the other peers means to one peer: who steps with it, and whose history it takes over. Pure.

Of two histories the one wins that more peers hold, and of equally many the greater one. So a peer that went on alone,
or has loaded a checkpoint, follows the others however many steps it has made, and all peers decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from averaging.common import CLIENT_PREFIX, counted, listed
from averaging.training.history import History, Progress, Stage, read_progress


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

    Args:
        own: the peer.
        announcements: packed progress by endpoint; a malformed one is ignored.
        partners: members of its last group, whose progress may be a few steps old.
        ignored: peers that are not followed.
        trains: whether the peer is training; it is together only with peers of which the same is true.
    """
    progress = read_progress(announcements)
    ready = {name: peer for name, peer in progress.items() if name not in own.absent and _trains(peer) is trains}
    alike = [peer for peer in ready.values() if peer.history == own.history]
    return Others(
        together=_together(own.history, ready, partners),
        samples=sum(peer.samples for peer in alike),
        computing=sum(peer.computing for peer in alike),
        ahead=_ahead(own, progress, progress, ignored),
    )


def find_together(
    own: History, announcements: Mapping[str, bytes], partners: Collection[str] = (), *, trains: bool = True
) -> tuple[str, ...]:
    """The `together` of `compare_progress`."""
    ready = {name: peer for name, peer in read_progress(announcements).items() if _trains(peer) is trains}
    return _together(own, ready, partners)


def _together(own: History, ready: Mapping[str, Progress], partners: Collection[str]) -> tuple[str, ...]:
    return tuple(
        name for name, peer in ready.items() if peer.history == own or (name in partners and peer.history < own)
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
    """The peers that a newcomer asks for their state, the best first.

    The donors of the origin that most peers have come first; of equally many, those of the origin of a peer that it was
    told to join, then of the greatest history. Of these, the donors whose own history at least half of these peers hold
    come first, then those with the highest priority.

    Args:
        offered: priorities and endpoints of the donors.
        peers: progress of all other peers.
        given: the peers that the newcomer was told to join.

    Returns:
        The donors, and what was announced for each origin that has any, the chosen one first.
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
