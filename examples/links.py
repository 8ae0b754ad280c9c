"""An emulated slow link in front of a peer: a relay on loopback that passes only so many bytes in a second.

The peer advertises the relay's address, so the relay carries what others send to it and what they get from it, all
over one link. In a round the others send a peer its share of their tensors and get its averages. That is as much as
the peer itself sends in shares and averages, so it takes as long as on a link with this rate in each direction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 1 << 14
"""Most bytes that pass at once; at 10 Mbit/s that is every 13 ms."""


class Link:
    """The capacity of one link. Pure.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = float("-inf")
        self.passed = 0
        """Bytes so far."""

    def take(self, now: float, nbytes: int) -> float:
        """Reserves the link for some bytes, after all that were reserved before; returns the seconds until they are
        through."""
        self._free_at = max(now, self._free_at) + nbytes / self._rate
        self.passed += nbytes
        return self._free_at - now


@asynccontextmanager
async def relay(link: Link, target: int) -> AsyncIterator[int]:
    """Relays connections to a port of this machine through a link, and yields the port to advertise."""
    connections: set[asyncio.Task[None]] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        connections.add(connection)
        try:
            with suppress(OSError):  # the peer is gone, or was never there
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target, limit=CHUNK_BYTES)
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(pump(link, reader, there_writer))
                    ways.create_task(pump(link, there_reader, writer))
        except* OSError:
            pass
        finally:
            writer.close()
            connections.discard(connection)

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=CHUNK_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def pump(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes one direction of a connection through the link, to its end."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            await asyncio.sleep(link.take(time.monotonic(), len(data)))
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
