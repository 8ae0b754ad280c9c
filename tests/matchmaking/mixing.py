"""How fast repeated averaging in groups brings peers together: rounds of one number per peer, without the protocol.

Two ways to form the groups: by the library's group bits, and by a fixed grid as in the simulation of the authors of
Moshpit averaging (Ryabinin et al., 2021, arXiv:2103.03239). A failure lasts one round.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from averaging.protocol.group import GROUP_ID_BYTES, Group, Member, digits_per_round, group_key, next_group_bits

MIXED = 1e-9
"""The variance over the peers, 1 at the start, below which they count as mixed."""

Values = NDArray[np.float64]


class GroupBits:
    """`side ** axes` peers in groups of `side`, formed and moved on by the library's rules.

    Whoever looks under the same key forms a group: full ones first, one of the rest. A peer that is left alone keeps
    its value and its key. That is matchmaking with one declaration per round; who is left is a matter of chance there.
    """

    def __init__(self, side: int, axes: int, seed: int) -> None:
        count, digits = side**axes, digits_per_round(side)
        self.rng, numbers = random.Random(seed), np.random.default_rng(seed)
        self.side, self.numbers = side, numbers
        self.values: Values = numbers.standard_normal(count)
        self.bits = [
            "".join(format(peer // side**axis % side, f"0{digits}b") for axis in range(axes - 1))
            for peer in range(count)
        ]
        self.members = [Member(f"peer:{peer + 1}") for peer in range(count)]

    def round(self, probability: float = 0.0) -> Values:
        """One round of all peers; returns the new values.

        Each fails with a probability: it is in a group, but neither gives nor takes anything. All move on.
        """
        fails = self.numbers.random(len(self.values)) < probability
        by_key: dict[str, list[int]] = {}
        for peer, bits in enumerate(self.bits):
            by_key.setdefault(group_key("run", bits), []).append(peer)
        for peers in by_key.values():
            self.rng.shuffle(peers)
            for start in range(0, len(peers), self.side):
                together = peers[start : start + self.side]
                if len(together) > 1:
                    self._average(together, fails)
        return self.values

    def _average(self, peers: list[int], fails: NDArray[np.bool_]) -> None:
        group = Group(self.rng.randbytes(GROUP_ID_BYTES), tuple(self.members[peer] for peer in peers))
        for place, peer in enumerate(peers):
            self.bits[peer] = next_group_bits(self.bits[peer], group, place, self.side)
        through = [peer for peer in peers if not fails[peer]]
        if through:
            self.values[through] = self.values[through].mean()


def bits_rounds(side: int, axes: int, seed: int, probability: float = 0.0) -> int:
    """Rounds until the peers are mixed, with the library's group bits."""
    peers = GroupBits(side, axes, seed)
    return _rounds(peers.round(probability) for _ in itertools.count())


def grid_rounds(side: int, axes: int, seed: int, probability: float = 0.0) -> int:
    """The same where every peer has a place in a grid for ever, and lines along one axis after the other average."""
    return _rounds(_grid(side, axes, np.random.default_rng(seed), probability))


def _grid(side: int, axes: int, rng: np.random.Generator, probability: float) -> Iterator[Values]:
    values = rng.standard_normal((side,) * axes)
    axis = 0
    while True:
        works = rng.random(values.shape) >= probability
        sums, counts = (values * works).sum(axis, keepdims=True), works.sum(axis, keepdims=True)
        values = np.where(works, sums / np.maximum(counts, 1), values)
        axis = (axis + 1) % axes
        yield values


def _rounds(values_after_each: Iterable[Values]) -> int:
    """How many rounds it takes until the variance is below `MIXED`."""
    for number, values in enumerate(values_after_each, start=1):
        if values.var() < MIXED:
            return number
        if number == 100:
            break
    raise AssertionError(f"the variance is not below {MIXED} after 100 rounds")
