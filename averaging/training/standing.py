"""What the progress of the other peers means to one peer: who steps with it, and whose history it takes over. Pure.

A history is worth the members that made it. A record in discovery is signed by its owner and says which steps that
owner has made last, so the records of a group together prove what the group has made, and a peer that claims steps that
nobody else has made is worth one. Members are counted by certificate where there are any, else by host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from averaging.common import CLIENT_PREFIX, counted, listed, member_of
from averaging.training.history import History, Made, Origin, Progress, Stage, read_progress

TRAINED_TOGETHER = 1
"""Rounds with others after which a peer leaves its history for no single peer of which it knows nothing."""

MAX_MET = 1024
"""Endpoints of former partners that a peer remembers."""

MAX_JUDGED = 64
"""Different histories that a peer judges at a time: those that most peers announce. A liar may announce many."""


@dataclass(frozen=True, slots=True)
class HistoryStanding:
    """What a peer knows about its own part in its run.

    Attributes:
        made: whether it has made the last step of its present history, or has begun or loaded it.
        missed: number of the last steps that it has taken over, if it has made the ones before; else 0.
        rounds: number of rounds that it has made together with other peers of this origin.
        met: endpoints of the peers that were in groups with it.
        allow_takeover: whether the greater history wins, whoever stands behind it.
    """

    made: bool = False
    missed: int = 0
    rounds: int = 0
    met: frozenset[str] = frozenset()
    allow_takeover: bool = False

    def after_round(self, members: Collection[str], *, averaged: bool) -> HistoryStanding:
        """The standing after a round with these members, this peer included."""
        met = self.met | frozenset(members)
        met = met if len(met) <= MAX_MET else frozenset(members)
        together = averaged and len(members) > 1
        standing = self.after_step() if together else self
        return replace(standing, rounds=self.rounds + together, met=met)

    def after_step(self) -> HistoryStanding:
        return replace(self, made=True, missed=0)

    def after_loading(self, history: History, before: History, *, made: bool) -> HistoryStanding:
        """The standing after the state of a peer was taken over, or a checkpoint was loaded (`made`).

        A peer that has made steps of the history that it takes over stands behind these steps as before.
        """
        rounds = self.rounds if history.origin.id == before.origin.id else 0
        if made or not (self.made or self.missed) or not history.includes(before):
            return replace(self, made=made, missed=0, rounds=rounds)
        missed = self.missed + history.step - before.step if history.lineage else 0
        return replace(self, made=not missed, missed=missed, rounds=rounds)

    @property
    def trained_together(self) -> bool:
        return self.rounds >= TRAINED_TOGETHER

    @property
    def announced(self) -> Made:
        """What this peer says in its record."""
        if not self.made:
            return Made.NOTHING
        return Made.TOGETHER if self.trained_together else Made.ALONE


@dataclass(frozen=True, slots=True)
class Own:
    """A peer that looks at the others.

    Attributes:
        history: its history.
        member: its certificate or host, see `member_of`.
        standing: its part in the run.
        donates: whether its state can be downloaded, see `History.yields_to`.
        quorum: number of peers that may make a step without the others, see `QuorumOptions`; 0 if none may.
        absent: peers that its last round lacked, and that have announced nothing since; they may have died.
    """

    history: History
    member: str = "this peer"
    standing: HistoryStanding = field(default_factory=lambda: HistoryStanding(made=True))
    donates: bool = True
    quorum: int = 0
    absent: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Others:
    """What the progress of the other peers means to one peer.

    Attributes:
        together: peers with the same history, and partners that have not announced it yet.
        samples: gathered for the next step by all peers with the same history.
        computing: samples in the batches that these peers compute now.
        ahead: peers whose state this peer wants to take over, with their history.
        refused: peers that claim a greater history, with that, and too few stand behind it.
    """

    together: tuple[str, ...]
    samples: float
    computing: float
    ahead: Mapping[str, History]
    refused: Mapping[str, History] = field(default_factory=dict)


@dataclass(slots=True)
class _Side:
    members: set[str] = field(default_factory=set)
    endpoints: set[str] = field(default_factory=set)
    together: bool = False

    def add(self, name: str, member: str, made: Made) -> None:
        if member:
            self.members.add(member)
            self.endpoints.add(name)
            self.together |= made is Made.TOGETHER


def compare_progress(
    own: Own,
    announcements: Mapping[str, bytes],
    members: Mapping[str, str] | None = None,
    partners: Collection[str] = (),
    *,
    ignored: Collection[str] = (),
    trains: bool = True,
) -> Others:
    """Compares the announced progress of the other peers with a peer's own history.

    Args:
        own: the peer.
        announcements: packed progress by endpoint; a malformed one is ignored.
        members: what each peer counts as, see `member_of`; by host if None.
        partners: members of its last group, whose progress may be a few steps old.
        ignored: peers whose claim to be ahead is ignored.
        trains: whether the peer is training; it is together only with peers of which the same is true.
    """
    progress = read_progress(announcements)
    ahead, refused = _judge_all(own, progress, progress, members, ignored)
    ready = {name: peer for name, peer in progress.items() if name not in own.absent and _trains(peer) is trains}
    alike = [peer for peer in ready.values() if peer.history == own.history]
    return Others(
        together=_together(own.history, ready, partners),
        samples=sum(peer.samples for peer in alike),
        computing=sum(peer.computing for peer in alike),
        ahead=ahead,
        refused=refused,
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


def look_for_greater_origin(
    own: Own,
    announcements: Mapping[str, bytes],
    members: Mapping[str, str] | None = None,
    *,
    ignored: Collection[str] = (),
) -> Others:
    """Like `compare_progress`, for strategies whose peers may differ: only a peer of another origin can be ahead."""
    progress = read_progress(announcements)
    strangers = {name: peer for name, peer in progress.items() if peer.history.origin.id != own.history.origin.id}
    ahead, refused = _judge_all(own, strangers, progress, members, ignored)
    return Others(tuple(name for name in progress if name not in strangers), 0.0, 0.0, ahead, refused)


def _judge_all(
    own: Own,
    claims: Mapping[str, Progress],
    peers: Mapping[str, Progress],
    members: Mapping[str, str] | None,
    ignored: Collection[str],
) -> tuple[dict[str, History], dict[str, History]]:
    """The peers among `claims` whose history this peer takes over, and those whose greater history it refuses."""
    by_history: dict[History, list[str]] = {}
    for name, peer in claims.items():
        known = peer.history == own.history or (peer.history < own.history and own.history.includes(peer.history))
        if not known and peer.donates and name not in ignored and not name.startswith(CLIENT_PREFIX):
            by_history.setdefault(peer.history, []).append(name)
    members = {name: member_of(name, "") for name in peers} if members is None else members
    ahead: dict[str, History] = {}
    refused: dict[str, History] = {}
    for history in sorted(by_history, key=lambda history: -len(by_history[history]))[:MAX_JUDGED]:
        if takes_over(own, history, peers, members):
            ahead |= dict.fromkeys(by_history[history], history)
        elif history > own.history:
            refused |= dict.fromkeys(by_history[history], history)
    return dict(sorted(ahead.items())), dict(sorted(refused.items()))


def takes_over(own: Own, theirs: History, peers: Mapping[str, Progress], members: Mapping[str, str]) -> bool:
    """Whether a peer leaves its own history for another one.

    The history wins behind which more members stand. If these are equally many, the one whose peers have trained
    together, and then the greater one. A peer that has trained together with others leaves its history for no single
    member, unless that is a former partner with the same origin: it may have made the last step.

    With a quorum, peers that have missed a step are no argument against it: if as many stand behind it as may make a
    step, and it follows the peer's own history, the peer takes it over. Of strangers all endpoints of one member count
    once.

    Args:
        own: the peer.
        theirs: the other history.
        peers: the progress of all other peers.
        members: what each of them counts as, see `member_of`; those without an entry do not count.
    """
    standing, greater = own.standing, own.history.yields_to(theirs, donates=own.donates)
    if standing.allow_takeover:
        return greater
    here, there = _sides(own, theirs, peers, members)
    if own.quorum and theirs.step > own.history.step and theirs.may_follow(own.history):
        known = {name if name in standing.met else members.get(name, "") for name in there.endpoints}
        if len(known) >= own.quorum:
            return True
    if len(there.members) != len(here.members) and len(there.members) > 1:
        return len(there.members) > len(here.members)
    if len(there.members) <= 1:
        partners = there.endpoints & standing.met if theirs.origin.id == own.history.origin.id else set[str]()
        if standing.trained_together and not partners:
            return False
        if len(here.members) != len(there.members):
            return len(there.members) > len(here.members)
        # Peers of one machine can only be counted one by one; those that nobody has met may be inventions. Another
        # machine counts as one, however many endpoints it has.
        count = len(partners) if standing.trained_together else len(there.endpoints)
        if count != len(here.endpoints) and (standing.trained_together or there.members == here.members):
            return count > len(here.endpoints)
    return greater if there.together == here.together else there.together


def _sides(own: Own, theirs: History, peers: Mapping[str, Progress], members: Mapping[str, str]) -> tuple[_Side, _Side]:
    """Who stands behind a peer's own history and not behind the other one, and who behind that."""
    same_origin = theirs.origin.id == own.history.origin.id
    here, there = _Side(), _Side()
    mine = Progress(own.history, made=own.standing.announced, missed=own.standing.missed)
    counted = {"": own.member, **members}
    for name, peer in {"": mine, **peers}.items():
        # Who has made no step of a history has only taken it over. Before the first step nobody has.
        made = peer.history if same_origin and not peer.history.step else peer.made_history
        # Of a peer that has missed steps, has ended its training or may have died, steps that both histories have speak
        # for neither.
        behind = peer.missed or name in own.absent or not _trains(peer)
        if made is None or (behind and own.history.may_follow(made) and theirs.may_follow(made)):
            continue
        if name and _stands_behind(peer.history, theirs):  # it is asked whether this peer itself changes sides
            there.add(name, counted.get(name, ""), peer.made)
        elif (
            peer.history.includes(own.history)
            or own.history.includes(peer.history)
            or (not same_origin and peer.history.origin.id == own.history.origin.id)
        ):
            here.add(name, counted.get(name, ""), peer.made)
    return here, there


