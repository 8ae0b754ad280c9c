"""Bounds what connections to the direct port may take, by the address of the caller. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from averaging.errors import BusyError

MAX_CONNECTIONS, MAX_CONNECTIONS_PER_HOST = 1024, 256
"""Connections of callers with a ticket."""

MAX_NEWCOMERS, MAX_NEWCOMERS_PER_HOST = 512, 64
"""Connections whose ticket has not arrived yet."""


class Places:
    """Counts connections of one kind.

    Args:
        in_all: maximum number.
        per_host: maximum number from one address.
    """

    def __init__(self, in_all: int, per_host: int) -> None:
        self._in_all, self._per_host = in_all, per_host
        self._taken: Counter[str] = Counter()

    def take(self, host: str) -> bool:
        """Takes a place; returns whether there was one."""
        if self._taken[host] >= self._per_host or self._taken.total() >= self._in_all:
            return False
        self._taken[host] += 1
        return True

    def leave(self, host: str) -> None:
        """Frees a place."""
        self._taken[host] -= 1
        if not self._taken[host]:
            del self._taken[host]


@dataclass(frozen=True, slots=True)
class HeldLimits:
    """Bytes of parts that no round has asked for.

    Attributes:
        per_host: limit of the callers at one address.
        in_all: limit of all callers.
    """

    per_host: int
    in_all: int


class Held:
    """Counts the bytes of streams that no round has accepted yet."""

    def __init__(self, limits: HeldLimits) -> None:
        self._limits = limits
        self._hosts: Counter[str] = Counter()

    def add(self, host: str, nbytes: int) -> None:
        """Records bytes that are about to be held.

        Raises:
            BusyError: that would be too many.
        """
        if self._hosts[host] + nbytes > self._limits.per_host or self._hosts.total() + nbytes > self._limits.in_all:
            raise BusyError("the unfinished requests of your host hold too much memory")
        self._hosts[host] += nbytes

    def release(self, host: str, nbytes: int) -> None:
        """Records that bytes are no longer held, or that a round bounds them."""
        self._hosts[host] -= nbytes
        if not self._hosts[host]:
            del self._hosts[host]
