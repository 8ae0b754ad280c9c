"""Records averages, bytes and dropped members of a round in progress, and computes its result."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from averaging.allreduce.partition import Part
from averaging.allreduce.shard_digest import ShardDigest, digest_of
from averaging.allreduce.stragglers import Lag, find_straggler
from averaging.errors import LyingLeaderError, UnprovenViolationError
from averaging.observe.receipts import Account, Dropped, Role, Straggler
from averaging.protocol.group import Group, conflicting_digest, pack_metadata
from averaging.protocol.messages import Buffer

logger = logging.getLogger("averaging.allreduce")

AdoptPart: TypeAlias = "Callable[[Part, torch.Tensor], bool]"
"""Writes a part's average or delta to the tensors; returns False if it could not do so at once."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round.

    Attributes:
        parts: the parts whose reply arrived, with the average or the delta: 1-D, on the CPU, read-only. Parts that were
            adopted on arrival are not included.
        dropped: the dropped members, in the order in which they were dropped.
        proven_drops: those in `dropped` that are proven to have caused it themselves.
        kept_local: number of elements without a reply, which keep their local values.
        encoded: the parts that another member reduced; this member reduced the other ones in `parts`.
        received_any: whether a part or an average of another member arrived and there is at least one average.
        accounts: one per member, in the group's order.
        straggler: see `Receipt`.
        digest: see `Receipt`.
    """

    parts: list[tuple[Part, torch.Tensor]]
    dropped: tuple[Dropped, ...]
    proven_drops: tuple[Dropped, ...]
    kept_local: int
    encoded: frozenset[Part]
    received_any: bool
    bytes_sent: int
    bytes_received: int
    accounts: tuple[Account, ...]
    straggler: Straggler | None
    digest: str


def changes(result: RoundResult) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The result as `SharedTensors.write` takes it: (tensor index, first element, values)."""
    for part, values in result.parts:
        yield part.tensor, part.start, values


