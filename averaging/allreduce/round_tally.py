"""Records averages, bytes and dropped members of a round in progress, and computes its result."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from averaging.allreduce.part_forms import Averaged, Part
from averaging.errors import (
    AveragingError,
    CallRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
    ViolationKind,
)
from averaging.protocol import Buffer, Group, MessageCode
from averaging.receipts import Account, DropCode, Dropped, Role, Straggler

ANSWERS = {
    MessageCode.CANCELLED: DropCode.CANCELLED,
    MessageCode.INTERNAL_ERROR: DropCode.INTERNAL_ERROR,
    MessageCode.BAD_GROUP_ID: DropCode.REFUSED,
    MessageCode.PROTOCOL_VIOLATION: DropCode.REFUSED,
}
"""The drop code of a member that sends one of these messages instead of a part or an average."""


def code_of(error: AveragingError) -> DropCode:
    """The drop code of a member if `error` was raised while this peer sent to it or read from it."""
    match error:
        case PeerUnreachableError():
            return DropCode.CONNECTION_LOST
        case CallRefusedError():
            return DropCode.REFUSED
        case ProtocolViolationError(kind=ViolationKind.NON_FINITE):
            return DropCode.NON_FINITE
        case _:
            return DropCode.PROTOCOL_VIOLATION


# Finds the member that the others had to wait for in a round. Pure.
#
# The last member to deliver is not necessarily a straggler: the send window makes all members finish at nearly the same
# time, even if one of them limits the rate. The measure is how long all others were done or at the end of their window.


MIN_LAG_SECONDS = 0.1  # A member that the others waited for less than this is not a straggler

MIN_LAG_FRACTION = 0.25
"""A member that the others waited for a smaller fraction of the round than this is not a straggler."""


class Lag:
    """Measures how long a shard's senders, each of which delivers all parts in order, waited for one of them.

    By sender, `seconds` are those in which all others had finished or had full windows because of it. `send_limits` are
    how many parts a sender may deliver, by how many the slowest one has delivered.
    """

    def __init__(self, senders: Iterable[str], send_limits: Sequence[int]) -> None:
        self._next = dict.fromkeys(senders, 0)
        self._send_limits = send_limits
        self._slowest, self._since = "", 0.0
        self.seconds: dict[str, float] = {}

    def ready(self, now: float) -> None:
        self.seconds.clear()  # until this member can answer, the others waited for it
        self._since = now

    def delivered(self, name: str, now: float) -> None:
        if name in self._next:  # else it was dropped
            self._next[name] += 1
            self._update(now)

    def dropped(self, name: str, now: float) -> None:
        if self._next.pop(name, None) is not None:
            self._update(now)

    @property
    def blocking(self) -> list[str]:
        """The senders for which another one has to wait."""
        front, limits = max(self._next.values(), default=0), self._send_limits
        return [name for name, at in self._next.items() if at < limits[-1] and front >= limits[at]]

    def _update(self, now: float) -> None:
        if self._slowest:
            self.seconds[self._slowest] = self.seconds.get(self._slowest, 0.0) + now - self._since
        self._slowest, self._since = self._find(), now

    def _find(self) -> str:
        if len(self._next) < 2:
            return ""
        name = min(self._next, key=lambda name: self._next[name])
        at = self._next[name]
        waits = at < self._send_limits[-1] and all(
            reached >= self._send_limits[at] for other, reached in self._next.items() if other != name
        )
        return name if waits else ""


def find_straggler(
    lag: Mapping[str, float],
    parts_in: Mapping[str, float],
    averages_in: Mapping[str, float],
    seconds: float,
    dropped: Collection[str],
) -> Straggler | None:
    """The straggler of a round as one member observed it; None if there is none.

    `lag` is `Lag.seconds`, empty with fewer than two senders. `parts_in` has when the last part of each sender arrived,
    and `averages_in` when the last average of each reducer did. Members that were `dropped` are not named again.
    """
    bound = max(MIN_LAG_SECONDS, MIN_LAG_FRACTION * seconds)
    waited = {name: value for name, value in lag.items() if name not in dropped}
    if not waited and len(parts_in) == 1 and parts_in.keys() == averages_in.keys():
        # Two peers: the other one had returned all averages before its own last part arrived.
        waited = {name: parts_in[name] - averages_in[name] for name in parts_in if name not in dropped}
    slowest = max(waited, key=lambda name: waited[name], default="")
    if slowest and waited[slowest] >= bound:
        return Straggler(slowest, waited[slowest], "parts")
    order = sorted((moment, name) for name, moment in averages_in.items() if name not in dropped)
    if len(order) >= 2:
        (before, _), (last, name) = order[-2:]
        if last - before >= bound:
            return Straggler(name, last - before, "averages")
    return None


logger = logging.getLogger("averaging.allreduce")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a round at one member; for fields that are not explained see `Receipt`."""

    parts: list[tuple[Part, Averaged]]  # whose reply arrived, with the average or the delta
    dropped: tuple[Dropped, ...]  # in the order in which they were dropped
    kept_local: int  # elements without a reply, which keep their local values
    clamped: int
    encoded: frozenset[Part]  # the parts that another member reduced; this member reduced the other ones in `parts`
    received_any: bool  # a part or an average of another member arrived, and there is at least one average
    bytes_sent: int
    bytes_received: int
    part_bytes_sent: int  # this peer's contribution; the rest of `bytes_sent` are averages
    part_bytes_received: int
    accounts: tuple[Account, ...]  # one per member, in the group's order
    straggler: Straggler | None
    digest: str
    answered: tuple[str, ...]  # members of whose shard an average or a delta has arrived
    one_way: tuple[str, ...]  # dropped members whose parts came, and nothing of their own shard: they cannot be called


