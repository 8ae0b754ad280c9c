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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from averaging.common import is_count, pack, unpack
from averaging.errors import ConfigError, ProtocolViolationError

MAX_BLOCKS, MAX_CLAIMS, MAX_EPOCH = 4096, 32, 1 << 31  # of a record, which has 1 KiB; 4096 blocks are 512 bytes
DEFAULT_BLOCKS = 1024
SETTLE = 0.5  # seconds from the announcement of a claim to its beginning: time for the others to see it
UNSETTLED = 2.0  # seconds after a peer has come or gone during which others may not know it
LEASE_SECONDS = 600.0  # without any progress so long, the claims of a peer that is still there end


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a dataset into blocks, which must be the same at all peers."""

    length: int  # samples
    block_size: int  # samples of a block; the last one may have fewer
    seed: int | None  # of the order of the samples; None for that of the dataset

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
        return -(-self.length // self.block_size)

    @property
    def digest(self) -> bytes:
        return blake2b(pack([self.length, self.block_size, self.seed]), digest_size=8).digest()

    def size(self, block: int) -> int:
        return min(self.block_size, self.length - block * self.block_size)


@dataclass(frozen=True, slots=True)
class DataRecord:
    """What a peer announces."""

    digest: bytes  # of the division
    epoch: int  # all earlier ones are complete
    done: int  # its blocks that are trained, as bits
    claims: Mapping[int, bool]  # the claimed blocks, and whether they have begun
    trained: int  # samples, to tell whether the peer goes on

    def pack(self) -> bytes:
        # The done blocks are a prefix and the bits behind it.
        prefix = ((self.done ^ (self.done + 1)).bit_length() - 1) if self.done else 0
        rest = self.done >> prefix
        bits = rest.to_bytes(-(-rest.bit_length() // 8), "little")
        claims = [block * 2 + begun for block, begun in self.claims.items()]
        return pack([self.digest, self.epoch, prefix, bits, claims, self.trained])

    @classmethod
    def unpack(cls, packed: bytes) -> DataRecord:
        """Unpacks what another peer has announced; raises ProtocolViolationError if it is malformed."""
        try:
            digest, epoch, prefix, bits, claims, trained = msgspec.convert(
                unpack(packed), _Packed, builtin_types=(bytes,)
            )
        except ValueError as error:
            raise ProtocolViolationError(f"a record of the data of a run is malformed: {error}") from None
        if prefix + 8 * len(bits) > MAX_BLOCKS + 7:
            raise ProtocolViolationError("a record of the data of a run names too many blocks")
        done = (int.from_bytes(bits, "little") << prefix) | ((1 << prefix) - 1)
        return cls(digest, epoch, done, {claim // 2: bool(claim % 2) for claim in claims}, trained)


Count = Annotated[int, msgspec.Meta(ge=0)]
Claims = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2 * MAX_BLOCKS)]], msgspec.Meta(max_length=MAX_CLAIMS)]
_Packed = tuple[bytes, Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)], Count, bytes, Claims, Count]


@dataclass(slots=True)
class BlockClaim:
    begins: float  # time from which it may be begun, in seconds of a monotonic clock
    begun: bool = False
    handed: int = 0  # samples
    retaken: bool = False  # a lost peer had begun it


@dataclass(frozen=True, slots=True)
class DataStatistics:
    """What this peer has done, since its sampler was made."""

    epoch: int = 0  # the present one
    blocks: int = 0  # of an epoch
    done: int = 0  # blocks of the present epoch that are trained, at any peer
    blocks_here: int = 0  # that this peer has trained
    samples_here: int = 0
    retaken: int = 0  # blocks that a lost peer had begun, and this one has begun again
    conflicts: int = 0  # blocks that another peer had begun, too: this one has given it up, or ended it before it knew
    most_duplicates: int = 0  # samples that were at most trained twice because of that


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


class Dealer:
    """One peer's view of an epoch, and its claims. `name` is unique in the run."""

    def __init__(self, division: Division, name: str) -> None:
        self.division, self.name = division, name
        self.epoch = 0
        self.done = 0  # blocks of the epoch that are known to be trained, as bits
        self.version = 0  # grows with each change that others should see
        self.claims: dict[int, BlockClaim] = {}
        self.statistics = DataStatistics()
        self._others: dict[str, _Seen] = {}
        self._abandoned: set[int] = set()  # blocks of this epoch that lost peers had begun
        self._finished: dict[int, set[str]] = {}  # blocks of this epoch trained here, and who had begun them as well
        self._came_or_went: float | None = None

    @property
    def is_complete(self) -> bool:
        return self.done == self._all

    @property
    def record(self) -> DataRecord:
        claims = {block: claim.begun for block, claim in self.claims.items()}
        return DataRecord(self.division.digest, self.epoch, self.done, claims, self.statistics.samples_here)

    def see(self, records: Mapping[str, DataRecord], now: float) -> None:
        """Takes the records of the other peers. Claims of this peer that others have by right are dropped."""
        if records.keys() != self._others.keys() or self._came_or_went is None:
            self._came_or_went = now
        for name in self._others.keys() - records.keys():
            lost = self._others.pop(name).record
            if lost.epoch == self.epoch:
                self.take_over_done(lost.epoch, lost.done)
                self._abandoned |= {block for block, begun in lost.claims.items() if begun}
        for name, record in records.items():
            seen = self._others.get(name)
            if seen is None or seen.record != record:
                self._others[name] = _Seen(record, now)
        self._follow_epoch([record.epoch for record in records.values()])
        known = self.done
        for name, record in records.items():
            if record.epoch == self.epoch:
                self.done |= record.done & self._all
                self._note_trained_twice(name, record)
        self.version += known != self.done
        self._give_up([block for block in self.claims if self.done >> block & 1])
        rivals = [each for each in self._claims_of_others(now) if each[0] in self.claims]
        self._give_up([block for block, begun, name in rivals if self._has_right(block, begun=begun, name=name)])

    def take_over_done(self, epoch: int, done: int) -> None:
        """Takes what is done from a checkpoint, or from a record that was withdrawn."""
        if epoch > self.epoch:
            self._begin_epoch(epoch)
        if epoch == self.epoch:
            self.done |= done & self._all
            self.version += 1

    def claim(self, now: float, ahead: int) -> None:
        """Claims free blocks, until `ahead` of them are claimed and not begun.

        Those for which this peer has the greatest hash come first. If all know the same peers, nobody else claims
        these, so they may be begun at once. The others settle until their claim was seen.
        """
        wanted = min(ahead, MAX_CLAIMS - len(self.claims)) - sum(not claim.begun for claim in self.claims.values())
        free = self._free(now) if wanted > 0 else []
        if not free:
            return
        blocks = self.division.blocks
        own = scores(self.name, self.epoch, blocks)[free]
        best = own.copy()
        for name in self._others:  # also those that have not heard yet that the epoch before is complete
            np.maximum(best, scores(name, self.epoch, blocks)[free], out=best)
        is_settled = self._came_or_went is not None and now - self._came_or_went >= UNSETTLED
        for index in np.lexsort((~own, own != best))[:wanted]:  # own blocks first, then those with the greatest hash
            at_once = is_settled and own[index] == best[index]
            block = free[index]
            self.claims[block] = BlockClaim(now if at_once else now + SETTLE, retaken=block in self._abandoned)
            self.version += 1

    def begin(self, now: float) -> int | None:
        for block, claim in self.claims.items():
            if not claim.begun and now >= claim.begins:
                claim.begun = True
                self.version += 1
                if claim.retaken:
                    self._count(retaken=1, most_duplicates=self.division.size(block))
                return block
        return None

    @property
    def has_claims_to_begin(self) -> bool:
        return not all(claim.begun for claim in self.claims.values())

    def has_free(self, now: float) -> bool:
        return bool(self._free(now))

    def finish(self, block: int) -> None:
        if self.claims.pop(block, None) is not None:
            self.done |= 1 << block
            self.version += 1
            self._finished[block] = set()
            self._count(blocks_here=1)

    def trained(self, samples: int) -> None:
        self._count(samples_here=samples)

    def release(self) -> None:
        self.version += bool(self.claims)
        self.claims.clear()

    def next_epoch(self) -> None:
        self._begin_epoch(self.epoch + 1)

    def holders(self) -> list[str]:
        """The other peers that have claims in this epoch."""
        return [name for name, seen in self._others.items() if seen.record.epoch == self.epoch and seen.record.claims]

    @property
    def _all(self) -> int:
        return (1 << self.division.blocks) - 1

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self.done = epoch, 0
        self.claims.clear()
        self._abandoned.clear()
        self._finished.clear()
        self.version += 1

    def _follow_epoch(self, epochs: list[int]) -> None:
        """Goes to a later epoch: the next one if anybody is there, one further away if most of the others are."""
        most = sorted(epochs)[(len(epochs) - 1) // 2] if epochs else 0
        target = max(most, self.epoch + 1 if self.epoch + 1 in epochs else 0)
        if target > self.epoch:
            self._begin_epoch(target)

    def _claims_of_others(self, now: float) -> Iterator[tuple[int, bool, str]]:
        """Each claim of another peer that goes on: the block, whether it has begun, and the peer."""
        for name, seen in self._others.items():
            if seen.record.epoch == self.epoch and now - seen.changed < LEASE_SECONDS:
                for block, begun in seen.record.claims.items():
                    yield block, begun, name

    def _has_right(self, block: int, *, begun: bool, name: str) -> bool:
        """Whether another peer keeps a block that both have claimed: who has begun it, else who has the greater hash.

        Both compare the same values. Otherwise both would keep it, or both give it up.
        """
        theirs, own = (int(scores(peer, self.epoch, self.division.blocks)[block]) for peer in (name, self.name))
        return (begun, theirs, name) > (self.claims[block].begun, own, self.name)

    def _give_up(self, blocks: list[int]) -> None:
        for block in set(blocks):
            claim = self.claims.pop(block)
            self.version += 1
            if claim.begun:
                self._count(conflicts=1, most_duplicates=claim.handed)

    def _note_trained_twice(self, name: str, record: DataRecord) -> None:
        """Counts a block of this peer that another one has begun, too, before it heard that it is done."""
        for block, begun in record.claims.items():
            if begun and block in self._finished and name not in self._finished[block]:
                self._finished[block].add(name)
                self._count(conflicts=1, most_duplicates=self.division.size(block))

    def _free(self, now: float) -> list[int]:
        taken = self.done
        for block in (*self.claims, *(block for block, _, _ in self._claims_of_others(now))):
            taken |= 1 << block
        return [block for block in range(self.division.blocks) if not taken >> block & 1]

    def _count(self, **counts: int) -> None:
        sums = {name: getattr(self.statistics, name) + count for name, count in counts.items()}
        self.statistics = replace(self.statistics, **sums)
