"""Who may do now what only a few can do at a time: a few of each host, so that none keeps all others from it."""

from __future__ import annotations

import asyncio
from collections import Counter


class HostQuota:
    """So many places, of which a host has at most a part.

    A place that becomes free goes to the host that has the fewest. Hosts that have as many are served in turn, and the
    callers of one host as they came. So nobody waits behind a host for which many wait.

    Args:
        in_all: places.
        per_host: of them at most.
    """

    def __init__(self, in_all: int, per_host: int) -> None:
        self._in_all, self._per_host = in_all, per_host
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by host, the one whose turn it is first

    def taken_by(self, host: str) -> int:
        """How many places `host` has."""
        return self._taken[host]

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for a place."""
        return bool(self._waiting)

    async def enter(self, host: str) -> None:
        """Takes a place, waiting for one if need be."""
        if self._may_enter(host):
            self._taken[host] += 1
            return
        called = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, {})[called] = None
        try:
            await called
        except asyncio.CancelledError:
            if not called.cancelled():  # a place was given to it at the same moment
                self.leave(host)
                raise
            line = self._waiting[host]
            del line[called]
            if not line:
                del self._waiting[host]
            raise

    def leave(self, host: str) -> None:
        """Gives a place back."""
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]
        able = [host for host in self._waiting if self._may_enter(host)]
        if able:
            host = min(able, key=lambda host: self._taken[host])
            line = self._waiting.pop(host)
            called = next(iter(line))
            del line[called]
            if line:
                self._waiting[host] = line  # behind the other hosts
            self._taken[host] += 1
            called.set_result(None)

    def _may_enter(self, host: str) -> bool:
        return self._taken.total() < self._in_all and self._taken[host] < self._per_host
