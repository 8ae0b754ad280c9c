"""A TCP proxy in front of one peer that stalls, cuts, swallows, corrupts or slows what others send to it."""

import asyncio
import socket
import struct
import threading
from enum import Enum
from types import TracebackType
from typing import Self

from tests.support.ports import free_port

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16


class Fault(Enum):
    """The fault of all connections."""

    NONE = "none"
    STALL = "stall"
    """Reading stops, so that flow control stops the senders."""
    CUT = "cut"
    """Both ends are reset."""
    HALF_OPEN = "half-open"
    """Everything is read and discarded silently."""
    CORRUPT = "corrupt"
    """All bytes become 0xff, which is neither an HTTP/2 frame nor a number."""
    FLIP = "flip"
    """One bit of one byte changes; everything else passes."""


class FaultProxy:
    """Runs in a thread of its own; a context manager.

    Args:
        rate: bytes per second in each direction of each connection; None for as fast as it goes.
        port: to listen on; 0 for a free one.
        target: port of the peer behind it; None for a free one.

    Attributes:
        port: to be advertised.
        target: port of the peer behind it.
        struck: set when the fault has begun.
    """

    def __init__(self, rate: float | None = None, *, port: int = 0, target: int | None = None) -> None:
        self.port, self.target = port, free_port() if target is None else target
        self.struck = threading.Event()
        self._rate = rate
        self._fault, self._left = Fault.NONE, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._connections: set[asyncio.Task[None]] = set()

    def arm(self, fault: Fault, after: int = 0) -> None:
        """Starts the fault after this number of further bytes for the peer."""
        self.struck.clear()
        self._loop.call_soon_threadsafe(self._arm, fault, after)

    def heal(self) -> None:
        self._loop.call_soon_threadsafe(self._heal)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except asyncio.CancelledError:
                return

    async def _serve(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        self._normal = asyncio.Event()
        self._normal.set()
        server = await asyncio.start_server(self._connected, HOST, self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            self._reset()
            self._normal.set()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _arm(self, fault: Fault, after: int) -> None:
        self._fault, self._left = fault, after

    def _heal(self) -> None:
        spoilt = self._fault is not Fault.NONE and self._left <= 0
        self._fault = Fault.NONE
        self._normal.set()
        if spoilt:
            self._reset()

    def _reset(self) -> None:
        for writer in list(self._writers):
            end = writer.get_extra_info("socket")
            if end.fileno() < 0:
                continue  # lost already; its task has not noticed yet
            # A close with a linger time of zero sends RST instead of FIN.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection(HOST, self.target)
        except (OSError, asyncio.CancelledError):  # asyncio's own callback treats a cancelled task as an error
            self._writers.discard(writer)
            writer.close()
            return
        self._writers.add(back)
        ways = [asyncio.create_task(self._pass_on(reader, back, up=True))]
        ways.append(asyncio.create_task(self._pass_on(there, writer, up=False)))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, back):
                self._writers.discard(end)
                end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                spoilt = await self._strike(data, up=up)
                if spoilt:
                    writer.write(spoilt)
                    await writer.drain()
                if self._rate is not None:
                    await asyncio.sleep(len(data) / self._rate)
        except OSError:
            return

    async def _strike(self, data: bytes, *, up: bool) -> bytes:
        if self._fault is Fault.NONE:
            return data
        self._left -= len(data) if up else 0
        if self._left > 0:
            return data
        self.struck.set()
        match self._fault:
            case Fault.STALL:
                self._normal.clear()
                await self._normal.wait()
                return data
            case Fault.CUT:
                self._reset()
                self._fault = Fault.NONE  # later connections pass
                return b""
            case Fault.HALF_OPEN:
                return b""
            case Fault.FLIP:
                self._fault = Fault.NONE
                return data[:-1] + bytes([data[-1] ^ 1])
            case _:
                return b"\xff" * len(data)
