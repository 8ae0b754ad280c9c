"""One TCP connection that carries frames. It belongs to the event loop in which it is created.

The socket is read and written by callbacks of the event loop, without asyncio's transports: those copy what the socket
does not take at once, and what they read.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections import deque
from collections.abc import Callable

from averaging.errors import PeerUnreachableError, ProtocolViolationError
from averaging.protocol import Buffer
from averaging.transport.direct.frames import (
    HEADER,
    TAG_BYTES,
    BufferPool,
    Cipher,
    Ciphers,
    Frame,
    FrameKind,
    Sizes,
    pack_header,
    read_header,
)
from averaging.transport.grpc import KEEPALIVE_SECONDS, SILENCE_SECONDS

FRAMES_AHEAD = 2
"""Complete frames that wait to be read before reading from the socket stops, so that TCP stops the sender."""

LOST = "connection lost"

UNREAD = "the other side took nothing for too long"


class Link:
    """A connection, open until `close` is called or an error occurs. It owns `sock`, connected and non-blocking.

    `lost` says why it has ended. `ahead` frames may wait to be read; with 0 a frame is received when it is asked for.
    `on_lost` is called once when the connection ends, except by `close`. `write_seconds` limits the time for sending a
    frame, given its size in bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        accepted: frozenset[FrameKind],
        max_body: int,
        buffers: BufferPool,
        ciphers: Ciphers | None = None,
    ) -> None:
        self._socket, self.name = sock, name
        # The event loop puts the text of what it does not watch into an exception, which for a socket asks the system.
        self._descriptor = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._accepted, self._max_body = accepted, max_body
        self._buffers, self.ciphers = buffers, ciphers
        self.lost = ""
        self.ahead = FRAMES_AHEAD
        self.on_lost: Callable[[], object] | None = None
        self.write_seconds: Callable[[int], float] | None = None
        self._header = bytearray(HEADER.size)
        self._header_view = memoryview(self._header)
        self._header_got = 0
        self._sizes: Sizes | None = None  # of the frame that is being received
        self._room: memoryview | None = None
        self._missing = 0  # bytes of its payload
        self._frames: deque[Frame] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._reading = False
        self._sealed = bytearray()
        set_options(sock)
        self._resume()

    @property
    def is_idle(self) -> bool:
        return not self.lost and not self._frames and not self._header_got and not self._missing

    def close(self, *, abort: bool = False) -> None:
        """Ends the connection; reads and writes in progress raise a `PeerUnreachableError`.

        With `abort` what the other side has not received is discarded, so that it learns of the end at once. Otherwise
        the end comes after that, and not at all while the other side reads nothing.
        """
        self.on_lost = None
        if abort and not self.lost:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end("this peer closed the connection")

    async def activity(self) -> None:
        """Returns when a byte of the next frame has arrived, or the connection has ended."""
        while self.is_idle:
            if self._reading:
                await self._wait_for_reader()
            else:
                self._resume()

    async def read(self) -> Frame:
        """Returns the next frame; raises a `PeerUnreachableError` if the connection has ended."""
        while not self._frames:
            if self.lost:
                raise PeerUnreachableError(self.name, self.lost)
            if self._reading:
                await self._wait_for_reader()
            else:
                self._resume()
        frame = self._frames.popleft()
        if not self._reading and len(self._frames) < self.ahead and not self.lost:
            self._resume()
        return frame

    async def send(self, kind: FrameKind, head: bytes = b"", body: Buffer = b"") -> None:
        """Sends a frame and returns when the system has taken all of it. Only one task may send at a time.

        If it is cancelled or raises, the connection must be closed: a part of the frame may be on its way.
        """
        pieces = self._pieces(kind, head, body)
        limit = math.inf
        while pieces:
            if self.lost:
                raise PeerUnreachableError(self.name, self.lost)
            try:
                sent = self._socket.sendmsg(pieces)
            except (BlockingIOError, InterruptedError):
                if limit == math.inf and self.write_seconds is not None:
                    limit = self._loop.time() + self.write_seconds(len(body))
                await self._wait_for_writer(limit)
                continue
            except OSError:
                self._fail(LOST)
                continue
            pieces = _rest(pieces, sent)

    def _pieces(self, kind: FrameKind, head: bytes, body: Buffer) -> list[memoryview]:
        """A frame as the system gets it, without a copy of a body that is not sealed."""
        header = pack_header(kind, len(head), len(body))
        if self.ciphers is None:
            return [memoryview(piece) for piece in (header, body, head) if len(piece)]
        return [memoryview(header), self._seal(self.ciphers.sending, header, head, body)]

    def _seal(self, cipher: Cipher, header: bytes, head: bytes, body: Buffer) -> memoryview:
        after_body = len(body) + TAG_BYTES if len(body) else 0
        nbytes = after_body + len(head) + TAG_BYTES
        if len(self._sealed) < nbytes:
            self._sealed = bytearray(nbytes)
        room = memoryview(self._sealed)[:nbytes]
        if after_body:
            cipher.seal(body, header, room[:after_body])
        cipher.seal(head, header, room[after_body:])
        return room

    # Receiving

    def _resume(self) -> None:
        self._reading = True
        if self._header_got == HEADER.size:
            self._begin_frame()
        if not self.lost and self._reading:
            self._loop.add_reader(self._descriptor, self._readable)

    def _pause(self) -> None:
        self._reading = False
        self._loop.remove_reader(self._descriptor)

    def _readable(self) -> None:
        missing = self._missing
        try:
            if missing and self._room is not None:
                nbytes = self._socket.recvmsg_into((self._room[-missing:], self._header_view))[0]
            else:
                nbytes = self._socket.recv_into(self._header_view[self._header_got :])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            nbytes = 0
        if not nbytes:
            self._fail(LOST)
            return
        if missing:
            self._missing = missing - min(nbytes, missing)
            nbytes -= missing - self._missing
            if not self._missing:
                self._complete()
        self._header_got += nbytes
        if self._header_got == HEADER.size and self._reading:
            self._begin_frame()
        elif nbytes:
            self._wake(self._reader)

    def _begin_frame(self) -> None:
        self._header_got = 0
        try:
            self._sizes = sizes = read_header(self._header, self._max_body, self._accepted)
        except ProtocolViolationError as error:
            self._fail(f"{LOST}: {error}")
            return
        payload = sizes.payload(sealed=self.ciphers is not None)
        if not payload:
            self._complete()
            return
        self._room = self._buffers.take(payload).data[:payload]
        self._missing = payload
        self._wake(self._reader)

    def _complete(self) -> None:
        sizes, room = self._sizes, self._room
        if sizes is None:
            return
        self._sizes = self._room = None
        body: Buffer = b""
        head = b""
        if room is not None:
            behind = sizes.body
            if self.ciphers is not None:
                packed = pack_header(sizes.kind, sizes.head, sizes.body)
                behind += TAG_BYTES if sizes.body else 0
                try:
                    if sizes.body:
                        self.ciphers.receiving.open(room[:behind], packed)
                    self.ciphers.receiving.open(room[behind:], packed)
                except ProtocolViolationError as error:
                    self._fail(f"{LOST}: {error}")
                    return
            body = room[: sizes.body]
            head = bytes(room[behind : behind + sizes.head])
        self._frames.append(Frame(sizes.kind, head, body))
        self._wake(self._reader)
        if len(self._frames) >= self.ahead:
            self._pause()

    # Waiting and ending

    async def _wait_for_reader(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def _wait_for_writer(self, limit: float) -> None:
        self._writer = writer = self._loop.create_future()
        self._loop.add_writer(self._descriptor, self._wake, writer)
        # At the time `limit` of the loop the connection ends.
        alarm = None if limit == math.inf else self._loop.call_at(limit, self._fail, UNREAD)
        try:
            await writer
        finally:
            self._writer = None
            if alarm is not None:
                alarm.cancel()
            if not self.lost:
                self._loop.remove_writer(self._descriptor)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, reason: str) -> None:
        on_lost, self.on_lost = self.on_lost, None
        self._end(reason)
        if on_lost is not None:
            on_lost()

    def _end(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        self._reading = False
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._socket.close()
        self._sizes = self._room = None
        self._missing = 0
        self._wake(self._reader)
        self._wake(self._writer)


def _rest(pieces: list[memoryview], sent: int) -> list[memoryview]:
    for place, piece in enumerate(pieces):
        if sent < len(piece):
            return [piece[sent:], *pieces[place + 1 :]]
        sent -= len(piece)
    return []


def set_options(sock: socket.socket) -> None:
    """Sends small frames at once, and notices another machine that has gone silent as gRPC's connections do."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_SECONDS),
        ("TCP_KEEPALIVE", KEEPALIVE_SECONDS),  # the same on macOS
        ("TCP_KEEPINTVL", SILENCE_SECONDS / 2),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * SILENCE_SECONDS),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), round(value))
