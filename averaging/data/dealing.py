"""Which peer trains which block of an epoch, decided by each peer alone from what all of them announce. Pure.

A dataset is divided into blocks. Each peer announces which blocks are done, as far as it knows, and which it has
claimed. It takes over what others announce as done. Of the free blocks it claims those for which it has the greatest
hash among the peers that are there, and only if there are none, those of others. So peers that see the same records
never claim the same block, and those that do not, because a record is on its way, mostly do not either.

What is left is decided alike by both peers that have claimed a block: who has begun it keeps it, else the greater hash.
A claim is announced for `SETTLE` seconds before it is begun, if others may not see the same peers, or if it is for a
block of theirs. A claim ends with its peer's record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from averaging.common import is_count, pack, unpack
from averaging.errors import ConfigError, ProtocolViolationError

MAX_BLOCKS, MAX_CLAIMS, MAX_EPOCH = 4096, 32, 1 << 31
"""Limits of a record, which has 1 KiB. 4096 blocks are 512 bytes."""

DEFAULT_BLOCKS = 1024
"""Blocks of a dataset, if the user gives no size."""

SETTLE = 0.5
"""Seconds from the announcement of a claim to its beginning: time for the others to see it."""

UNSETTLED = 2.0
"""Seconds after a peer has come or gone during which others may not know it."""

LEASE_SECONDS = 600.0
"""Seconds without any progress after which the claims of a peer that is still there end."""


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a dataset into blocks, which must be the same at all peers.

    Attributes:
        length: samples of the dataset.
        block_size: samples of a block; the last block may have fewer.
        seed: of the order of the samples; None for the order of the dataset.

    Raises:
        ConfigError: there are no samples, or too many blocks.
    """

    length: int
    block_size: int
    seed: int | None

    def __post_init__(self) -> None:
        for name in ("length", "block_size"):
            if not is_count(getattr(self, name)) or not getattr(self, name):
                raise ConfigError(f"{name} must be a whole number, at least 1, not {getattr(self, name)!r}")
        if self.blocks > MAX_BLOCKS:
            least = -(-self.length // MAX_BLOCKS)
            raise ConfigError(
                f"{self.length} samples in blocks of {self.block_size} are {self.blocks} blocks; {MAX_BLOCKS} are "
                f"possible, so give a block_size of at least {least}"
            )

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.length // self.block_size)

    @property
    def digest(self) -> bytes:
        """Eight bytes that are the same for the same division."""
        return blake2b(pack([self.length, self.block_size, self.seed]), digest_size=8).digest()

    def size(self, block: int) -> int:
        """Samples of a block."""
        return min(self.block_size, self.length - block * self.block_size)


@dataclass(frozen=True, slots=True)
class DataRecord:
    """What a peer announces.

    Attributes:
        digest: `Division.digest`.
        epoch: its epoch; all earlier ones are complete.
        done: the blocks of it that are trained, as the bits of a number.
        claims: the blocks that it has claimed, and whether it has begun them.
        trained: samples that it has trained, to tell whether it goes on.
    """

    digest: bytes
    epoch: int
    done: int
    claims: Mapping[int, bool]
    trained: int

    def pack(self, blocks: int) -> bytes:
        """Packs it, with the done blocks as a prefix and the bits behind it."""
        prefix = ((self.done ^ (self.done + 1)).bit_length() - 1) if self.done else 0
        rest = self.done >> prefix
        bits = rest.to_bytes(-(-rest.bit_length() // 8), "little")
        claims = [block * 2 + begun for block, begun in self.claims.items()]
        return pack([self.digest, self.epoch, prefix, bits, claims, self.trained])

    @classmethod
    def unpack(cls, packed: bytes) -> DataRecord:
        """Unpacks what another peer has announced.

        Raises:
            ProtocolViolationError: it is malformed.
        """
        try:
            fields = unpack(packed, MAX_CLAIMS + 8)
        except ValueError as error:
            raise ProtocolViolationError(f"a record of the data of a run is malformed: {error}") from None
        match fields:
            case [bytes(digest), epoch, prefix, bytes(bits), list(claims), trained] if (
                all(is_count(value) for value in (epoch, prefix, trained, *claims))
                and prefix + 8 * len(bits) <= MAX_BLOCKS + 7
                and epoch <= MAX_EPOCH
                and len(claims) <= MAX_CLAIMS
                and all(claim < 2 * MAX_BLOCKS for claim in claims)
            ):
                done = (int.from_bytes(bits, "little") << prefix) | ((1 << prefix) - 1)
                return cls(digest, epoch, done, {claim // 2: bool(claim % 2) for claim in claims}, trained)
        raise ProtocolViolationError("a record of the data of a run is malformed")


class BlockState(IntEnum):
    """How far a peer is with a block that it has claimed."""

    ANNOUNCED = 0
    BEGUN = 1


@dataclass(slots=True)
class BlockClaim:
    """A block that this peer has claimed.

    Attributes:
        since: when, in seconds of a monotonic clock.
        settles: seconds until it may be begun.
        state: how far it is.
        handed: samples of it that were handed out.
        retaken: whether a lost peer had begun it.
    """

    since: float
    settles: float
    state: BlockState = BlockState.ANNOUNCED
    handed: int = 0
    retaken: bool = False


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """What this peer has done, since its sampler was made.

    Attributes:
        epoch: the present epoch, counted from 0.
        blocks: blocks of an epoch.
        done: those of the present epoch that are trained, at any peer.
        blocks_here: blocks that this peer has trained.
        samples_here: samples that it has trained.
        retaken: blocks that a lost peer had begun, and this one has begun again.
        conflicts: blocks that another peer had begun, too: this one has given it up, or ended it before it knew.
        most_duplicates: samples that were at most trained twice because of that.
    """

    epoch: int = 0
    blocks: int = 0
    done: int = 0
    blocks_here: int = 0
    samples_here: int = 0
    retaken: int = 0
    conflicts: int = 0
    most_duplicates: int = 0


@lru_cache(maxsize=512)
def scores(peer: str, epoch: int, blocks: int) -> NDArray[np.uint64]:
    """The hash of a peer with each block of an epoch: the peer with the greatest one should train the block."""
    start = int.from_bytes(blake2b(f"{epoch} {peer}".encode(), digest_size=8).digest(), "little")
    mixed = np.arange(1, blocks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(slots=True)
class _Seen:
    record: DataRecord
    changed: float


@dataclass(slots=True)
class Dealer:
    """One peer's view of an epoch, and its claims.

    Args:
        division: the dataset.
        name: this peer, unique in the run.

    Attributes:
        epoch: the present epoch.
        done: its blocks that are known to be trained, as bits.
        claims: this peer's claims.
        statistics: counts.
        version: grows with each change that others should see.
    """

    division: Division
    name: str
    lease_seconds: float = LEASE_SECONDS
    epoch: int = 0
    done: int = 0
    claims: dict[int, BlockClaim] = field(default_factory=dict)
    statistics: DataStatistics = field(default_factory=DataStatistics)
    version: int = 0
    _others: dict[str, _Seen] = field(default_factory=dict)
    _abandoned: dict[int, int] = field(default_factory=dict)  # blocks that lost peers had begun, and the epoch
    _came_or_went: float | None = None
    _finished: dict[int, set[str]] = field(default_factory=dict)  # own blocks, and who had begun them as well

    @property
    def is_complete(self) -> bool:
        """Whether all blocks of the epoch are trained."""
        return self.done == (1 << self.division.blocks) - 1

    @property
    def record(self) -> DataRecord:
        """What this peer announces."""
        claims = {block: claim.state is BlockState.BEGUN for block, claim in self.claims.items()}
        return DataRecord(self.division.digest, self.epoch, self.done, claims, self.statistics.samples_here)

    def see(self, records: Mapping[str, DataRecord], now: float) -> None:
        """Takes what the other peers announce. Claims of this peer that others have by right are dropped.

        Args:
            records: by peer, without peers that divide the dataset otherwise.
            now: seconds of a monotonic clock.
        """
        if records.keys() != self._others.keys() or self._came_or_went is None:
            self._came_or_went = now
        for name in self._others.keys() - records.keys():
            self._lose(self._others.pop(name).record)
        for name, record in records.items():
            seen = self._others.get(name)
            if seen is None or seen.record != record:
                self._others[name] = _Seen(record, now)
        self._follow_epoch([record.epoch for record in records.values()])
        known = self.done
        for name, record in records.items():
            if record.epoch == self.epoch:
                self.done |= record.done & ((1 << self.division.blocks) - 1)
                self._note_trained_twice(name, record)
        if known != self.done:
            self.version += 1
        for block in [block for block in self.claims if self._must_give_up(block, now)]:
            self._give_up(block)

    def take_over_done(self, epoch: int, done: int) -> None:
        """Takes what is done from a checkpoint, or from a record that was withdrawn."""
        if epoch > self.epoch:
            self._begin_epoch(epoch)
        if epoch == self.epoch:
            self.done |= done & ((1 << self.division.blocks) - 1)
            self.version += 1

    def claim(self, now: float, ahead: int) -> None:
        """Claims free blocks, until `ahead` of them are claimed and not begun."""
        waiting = sum(claim.state is BlockState.ANNOUNCED for claim in self.claims.values())
        for block, is_own in self._best_free(min(ahead, MAX_CLAIMS - len(self.claims)) - waiting, now):
            settled = is_own and self._came_or_went is not None and now - self._came_or_went >= UNSETTLED
            retaken = self._abandoned.get(block) == self.epoch
            self.claims[block] = BlockClaim(now, 0.0 if settled else SETTLE, retaken=retaken)
            self.version += 1

    def begin(self, now: float) -> int | None:
        """Begins the first claim that may be begun. Returns its block; None if none may."""
        for block, claim in self.claims.items():
            if claim.state is BlockState.ANNOUNCED and now - claim.since >= claim.settles:
                claim.state = BlockState.BEGUN
                self.version += 1
                if claim.retaken:
                    size = self.division.size(block)
                    self._count(retaken=1, most_duplicates=size)
                return block
        return None

    @property
    def has_claims_to_begin(self) -> bool:
        """Whether there are claims that have not begun."""
        return any(claim.state is BlockState.ANNOUNCED for claim in self.claims.values())

    def has_free(self, now: float) -> bool:
        """Whether there is a block that this peer could claim."""
        return bool(self._free(now))

    def finish(self, block: int) -> None:
        """Notes that a block of this peer is trained."""
        if self.claims.pop(block, None) is not None:
            self.done |= 1 << block
            self.version += 1
            self._finished[block] = set()
            self._count(blocks_here=1)

    def trained(self, samples: int) -> None:
        """Counts samples that this peer has trained."""
        self._count(samples_here=samples)

    def release(self, blocks: Iterable[int] | None = None) -> None:
        """Gives claims back, of which this peer trains nothing more; all of them if None."""
        for block in list(self.claims if blocks is None else blocks):
            if self.claims.pop(block, None) is not None:
                self.version += 1

    def next_epoch(self) -> None:
        """Begins the next epoch; the present one is complete."""
        self._begin_epoch(self.epoch + 1)

    def holders(self) -> list[str]:
        """The other peers that have claims in this epoch."""
        return [name for name, seen in self._others.items() if seen.record.epoch == self.epoch and seen.record.claims]

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.done = epoch, 0
        self.claims.clear()
        self._abandoned.clear()
        self._finished.clear()
        self.version += 1

    def _follow_epoch(self, epochs: list[int]) -> None:
        """Goes to a later epoch: the next one if anybody is there, one further away if most of the others are."""
        most = sorted(epochs)[(len(epochs) - 1) // 2] if epochs else 0
        target = max(most, self.epoch + 1 if any(epoch == self.epoch + 1 for epoch in epochs) else 0)
        if target > self.epoch:
            self._begin_epoch(target)

    def _lose(self, record: DataRecord) -> None:
        """Notes what a peer that has gone had done and begun."""
        self.take_over_done(min(record.epoch, self.epoch), record.done if record.epoch == self.epoch else 0)
        if record.epoch == self.epoch:
            self._abandoned.update({block: self.epoch for block, begun in record.claims.items() if begun})

    def _claimants(self, block: int, now: float) -> list[tuple[bool, int, str]]:
        """The other peers that claim a block: whether they have begun it, their hash, and their name."""
        return [
            (seen.record.claims[block], self._score(name, block), name)
            for name, seen in self._others.items()
            if seen.record.epoch == self.epoch
            and block in seen.record.claims
            and now - seen.changed < self.lease_seconds
        ]

    def _score(self, name: str, block: int) -> int:
        return int(scores(name, self.epoch, self.division.blocks)[block])

    def _must_give_up(self, block: int, now: float) -> bool:
        if self.done >> block & 1:
            return True
        own = (self.claims[block].state is BlockState.BEGUN, self._score(self.name, block), self.name)
        return any(other > own for other in self._claimants(block, now))

    def _give_up(self, block: int) -> None:
        claim = self.claims.pop(block)
        self.version += 1
        if claim.state is BlockState.BEGUN:
            self._count(conflicts=1, most_duplicates=claim.handed)

    def _note_trained_twice(self, name: str, record: DataRecord) -> None:
        """Counts a block of this peer that another one has begun, too, before it heard that it is done."""
        for block, begun in record.claims.items():
            if begun and block in self._finished and name not in self._finished[block]:
                self._finished[block].add(name)
                self._count(conflicts=1, most_duplicates=self.division.size(block))

    def _free(self, now: float) -> list[int]:
        taken = self.done
        for seen in self._others.values():
            if seen.record.epoch == self.epoch and now - seen.changed < self.lease_seconds:
                for block in seen.record.claims:
                    taken |= 1 << block
        for block in self.claims:
            taken |= 1 << block
        return [block for block in range(self.division.blocks) if not taken >> block & 1]

    def _best_free(self, count: int, now: float) -> list[tuple[int, bool]]:
        """The free blocks that this peer should claim first, and whether it has the greatest hash for each."""
        free = self._free(now) if count > 0 else []
        if not free:
            return []
        blocks = self.division.blocks
        own = scores(self.name, self.epoch, blocks)[free]
        present = [name for name, seen in self._others.items() if seen.record.epoch == self.epoch]
        best = own.copy()
        for name in present:
            np.maximum(best, scores(name, self.epoch, blocks)[free], out=best)
        is_own = own == best
        order = np.lexsort((~own, ~is_own))  # own blocks first, then those with the greatest hash
        return [(free[index], bool(is_own[index])) for index in order[:count]]

    def _count(self, **counts: int) -> None:
        self.statistics = replace(
            self.statistics, **{name: getattr(self.statistics, name) + count for name, count in counts.items()}
        )
