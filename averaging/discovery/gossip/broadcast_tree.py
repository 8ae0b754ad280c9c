"""The tree by which a new record reaches every peer exactly once, in log_fanout(N) hops. Pure.

Peers are on a ring, in the order of the hashes of their endpoints. A peer that is to send a record to a range of the
ring splits the peers that it knows there into `fanout` branches of equal size. It sends the record to the first peer
of each branch, together with the range of that branch, and that peer does the same for the range.

A range never contains a peer that has received the record already. So there is one message per peer, and the broadcast
ends even if the peers disagree about who is in the run. The branches depend on the ring alone, so a peer always sends
to the same few others, to which it has connections. These are the fingers of Chord (Stoica et al. 2001); El-Ansary et
al. (2003) describe the broadcast over them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

RING = 2**64
"""Hashes are from 1 to RING - 1. No peer has hash 0, so the range (0, 0) is empty."""


@dataclass(frozen=True, slots=True)
class BroadcastBranch:
    """A range of the ring, ends included, and the peers that can serve it, in the order in which to try them."""

    start: int
    end: int
    candidates: tuple[str, ...]


@lru_cache(maxsize=16384)
def peer_hash(endpoint: str) -> int:
    """A peer's place on the ring, from 1 to 2**64 - 1."""
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "little") or 1


def all_others(endpoint: str) -> tuple[int, int]:
    """The range of all peers but `endpoint`."""
    own = peer_hash(endpoint)
    return (own + 1) % RING, own - 1


class BroadcastRing:
    """The peers in the order of their hashes; of two with the same hash, only the first is on the ring."""

    def __init__(self, endpoints: Iterable[str] = ()) -> None:
        self._places: list[tuple[int, str]] = []
        self._names: set[str] = set()
        for endpoint in endpoints:
            self.add(endpoint)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, endpoint: object) -> bool:
        return endpoint in self._names

    def __getitem__(self, index: int) -> str:
        return self._places[index][1]

    def add(self, endpoint: str) -> None:
        """Adds a peer, unless it is on the ring."""
        number = peer_hash(endpoint)
        if not self.within(number, number):
            insort(self._places, (number, endpoint))
            self._names.add(endpoint)

    def discard(self, endpoint: str) -> None:
        """Removes a peer, if it is on the ring."""
        if endpoint in self._names:
            self._names.discard(endpoint)
            self._places.remove((peer_hash(endpoint), endpoint))

    def within(self, start: int, end: int) -> list[tuple[int, str]]:
        """The peers with a hash in [start, end], in ring order; if end < start, the range wraps around."""
        if start <= end:
            return self._places[bisect_left(self._places, (start, "")) : bisect_right(self._places, (end + 1, ""))]
        return self.within(start, RING - 1) + self.within(0, end)

    def branches(
        self, endpoint: str, start: int, end: int, fanout: int, avoid: Container[str] = ()
    ) -> list[BroadcastBranch]:
        """The branches by which `endpoint` reaches [start, end]: at most fanout + 1, without its own hash.

        Peers in `avoid`, which did not answer lately, are tried after all others of their branch.
        """
        if (start, end) == (0, 0):
            return []
        own = peer_hash(endpoint)
        if not _contains(start, end, own):
            return self._split(start, end, fanout, avoid)
        after = self._split((own + 1) % RING, end, fanout, avoid) if own != end else []
        # Usually this peer is the first of its branch, with none before it. There are some if the sender knows other
        # peers than this one, or if the first peer of the branch did not answer.
        before = self._split(start, own - 1, 1, avoid) if own != start else []
        return after + before

    def _split(self, start: int, end: int, fanout: int, avoid: Container[str]) -> list[BroadcastBranch]:
        """Splits [start, end] into `fanout` branches of equal size, or fewer if there are fewer members."""
        members = self.within(start, end)
        count = min(fanout, len(members))
        bounds = [len(members) * number // count for number in range(count + 1)] if count else []
        starts = [start, *(members[bound][0] for bound in bounds[1:-1])]
        ends = [*((first - 1) % RING for first in starts[1:]), end]
        branches = []
        for number in range(count):
            names = [name for _, name in members[bounds[number] : bounds[number + 1]]]
            names.sort(key=lambda name: name in avoid)  # stable
            branches.append(BroadcastBranch(starts[number], ends[number], tuple(names)))
        return branches


def _contains(start: int, end: int, number: int) -> bool:
    return start <= number <= end if start <= end else number >= start or number <= end
