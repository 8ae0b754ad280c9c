"""The receipt of a round: outcome, members, durations, why it failed; and what all receipts add up to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from averaging.common import counted, duration, size
from averaging.errors import printable
from averaging.receipts.drift import Drift, DriftKind


class Outcome(StrEnum):
    """How a round ended."""

    AVERAGED = "averaged"
    """The tensors hold the group's average, except for the parts of dropped reducers."""
    NO_GROUP = "no_group"
    """No group was found in time. The tensors are unchanged."""
    FAILED = "failed"
    """The all-reduce failed. The tensors are unchanged."""
    CANCELLED = "cancelled"
    """This peer's application cancelled the round. The tensors are unchanged."""


class Role(StrEnum):
    """The role of a member in matchmaking."""

    LEADER = "leader"
    """It assembled the group and began the all-reduce."""
    FOLLOWER = "follower"
    """It joined the group of the leader."""


class DropCode(StrEnum):
    """Why a member was dropped, for programs. Unknown codes of later releases are read as `OTHER`."""

    SILENT = "silent"
    """It sent or received nothing until its deadline."""
    ROUND_DEADLINE = "round_deadline"
    """It had not finished at the deadline of the whole round, or it held the others up for too long."""
    CONNECTION_LOST = "connection_lost"
    """The connection failed or was lost, or it ended a stream early."""
    REFUSED = "refused"
    """It refused to take part with this peer in this round."""
    PROTOCOL_VIOLATION = "protocol_violation"
    """It violated the protocol."""
    NON_FINITE = "non_finite"
    """It sent NaN or infinity."""
    CANCELLED = "cancelled"
    """It left the round, or it dropped this peer."""
    INTERNAL_ERROR = "internal_error"
    """An internal error at it or at this peer; the reason says at which."""
    OTHER = "other"
    """None of the above."""

    @classmethod
    def _missing_(cls, value: object) -> DropCode | None:
        return cls.OTHER if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A member that was dropped in the round.

    Attributes:
        reason: text with figures.
        code: the reason for programs.
        waited: seconds of silence, if that is the reason; else None.
        deadline: its deadline in seconds, if that is the reason; else None.
        basis: where the deadline comes from, such as `stall_timeout`.
    """

    endpoint: str
    reason: str
    code: DropCode = DropCode.OTHER
    waited: float | None = None
    deadline: float | None = None
    basis: str = ""

    @classmethod
    def overdue(
        cls, endpoint: str, behaviour: str, waited: float, deadline: float, basis: str, *, after: str = ""
    ) -> Dropped:
        """Returns a member that missed its deadline: `sent nothing for 4.1 s, deadline 4.0 s = 4 × its median of 1 s`.

        `behaviour` is such as `sent nothing`, and `after` its progress before, such as `3 of 10 averages`.
        """
        reason = f"{behaviour} for {_seconds(waited)}, deadline {_seconds(deadline)} = {basis}"
        reason += f", after {after}" if after else ""
        return cls(endpoint, reason, DropCode.SILENT, waited, deadline, basis)


@dataclass(frozen=True, slots=True)
class Account:
    """One member's task in a round, and its traffic with the peer whose receipt this is.

    Attributes:
        mode: node, client (accepts no connections, so it reduces nothing) or auxiliary (contributes no tensors).
        weight: weight of its tensors in the average.
        share: fraction of all elements that it reduces, from 0 to 1.
        bytes_sent: parts and averages sent to it, as packed for the wire.
        bytes_received: parts and averages received from it, as packed for the wire.
        digest: digest of the averages that it reduced, 16 hex digits; the same at all peers that received all of them.
            Empty if some are missing, if it reduces nothing, or if replies are deltas, which differ between members.
        waited: seconds for which it had looked for a group when this group was ready, as observed by this peer. None if
            unknown: it looked already when this peer began to look, or it is a client and this peer did not lead it.
        lane: how this peer's parts travelled to it and the averages back: `grpc`, or `direct` for a connection beside
            gRPC, `sealed` if that is encrypted. Empty if it reduces nothing for this peer, or outside of gRPC.
        lane_reason: why `lane` is `grpc`, as text.
        step_rate: local steps per second that it announced, or samples per second with GradientAveraging, without the
            time in which it waits for others. None if it announced none, for example because it does not train.
        age: rounds that the others have made since it had the state on which it made the local steps that it has
            contributed, on average; 0 if it has missed none. None if it does not say: only members with `quorum` do.
        discount: factor that its age has put on `weight`, which includes it; None if it does not say.
        weight_unit: `samples` if the member says that its weight counts them; else empty.
    """

    endpoint: str
    role: Role = Role.FOLLOWER
    mode: str = "node"
    weight: float = 1.0
    share: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    digest: str = ""
    waited: float | None = None
    step_rate: float | None = None
    lane: str = ""
    lane_reason: str = ""
    age: int | None = None
    discount: float | None = None
    weight_unit: str = ""

    @property
    def weight_text(self) -> str:
        """`weight 400 samples`; without the unit if the weight has none."""
        return f"weight {self.weight:g} {self.weight_unit}".rstrip()

    @property
    def lateness(self) -> str:
        """`9 steps late, weight × 0.387`; empty if it is not late."""
        if not self.age:
            return ""
        discount = "" if self.discount is None else f", weight × {self.discount:.3g}"
        return f"{counted(self.age, 'step')} late{discount}"


@dataclass(frozen=True, slots=True)
class LateArrival:
    """The member for which the others waited before the all-reduce began, as observed by this peer.

    Attributes:
        seconds: between the arrival of the second to last member and its own. A member arrives when it begins to look
            for a group.
    """

    endpoint: str
    seconds: float

    def __str__(self) -> str:
        return f"{printable(self.endpoint)} arrived {duration(self.seconds)} after the others"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The member for which the others waited in the all-reduce, as observed by this peer.

    Attributes:
        seconds: how long this peer waited for this member alone.
        what: what it waited for: `parts` to reduce, or `averages`.
    """

    endpoint: str
    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of one round at one peer. `docs/operate/receipts.md` describes its JSON form.

    Attributes:
        round: number of the round at this peer, from 1.
        outcome: how it ended.
        reason: why nothing was averaged; empty if `outcome` is averaged, also if members were dropped.
        group_id: 20 bytes; empty without a group.
        members: endpoints in the group's order, including this peer.
        dropped: members that this peer dropped, so that their contribution or shard was lost.
        gathered: the `gather` value of each member, by endpoint.
        seconds: duration of the round.
        allreduce_seconds: duration from BEGIN_ALLREDUCE to the end; 0 without a group.
        bytes_sent: parts and averages sent, as packed for the wire.
        bytes_received: parts and averages received, as packed for the wire.
        part_bytes_sent: those of `bytes_sent` that are parts, this peer's contribution to the shards of others; the
            rest are averages of its own shard. 0 in receipts of older releases.
        part_bytes_received: those of `bytes_received` that are parts, the others' contributions to its own shard.
        kept_local: number of elements that kept their local values because their reducer was dropped.
        strategy: class of the strategy with which this peer trains; empty if it does not train.
        clamped: values that this peer has sent or that its averages have, and that are cut to the largest number of the
            compression, such as 65504 of FLOAT16, since they exceed it. Both count, so one element may count twice.
        state_version: version of this peer's state after the round.
        run_id: id of the run.
        endpoint: endpoint of the peer whose receipt this is.
        topic: what was averaged, including its phase; empty for the peer's own tensors.
        started: start of the round, in seconds since the epoch.
        role: role of this peer in the group; None without a group.
        accounts: one for each of `members`, in their order; empty if the all-reduce did not begin.
        phases: seconds by phase, in order: `checking` this peer's tensors for NaN, `looking` for a group, `preparing`
            the data, `allreduce`, `adopting` the result. Phases that were not reached are missing.
        straggler: the member for which the others waited; None if there is none. Members in `dropped` do not count.
        digest: digest of all averages of the round, 16 hex digits; equal at all members with the same averages. Empty
            if an average is missing, or if replies are deltas.
        state: digest of what must be equal at all members, 16 hex digits: with GradientAveraging the parameters before
            the step, with DiLoCo the model after the last global step (of more than 16 MiB another piece in each step),
            else the tensors after the round. Empty if nothing must be equal.
        last_to_arrive: the member that arrived last at the group. None if unknown, or unless it arrived 0.1 s, and a
            quarter of the time since this peer's last round, after the one before. A peer cannot observe itself.
        drift: the members whose tensors or hyperparameters differ from those of most members although they should not,
            also this peer; at most one entry for each kind of difference. Members of other software are not compared.
        left: members of this peer's last groups that have left the run in order since, so that nobody waits for them.
    """

    round: int
    outcome: Outcome
    reason: str = ""
    group_id: bytes = b""
    members: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    gathered: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    allreduce_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    kept_local: int = 0
    state_version: int = 0
    run_id: str = ""
    endpoint: str = ""
    topic: str = ""
    started: float = 0.0
    role: Role | None = None
    accounts: tuple[Account, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    straggler: Straggler | None = None
    digest: str = ""
    state: str = ""
    last_to_arrive: LateArrival | None = None
    drift: tuple[Drift, ...] = ()
    left: tuple[str, ...] = ()
    part_bytes_sent: int = 0
    part_bytes_received: int = 0
    clamped: int = 0
    strategy: str = ""

    @property
    def averaged(self) -> bool:
        """Whether the tensors hold an average now."""
        return self.outcome is Outcome.AVERAGED

    @property
    def ended(self) -> float:
        """End of the round, in seconds since the epoch."""
        return self.started + self.seconds

    def __str__(self) -> str:
        took = f"after {duration(self.seconds)}"
        if self.outcome is Outcome.NO_GROUP:
            return f"round {self.round}: no group {took}: {printable(self.reason)}"
        if self.outcome is Outcome.CANCELLED:
            return f"round {self.round}: cancelled {took}"
        also = [f"DRIFT: {drift}" for drift in self.drifted] + [f"{name} has left the run" for name in self.left]
        if self.outcome is Outcome.FAILED:
            return f"round {self.round}: {printable('; '.join([f'failed {took}: {self.reason}', *also]))}"
        facts = [
            f"averaged with {counted(len(self.members) - 1, 'other')} in {duration(self.seconds)} "
            f"(all-reduce {duration(self.allreduce_seconds)}, {size(self.bytes_sent)} out, "
            f"{size(self.bytes_received)} in)",
            *([str(self.last_to_arrive)] if self.last_to_arrive else []),
            *(f"{account.endpoint}: {account.lateness}" for account in self.accounts if account.lateness),
            *(f"lost {dropped.endpoint} ({dropped.reason})" for dropped in self.dropped),
            *([self.clamped_text] if self.clamped else []),
        ]
        return f"round {self.round}: {printable('; '.join(facts + also))}"

    @property
    def clamped_text(self) -> str:
        """What was clamped, and the remedy."""
        return (
            f"CLAMPED: {counted(self.clamped, 'value')} sent or averaged exceed what the compression can hold and were "
            "cut to its largest number; look for diverging tensors, or use bfloat16, int8 or no compression"
        )

    def rate_text(self, rate: float) -> str:
        """A step rate with the unit in which this peer's strategy counts."""
        return f"{rate:.3g} {'samples' if self.strategy == 'GradientAveraging' else 'steps'}/s"

    @property
    def drifted(self) -> tuple[Drift, ...]:
        """The drift that rounding cannot have caused."""
        return tuple(drift for drift in self.drift if drift.kind is not DriftKind.ROUNDING)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value:.3g} s"


