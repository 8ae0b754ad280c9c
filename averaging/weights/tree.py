"""Decides from whom each follower gets a version, so that the publisher sends few copies. Pure.

For each version the followers form a tree below the publisher: the first ones that ask get it from the publisher, and
the next ones from those, while they still receive it. A follower whose source fails gets another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TypeAlias

Follower: TypeAlias = bytes
"""The name of a follower."""

PUBLISHER: Follower = b""


class Tree:
    """Who gets one version from whom.

    Args:
        copies: followers that get it from the publisher.
    """

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._source: dict[Follower, Follower] = {}
        self._failures: Counter[Follower] = Counter()

    def source_of(
        self, follower: Follower, able: Collection[Follower], failed: Collection[Follower], fan_out: int
    ) -> Follower:
        """Returns the source for a follower that asks for one, for the first time or again.

        Args:
            follower: the asking follower.
            able: the followers that hand on, and that `follower` can reach.
            failed: the followers that have not delivered to it.
            fan_out: followers that may get it from one other follower.

        Returns:
            The same source as before, if there is one that has not failed. Otherwise the publisher if it has room, else
            the follower with the shortest way to the publisher that has room, or the publisher if there is none.
        """
        before = self._source.get(follower)
        if before is not None:
            if before not in failed and (before == PUBLISHER or before in able):
                return before
            self._failures[before] += before in failed
            del self._source[follower]
        children = Counter(self._source.values())
        if children[PUBLISHER] < self._copies:
            chosen = PUBLISHER
        else:
            below = self._below(follower)
            possible = [
                each
                for each in self._source
                if each in able and each not in failed and each not in below and children[each] < fan_out
            ]
            chosen = min(possible, key=lambda each: (self._failures[each], self._depth(each)), default=PUBLISHER)
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
