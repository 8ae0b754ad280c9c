"""Finds silent nodes by this node's own clock, without a comparison of clocks. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)


class Silence(Generic[Node]):
    """Counts for how long the last heartbeat of each node has stayed the same.

    If this node could not read heartbeats, because it was stopped or the register did not answer, that time counts as
    at most one interval.

    Args:
        interval: Seconds between two heartbeats.
        limit: Seconds of silence after which a node is dead.
    """

    def __init__(self, interval: float, limit: float) -> None:
        self._interval, self._limit = interval, limit
        self._seen: dict[Node, tuple[object, float]] = {}  # the last heartbeat, and the seconds without a change
        self._looked: float | None = None

    def silent(self, heartbeats: Mapping[Node, object], now: float) -> list[Node]:
        """The nodes that are silent for too long, given the last heartbeat of each, at `now` on a monotonic clock."""
        passed = 0.0 if self._looked is None else min(now - self._looked, self._interval)
        self._looked = now
        seen: dict[Node, tuple[object, float]] = {}
        for node, heartbeat in heartbeats.items():
            last = self._seen.get(node)
            same = last is not None and last[0] == heartbeat
            seen[node] = (heartbeat, last[1] + passed if same and last is not None else 0.0)
        self._seen = seen
        return [node for node, (_, silence) in seen.items() if silence > self._limit]
