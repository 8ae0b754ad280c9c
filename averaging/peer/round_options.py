"""What a strategy may say of one round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

StopSearch = Callable[[Mapping[str, bytes]], bool]
"""Whether to look for a group on has become vain, by what the others tell of their progress, by endpoint."""

StartSize = Callable[[Mapping[str, bytes]], int]
"""With how many that contribute a group may begin, by the same."""


ExpectedPeers = Callable[[Mapping[str, bytes]], Collection[str]]
"""Which of the others a round waits for, by endpoint, by the same."""


class RoundOptions(TypedDict, total=False):
    """What a strategy may say of one round; the keyword arguments of `Peer.average`.

    Attributes:
        weight: of this peer; the averager's if not given.
        gather: handed to all members of the group, see `Peer.average`.
        phase: of the topic, such as a step; peers in other phases are not met.
        enough: a group that this peer leads begins at once with so many that contribute, or with what it returns for
            the others' progress whenever that changes; if not given, with all that are awaited and have not left.
        awaited: which of the others it waits for; if not given, all that train in the run. A peer at whose address
            nothing listens any more is not waited for.
        patience: seconds to look for a group; if not given, `group_wait` for each key to look under.
        overtaken: asked, whenever the others' progress changes, whether to look on has become vain.
        state: a digest of what all members must hold alike when the round begins, for the receipt.
    """

    weight: float
    gather: Any
    phase: str
    start_size: int | StartSize
    expected_peers: ExpectedPeers
    search_timeout: float
    stop_search: StopSearch
    state: str


def all_of(expected_peers: ExpectedPeers, now: Mapping[str, bytes]) -> StartSize:
    """This peer and those that are awaited now, as long as they are."""
    expected = frozenset(expected_peers(now))
    return lambda announcements: 1 + len(expected.intersection(expected_peers(announcements)))
