"""The streams of fresh records to clients, which cannot be dialled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from averaging.discovery.gossip.settings import GossipSettings
from averaging.errors import CallRefusedError
from averaging.protocol.messages import Record


class Follower:
    """What waits for one client; of one record only the newest."""

    def __init__(self, endpoint: str, settings: GossipSettings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._waiting: dict[tuple[str, str, bytes], Record] = {}
        self._ready = asyncio.Event()
        self._over = False

    def add(self, record: Record) -> None:
        """Puts a record in line; one too many ends the stream."""
        if len(self._waiting) < self._settings.follower_backlog:
            self._waiting[record.key, record.subkey, record.owner] = record
        else:
            self._over = True
        self._ready.set()

    def end(self) -> None:
        """Ends the stream after what waits."""
        self._ready.set()
        self._over = True

    async def records(self) -> AsyncGenerator[tuple[Record, ...], None]:
        """Yields what was added, as the client takes it.

        Raises:
            CallRefusedError: this peer leaves, or the client is too slow; it should turn to another peer.
        """
        while True:
            await self._ready.wait()
            if not self._over:
                await asyncio.sleep(self._settings.tick)
            self._ready.clear()
            waiting, self._waiting = list(self._waiting.values()), {}
            over, size = self._over, self._settings.records_per_reply
            for first in range(0, len(waiting), size):
                yield tuple(waiting[first : first + size])
            if over:
                raise CallRefusedError(self._endpoint, "ends the stream: this peer leaves, or its reader is too slow")


class ClientStreams:
    """All clients that follow this peer."""

    def __init__(self, endpoint: str, settings: GossipSettings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._followers: dict[Follower, None] = {}
        self._one_left = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._followers)

    @contextmanager
    def follow(self) -> Iterator[Follower]:
        """A new stream, for as long as the context is open.

        Raises:
            CallRefusedError: there are enough, or this peer leaves.
        """
        if self._ended:
            raise CallRefusedError(self._endpoint, "leaves the run; try another peer")
        if len(self._followers) >= self._settings.most_followers:
            raise CallRefusedError(self._endpoint, f"has {len(self._followers)} clients already; try another peer")
        follower = Follower(self._endpoint, self._settings)
        self._followers[follower] = None
        try:
            yield follower
        finally:
            del self._followers[follower]
            self._one_left.set()

    def publish(self, record: Record) -> None:
        """Sends a record to all of them."""
        for follower in self._followers:
            follower.add(record)

    def end(self) -> None:
        """Ends all streams after what waits in them, and begins no other."""
        self._ended = True
        for follower in self._followers:
            follower.end()

    async def gone(self) -> None:
        """Waits until all clients have taken what waited for them, or hung up."""
        while self._followers:
            self._one_left.clear()
            await self._one_left.wait()
