"""The status of a peer."""

from __future__ import annotations

from dataclasses import dataclass

from averaging.common.sanitize import counted, html_table
from averaging.deadlines.learned_deadlines import Learned
from averaging.errors import printable
from averaging.observe.receipts import Receipt


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
