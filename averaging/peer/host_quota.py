"""A semaphore with a limit per host, so that one host cannot take all places."""

from __future__ import annotations

import asyncio
from collections import Counter


class HostQuota:
    """Limits concurrent callers, in total and per host.

    A free place goes to the host with the fewest places. Hosts with equally many are served in turn, and the callers of
    one host in order of arrival. So a host with many waiting callers does not delay the others.

    Args:
        in_all: number of places.
        per_host: maximum number of places of one host.
    """

    def __init__(self, in_all: int, per_host: int) -> None:
        self._in_all, self._per_host = in_all, per_host
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by host, the next one first

    def taken_by(self, host: str) -> int:
        """Number of places that `host` has."""
        return self._taken[host]

    @property
    def wanted(self) -> bool:
        """Whether a caller waits for a place."""
        return bool(self._waiting)

    async def enter(self, host: str) -> None:
        """Takes a place; waits until there is one."""
        if self._may_enter(host):
            self._taken[host] += 1
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, {})[granted] = None
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it was granted a place at the same time
                self.leave(host)
                raise
            queue = self._waiting[host]
            del queue[granted]
            if not queue:
                del self._waiting[host]
            raise

    def leave(self, host: str) -> None:
        """Returns a place."""
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]
        able = [host for host in self._waiting if self._may_enter(host)]
        if able:
            host = min(able, key=lambda host: self._taken[host])
            queue = self._waiting.pop(host)
            granted = next(iter(queue))
            del queue[granted]
            if queue:
                self._waiting[host] = queue  # behind the other hosts
            self._taken[host] += 1
            granted.set_result(None)

    def _may_enter(self, host: str) -> bool:
        return self._taken.total() < self._in_all and self._taken[host] < self._per_host