def _stands_behind(history: History, other: History) -> bool:
    """Whether a peer with `history` has made the steps of the other one; without global steps the origin decides."""
    without_steps = history.step > 0 and not history.lineage and not other.lineage
    return history.includes(other) or (without_steps and history.origin.id == other.origin.id)


@dataclass(frozen=True, slots=True)
class Claim:
    """One of several histories that a newcomer sees.

    Attributes:
        history: the greatest one of its origin.
        members: those that have made steps of that origin, see `member_of`.
        endpoints: the peers that have.
        given: whether the newcomer was told to join one of them.
    """

    history: History
    members: frozenset[str]
    endpoints: tuple[str, ...]
    given: bool

    def weight(self, *, of_one_machine: bool) -> tuple[int, int, bool, History]:
        return len(self.members), len(self.endpoints) if of_one_machine else 0, self.given, self.history

    def __str__(self) -> str:
        members = counted(len(self.members), "member")
        return f"step {self.history.step} of {members} ({listed(self.endpoints) or 'that has made no step'})"


def rank_donors(
    offered: Collection[tuple[float, str]],
    peers: Mapping[str, Progress],
    members: Mapping[str, str],
    given: Collection[str] = (),
) -> tuple[list[str], list[Claim]]:
    """The peers that a newcomer asks for their state, the best first.

    The donors of the origin that most members have trained with come first; of equally many, those of the origin of a
    peer that it was told to join, then of the greatest history. Of these, the donors whose own history most of these
    members have reached come first, then those with the highest priority.

    Args:
        offered: priorities and endpoints of the donors.
        peers: progress of all other peers.
        members: see `takes_over`.
        given: the peers that the newcomer was told to join.

    Returns:
        The donors, and what was announced for each origin that has any, the chosen one first.
    """
    donors = {name for _, name in offered}
    origins = {peers[name].history.origin.id for name in donors & peers.keys()}
    claims, given_names = [], set(given)
    for origin in origins:
        offers = [peer.history for name, peer in peers.items() if name in donors and peer.history.origin.id == origin]
        behind = _reached(History(origin=Origin(id=origin)), peers, members)
        is_given = not given_names.isdisjoint(behind)
        claims.append(Claim(max(offers), _members(behind, members), tuple(sorted(behind)), is_given))
    of_one_machine = len(frozenset[str]().union(*(claim.members for claim in claims))) == 1
    claims.sort(key=lambda claim: claim.weight(of_one_machine=of_one_machine), reverse=True)
    if not claims:
        return [name for _, name in sorted(offered, key=lambda donor: (-donor[0], donor[1]))], []
    place = {claim.history.origin.id: number for number, claim in enumerate(claims)}
    reached = {history: _reached(history, peers, members) for history in {peer.history for peer in peers.values()}}

    def outvoted(history: History, claim: Claim) -> bool:
        if len(claim.members) > 1:
            return 2 * len(_members(reached[history], members)) <= len(claim.members)
        return 2 * len(reached[history]) <= len(claim.endpoints) > 1

    def order(donor: tuple[float, str]) -> tuple[int, bool, bool, float, str]:
        priority, name = donor
        if name not in peers:
            return len(claims), False, False, -priority, name
        history = peers[name].history
        number = place[history.origin.id]
        loses = outvoted(history, claims[number])
        return number, loses, loses and given_names.isdisjoint(reached[history]), -priority, name

    return [name for _, name in sorted(offered, key=order)], claims


def _reached(history: History, peers: Mapping[str, Progress], members: Mapping[str, str]) -> list[str]:
    """The peers that count and have made the steps of a history; without global steps, as many local ones."""
    made = {name: peer.made_history for name, peer in peers.items() if members.get(name)}
    return [name for name, steps in made.items() if steps is not None and steps.includes(history)]


def _members(names: Collection[str], members: Mapping[str, str]) -> frozenset[str]:
    return frozenset(members[name] for name in names)
