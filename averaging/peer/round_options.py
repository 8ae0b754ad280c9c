"""The options of one round that a strategy may set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypedDict

from averaging.protocol import Group
from averaging.receipts import DriftCheck

StopSearch = Callable[[Mapping[str, bytes]], bool]
"""Whether the search for a group ends, given the others' packed progress by endpoint."""

StartSize = Callable[[Mapping[str, bytes]], int]
"""Number of contributing members with which a group begins, given the same."""

ExpectedPeers = Callable[[Mapping[str, bytes]], Collection[str]]
"""Endpoints of the peers for which a round waits, given the same."""


Confirm = Callable[[Group], Awaitable[str]]
"""Says why the result of a round with this group is not adopted; an empty text if it is."""


class RoundOptions(TypedDict, total=False):
    """Options of one round; the keyword arguments of `Peer.average`, where they are described.

    Attributes:
        weight: weight of this peer; the averager's if not given.
        gather: passed to all members of the group.
        phase: phase of the topic, such as a step number.
        start_size: if not given, the number of expected peers that have not left, and this one.
        expected_peers: if not given, all peers that train in the run.
        search_timeout: seconds; if not given, `group_wait` for each key to search.
        stop_search: if not given, the search ends when all expected peers have left.
        drift: of what all members must hold alike, from `Training.fingerprint`. Hyperparameters are compared anyway.
        confirm: not for strategies; set where the model is divided between the ranks of a site.
    """

    weight: float
    gather: Any
    phase: str
    start_size: int | StartSize
    expected_peers: ExpectedPeers
    search_timeout: float
    stop_search: StopSearch
    drift: DriftCheck
    confirm: Confirm


def all_of(expected_peers: ExpectedPeers, announcements: Mapping[str, bytes]) -> StartSize:
    """Counts this peer and those of the presently expected peers that are still expected."""
    expected = frozenset(expected_peers(announcements))
    return lambda seen: 1 + len(expected.intersection(expected_peers(seen)))
