"""What has come of a round so far, noted by both of its sides, and what it comes to in the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from averaging.allreduce.partition import Part
from averaging.observe.receipts import Dropped

logger = logging.getLogger("averaging.allreduce")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came out of a round.

    Attributes:
        parts: the parts whose reply arrived, with the average or the delta: 1-D, on the CPU, not to be written.
        dropped: members that were lost, in the order in which they were.
        kept_local: elements without a reply, which keep their local values.
        encoded: the parts of `parts` that another member has reduced; the rest this one has.
        heard: whether a part or an average of another member is in it.
    """

    parts: list[tuple[Part, torch.Tensor]]
    dropped: tuple[Dropped, ...]
    kept_local: int
    encoded: frozenset[Part]
    heard: bool
    bytes_sent: int
    bytes_received: int


def changes(result: RoundResult) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The result as `SharedTensors.write` takes it: (tensor index, first element, values)."""
    for part, values in result.parts:
        yield part.tensor, part.start, values


@dataclass(slots=True)
class Outcome:
    """The account of a round in progress."""

    group_id: bytes
    averages: dict[Part, torch.Tensor] = field(default_factory=dict)  # or deltas, as the schema has it
    dropped: dict[str, str] = field(default_factory=dict)
    heard: bool = False
    bytes_sent: int = 0
    bytes_received: int = 0

    def sent(self, nbytes: int) -> None:
        """Values left for another member."""
        self.bytes_sent += nbytes

    def received(self, nbytes: int) -> None:
        """Values of another member are in."""
        self.bytes_received += nbytes
        self.heard = True

    def lose(self, name: str, reason: str) -> None:
        """A member is lost; the first reason counts."""
        if self.dropped.setdefault(name, reason) is reason:
            logger.info("group %s: lost %s: %s", self.group_id.hex()[:8], name, reason)

    def result(self, wanted: Sequence[Part], own: Sequence[Part]) -> RoundResult:
        """What came of it for a member that wants the averages of some parts and reduces some itself."""
        return RoundResult(
            parts=[(part, self.averages[part]) for part in wanted if part in self.averages],
            dropped=tuple(Dropped(name, reason) for name, reason in self.dropped.items()),
            kept_local=sum(part.numel for part in wanted if part not in self.averages),
            encoded=frozenset(self.averages.keys() - set(own)),
            heard=self.heard,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
        )
