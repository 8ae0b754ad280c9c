"""The streams of new records to clients, which accept no connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from averaging.discovery.gossip.settings import GossipSettings
from averaging.errors import CallRefusedError
from averaging.protocol import Record


class ClientStream:
    """The records that wait for one client; of each record, only the newest version."""

    def __init__(self, endpoint: str, settings: GossipSettings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._waiting: dict[tuple[str, str, bytes], Record] = {}
        self._ready = asyncio.Event()
        self._ended = False

    def add(self, record: Record) -> None:
        """Adds a record; if too many wait already, the stream ends."""
        if len(self._waiting) < self._settings.stream_backlog:
            self._waiting[record.key, record.subkey, record.owner] = record
        else:
            self._ended = True
        self._ready.set()

    def end(self) -> None:
        """Ends the stream after the records that wait."""
        self._ready.set()
        self._ended = True

    async def records(self) -> AsyncGenerator[tuple[Record, ...], None]:
        """Yields the records that were added.

        Raises:
            CallRefusedError: this peer leaves, or the client is too slow. It should follow another peer.
        """
        while True:
            await self._ready.wait()
            if not self._ended:
                await asyncio.sleep(self._settings.tick)
            self._ready.clear()
            waiting, self._waiting = list(self._waiting.values()), {}
            ended, size = self._ended, self._settings.records_per_reply
            for first in range(0, len(waiting), size):
                yield tuple(waiting[first : first + size])
            if ended:
                raise CallRefusedError("", "ends the stream: this peer leaves, or its reader is too slow")


class ClientStreams:
    """The streams to all clients of this peer."""

    def __init__(self, endpoint: str, settings: GossipSettings) -> None:
        self._endpoint = endpoint
        self._settings = settings
        self._streams: dict[ClientStream, None] = {}
        self._one_closed = asyncio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._streams)

    @contextmanager
    def open(self) -> Iterator[ClientStream]:
        """A new stream, until the context is left.

        Raises:
            CallRefusedError: there are too many streams, or this peer leaves.
        """
        if self._ended:
            raise CallRefusedError("", "leaves the run; try another peer")
        if len(self._streams) >= self._settings.max_streams:
            raise CallRefusedError("", f"has {len(self._streams)} clients already; try another peer")
        stream = ClientStream(self._endpoint, self._settings)
        self._streams[stream] = None
        try:
            yield stream
        finally:
            del self._streams[stream]
            self._one_closed.set()

    def publish(self, record: Record) -> None:
        """Adds a record to all streams."""
        for stream in self._streams:
            stream.add(record)

    def end(self) -> None:
        """Ends all streams after the records that wait in them, and refuses new ones."""
        self._ended = True
        for stream in self._streams:
            stream.end()

    async def wait_closed(self) -> None:
        """Waits until all streams have been read to their end, or closed by their clients."""
        while self._streams:
            self._one_closed.clear()
            await self._one_closed.wait()
