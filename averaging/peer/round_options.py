"""What a strategy may say of one round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

Overtaken = Callable[[Mapping[str, bytes]], bool]
"""Whether to look for a group on has become vain, by what the others tell of their progress, by endpoint."""

Enough = Callable[[Mapping[str, bytes]], int]
"""With how many that contribute a group may begin, by the same."""


class RoundOptions(TypedDict, total=False):
    """What a strategy may say of one round.

    Attributes:
        weight: of this peer; the averager's if not given.
        gather: handed to all members of the group, see `Peer.average`.
        phase: of the topic, such as a step; peers in other phases are not met.
        enough: a group that this peer leads begins at once with so many that contribute, or with what it says to the
            others' progress whenever that changes; if not given, with all that train in the run and have not left.
        patience: seconds to look for a group; if not given, `matchmaking_time` for each key to look under.
        overtaken: asked, whenever the others' progress changes, whether to look on has become vain.
    """

    weight: float
    gather: Any
    phase: str
    enough: int | Enough
    patience: float
    overtaken: Overtaken


def all_of(awaited: Collection[str]) -> Enough:
    """This peer and those of `awaited`, by endpoint, that have not left meanwhile."""
    return lambda told: 1 + len(told.keys() & awaited)
