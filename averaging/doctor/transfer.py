"""Round trips and transfers that measure the path to a peer: what the peer serves, and the caller's side.

A measurement must not cost a run more than it is worth. A peer serves one transfer at a time and none while it takes
part in a round; a transfer ends after `MAX_TRANSFER_BYTES`, after `MAX_TRANSFER_SECONDS`, or when a round begins; and
their number is limited, for each host and for all.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from averaging.errors import (
    BusyError,
    CallRefusedError,
    PeerUnreachableError,
    ProtocolViolationError,
    RefusalCause,
)
from averaging.transport import RpcHandler, RpcMethod, rpc_caller
from averaging.transport.grpc import Channels
from averaging.wire import probe_pb2

_PROBE = "/averaging.probe.v1.Probe"

MAX_TRANSFER_BYTES, MAX_TRANSFER_SECONDS = 64 << 20, 10.0
"""The largest transfer: what it moves, and how long it takes."""

GRACE_SECONDS = 5.0
"""After this time beyond `MAX_TRANSFER_SECONDS` another caller gets the place of one that does not read. A caller gives
up a transfer from which nothing comes for this time."""

CHUNK_BYTES, MAX_CHUNK_BYTES = 256 << 10, 1 << 20
"""Bytes of a message of a transfer: as they are sent, and the most that is accepted."""

MAX_ECHO_BYTES = 64 << 10
"""Bytes of an echo in each direction: more than fit into the packets of any usual network."""

PERIOD_SECONDS = 600.0
"""The period of the following limits."""

TRANSFERS_PER_HOST, TRANSFERS_IN_ALL = 8, 24
"""Transfers of one calling host, and of all. A doctor needs two."""

ECHOES_PER_HOST, ECHOES_IN_ALL = 2000, 10_000
"""Echoes of one calling host, and of all. A doctor needs at most two hundred."""

SAMPLE_SECONDS = 0.005
"""Time between two samples of a transfer."""

Item = TypeVar("Item")

ECHO = RpcMethod(
    f"{_PROBE}/Echo",
    probe_pb2.EchoRequest,
    probe_pb2.EchoReply,
    max_request_bytes=MAX_ECHO_BYTES + 1024,
    max_reply_bytes=MAX_ECHO_BYTES + 1024,
)
DOWNLOAD = RpcMethod(
    f"{_PROBE}/Download",
    probe_pb2.DownloadRequest,
    probe_pb2.Chunk,
    replies_stream=True,
    max_reply_bytes=MAX_CHUNK_BYTES + 1024,
)
UPLOAD = RpcMethod(
    f"{_PROBE}/Upload",
    probe_pb2.Chunk,
    probe_pb2.UploadReply,
    requests_stream=True,
    max_request_bytes=MAX_CHUNK_BYTES + 1024,
    max_reply_bytes=1024,
)


class CallLimit:
    """Limits the calls in a period. Its memory is bounded by `in_all`.

    Args:
        what: What is limited, in the plural.
        per_host: Maximum for one host.
        in_all: Maximum for all hosts.
    """

    def __init__(self, what: str, per_host: int, in_all: int) -> None:
        self._what, self._per_host, self._in_all = what, per_host, in_all
        self._calls: deque[tuple[float, str]] = deque()  # earliest first
        self._by_host: Counter[str] = Counter()

    def take(self, host: str, now: float) -> None:
        """Counts one call.

        Raises:
            BusyError: The limit of the host, or that of all, is reached.
        """
        while self._calls and now - self._calls[0][0] >= PERIOD_SECONDS:
            _, earliest = self._calls.popleft()
            self._by_host[earliest] -= 1
            if not self._by_host[earliest]:
                del self._by_host[earliest]
        own = self._by_host[host] >= self._per_host
        if own or len(self._calls) >= self._in_all:
            whose = f"your host had {self._per_host}" if own else f"all hosts together had {self._in_all}"
            raise BusyError(
                f"{whose} {self._what} within {PERIOD_SECONDS / 60:.0f} minutes, the maximum; try again later"
            )
        self._calls.append((now, host))
        self._by_host[host] += 1


@dataclass(slots=True)
class TransferProgress:
    """The progress of one transfer, as the side sees it that receives.

    Attributes:
        nbytes: Bytes so far.
    """

    nbytes: int = 0
    _samples: list[tuple[float, int]] = field(default_factory=list)  # of a monotonic clock; bytes until then

    def add(self, count: int, now: float) -> None:
        """Counts bytes that have arrived."""
        self.nbytes += count
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, self.nbytes))
        else:
            self._samples[-1] = (self._samples[-1][0], self.nbytes)

    def seconds(self) -> float:
        """Time from the first bytes to the last."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def rate(self) -> float:
        """Bytes/s in the second half of the time, when TCP has found its rate; 0 if nothing can be said.

        Of less than a second it is the rate of the whole, for a fast link needs no time to find it.
        """
        if self.seconds() < SAMPLE_SECONDS:
            return 0.0
        (begun, first), (ended, received) = self._samples[0], self._samples[-1]
        middle = (begun + ended) / 2 if ended - begun > 1 else begun
        then, before = next(sample for sample in self._samples if sample[0] >= middle)
        if then == ended:
            then, before = begun, first
        return (received - before) / (ended - then)


