"""The receipt of an attempt to average: what happened, with whom, how long it took, and why if it failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from averaging.common.sanitize import counted, duration, html_table, size
from averaging.errors import printable


class Outcome(StrEnum):
    """How an attempt ended. Where tensors are untouched, `in_place` may have written some averages before it ended."""

    AVERAGED = "averaged"
    """The tensors hold the group's average, but for the parts of dropped reducers."""
    NO_GROUP = "no_group"
    """No group came together in time; the tensors are untouched."""
    FAILED = "failed"
    """The round could not be done; the tensors are untouched."""
    CANCELLED = "cancelled"
    """This peer's application cancelled the attempt; the tensors are untouched."""


class Role(StrEnum):
    """What a member did when the group was formed."""

    LEADER = "leader"
    """It took the others in and began the round."""
    FOLLOWER = "follower"
    """It was taken in."""


class DropCode(StrEnum):
    """Why a member was lost, for programs; codes that a later version adds are read as `OTHER`."""

    SILENT = "silent"
    """It sent or took nothing for longer than its deadline."""
    ROUND_DEADLINE = "round_deadline"
    """The deadline of the whole round passed before it was done, or it held the others up for too long."""
    CONNECTION_LOST = "connection_lost"
    """The connection broke or could not be made, or it ended a stream early."""
    REFUSED = "refused"
    """It answered that it does not serve this peer in this round."""
    PROTOCOL_VIOLATION = "protocol_violation"
    """It sent what the protocol does not allow."""
    NON_FINITE = "non_finite"
    """It sent NaN or infinity."""
    OTHER_GROUP = "other_group"
    """By its account the leader announced to it another group than to this peer: other members, order or weights."""
    CANCELLED = "cancelled"
    """It left the round, or gave this peer up."""
    INTERNAL_ERROR = "internal_error"
    """An error that is no fault of the protocol's, at it or at this peer; the reason says at whom."""
    OTHER = "other"
    """None of the above."""

    @classmethod
    def _missing_(cls, value: object) -> DropCode | None:
        return cls.OTHER if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A member that was lost in the round, and why.

    Attributes:
        reason: in words, with figures.
        code: the same for programs.
        waited: seconds for which nothing came, where that is why; else None.
        deadline: seconds for which it would have been waited.
        basis: how that deadline came about, such as `part_timeout`.
    """

    endpoint: str
    reason: str
    code: DropCode = DropCode.OTHER
    waited: float | None = None
    deadline: float | None = None
    basis: str = ""

    @classmethod
    def overdue(
        cls, endpoint: str, deed: str, waited: float, deadline: float, basis: str, *, after: str = ""
    ) -> Dropped:
        """A member that let its deadline pass: `sent nothing for 4.1 s, deadline 4.0 s = 4 × its median of 1 s`.

        Args:
            endpoint: the member.
            deed: what it did all the time, such as `sent nothing`.
            waited: seconds.
            deadline: seconds.
            basis: see above.
            after: what it had done before, such as `3 of 10 averages`.
        """
        reason = f"{deed} for {_seconds(waited)}, deadline {_seconds(deadline)} = {basis}"
        reason += f", after {after}" if after else ""
        return cls(endpoint, reason, DropCode.SILENT, waited, deadline, basis)


@dataclass(frozen=True, slots=True)
class Account:
    """What one member had to do in a round, and what passed between it and the peer whose receipt this is.

    Attributes:
        mode: node, client (accepts no connection, so it reduces nothing) or auxiliary (contributes no tensors).
        weight: of its tensors in the average.
        share: fraction of all elements that it reduces, from 0 to 1.
        bytes_sent: to it: parts for it to reduce, and averages that it had asked for, as packed for the wire.
        bytes_received: from it, likewise.
        digest: of the averages that it reduced, 16 hex digits: equal at all who got them whole. Empty if not all of
            them came, if it reduces nothing, or if replies are deltas, which differ from member to member.
        waited: seconds for which it had been looking for a group when this one was ready, as this peer observed it;
            None if this peer cannot know: the member was looking already when this peer began to look, or it is a
            client and this peer did not lead it.
        step_rate: local steps per second that the member announced, or samples per second with GradientAveraging. Time
            in which it waits for others is not in it. None if it announced none, as peers that do not train.
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