K = TypeVar("K")
N = TypeVar("N", int, float)

UNKNOWN_LANE = "unknown"
"""The lane of bytes whose lane the receipt does not name: of members that reduce nothing, or outside of gRPC."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all rounds of a peer. None of them ever falls."""

    # number of rounds by outcome; outcomes that did not happen are missing, as in all mappings here
    rounds: Mapping[Outcome, int] = field(default_factory=dict)
    seconds: float = 0.0  # duration of all rounds
    phase_seconds: Mapping[str, float] = field(default_factory=dict)  # seconds by phase, see `Receipt.phases`
    # parts and averages sent, by lane (`direct`, `sealed`, `grpc` or `unknown`)
    bytes_sent: Mapping[str, int] = field(default_factory=dict)
    bytes_received: Mapping[str, int] = field(default_factory=dict)  # the same of those received
    waiting_seconds: float = 0.0  # seconds of the rounds in which this peer waited for other members, see `waited_in`
    dropped: Mapping[DropCode, int] = field(default_factory=dict)  # members dropped by this peer, by code
    kept_local: int = 0  # elements that kept their local values because their reducer was dropped

    def plus(self, receipt: Receipt) -> Totals:
        """The totals after one more round."""
        accounts = [(account.lane or UNKNOWN_LANE, account) for account in receipt.accounts]
        return Totals(
            rounds=_added(self.rounds, [(receipt.outcome, 1)]),
            seconds=self.seconds + receipt.seconds,
            phase_seconds=_added(self.phase_seconds, receipt.phases.items()),
            bytes_sent=_added(self.bytes_sent, ((lane, account.bytes_sent) for lane, account in accounts)),
            bytes_received=_added(self.bytes_received, ((lane, account.bytes_received) for lane, account in accounts)),
            waiting_seconds=self.waiting_seconds + waited_in(receipt),
            dropped=_added(self.dropped, ((dropped.code, 1) for dropped in receipt.dropped)),
            kept_local=self.kept_local + receipt.kept_local,
        )


def waited_in(receipt: Receipt) -> float:
    """Seconds of a round in which its peer waited for others: for a group, and for one member in the all-reduce."""
    straggler = 0.0 if receipt.straggler is None else receipt.straggler.seconds
    return min(receipt.seconds, receipt.phases.get("looking", 0.0) + straggler)


def _added(sums: Mapping[K, N], amounts: Iterable[tuple[K, N]]) -> dict[K, N]:
    """The sums with these amounts added; amounts of 0 make no new key."""
    result = dict(sums)
    for key, amount in amounts:
        if amount:
            result[key] = result[key] + amount if key in result else amount
    return result
