"""Which nodes are silent, by this node's own clock: clocks of several machines are never compared. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Node = TypeVar("Node", bound=Hashable)


class Silence(Generic[Node]):
    """Counts for how long the last heartbeat of each node has stayed the same.

    Time in which this node saw nothing, because it was stopped or the register was away, counts as one interval at
    most: the others had no chance to be heard.

    Args:
        interval: Seconds between two heartbeats.
        limit: Seconds of silence after which a node is dead.
    """

    def __init__(self, interval: float, limit: float) -> None:
        self._interval, self._limit = interval, limit
        self._seen: dict[Node, tuple[object, float]] = {}  # the last heartbeat, and for how long it has been the same
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
