"""Decides from whom each follower gets a version, so that the publisher sends few copies. Pure.

The tree of a new version is planned for all followers that wait for it: how many copies each source sends depends on
how long a copy takes and how many followers there are, and fast followers come before slow ones.

For each version the followers form a tree below the publisher: the first ones that ask get it from the publisher, and
the next ones from those, while they still receive it. A follower whose source fails gets it from the publisher.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping
from typing import TypeAlias

Follower: TypeAlias = bytes
"""The name of a follower."""

PUBLISHER: Follower = b""


HOP_SECONDS = 0.25
"""How much later a version ends at a follower than at its source: the messages under way, and the way itself. On
emulated links of 100 Mbit/s, with two cores for all, it was 0.1 s with 8 followers and 0.2 s with 32."""

SIDE_BY_SIDE = 1.33
"""How many times longer than its link needs a source takes for several copies at once. On the same links, 64 MiB to 8
followers took 15.9 s with two copies from each source and 6.5 s in a chain; to 32, which shared two cores, 28 and 13 s.
"""

FAN_OUTS = (1, 2, 4)

UNKNOWN_WHOLE, UNKNOWN_DIFFERENCE = 1, 4
"""Copies that each source sends if rates are not known. A chain is the best for long versions: each link carries them
once."""

CLASS = 4.0
"""Followers whose rates differ by less than this factor keep the order in which they came, and so their sources, to
which they have fast connections."""


def best_fan_out(followers: int, nbytes: int, rate: float) -> int:
    """Copies that each source should send, for the last follower to have a version soon."""

    def seconds(fan_out: int) -> float:
        copies = 1 if fan_out == 1 else SIDE_BY_SIDE * fan_out
        return copies * nbytes / rate + depth_of(followers, fan_out) * HOP_SECONDS

    return min(FAN_OUTS, key=seconds)


def depth_of(followers: int, fan_out: int) -> int:
    """Followers that a version passes through."""
    if fan_out == 1:
        return followers
    return math.ceil(math.log(followers * (fan_out - 1) + fan_out, fan_out)) - 1


def in_order(followers: Iterable[Follower], rates: Mapping[Follower, float]) -> list[Follower]:
    """The followers in the order in which they are placed: the fast ones first, those of one class as they came.

    Args:
        followers: in the order in which they came.
        rates: bytes/s that each has received; those without one are placed as those in the middle.
    """
    known = sorted(rate for rate in rates.values() if rate > 0)
    middle = known[len(known) // 2] if known else 1.0
    fastest = known[-1] if known else 1.0

    def rank(follower: Follower) -> int:
        rate = rates.get(follower, 0.0)
        return int(math.log(fastest / (rate if rate > 0 else middle), CLASS))

    return sorted(followers, key=rank)


class Tree:
    """Who gets one version from whom.

    Args:
        copies: followers that get it from the publisher.
    """

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._source: dict[Follower, Follower] = {}

    def plan(self, followers: Iterable[Follower], able: Container[Follower], fan_out: int) -> None:
        """Gives sources to followers that have none, in this order: each the one with the shortest way."""
        children = Counter(self._source.values())
        room = deque([PUBLISHER] * (self._copies - children[PUBLISHER]))
        for each in self._source:
            room.extend([each] * (fan_out - children[each] if each in able else 0))
        for follower in followers:
            self._source[follower] = room.popleft() if room else PUBLISHER
            room.extend([follower] * (fan_out if follower in able else 0))

    def source_of(
        self, follower: Follower, able: Collection[Follower], failed: Collection[Follower], fan_out: int
    ) -> Follower:
        """Returns the source for a follower that asks for one, for the first time or again.

        Args:
            follower: the asking follower.
            able: the followers that hand on, and that `follower` can reach.
            failed: the followers that have not delivered to it. Then it gets the version from the publisher.
            fan_out: followers that may get it from one other follower.

        Returns:
            The same source as before, if there is one. Otherwise the publisher if it has room, else the follower with
            the shortest way to the publisher that has room, or the publisher if there is none.
        """
        before = self._source.get(follower)
        if before is not None:
            if before not in failed and (before == PUBLISHER or before in able):
                return before
            del self._source[follower]
        children = Counter(self._source.values())
        if failed or children[PUBLISHER] < self._copies:
            chosen = PUBLISHER
        else:
            below = self._below(follower)
            possible = [
                each for each in self._source if each in able and each not in below and children[each] < fan_out
            ]
            chosen = min(possible, key=self._depth, default=PUBLISHER)
        self._source[follower] = chosen
        return chosen

    def leave(self, follower: Follower) -> None:
        """Removes a follower that is gone. Those that get the version from it ask again."""
        self._source.pop(follower, None)

    @property
    def sources(self) -> Mapping[Follower, Follower]:
        """The present source of each follower."""
        return dict(self._source)

    def _below(self, follower: Follower) -> set[Follower]:
        """The follower and all that get the version through it, which would wait for each other."""
        below = {follower}
        while True:
            more = {each for each, source in self._source.items() if source in below} - below
            if not more:
                return below
            below |= more

    def _depth(self, follower: Follower) -> int:
        depth = 0
        seen: set[Follower] = set()
        while follower in self._source and follower not in seen:
            seen.add(follower)
            follower = self._source[follower]
            depth += 1
        return depth
