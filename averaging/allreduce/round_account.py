"""What has come of a round so far, noted by both of its sides, and what it comes to in the end."""

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
from averaging.protocol.group import Group, another_group, pack_metadata
from averaging.protocol.messages import Buffer

logger = logging.getLogger("averaging.allreduce")

Adopting: TypeAlias = "Callable[[Part, torch.Tensor], bool]"
"""Writes a part's average, or its delta, to where it belongs; returns whether it could do so at once."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What came out of a round.

    Attributes:
        parts: the parts whose reply arrived, with the average or the delta: 1-D, on the CPU, not to be written. Those
            that were adopted as they came are not among them.
        dropped: members that were lost, in the order in which they were.
        kept_local: elements without a reply, which keep their local values.
        encoded: the parts that arrived from another member; the rest of those in `parts` this one has reduced.
        heard: whether a part or an average of another member is in it; never where nothing came to an average, as of
            members without a weight.
        offences: of those who were dropped, the ones that certainly did what they were dropped for.
        accounts: of every member, in the group's order.
        straggler: see `Receipt`.
        digest: see `Receipt`.
    """

    parts: list[tuple[Part, torch.Tensor]]
    dropped: tuple[Dropped, ...]
    offences: tuple[Dropped, ...]
    kept_local: int
    encoded: frozenset[Part]
    heard: bool
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
        endpoint: the member.
        parts_of: what each member reduces, by name.
        reach: of this member's own shard, see `pace.reach`.
        alike: whether all members get the same averages, so that these are worth a digest.
        adopt: tried with each as it comes once another member is heard; None keeps all until the end.

    Attributes:
        group_id: the public one.
        arrived: the parts whose average, or delta, is in.
        dropped: who was lost, by name.
        averaged: whether there is an average of anything.
        metadata: of messages to members that read it, see `pack_metadata`.
        heard_another: whether a member was announced another group.
    """

    def __init__(
        self,
        group: Group,
        endpoint: str,
        parts_of: Mapping[str, Sequence[Part]],
        *,
        reach: Sequence[int],
        alike: bool,
        adopt: Adopting | None = None,
    ) -> None:
        self._group, self.group_id = group, group.public_id
        self._endpoint, self._parts_of, self._alike = endpoint, parts_of, alike
        self.metadata, self.heard_another = pack_metadata(group), False
        self._sends = group.members[group.index(endpoint)].sends
        own = parts_of[endpoint]
        senders = [member.endpoint for member in group.members if own and member.sends and member.endpoint != endpoint]
        self._lag = Lag(senders, reach)
        self.arrived: set[Part] = set()
        self.averaged = False
        self._adopt = adopt
        self._kept: dict[Part, torch.Tensor] = {}
        self.dropped: dict[str, Dropped] = {}
        self._offences: dict[str, Dropped] = {}
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._digests = {name: ShardDigest() for name in parts_of}
        self._parts_in: dict[str, float] = {}
        self._averages_in: dict[str, float] = {}
        self._began: float | None = None

    def begin(self) -> None:
        """The round begins now."""
        self._began = _now()

    def ready(self) -> None:
        """This member has prepared what it sends, and can answer the others."""
        self._lag.ready(_now())

    def sent(self, name: str, nbytes: int) -> None:
        """Values left for a member."""
        self._sent[name] += nbytes

    def received_part(self, name: str, nbytes: int) -> None:
        """A part of a sender is in, and in order."""
        self._received[name] += nbytes
        self._parts_in[name] = now = _now()
        self._lag.delivered(name, now)

    def received_average(self, name: str, part: Part, values: torch.Tensor, buffer: Buffer) -> None:
        """An average of a reducer is in, as the values that `buffer` was decoded to."""
        self._received[name] += len(buffer)
        self._averages_in[name] = _now()
        self.put(part, values)
        if self._alike:
            self._digests[name].add(buffer)

    def has_heard(self, name: str) -> bool:
        """Whether a part or an average of that member is in."""
        return name in self._received

    def put(self, part: Part, values: torch.Tensor) -> None:
        """The average of a part is in, or its delta."""
        self.arrived.add(part)
        self.averaged = True
        # A round in which no other member is heard has failed, and leaves the tensors as they were.
        if self._adopt is None or not self._received or not self._adopt(part, values):
            self._kept[part] = values

    def reduced(self, buffer: Buffer) -> None:
        """This member has averaged its next part, and packed it for all."""
        if self._alike:
            self._digests[self._endpoint].add(buffer)

    def compare(self, name: str, metadata: bytes) -> None:
        """Looks whether a member was announced the same group as this one, by the metadata of a message.

        Raises:
            UnprovenViolationError: it was not, or says so; as the group's id fits what this member was announced, the
                round goes on among those who were announced the same.
            LyingLeaderError: it was not, and nothing tells who of all members was announced the right group.
        """
        if not (heard := another_group(self._group, metadata)):
            return
        if self._group.committed:
            raise UnprovenViolationError(
                f"was announced other members, another order or other weights by {self._group.leader or 'the leader'}, "
                "or says so"
            )
        self.heard_another = True
        self.metadata = pack_metadata(self._group, heard)  # so that those learn it who were announced the same
        raise LyingLeaderError(
            f"{self._group.leader or 'the leader'} announced other members, another order or other weights to {name} "
            "than to this peer, so nothing of this round is adopted"
        )

    def lose(self, lost: Dropped, *, proven: bool = True) -> None:
        """A member is lost; the first reason counts.

        Args:
            lost: who, and why.
            proven: whether it did certainly itself what it is dropped for.
        """
        if self.dropped.setdefault(lost.endpoint, lost) is lost:
            if proven:
                self._offences[lost.endpoint] = lost
            logger.info("group %s: lost %s: %s", self.group_id.hex()[:8], lost.endpoint, lost.reason)
            self._lag.dropped(lost.endpoint, _now())

    def result(self) -> RoundResult:
        """What has come of it so far."""
        wanted = [part for parts in self._parts_of.values() for part in parts] if self._sends else []
        digests = {name: self._digest(name) for name, parts in self._parts_of.items() if parts}
        return RoundResult(
            parts=[(part, self._kept[part]) for part in wanted if part in self._kept],
            dropped=tuple(self.dropped.values()),
            offences=tuple(self._offences.values()),
            kept_local=sum(part.numel for part in wanted if part not in self.arrived),
            encoded=frozenset(self.arrived - set(self._parts_of[self._endpoint])),
            heard=self.averaged and bool(self._received),
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

    def _digest(self, name: str) -> str:
        """The digest of a shard; empty if not all of it is there."""
        digest = self._digests[name]
        return str(digest) if digest.parts == len(self._parts_of[name]) else ""

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
            )
            for member in self._group.members
            for name in [member.endpoint]
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
