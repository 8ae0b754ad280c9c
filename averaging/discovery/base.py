"""The contract of discovery: small records under a key, one per subkey, that expire at a time chosen by their owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from averaging.errors import AveragingError
from averaging.timing import is_set_within

MAX_VALUE_BYTES = 1024  # the largest value of a record

MAX_LIFETIME = 3600.0
"""Largest number of seconds until a record expires. What should last longer must be stored again in time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record as readers see it."""

    value: bytes  # its value
    expiration: float  # when it expires, in seconds since the epoch


@dataclass(frozen=True, slots=True)
class KnownPeer:  # another peer
    since: float  # when it joined the run, by its own clock, in seconds since the epoch
    values: Mapping[str, bytes]  # that it has stored, by key


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The other peers, and what may keep them from this peer, as far as discovery knows."""

    peers: Mapping[str, KnownPeer]  # the other peers of the run, by endpoint
    silent: Mapping[str, str] = field(default_factory=dict)  # peers that did not answer this peer lately, and why
    # peers whose clock differs by more than is allowed. The value is the number of seconds by which that clock is
    # ahead; it is negative if it is behind.
    clock_offsets: Mapping[str, float] = field(default_factory=dict)
    # a text why there may be no other peers and what to do, if this follows from this peer's `join`
    isolation: str = ""
    # seconds by which this peer's clock is ahead of the median of the others; None if none has answered
    clock_ahead: float | None = None
    # seconds to add to this peer's clock for the median of all clocks, its own included, so that all peers reckon the
    # same time; 0 if no other clock is known
    clock_correction: float = 0.0


def clock_difference(ahead: float) -> str:
    """`40 s ahead of`, or `40 s behind` if it is negative."""
    seconds = abs(ahead)
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s {'ahead of' if ahead > 0 else 'behind'}"


class Discovery(Protocol):
    """One peer's access to the records of its run.

    It is an async context manager: entering it joins the run, leaving it withdraws the records of this peer.
    Reading is local and never waits for the network. A peer need not hold what nobody has read or followed.
    """

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> None:
        """Stores or replaces this peer's record under (key, subkey). Does not wait until other peers have it.

        The owner that stored a record under (key, subkey) first holds the place until that record expires or is
        withdrawn. If another owner holds it, the new record is kept but not read, and takes the place afterwards. This
        is not an error: it happens after a restart, when the record from before is still there.

        Raises:
            DiscoveryError: the value is over 1 KiB, a name is over 256 bytes, it has expired already or expires more
                than an hour from now, or too many records are stored.
            ClosedError: the discovery has not been entered, or has been left.
        """

    async def withdraw(self, key: str, subkey: str) -> None:
        """Removes this peer's record before it expires; does nothing if there is none."""

    async def follow(self, key: str, *, keep: bool = True) -> None:
        """Has this peer hold the records under `key`; returns when it holds them.

        If that takes longer than some seconds, it returns, and the records come later.

        Args:
            key: the key.
            keep: whether they are held until this peer leaves; otherwise until nobody has read them for a while.
        """

    def get(self, key: str) -> Mapping[str, Entry]:
        """The records under `key` that have not expired, by subkey.

        If the key is neither followed nor watched, they may be missing the first time, and come later.
        """

    def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        """Yields what `get(key)` returns, at once and again whenever it changes, also by expiration.

        Changes that come faster than the reader are merged. Close it (`contextlib.aclosing`) to stop watching. It ends
        when the discovery is left.
        """

    def knows(self, endpoint: str) -> bool:
        """Whether any record that this peer holds, and that has not expired, has `endpoint` as its subkey."""

    def withdrew(self, endpoint: str) -> bool:
        """Whether a peer that this one knew lately has withdrawn its records, and not only let them expire."""

    def endpoints(self) -> frozenset[str]:
        """The peers that discovery knows: all subkeys of the records that it holds and that have not expired.

        A peer that seems to have died may be left out sooner.
        """

    def diagnose(self) -> Diagnosis:
        """The other peers and what may keep them from this one; used to explain why no group was found."""


_MIN_WAIT = 0.001  # s; the loop's clock and the wall clock differ slightly


class Watchers:
    """Wakes the readers of a key when it changes or when something under it expires."""

    def __init__(
        self,
        clock: Callable[[], float],
        read: Callable[[str], Mapping[str, Entry]],
        next_expiration: Callable[[str], float | None],
    ) -> None:
        self._clock, self._read, self._next_expiration = clock, read, next_expiration
        self._waiting: dict[str, dict[asyncio.Event, None]] = {}
        self._closed = False

    def notify(self, key: str) -> None:
        for event in self._waiting.get(key, ()):
            event.set()

    def close(self) -> None:
        self._closed = True
        for key in self._waiting:
            self.notify(key)

    async def watch(self, key: str) -> AsyncGenerator[Mapping[str, Entry], None]:
        event = asyncio.Event()
        waiting = self._waiting.setdefault(key, {})
        waiting[event] = None
        yielded: Mapping[str, Entry] | None = None
        try:
            while not self._closed:
                event.clear()
                entries = self._read(key)
                if entries != yielded:
                    yielded = entries
                    yield entries
                else:
                    until = self._next_expiration(key)
                    await is_set_within(None if until is None else max(_MIN_WAIT, until - self._clock()), event)
        finally:
            del waiting[event]
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]


logger = logging.getLogger(__name__)


class PublishedRecord:
    """The record of this peer under one key, with what `value` returns; None if there is nothing to store now.

    It expires `lifetime` seconds after this peer has died, and is stored again after `refresh` seconds, changed or not.
    Two stores are at least `pause` seconds apart, except after an urgent change; faster changes are merged.
    """

    def __init__(
        self,
        discovery: Discovery,
        key: str,
        endpoint: str,
        value: Callable[[], bytes | None],
        *,
        lifetime: float,
        refresh: float,
        pause: float = 0.0,
        clock: Callable[[], float],
    ) -> None:
        self._discovery, self._key, self._endpoint = discovery, key, endpoint
        self._value, self._clock = value, clock
        self._lifetime, self._refresh, self._pause = lifetime, refresh, pause
        self._changed, self._urgent = asyncio.Event(), asyncio.Event()
        self._withdrawn = False

    async def withdraw(self) -> None:
        self._withdrawn = True  # from here on it is not stored any more
        await self._discovery.withdraw(self._key, self._endpoint)

    def changed(self, *, urgent: bool = False) -> None:
        """Has `keep` store the record again, because its value has changed; if urgent, without a pause."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def keep(self) -> None:
        """Stores the record after each change and before it expires, until cancelled. Call `store` first."""
        while True:
            await is_set_within(self._refresh, self._changed)
            self._changed.clear()
            self._urgent.clear()
            await self.store()
            if self._pause:
                await is_set_within(self._pause, self._urgent)

    async def store(self) -> None:
        value = self._value()
        if value is None or self._withdrawn:
            return
        try:
            await self._discovery.store(self._key, self._endpoint, value, self._clock() + self._lifetime)
        except AveragingError as error:  # `keep` tries again
            logger.warning("could not store this peer's record under %s in discovery: %s", self._key, error)
