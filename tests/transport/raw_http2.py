"""Callers below gRPC: HTTP/2 frames on a socket, so that requests can be left unfinished, or be no requests at all."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

from tests.support.listening import closed

NOTHING = 0xBB
"""A kind of frame that HTTP/2 does not know, and that everybody passes over."""


def message(raw: bytes, announced: int | None = None) -> bytes:
    """A message as gRPC frames it, perhaps one that is to be longer than what follows."""
    return struct.pack(">BI", 0, len(raw) if announced is None else announced) + raw


class Stranger:
    """One connection.

    Attributes:
        headers: what came of each stream in headers and trailers.
        data: what came of each stream in messages, framed.
        over: streams that the other side has ended.
        gone: set when the connection is closed by the other side.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._heard = asyncio.Condition()
        self.headers: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytes] = {}
        self.over: set[int] = set()
        self.gone = False

    async def begin(self) -> None:
        """Opens the connection, and waits for the other side's settings."""
        self._http.initiate_connection()
        await self._flush()
        async with self._heard:
            await self._heard.wait_for(lambda: self.gone or self._http.max_outbound_frame_size > 16384)

    async def open(self, path: str, metadata: Iterable[tuple[str, str]] = ()) -> int:
        """Begins a call."""
        stream = self._http.get_next_available_stream_id()
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "peer"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *metadata,
        ]
        self._http.send_headers(stream, headers)
        await self._flush()
        return stream

    async def send(self, stream: int, raw: bytes, *, end: bool = False) -> bool:
        """Sends a part of what a call says, as fast as flow control lets it; whether the call still goes on."""
        begin = 0
        while True:
            async with self._heard:
                await self._heard.wait_for(lambda: self._over(stream) or self._room(stream) > 0)
            if self._over(stream):
                return False
            stop = min(begin + min(self._room(stream), self._http.max_outbound_frame_size, 1 << 16), len(raw))
            self._http.send_data(stream, raw[begin:stop], end_stream=end and stop == len(raw))
            begin = stop
            await self._flush()
            if begin == len(raw):
                return not self.gone

    async def junk(self, nbytes: int) -> None:
        """Sends a frame that means nothing."""
        await self._write(struct.pack(">I", nbytes)[1:] + bytes([NOTHING, 0]) + bytes(4) + bytes(nbytes))

    async def ended(self, stream: int) -> dict[str, str]:
        """The headers of a call when the other side has ended it, or has gone."""
        async with self._heard:
            await self._heard.wait_for(lambda: self._over(stream))
        return self.headers.get(stream, {})

    async def replied(self, stream: int, nbytes: int) -> bytes:
        """The first bytes of the messages of a call."""
        async with self._heard:
            await self._heard.wait_for(lambda: self._over(stream) or len(self.data.get(stream, b"")) >= nbytes)
        return self.data.get(stream, b"")[:nbytes]

    async def listen(self) -> None:
        """Takes what comes until the connection is closed."""
        with suppress(OSError, ProtocolError):
            while raw := await self._reader.read(1 << 16):
                events = self._http.receive_data(raw)
                async with self._heard:
                    for event in events:
                        self._take(event)
                    self._heard.notify_all()
                await self._flush()
        async with self._heard:
            self.gone = True
            self._heard.notify_all()

    def _take(self, event: Event) -> None:
        if isinstance(event, ResponseReceived | TrailersReceived):
            told = {str(name): str(value) for name, value in event.headers}
            self.headers.setdefault(event.stream_id, {}).update(told)
        elif isinstance(event, DataReceived):
            self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
            self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded | StreamReset):
            self.over.add(event.stream_id)
        elif isinstance(event, ConnectionTerminated):
            self.gone = True

    def _over(self, stream: int) -> bool:
        return self.gone or stream in self.over

    def _room(self, stream: int) -> int:
        return self._http.local_flow_control_window(stream)

    async def _flush(self) -> None:
        await self._write(self._http.data_to_send())

    async def _write(self, raw: bytes) -> None:
        if self.gone or not raw:
            return
        try:
            self._writer.write(raw)
            await self._writer.drain()
        except OSError:
            self.gone = True


@asynccontextmanager
async def stranger(endpoint: str) -> AsyncIterator[Stranger]:
    """Somebody who has connected to a peer."""
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    one = Stranger(reader, writer)
    listening = asyncio.create_task(one.listen())
    try:
        await one.begin()
        yield one
    finally:
        await closed(writer)
        await listening
