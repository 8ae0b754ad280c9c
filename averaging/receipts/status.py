"""The status of a peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from averaging.common import counted, html_table, listed
from averaging.errors import printable
from averaging.receipts.receipt import Receipt
from averaging.timing import Learned


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
        drift = "".join(f"; DRIFT: {one}" for one in last.drifted) if last else ""
        return printable(
            f"{self.endpoint} of run {self.run_id}: {self.doing}; {counted(self.rounds, 'round')} averaged, "
            f"state version {self.state_version}, {counted(self.known_peers - 1, 'other peer')} known{late}{drift}"
        )

    def _repr_html_(self) -> str:
        rows = {
            "doing": self.doing,
            "mode": self.mode,
            "software": self.software,
            "rounds averaged": self.rounds,
            "last round": self.last_round or "none yet",
            "state version": self.state_version,
            "other peers known": self.known_peers - 1,
        }
        return html_table(f"{self.endpoint} of run {self.run_id}", rows)


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

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"local step": self.local_step}
        if self.global_step is not None:
            rows |= {"global step": self.global_step, "gathered for the next": f"{self.samples:g}"}
        rows |= {"peers": listed(sorted(self.peers)), "last round": self.last_receipt or "none yet", "peer": self.peer}
        return html_table(f"training of run {self.peer.run_id}", rows)


@dataclass(frozen=True, slots=True)
class Finish:
    """How the training of a peer ended, see `DecentralizedAverager.finish`.

    Attributes:
        digest: digest of the weights in the model, 16 hexadecimal digits.
        digests: digests of the other peers that finished at the same time, by endpoint; an empty one if a peer did not
            announce it in time.
        late: endpoints of the peers that still train.
        receipt: receipt of the last round; None if there was none.
        left: whether this peer had left the run before, on SIGTERM.
        differing: the parts of the model in which another peer differs, by its endpoint: "parameters", "buffers" or
            "frozen parameters" (those that the optimizer does not train).
        unchecked: whether buffers and frozen parameters were not compared, since the averager was made without `model`.
    """

    digest: str
    digests: Mapping[str, str]
    late: tuple[str, ...] = ()
    receipt: Receipt | None = None
    left: bool = False
    differing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unchecked: bool = False

    @property
    def alike(self) -> bool:
        """Whether all peers of the run hold the same weights now, as far as they were compared. True for a single peer.

        With `model` all that it computes with is compared: parameters, buffers, and what is not trained.
        """
        same = all(digest == self.digest for digest in self.digests.values())
        return same and not self.left and not self.late and not self.differing

    def __str__(self) -> str:
        if self.left:
            return "left the run before its end, so the weights of the other peers are unknown"
        if self.alike:
            count = len(self.digests)
            unchecked = (
                "; buffers and frozen parameters were not compared, which takes model=" if self.unchecked else ""
            )
            return f"all {count + 1} peers hold the same weights{unchecked}" if count else "finished alone"
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

    def _repr_html_(self) -> str:
        rows = {"weights": str(self), "digest": self.digest}
        rows |= {name: digest or "not announced in time" for name, digest in self.digests.items()}
        rows |= dict.fromkeys(self.late, "still trains")
        return html_table("end of the training", rows)