def changes(result: RoundResult) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The result as `SharedTensors.write` takes it, of tensors of which all elements were sent."""
    for part, values in result.parts:
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"{part} is in tile order")
        for piece, elements in part.divide(values):
            yield piece.tensor, piece.start, elements


class RoundTally:
    """What a round in progress has brought so far, at one member.

    `parts_of` are the shards by member, `send_limits` those of this member's own. All members get the same averages if
    `identical`, so that digests can be compared.
    """

    def __init__(
        self,
        group: Group,
        endpoint: str,
        parts_of: Mapping[str, Sequence[Part]],
        *,
        send_limits: Sequence[int],
        identical: bool,
    ) -> None:
        self._group, self.group_id = group, group.public_id
        self._endpoint, self._parts_of, self._identical = endpoint, parts_of, identical
        self._sends = group.members[group.index(endpoint)].sends
        own = parts_of[endpoint]
        senders = [member.endpoint for member in group.members if own and member.sends and member.endpoint != endpoint]
        self._lag = Lag(senders, send_limits)
        self.arrived: set[Part] = set()
        self.averaged, self.clamped = False, 0
        self._kept: dict[Part, Averaged] = {}
        self.dropped: dict[str, Dropped] = {}
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()
        self._part_bytes_sent, self._part_bytes_received = 0, 0  # bytes; the rest are averages
        # Of each shard's averages as encoded, in order, and their number. They detect errors, not forgery: XXH3 runs at
        # memory speed, and a cryptographic hash, at 0.6 to 1.5 GB/s on one core, would slow down averaging.
        self._digests = {name: xxhash.xxh3_64() for name in parts_of}
        self._digested: Counter[str] = Counter()
        self._lanes: dict[str, tuple[str, str]] = {}
        self._parts_in: dict[str, float] = {}
        self._averages_in: dict[str, float] = {}
        self._began: float | None = None

    def begin(self) -> None:
        self._began = _now()

    def ready(self) -> None:
        self._lag.ready(_now())

    def lane(self, name: str, lane: str, reason: str) -> None:
        self._lanes[name] = lane, reason

    def sent_part(self, name: str, nbytes: int) -> None:
        self._sent[name] += nbytes
        self._part_bytes_sent += nbytes

    def sent_average(self, name: str, nbytes: int) -> None:
        self._sent[name] += nbytes

    def received_part(self, name: str, nbytes: int) -> None:
        self._received[name] += nbytes
        self._part_bytes_received += nbytes
        self._parts_in[name] = now = _now()
        self._lag.delivered(name, now)

    def received_average(self, name: str, part: Part, values: Averaged, buffer: Buffer) -> None:
        self._received[name] += len(buffer)
        self._averages_in[name] = _now()
        self.put(part, values)
        self._digest(name, buffer)

    @property
    def busier_bytes(self) -> int:
        return max(self._sent.total(), self._received.total())

    def has_received_from(self, name: str) -> bool:
        return name in self._received

    def put(self, part: Part, values: Averaged) -> None:
        self.arrived.add(part)
        self.averaged = True
        self._kept[part] = values

    def reduced(self, buffer: Buffer) -> None:
        self._digest(self._endpoint, buffer)

    def _digest(self, name: str, buffer: Buffer) -> None:
        if self._identical:
            self._digests[name].update(buffer)
            self._digested[name] += 1

    @property
    def blocking(self) -> list[str]:
        return self._lag.blocking

    def drop(self, dropped: Dropped) -> None:
        if self.dropped.setdefault(dropped.endpoint, dropped) is dropped:  # the first reason counts
            logger.info("group %s: dropped %s: %s", self.group_id.hex()[:8], dropped.endpoint, dropped.reason)
            self._lag.dropped(dropped.endpoint, _now())

    def result(self) -> RoundResult:
        wanted = [part for parts in self._parts_of.values() for part in parts] if self._sends else []
        digests = {  # empty if an average is missing
            name: self._digests[name].hexdigest() if self._digested[name] == len(parts) else ""
            for name, parts in self._parts_of.items()
            if parts
        }
        return RoundResult(
            parts=[(part, self._kept[part]) for part in wanted if part in self._kept],
            dropped=tuple(self.dropped.values()),
            kept_local=sum(part.numel for part in wanted if part not in self.arrived),
            clamped=self.clamped,
            encoded=frozenset(self.arrived - set(self._parts_of[self._endpoint])),
            received_any=self.averaged and bool(self._received),
            bytes_sent=self._sent.total(),
            bytes_received=self._received.total(),
            part_bytes_sent=self._part_bytes_sent,
            part_bytes_received=self._part_bytes_received,
            accounts=self._accounts(digests),
            straggler=find_straggler(
                self._lag.seconds,
                self._parts_in,
                self._averages_in,
                0.0 if self._began is None else _now() - self._began,
                self.dropped.keys(),
            ),
            digest=xxhash.xxh3_64_hexdigest(" ".join(digests.values()).encode()) if all(digests.values()) else "",
            answered=tuple(self._averages_in),
            one_way=tuple(
                name
                for name in self.dropped
                if self._parts_of[name] and name in self._parts_in.keys() - self._averages_in
            ),
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
