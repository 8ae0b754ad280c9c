"""The status of a peer, of its training, and how fast it trains. Pure: the caller passes the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from averaging.common import counted, is_number, listed, unpack
from averaging.errors import printable
from averaging.receipts.progress import TrainingProgress
from averaging.receipts.receipt import Receipt, Totals
from averaging.timing import Learned


@dataclass(frozen=True, slots=True)
class WeightReader:
    """A follower or an explorer that gets weights from a service on a peer's port."""

    kind: str  # follower or explorer
    name: str  # endpoint of a follower that hands on what it has, or the name that an explorer has given
    # of an explorer: running, require_sync or stopped; of a follower empty, or why its version is unknown
    status: str = ""
    # newest version that it has asked for, or that its engine has; None before the first, and if unknown
    version: int | None = None
    newest: int | None = None  # newest version that there is; None before the first


MAX_READERS = 256  # readers of weights in a status


@runtime_checkable
class ReadByService(Protocol):
    """A service on a peer's port that knows who gets weights from it."""

    def readers(self) -> Iterable[WeightReader]:
        """Called in the event loop of the server, for the status of the peer."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Identity and present activity of a peer.

    Attributes:
        started: start of the peer, in seconds since the epoch.
        declared_expiration: declared end of its search for a group, in seconds since the epoch; 0 without one.
        leader: endpoint of the leader that it follows; empty without one.
        group_id: group of the all-reduce in progress; empty without one.
        members: members of that group.
        rounds: number of rounds that averaged.
        known_peers: number of peers in discovery, including this one.
        deadlines: deadlines learned of other peers, latest first.
        training: progress of its training; None if it does not train.
        readers: followers and explorers that get weights from services on its port, at most `MAX_READERS`.
        totals: sums over all its rounds; None before the first.
        waiting_for: endpoints of the peers for which it has waited for some time now.
        receipts: receipts of past rounds, oldest first, if the caller asked for some.
        peers: endpoints of the known peers, including this one, if the caller asked for them.
    """

    endpoint: str
    run_id: str
    mode: str
    software: str
    started: float
    schema_hash: bytes
    group_key: str
    looking: bool
    declared_expiration: float
    leader: str
    group_id: bytes
    members: tuple[str, ...]
    last_round: Receipt | None
    rounds: int
    state_version: int
    known_peers: int
    deadlines: tuple[Learned, ...] = ()
    training: TrainingProgress | None = None
    waiting_for: tuple[str, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    peers: tuple[str, ...] = ()
    totals: Totals | None = None
    readers: tuple[WeightReader, ...] = ()

    @property
    def role(self) -> str:
        """Trainer, auxiliary, or peer for one that only averages."""
        return "trainer" if self.training else "auxiliary" if self.mode == "auxiliary" else "peer"

    @property
    def doing(self) -> str:
        """What the peer is doing, as text."""
        if self.members:
            return f"averaging with {counted(len(self.members) - 1, 'other')}"
        if self.looking:
            return f"looking for a group{f', following {self.leader}' if self.leader else ''}"
        return "idle"

    def __str__(self) -> str:
        last = self.last_round
        late = f"; {last.last_to_arrive} in round {last.round}" if last and last.last_to_arrive else ""
        drift = "".join(f"; DRIFT: {each}" for each in last.drifted) if last else ""
        return printable(
            f"{self.endpoint} of run {self.run_id}: {self.doing}; {counted(self.rounds, 'round')} averaged, "
            f"state version {self.state_version}, {counted(self.known_peers - 1, 'other peer')} known{late}{drift}"
        )


# The training status of a peer and its run.


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """The value of `DecentralizedAverager.status`.

    Attributes:
        local_step: number of calls of `step`, including those before a downloaded or loaded state.
        global_step: number of global steps of the run; None if the strategy has none.
        samples: samples of this peer for the next global step, if the strategy counts them; with DiLoCo local steps.
        peers: endpoints of the known peers of the run, including this one.
        alone: whether no other peer is known.
        last_receipt: receipt of the last round; None before the first.
        peer: status of the peer itself.
    """

    local_step: int
    global_step: int | None
    samples: float
    peers: frozenset[str]
    alone: bool
    last_receipt: Receipt | None
    peer: PeerStatus

    def __str__(self) -> str:
        gathered = f", {self.samples:g} gathered for the next" if self.samples else ""
        steps = "" if self.global_step is None else f" (global step {self.global_step}{gathered})"
        others = "alone" if self.alone else f"with {counted(len(self.peers) - 1, 'other')}"
        last = "no round yet" if self.last_receipt is None else str(self.last_receipt)
        return f"step {self.local_step}{steps}, {others}; {last}"


UNSAVED = "buffers with persistent=False"
"""Name of the part of a model that is in no state dict, so that neither rounds nor newcomers get it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How the training of a peer ended, see `DecentralizedAverager.finish`.

    Attributes:
        digest: digest of the weights in the model, 16 hexadecimal digits.
        digests: digests of the other peers that finished at the same time, by endpoint; an empty one if a peer did not
            announce it in time.
        late: endpoints of the peers that still train.
        receipt: receipt of the last round; None if there was none.
        left: whether this peer had left the run before, on a signal.
        differing: the parts of the model in which another peer differs, by its endpoint: "parameters", "buffers",
            "frozen parameters" (those that the optimizer does not train) or `UNSAVED`.
        unchecked: whether buffers and frozen parameters were not compared, since the averager was made without `model`.
        dropped: local steps of this peer, or samples with `GradientAveraging`, that are in no average.
    """

    digest: str
    digests: Mapping[str, str]
    late: tuple[str, ...] = ()
    receipt: Receipt | None = None
    left: bool = False
    differing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unchecked: bool = False
    dropped: float = 0.0

    @property
    def alike(self) -> bool:
        """Whether all peers of the run hold the same weights now, as far as they were compared. True for a single peer.

        With `model` these are the parameters, trained and frozen, and the buffers of its state dict. Other buffers may
        be caches, so those that differ are only named in the text.
        """
        same = all(digest == self.digest for digest in self.digests.values())
        others = any(set(parts) - {UNSAVED} for parts in self.differing.values())
        return same and not self.left and not self.late and not others

    def __str__(self) -> str:
        if self.left:
            return "left the run before its end, so the weights of the other peers are unknown"
        lost = f"the last {self.dropped:g} local steps or samples of this peer are in no average"
        return f"{self._comparison}; {lost}" if self.dropped else self._comparison

    @property
    def _comparison(self) -> str:
        if self.alike:
            count = len(self.digests)
            unchecked = (
                "; buffers and frozen parameters were not compared, which takes model=" if self.unchecked else ""
            )
            other = (
                f"; {listed(list(self.differing))} with other {UNSAVED}: outputs may differ" if self.differing else ""
            )
            return f"all {count + 1} peers hold the same weights{unchecked}{other}" if count else "finished alone"
        others: dict[str, list[str]] = {}
        for name, digest in self.digests.items():
            if digest and (digest != self.digest or name in self.differing):
                others.setdefault(" and ".join(self.differing.get(name, ("weights",))), []).append(name)
        silent = [name for name, digest in self.digests.items() if not digest]
        parts = [
            f"{listed(names)} {what}"
            for names, what in (
                *((names, f"hold other {parts}") for parts, names in others.items()),
                (silent, "did not announce their weights in time"),
                (self.late, "still train"),
            )
            if names
        ]
        return f"NOT all peers hold the same weights: {'; '.join(parts)}"


# How fast a peer trains. It announces its rate in its progress record, and other peers put that into their receipts,
# which so distinguish slow peers from those that are late for another reason.

MIN_RATE, MAX_RATE = 1e-9, 1e9  # limits of plausible rates, per second
INDEX = 6  # position of the rate in a progress record, see `strategies.history.Progress`


def check_rate(value: object) -> float | None:
    """Returns a rate announced by another peer; None if it is implausible."""
    return float(value) if is_number(value) and MIN_RATE <= value <= MAX_RATE else None


def rate_in(progress: bytes) -> float | None:
    """Returns the rate in a progress record; None if it has none or is unreadable."""
    try:
        items = unpack(progress)
    except ValueError:
        return None
    return check_rate(items[INDEX]) if isinstance(items, list) and len(items) > INDEX else None
