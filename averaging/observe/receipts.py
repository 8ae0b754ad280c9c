"""The receipt of an attempt to average: what happened, with whom, how long it took, and why if it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How an attempt ended."""

    AVERAGED = "averaged"
    """The tensors hold the group's average, but for the parts of dropped reducers."""
    NO_GROUP = "no_group"
    """No group came together in time; the tensors are untouched."""
    FAILED = "failed"
    """The round could not be done; the tensors are untouched."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A member that was lost in the round, and why."""

    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """One attempt to average.

    Attributes:
        round: number of this attempt at this peer, from 0.
        outcome: how it ended.
        reason: in words, why it was not an average of all members; empty if it was.
        group_id: 20 bytes; empty without a group.
        members: endpoints in the group's order, this peer included.
        dropped: members whose contribution or shard was lost, as far as this peer saw it.
        gathered: what each member's application passed as `gather`, by endpoint.
        seconds: from the start of looking for a group to the end.
        allreduce_seconds: from BEGIN_ALLREDUCE to the end; 0 without a group.
        bytes_sent: of tensor parts and averages, as packed for the wire.
        bytes_received: likewise.
        kept_local: how many elements kept their local values because their reducer was lost.
        state_version: the version of this peer's state after the attempt.
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

    @property
    def averaged(self) -> bool:
        """Whether the tensors hold an average now."""
        return self.outcome is Outcome.AVERAGED

    def __str__(self) -> str:
        if self.outcome is Outcome.NO_GROUP:
            return f"round {self.round}: no group after {self.seconds:.1f} s: {self.reason}"
        if self.outcome is Outcome.FAILED:
            return f"round {self.round}: failed after {self.seconds:.1f} s: {self.reason}"
        count = len(self.members) - 1
        others = "1 other" if count == 1 else f"{count} others"
        lost = "".join(f"; lost {dropped.endpoint} ({dropped.reason})" for dropped in self.dropped)
        return (
            f"round {self.round}: averaged with {others} in {self.seconds:.2f} s "
            f"(all-reduce {self.allreduce_seconds:.2f} s, {self.bytes_sent / 2**20:.1f} MiB out, "
            f"{self.bytes_received / 2**20:.1f} MiB in){lost}"
        )