class RoundAccount:
    """The account of a round in progress at one member.

    Args:
        endpoint: this member.
        parts_of: the shard of each member, by name.
        send_limits: the limits of this member's own shard, see `send_window.send_limits`.
        identical: whether all members get the same averages, so that digests can be compared.
        adopt: called with each average on arrival, once data of another member has arrived. None keeps all averages
            until the end.

    Attributes:
        group_id: the public id.
        arrived: the parts whose average or delta has arrived.
        dropped: the dropped members, by name.
        averaged: whether at least one part has been averaged.
        metadata: the metadata of messages to members that read it, see `pack_metadata`.
        saw_conflict: whether another group was announced to another member.
    """

    def __init__(
        self,
        group: Group,
        endpoint: str,
        parts_of: Mapping[str, Sequence[Part]],
        *,
        send_limits: Sequence[int],
        identical: bool,
        adopt: AdoptPart | None = None,
    ) -> None:
        self._group, self.group_id = group, group.public_id
        self._endpoint, self._parts_of, self._identical = endpoint, parts_of, identical
        self.metadata, self.saw_conflict = pack_metadata(group), False
        self._sends = group.members[group.index(endpoint)].sends
        own = parts_of[endpoint]
        senders = [member.endpoint for member in group.members if own and member.sends and member.endpoint != endpoint]
        self._lag = Lag(senders, send_limits)
        self.arrived: set[Part] = set()
        self.averaged = False
        self._adopt = adopt
        self._kept: dict[Part, torch.Tensor] = {}
        self.dropped: dict[str, Dropped] = {}
        self._proven_drops: dict[str, Dropped] = {}
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._digests = {name: ShardDigest() for name in parts_of}
        self._lanes: dict[str, tuple[str, str]] = {}
        self._parts_in: dict[str, float] = {}
        self._averages_in: dict[str, float] = {}
        self._began: float | None = None

    def begin(self) -> None:
        """Starts the clock of the round."""
        self._began = _now()

    def ready(self) -> None:
        """Records that this member has prepared its tensors and can answer the others."""
        self._lag.ready(_now())

    def lane(self, name: str, lane: str, reason: str) -> None:
        """Records how this member's parts travel to a reducer; see `Account`."""
        self._lanes[name] = lane, reason

    def sent(self, name: str, nbytes: int) -> None:
        """Records bytes sent to a member."""
        self._sent[name] += nbytes

    def received_part(self, name: str, nbytes: int) -> None:
        """Records a valid part of a sender."""
        self._received[name] += nbytes
        self._parts_in[name] = now = _now()
        self._lag.delivered(name, now)

    def received_average(self, name: str, part: Part, values: torch.Tensor, buffer: Buffer) -> None:
        """Records an average of a reducer; `values` are decoded from `buffer`."""
        self._received[name] += len(buffer)
        self._averages_in[name] = _now()
        self.put(part, values)
        if self._identical:
            self._digests[name].add(buffer)

    def has_received_from(self, name: str) -> bool:
        """Whether a part or an average of that member has arrived."""
        return name in self._received

    def put(self, part: Part, values: torch.Tensor) -> None:
        """Adopts the average or the delta of a part, or keeps it for the end."""
        self.arrived.add(part)
        self.averaged = True
        # Without data from another member the round fails, and the tensors must be unchanged.
        if self._adopt is None or not self._received or not self._adopt(part, values):
            self._kept[part] = values

    def reduced(self, buffer: Buffer) -> None:
        """Adds the next average of this member's own shard, as encoded, to its digest."""
        if self._identical:
            self._digests[self._endpoint].add(buffer)

    def compare(self, name: str, metadata: bytes) -> None:
        """Compares the group that was announced to a member, by the metadata of its message, with this member's.

        Raises:
            UnprovenViolationError: they differ. The group id is bound to this member's group, so the round
                continues among the members with the same group.
            LyingLeaderError: they differ, and it is unknown which members have the right group.
        """
        if not (digest := conflicting_digest(self._group, metadata)):
            return
        leader = self._group.leader or "the leader"
        if self._group.committed:
            raise UnprovenViolationError(
                f"claims that {leader} announced other members, another order or other weights to it"
            )
        self.saw_conflict = True
        self.metadata = pack_metadata(self._group, digest)  # evidence for the members with the same group
        raise LyingLeaderError(
            f"{leader} announced other members, another order or other weights to {name} than to this peer; nothing of "
            "this round is adopted"
        )

    def drop(self, dropped: Dropped, *, proven: bool = True) -> None:
        """Records a dropped member; the first reason counts.

        Args:
            dropped: the member and the reason.
            proven: whether the member is proven to have caused it itself.
        """
        if self.dropped.setdefault(dropped.endpoint, dropped) is dropped:
            if proven:
                self._proven_drops[dropped.endpoint] = dropped
            logger.info("group %s: dropped %s: %s", self.group_id.hex()[:8], dropped.endpoint, dropped.reason)
            self._lag.dropped(dropped.endpoint, _now())

    def result(self) -> RoundResult:
        """The result so far."""
        wanted = [part for parts in self._parts_of.values() for part in parts] if self._sends else []
        digests = {  # empty if an average is missing
            name: str(self._digests[name]) if self._digests[name].parts == len(parts) else ""
            for name, parts in self._parts_of.items()
            if parts
        }
        return RoundResult(
            parts=[(part, self._kept[part]) for part in wanted if part in self._kept],
            dropped=tuple(self.dropped.values()),
            proven_drops=tuple(self._proven_drops.values()),
            kept_local=sum(part.numel for part in wanted if part not in self.arrived),
            encoded=frozenset(self.arrived - set(self._parts_of[self._endpoint])),
            received_any=self.averaged and bool(self._received),
            bytes_sent=self._sent.total(),
            bytes_received=self._received.total(),
            accounts=self._accounts(digests),
            straggler=find_straggler(
                self._lag.seconds,
                self._parts_in,
                self._averages_in,
                0.0 if self._began is None else _now() - self._began,
                self.dropped.keys(),
            ),
            digest=digest_of(digests.values()) if all(digests.values()) else "",
        )

    def _accounts(self, digests: Mapping[str, str]) -> tuple[Account, ...]:
        elements = {name: sum(part.numel for part in parts) for name, parts in self._parts_of.items()}
        total = sum(elements.values()) or 1
        return tuple(
            Account(
                endpoint=name,
                role=Role.LEADER if name == self._group.leader else Role.FOLLOWER,
                mode=member.mode.name.lower(),
                weight=member.weight,
                share=elements[name] / total,
                bytes_sent=self._sent[name],
                bytes_received=self._received[name],
                digest=digests.get(name, ""),
                lane=self._lanes.get(name, ("", ""))[0],
                lane_reason=self._lanes.get(name, ("", ""))[1],
            )
            for member in self._group.members
            for name in [member.endpoint]
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