@dataclass(frozen=True, slots=True)
class LateArrival:
    """The member that the others waited for before the round could begin, as this peer observed it.

    Attributes:
        seconds: from the arrival of the member before it to its own. A member arrives when it begins to look for a
            group.
    """

    endpoint: str
    seconds: float

    def __str__(self) -> str:
        return f"{printable(self.endpoint)} arrived {duration(self.seconds)} after the others"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The member that the others had to wait for, as this peer saw it.

    Attributes:
        seconds: for so long this peer had all it could have of the others, and waited for this one alone.
        what: it waited for: `parts` to reduce, or `averages`.
    """

    endpoint: str
    seconds: float
    what: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """One attempt to average. `docs/receipts.md` has the same as JSON.

    Attributes:
        round: number of this attempt at this peer, from 1.
        outcome: how it ended.
        reason: in words, why nothing was averaged; empty if `outcome` is averaged, also where `dropped` names members.
        group_id: 20 bytes; empty without a group.
        members: endpoints in the group's order, this peer included.
        dropped: members whose contribution or shard was lost, as far as this peer saw it.
        gathered: what each member's application passed as `gather`, by endpoint.
        seconds: from the beginning of the attempt to its end.
        allreduce_seconds: from BEGIN_ALLREDUCE to the end; 0 without a group.
        bytes_sent: of tensor parts and averages, as packed for the wire.
        bytes_received: likewise.
        kept_local: how many elements kept their local values because their reducer was lost.
        state_version: the version of this peer's state after the attempt.
        run_id: the run.
        endpoint: whose receipt this is.
        topic: what was averaged, its phase included; empty for the peer's own tensors.
        started: when the attempt began, in seconds since the epoch.
        role: of this peer in the group; None without one.
        accounts: one for each of `members`, in their order; empty if the round did not begin.
        phases: seconds by phase, in order: `checking` the own tensors for NaN, `looking` for a group, `preparing` what
            is sent, `allreduce`, `adopting` the result. Phases that were not reached are left out.
        straggler: whom the others had to wait for; None if nobody stands out. Members in `dropped` are not named again.
        digest: of all averages of the round, 16 hex digits: equal at all members that got the same. Empty if an average
            is missing, or if replies are deltas.
        state: a digest, 16 hex digits, of what all members must hold alike: with GradientAveraging the parameters
            before the step, with DiLoCo the model after the last global step (of more than 16 MiB another piece in each
            step), else the tensors after the round. Empty if they need not be alike.
        last_to_arrive: the member that arrived last at the group; None if it did not come at least 0.1 s after the one
            before it, and after a quarter of the time since this peer's last attempt, or if that is not known. A peer
            cannot know it of itself, since it has not observed the others before.
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

    @property
    def averaged(self) -> bool:
        """Whether the tensors hold an average now."""
        return self.outcome is Outcome.AVERAGED

    def __str__(self) -> str:
        if self.outcome is Outcome.NO_GROUP:
            return f"round {self.round}: no group after {duration(self.seconds)}: {printable(self.reason)}"
        if self.outcome is Outcome.CANCELLED:
            return f"round {self.round}: cancelled after {duration(self.seconds)}"
        if self.outcome is Outcome.FAILED:
            return f"round {self.round}: failed after {duration(self.seconds)}: {printable(self.reason)}"
        lost = "".join(
            f"; lost {printable(dropped.endpoint)} ({printable(dropped.reason)})" for dropped in self.dropped
        )
        late = "" if self.last_to_arrive is None else f"; {self.last_to_arrive}"
        return (
            f"round {self.round}: averaged with {counted(len(self.members) - 1, 'other')} in {duration(self.seconds)} "
            f"(all-reduce {duration(self.allreduce_seconds)}, {size(self.bytes_sent)} out, "
            f"{size(self.bytes_received)} in){late}{lost}"
        )

    def _repr_html_(self) -> str:
        rows: dict[str, object] = {"outcome": self.outcome.value}
        if self.reason:
            rows["reason"] = self.reason
        rows |= {phase: duration(seconds) for phase, seconds in self.phases.items()}
        rows |= {"sent": size(self.bytes_sent), "received": size(self.bytes_received)}
        for account in self.accounts:
            name = account.endpoint + (" (this peer)" if account.endpoint == self.endpoint else "")
            told = f"{account.role.value}, weight {account.weight:g}, reduces {account.share:.0%}"
            if account.waited is not None:
                told += f", waited {duration(account.waited)}"
            if account.step_rate is not None:
                told += f", {step_rate_text(account.step_rate, self.topic)}"
            rows[name] = told
        if self.last_to_arrive is not None:
            late = self.last_to_arrive
            rows["last to arrive"] = f"{late.endpoint}, {duration(late.seconds)} after the others"
        rows |= {f"lost {dropped.endpoint}": dropped.reason for dropped in self.dropped}
        if self.straggler is not None:
            rows["waited for"] = f"{self.straggler.endpoint}, {duration(self.straggler.seconds)}, {self.straggler.what}"
        return html_table(f"round {self.round} of run {self.run_id}", rows)


def step_rate_text(rate: float, topic: str) -> str:
    """A step rate with its unit, which is that of the strategy that averages `topic`."""
    return f"{rate:.3g} {'samples' if topic.partition('/')[0] == 'gradients' else 'steps'}/s"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value:.3g} s"