class TransferService:
    """The methods Echo, Download and Upload of a peer.

    Args:
        in_round: Whether the peer takes part in a round now.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, in_round: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._in_round, self._clock = in_round, clock
        self._transfers = CallLimit("transfers", TRANSFERS_PER_HOST, TRANSFERS_IN_ALL)
        self._echoes = CallLimit("echoes", ECHOES_PER_HOST, ECHOES_IN_ALL)
        self._place: object | None = None  # that of the transfer in progress
        self._since = 0.0

    def rpc_handlers(self) -> Iterable[RpcHandler]:
        """See `RpcService`."""
        return [ECHO.answers(self.echo), DOWNLOAD.streams(self.download), UPLOAD.collects(self.upload)]

    async def echo(self, request: probe_pb2.EchoRequest) -> probe_pb2.EchoReply:
        """Answers with as many bytes as were asked for.

        Raises:
            BusyError: There were too many.
            ProtocolViolationError: It asks for too many bytes.
        """
        if request.reply_bytes > MAX_ECHO_BYTES:
            raise ProtocolViolationError(f"an echo of {request.reply_bytes} bytes; at most {MAX_ECHO_BYTES} are sent")
        self._echoes.take(rpc_caller().host, self._clock())
        return probe_pb2.EchoReply(padding=bytes(request.reply_bytes))

    async def download(self, request: probe_pb2.DownloadRequest) -> AsyncGenerator[probe_pb2.Chunk, None]:
        """Sends bytes as fast as the caller takes them.

        Raises:
            BusyError: The peer averages, another transfer is in progress, or there were too many.
        """
        place = self._take_place()
        left, end = min(request.bytes, MAX_TRANSFER_BYTES), self._end(request.seconds)
        data = os.urandom(CHUNK_BYTES)  # a compressing link would carry zeros too fast
        try:
            while left > 0 and self._clock() < end:
                if self._place is not place or self._in_round():
                    yield probe_pb2.Chunk(interrupted=True)
                    return
                yield probe_pb2.Chunk(data=data[:left])
                left -= len(data)
        finally:
            self._leave(place)

    async def upload(self, chunks: AsyncIterator[probe_pb2.Chunk]) -> probe_pb2.UploadReply:
        """Receives bytes, and says how fast they came.

        Raises:
            BusyError: The peer averages, another transfer is in progress, or there were too many.
            ProtocolViolationError: A message without bytes arrived, which would be received without end.
        """
        place = self._take_place()
        progress, interrupted = TransferProgress(), False
        try:
            async with asyncio.timeout(MAX_TRANSFER_SECONDS + GRACE_SECONDS):
                async for chunk in chunks:
                    if not chunk.data:
                        raise ProtocolViolationError("a message without bytes in an upload")
                    progress.add(len(chunk.data), self._clock())
                    interrupted = self._place is not place or self._in_round()
                    if interrupted or progress.nbytes >= MAX_TRANSFER_BYTES:
                        break
        except TimeoutError:
            interrupted = True
        finally:
            self._leave(place)
        return probe_pb2.UploadReply(
            bytes=progress.nbytes, seconds=progress.seconds(), rate=progress.rate(), interrupted=interrupted
        )

    def _end(self, seconds: float) -> float:
        return self._clock() + min(seconds, MAX_TRANSFER_SECONDS) if seconds > 0 else self._clock()

    def _take_place(self) -> object:
        now = self._clock()
        if self._in_round():
            raise BusyError("it averages now, and measures between rounds only")
        if self._place is not None and now - self._since < MAX_TRANSFER_SECONDS + GRACE_SECONDS:
            raise BusyError("another transfer is in progress, and it makes one at a time")
        self._transfers.take(rpc_caller().host, now)
        self._place, self._since = object(), now
        return self._place

    def _leave(self, place: object) -> None:
        if self._place is place:
            self._place = None


# The caller's side


TRY_AGAIN_SECONDS, PATIENCE_SECONDS = 0.5, 20.0
"""Pause before a transfer is asked for again that the peer refused because it was busy, and the time for all tries."""


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    """The result of a transfer.

    Attributes:
        nbytes: What was moved.
        seconds: How long that took.
        rate: Bytes/s in the second half of the time; 0 if it was too short.
        interrupted: Whether the peer ended it early, because a round began.
    """

    nbytes: int
    seconds: float
    rate: float
    interrupted: bool


async def echo(channels: Channels, endpoint: str, out: int = 0, back: int = 0) -> float:
    """Makes one round trip with `out` and `back` bytes, and returns its seconds.

    Raises:
        AveragingError: The call failed.
    """
    started = time.perf_counter()
    request = probe_pb2.EchoRequest(padding=bytes(out), reply_bytes=back)
    reply = await channels.call(endpoint, ECHO, request)
    if len(reply.padding) != back:
        raise ProtocolViolationError(f"answered with an echo of {len(reply.padding)} bytes instead of {back}", endpoint)
    return time.perf_counter() - started


async def download(channels: Channels, endpoint: str) -> MeasuredTransfer:
    """Measures the bandwidth from a peer.

    Raises:
        AveragingError: The peer stayed busy, or the call failed.
    """

    async def once() -> MeasuredTransfer:
        request = probe_pb2.DownloadRequest(bytes=MAX_TRANSFER_BYTES, seconds=MAX_TRANSFER_SECONDS)
        progress, interrupted = TransferProgress(), False
        end = time.monotonic() + MAX_TRANSFER_SECONDS + GRACE_SECONDS
        async with aclosing(channels.stream(endpoint, DOWNLOAD, request)) as chunks:
            while (chunk := await _within(endpoint, anext(chunks, None), GRACE_SECONDS)) is not None:
                interrupted = interrupted or chunk.interrupted
                progress.add(len(chunk.data), time.monotonic())
                if progress.nbytes > MAX_TRANSFER_BYTES or time.monotonic() > end:
                    raise ProtocolViolationError("sends for longer, or more, than it was asked to", endpoint)
        return MeasuredTransfer(progress.nbytes, progress.seconds(), progress.rate(), interrupted)

    return await _patiently(once)


async def upload(channels: Channels, endpoint: str) -> MeasuredTransfer:
    """Measures the bandwidth to a peer.

    Raises:
        AveragingError: The peer stayed busy, or the call failed.
    """

    async def once() -> MeasuredTransfer:
        data = os.urandom(CHUNK_BYTES)
        end = time.monotonic() + MAX_TRANSFER_SECONDS

        async def chunks() -> AsyncIterator[probe_pb2.Chunk]:
            left = MAX_TRANSFER_BYTES
            while left > 0 and time.monotonic() < end:
                yield probe_pb2.Chunk(data=data[:left])
                left -= len(data)

        async with aclosing(channels.stream(endpoint, UPLOAD, chunks())) as replies:
            reply = await _within(endpoint, anext(replies, None), MAX_TRANSFER_SECONDS + 2 * GRACE_SECONDS)
        if reply is None or not (0 <= reply.seconds < math.inf and 0 <= reply.rate < math.inf):
            raise ProtocolViolationError("answered an upload with no result", endpoint)
        return MeasuredTransfer(min(reply.bytes, MAX_TRANSFER_BYTES), reply.seconds, reply.rate, reply.interrupted)

    return await _patiently(once)


async def _patiently(once: Callable[[], Awaitable[MeasuredTransfer]]) -> MeasuredTransfer:
    """Makes a transfer, again while the peer is busy or a round interrupts it at once."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            done = await once()
        except CallRefusedError as error:
            if error.definite or error.cause is RefusalCause.NOT_SERVED or time.monotonic() > end:
                raise
        else:
            if not done.interrupted or done.rate or time.monotonic() > end:
                return done
        await asyncio.sleep(TRY_AGAIN_SECONDS)


async def _within(endpoint: str, step: Awaitable[Item], seconds: float) -> Item:
    try:
        async with asyncio.timeout(seconds):
            return await step
    except TimeoutError:
        raise PeerUnreachableError(endpoint, "the transfer stopped on the way") from None
