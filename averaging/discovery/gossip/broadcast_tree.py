"""Who tells whom: a fresh record goes down a tree over the ring of peers, so that each is told exactly once. Pure.

Peers stand on a ring in the order of the hashes of their endpoints. Whoever has to tell a range of the ring cuts those
it knows there, in the order in which they follow itself, into `fanout` runs of equal size, and tells the first of each
run the record together with the run's range, for which that one does the same. A range never holds the hash of a peer
that has been told already, so it takes one message per peer and log_fanout(N) hops, and it ends whatever the peers
believe about who is there. The cuts depend on the ring alone, so a peer always talks to the same few others (the
fingers of Chord, Stoica et al. 2001; broadcast over them, El-Ansary et al. 2003), to which connections are open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

RING = 2**64
"""Hashes are below this; 0 is nobody's, so that the range (0, 0) can mean nobody."""


@dataclass(frozen=True, slots=True)
class BroadcastBranch:
    """A range of the ring, ends included, and who can be asked to tell it, in the order in which to try them."""

    start: int
    end: int
    candidates: tuple[str, ...]


@lru_cache(maxsize=16384)
def peer_hash(endpoint: str) -> int:
    """A peer's place on the ring, from 1 to 2**64 - 1."""
    return int.from_bytes(blake2b(endpoint.encode(), digest_size=8).digest(), "little") or 1


def all_others(endpoint: str) -> tuple[int, int]:
    """The range of everybody but `endpoint`."""
    own = peer_hash(endpoint)
    return (own + 1) % RING, own - 1


class BroadcastRing:
    """The peers to tell, in the order of their hashes; of two with the same hash only the first is on it."""

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
        """Adds a peer, unless it is there."""
        number = peer_hash(endpoint)
        if not self.within(number, number):
            insort(self._places, (number, endpoint))
            self._names.add(endpoint)

    def discard(self, endpoint: str) -> None:
        """Takes a peer out, if it is there."""
        if endpoint in self._names:
            self._names.discard(endpoint)
            self._places.remove((peer_hash(endpoint), endpoint))

    def within(self, start: int, end: int) -> list[tuple[int, str]]:
        """Those whose hash lies in [start, end], in ring order; if end < start the range goes on past the top."""
        if start <= end:
            return self._places[bisect_left(self._places, (start, "")) : bisect_right(self._places, (end + 1, ""))]
        return self.within(start, RING - 1) + self.within(0, end)

    def branches(
        self, endpoint: str, start: int, end: int, fanout: int, avoid: Container[str] = ()
    ) -> list[BroadcastBranch]:
        """How `endpoint` has [start, end] told: at most fanout + 1 branches, none of which holds its own hash.

        Those in `avoid`, who did not answer lately, are tried after all others of their branch.
        """
        if (start, end) == (0, 0):
            return []
        own = peer_hash(endpoint)
        if not _contains(start, end, own):
            return self._cut(start, end, fanout, avoid)
        after = self._cut((own + 1) % RING, end, fanout, avoid) if own != end else []
        # A peer that is the first of its run has nobody before it. Only another view of the ring, or a first one that
        # does not answer, puts some there.
        before = self._cut(start, own - 1, 1, avoid) if own != start else []
        return after + before

    def _cut(self, start: int, end: int, fanout: int, avoid: Container[str]) -> list[BroadcastBranch]:
        """Cuts [start, end] into `fanout` ranges with equally many members, or fewer if there are fewer members."""
        members = self.within(start, end)
        runs = min(fanout, len(members))
        bounds = [len(members) * run // runs for run in range(runs + 1)] if runs else []
        starts = [start, *(members[bound][0] for bound in bounds[1:-1])]
        ends = [*((first - 1) % RING for first in starts[1:]), end]
        branches = []
        for run in range(runs):
            names = [name for _, name in members[bounds[run] : bounds[run + 1]]]
            names.sort(key=lambda name: name in avoid)  # stable
            branches.append(BroadcastBranch(starts[run], ends[run], tuple(names)))
        return branches


def _contains(start: int, end: int, number: int) -> bool:
    return start <= number <= end if start <= end else number >= start or number <= end
